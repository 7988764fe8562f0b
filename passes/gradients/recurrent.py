"""Gradients of recurrent layers: of the op that keeps its gates, and of RNN, GRU and LSTM through their equivalent Scan.

``autodiff`` puts the former in place of common layers. Of another, the forward node stays, because runtimes have a kernel for
it; the backward pass runs a forward Scan of its own (:mod:`graphc.ir.ops.recurrent`).
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.gradient import gradient
from graphc.ir.builder import Builder
from graphc.ir.declare import OPS, decompose_node
from graphc.ir.ops.recurrent import recurrence
from graphc.ir.ops.recurrent_gradient import GRADIENTS
from graphc.ir.ops.recurrent_training import LSTM
from graphc.passes.gradients.reverse_mode import through


@gradient("RNN", "GRU", "LSTM", selective=True)
def recurrent(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """(hₜ, cₜ) = cell(xₜ, hₜ₋₁, cₜ₋₁);  ∂ through a Scan over t"""
    return tuple(through(op, node, dys, needs, lambda: recurrence(op, node)))


@gradient("graphc::RecurrentTraining", selective=True)
def recurrent_training(op: Builder, node: ir.Node, *dys: ir.Value | None, needs: set[ir.Value]) -> Any:
    """(hₜ, cₜ) = cell(aₜ, hₜ₋₁, cₜ₋₁);  ∂a, ∂R, ∂b, ∂h₀, ∂c₀ by RecurrentTrainingGrad

    What it keeps has an adjoint in gradients of gradients only, which go through the decomposition.
    """
    dy, dy_h, dgates, dcells, dy_c = (*dys, None, None)[:5]
    if dgates is not None or dcells is not None:
        return tuple(through(op, node, dys, needs, lambda: decompose_node(op, node)))
    _, r, _, _, lengths, h, c = (*node.inputs, *[None] * 5)[:7]
    y, _, gates, cells, _ = (*node.outputs, None, None)[:5]
    attributes = OPS[node.op_type].attribute_values(node)
    operands = (y, gates, r, cells, lengths, h, c, dy, dy_h, dy_c)
    made = op.emit(f"{node.op_type}Grad", operands, attributes, domain=node.domain, outputs=GRADIENTS[attributes["cell"]])
    dprojected, dr, dh, dbias, dextra = (*made, None)[:5]
    dhidden, dc = (None, dextra) if attributes["cell"] == LSTM else (dextra, None)
    return dprojected, dr, dbias, dhidden, None, dh, dc
