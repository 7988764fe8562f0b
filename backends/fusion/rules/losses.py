"""Decomposes ONNX's losses, whose log-softmax is then the one that their gradient reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphc.backends.fusion.rules.table import rule
from graphc.ir.builder import Builder
from graphc.ir.ops.losses import onnx_class_loss


@rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def class_loss(op: Builder, node: ir.Node) -> Sequence[Any]:
    return onnx_class_loss(op, node)[: len(node.outputs)]
