"""Translates products with a weight per group of rows, in which PyTorch computes mixtures of experts, to ONNX.

    y[s] = x[s] · w[e]  for offsets[e − 1] ≤ s < offsets[e]; rows behind the last offset are 0

ONNX has no such product, and its rows are as many as the data say. One product over all experts has fixed shapes:

    owner[s] = how many offsets are ≤ s
    y = Reshape(Where(owner = e, x, 0), [S, E·D]) · Reshape(w, [E·D, O])
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Entries of the ``custom_translation_table`` of ``torch.onnx.export`` for the grouped products that exist here.

    Those are ``torch.nn.functional.grouped_mm``, and the operator by which transformers replaces it in float32.
    """
    import torch

    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    if hasattr(torch.ops.aten, "_grouped_mm"):
        found[torch.ops.aten._grouped_mm.default] = _annotated(_grouped_mm)
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if fallback is not None:
        found[fallback.default] = _annotated(_product)
    return found


@contextlib.contextmanager
def of_any_type() -> Iterator[None]:
    """While the exporter captures a module, grouped products of other types than bfloat16 have shapes too (PyTorch 2.13)."""
    import torch
    from torch._subclasses import fake_impls

    table = getattr(fake_impls, "op_implementations_dict", {})
    operator = getattr(torch.ops.aten, "_grouped_mm", None)
    if operator is None or operator.default in table:
        yield
        return

    def shape(mode, operator, x, w, offs=None, bias=None, out_dtype=None):  # type: ignore[no-untyped-def]
        if len(w.shape) != 3:  # no product that has a translation
            return NotImplemented
        return x.new_empty((*x.shape[:-1], w.shape[-1]), dtype=out_dtype)

    table[operator.default] = shape
    try:
        yield
    finally:
        del table[operator.default]


def _annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with annotations as types: the exporter reads the kinds of the operands from them, and takes no text."""
    from onnxscript import FLOAT, INT64

    kinds = {"x": FLOAT, "w": FLOAT, "offsets": INT64, "bias": FLOAT, "out_dtype": int, "return": FLOAT}
    function.__annotations__ = {name: kinds[name] for name in function.__annotations__}
    return function


def _grouped_mm(x: Any, w: Any, offsets: Any = None, bias: Any = None, out_dtype: int = -1) -> Any:
    """``aten::_grouped_mm`` of rows in groups, or of as many matrices as weights."""
    from onnxscript import opset20

    op: Any = opset20
    del out_dtype  # the type of x: PyTorch takes no other
    ranks = len(x.shape), len(w.shape)
    if ranks == (3, 3) and offsets is None:
        y = op.MatMul(x, w)
    elif ranks == (2, 3) and offsets is not None:
        y = _product(x, w, offsets)
    else:
        raise NotImplementedError(f"grouped_mm of ranks {ranks[0]} and {ranks[1]} has no translation: group rows of a matrix")
    return y if bias is None else op.Add(y, bias)


def _product(x: Any, w: Any, offsets: Any) -> Any:
    """``(S, D), (E, D, O), (E,) → (S, O)``"""
    from onnxscript import opset20

    op: Any = opset20
    experts, depth, width = w.shape
    ends = op.Unsqueeze(op.Cast(offsets, to=7), [0])
    rows = op.Shape(x, start=0, end=1)
    position = op.Unsqueeze(op.Range(op.Constant(value_int=0), op.Squeeze(rows, [0]), op.Constant(value_int=1)), [1])
    owner = op.ReduceSum(op.Cast(op.LessOrEqual(ends, position), to=7), [1], keepdims=1)
    numbers = op.Constant(value_ints=list(range(experts)))
    mine = op.Unsqueeze(op.Equal(owner, op.Unsqueeze(numbers, [0])), [2])
    spread = op.Where(mine, op.Unsqueeze(x, [1]), op.CastLike(op.Constant(value_float=0.0), x))
    return op.MatMul(op.Reshape(spread, [-1, experts * depth]), op.Reshape(w, [experts * depth, width]))
