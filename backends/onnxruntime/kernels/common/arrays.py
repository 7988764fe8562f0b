"""Helpers for the arrays that kernels are bound to."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.device import Array
from graphc.ir.facts import static_dims


def given(arrays: Sequence[Array | None], count: int) -> list[Array]:
    """The first ``count`` inputs or outputs of an op that requires them."""
    found = [a for a in arrays[:count] if a is not None]
    assert len(found) == count, "the op's declaration requires these operands"
    return found


def optional(arrays: Sequence[Array | None], index: int) -> Array | None:
    """Input or output ``index``, None where it is left out."""
    return arrays[index] if index < len(arrays) else None


def have_spatial_axes(node: ir.Node, inputs: Sequence[int], most: int) -> bool:
    """Whether these inputs of a node have one to ``most`` spatial axes behind N and C, and no empty dimension."""
    for index in inputs:
        value = node.inputs[index]
        shape = static_dims(value) if value is not None else None
        if shape is None or not 3 <= len(shape) <= 2 + most or 0 in shape:
            return False
    return True
