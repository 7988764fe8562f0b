"""Matrix products that read their operands, and write their result, in another order of axes.

The ``permuted_products`` pass makes them of a MatMul and the Transposes around it, for backends whose kernels read memory with
strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare, spec_of
from graphc.ir.facts import required


def _permuted(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    (dtype, of_a), (_, of_b) = (spec_of(value) for value in inputs)
    a, b = ([required(shape)[axis] for axis in attributes[perm]] for shape, perm in ((of_a, "permA"), (of_b, "permB")))
    if len(a) != len(b) or a[:-2] != b[:-2] or a[-1] != b[-2]:
        raise ModelError(f"PermutedMatMul has operands of shapes {a} and {b}, whose matrices cannot be multiplied")
    made = [*a[:-1], b[-1]]
    return [(dtype, ir.Shape([made[axis] for axis in attributes["permY"]]))]


@declare(
    "PermutedMatMul",
    inputs="a b",
    outputs="y",
    attributes={"permA": REQUIRED, "permB": REQUIRED, "permY": REQUIRED},
    infer=_permuted,
)
def permuted_matmul(
    op: Builder, a: ir.Value, b: ir.Value, *, permA: Sequence[int], permB: Sequence[int], permY: Sequence[int]
) -> ir.Value:
    """y = Transpose(Transpose(a, permA)·Transpose(b, permB), permY), operands of one rank with as many matrices each."""
    operands = (x if list(perm) == sorted(perm) else op.Transpose(x, perm=list(perm)) for x, perm in ((a, permA), (b, permB)))
    made = op.MatMul(*operands)
    return made if list(permY) == sorted(permY) else op.Transpose(made, perm=list(permY))  # type: ignore[no-any-return]
