"""Products in which every row has one of several matrices, as in mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare, spec_of
from graphc.ir.facts import constant, required, shape_of_result


def _product(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    (dtype, rows), (_, weights), (_, owners) = (spec_of(value) for value in inputs)
    count, own = required(rows)[0], required(owners)[0]
    if isinstance(count, int) and isinstance(own, int) and count != own:
        raise ModelError(f"GroupedMatMul has {count} rows and {own} owners; each row has one")
    return [(dtype, ir.Shape([count, required(weights)[1 if attributes["transB"] else 2]]))]


@declare("GroupedMatMul", inputs="x w owner", outputs="y", attributes={"transB": 0, "gathers": 0}, infer=_product)
def grouped_matmul(op: Builder, x: ir.Value, w: ir.Value, owner: ir.Value, *, transB: int, gathers: int) -> ir.Value:
    """y[s] = x[s]·w[owner[s]], 0 where w has no such matrix. x: S × D, w: E × D × O or, with ``transB``, E × O × D.

    Without a kernel every row meets every matrix, or, with ``gathers``, a matrix of its own, which then has to exist.
    """
    if gathers:
        own = op.Gather(w, owner, axis=0)
        own = op.Transpose(own, perm=[0, 2, 1]) if transB else own
        return op.Squeeze(op.MatMul(op.Unsqueeze(x, [1]), own), [1])  # type: ignore[no-any-return]
    if transB:
        w = op.Transpose(w, perm=[0, 2, 1])
    return op.MatMul(_spread(op, x, owner, op.shape(w)), op.Flatten(w, axis=2))  # type: ignore[no-any-return]


def _of_shape(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(spec_of(inputs[0])[0], shape_of_result(inputs[3]))]


@declare("GroupedMatMulGradWeight", inputs="x dy owner shape", outputs="dw", attributes={"gathers": 0}, infer=_of_shape)
def grouped_matmul_grad_weight(
    op: Builder, x: ir.Value, dy: ir.Value, owner: ir.Value, shape: ir.Value, *, gathers: int
) -> ir.Value:
    """dw[e] = Σ x[s]ᵀ·dy[s] over the rows s with owner[s] = e, 0 without any. x: S × D, dy: S × O, shape: [E, D, O]."""
    if gathers:
        return op.graphc.GatherGrad(op.MatMul(op.Unsqueeze(x, [2]), op.Unsqueeze(dy, [1])), owner, shape)  # type: ignore[no-any-return]
    spread = op.Transpose(_spread(op, x, owner, shape), perm=[1, 0])
    return op.Reshape(op.MatMul(spread, dy), shape)  # type: ignore[no-any-return]


def _spread(op: Builder, x: ir.Value, owner: ir.Value, shape: ir.Value) -> Any:
    """S × (E·D): each row at the place of its matrix, zeros elsewhere; ``shape`` begins with E."""
    known = constant(shape)
    if known is None:
        numbers = op.Range(op.const(0), op.Gather(shape, op.const(0), axis=0), op.const(1))
    else:
        numbers = op.const(np.arange(known[0]))
    mine = op.Equal(op.Unsqueeze(owner, [1, 2]), op.Unsqueeze(numbers, [0, 2]))
    return op.Flatten(op.Where(mine, op.Unsqueeze(x, [1]), op.scalar(0, x)), axis=1)
