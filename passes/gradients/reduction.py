"""Gradients of reductions."""

from __future__ import annotations

import onnx_ir as ir

from graphc.gradient import gradient
from graphc.ir.builder import Builder


@gradient("ReduceSum")
def add(op: Builder, node: ir.Node, dz: ir.Value):
    return op.expand_like(dz, node.inputs[0])
