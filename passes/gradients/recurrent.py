"""Gradients of RNN, GRU and LSTM, through the Scan that computes the same (:mod:`graphc.ir.ops.recurrent`).

The forward node stays as it is, for a runtime has a kernel for it; the backward pass has a forward Scan of its own.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.ir.ops.recurrent import recurrence
from graphc.passes.gradients.reverse_mode import through


@gradient("RNN", "GRU", "LSTM", selective=True)
def recurrent(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """(hₜ, cₜ) = cell(xₜ, hₜ₋₁, cₜ₋₁);  ∂ by way of a Scan over t"""
    return tuple(through(op, node, dys, needs, lambda: recurrence(op, node)))
