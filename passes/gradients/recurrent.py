"""Gradients of RNN, GRU and LSTM, through their equivalent Scan (:mod:`graphc.ir.ops.recurrent`).

The forward node stays, because runtimes have a kernel for it; the backward pass runs a forward Scan of its own.
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
    """(hₜ, cₜ) = cell(xₜ, hₜ₋₁, cₜ₋₁);  ∂ through a Scan over t"""
    return tuple(through(op, node, dys, needs, lambda: recurrence(op, node)))
