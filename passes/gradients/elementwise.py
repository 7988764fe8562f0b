"""Gradients of elementwise ops."""

from __future__ import annotations

import onnx_ir as ir

from graphc.gradient import gradient
from graphc.ir.builder import Builder


@gradient("Add")
def add(op: Builder, node: ir.Node, dz: ir.Value):
    """z = a + b;  ∂a = ∂b = dz"""
    return dz, dz


@gradient("Mul")
def mul(op: Builder, node: ir.Node, dz: ir.Value):
    """z = a·b;  ∂a = dz·b,  ∂b = dz·a"""
    a, b = node.inputs
    return lambda: op.Mul(dz, b), lambda: op.Mul(dz, a)

@gradient("Exp")
def exp(op: Builder, node: ir.Node, dz: ir.Value):
    return op.Mul(dz, node.outputs[0])
