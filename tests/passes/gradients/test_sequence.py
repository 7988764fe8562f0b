"""Sequence and optional ops against central differences, on the reference and on onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphc.ir.builder import Builder
from graphc.ir.subgraphs import finish_body, new_body
from graphc.ir.verify import verify_model
from tests.gradient_check import Array, check_gradient, new_model, normal, on_onnxruntime, reference
from tests.tiers import params

Build = Callable[[Builder, ir.Value, ir.Value, ir.Value], Any]


def three(op: Builder, x: ir.Value, y: ir.Value) -> Any:
    return op.SequenceConstruct(x, op.Exp(y), op.Sin(x))


def at(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    s = three(op, x, y)
    return op.Mul(op.SequenceAt(s, k), op.SequenceAt(s, np.int64(-1)))


def insert(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    s = op.SequenceInsert(op.SequenceInsert(three(op, x, y), op.Cos(x), k), op.Tanh(y))
    return op.ConcatFromSequence(s, axis=1)


def erase(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    return op.ConcatFromSequence(op.SequenceErase(op.SequenceErase(three(op, x, y), k)), axis=-1, new_axis=1)


def split(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    rows = op.SplitToSequence(x, axis=0, keepdims=0)
    parts = op.SplitToSequence(y, op.const([1, 3]), axis=0)
    halves = op.SplitToSequence(y, np.int64(2), axis=0)
    return op.Mul(op.SequenceAt(rows, k), op.ConcatFromSequence(parts, axis=0)), op.SequenceAt(halves, np.int64(0))


def concat(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    s = op.SequenceConstruct(x, op.Concat(y, y, axis=0))
    return op.Mul(op.ConcatFromSequence(s, axis=-2), op.ConcatFromSequence(s, axis=0))


def mapped(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    """One body that captures y, one that takes a second sequence and a tensor."""
    rows = op.SplitToSequence(x, axis=0)
    body, inner, (row,) = new_body(op, [("row", x.type, None)])
    finish_body(inner, [inner.Mul(inner.Tanh(row), y)])
    t = op.SequenceMap(rows, body=body)
    body, inner, (a, b, c) = new_body(op, [(n, x.type, None) for n in "abc"])
    finish_body(inner, [inner.Mul(inner.Mul(a, b), c), inner.Exp(b)])
    first, second = op.SequenceMap(t, rows, op.Exp(y), body=body, _outputs=2)
    return op.ConcatFromSequence(first, axis=0), op.ConcatFromSequence(second, axis=0)


def optional(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    whole = op.OptionalGetElement(op.Optional(op.Exp(x)))
    return op.Mul(whole, op.SequenceAt(op.OptionalGetElement(op.Optional(three(op, x, y))), np.int64(1)))


def branches(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    """Sequences that leave an If."""
    s = three(op, x, y)
    one, first, _ = new_body(op, [])
    finish_body(first, [first.SequenceInsert(s, first.Exp(x))])
    other, second, _ = new_body(op, [])
    finish_body(second, [second.SequenceErase(s)])
    (t,) = op.emit("If", [op.Greater(k, np.int64(0))], {"then_branch": one, "else_branch": other}, outputs=1)
    return op.ConcatFromSequence(t, axis=0)


def shared(op: Builder, x: ir.Value, y: ir.Value, k: ir.Value) -> Any:
    """A sequence that two ops read: its adjoint is the sum of two sequences."""
    s = three(op, x, y)
    return op.Mul(op.ConcatFromSequence(s, axis=0, new_axis=1), op.SequenceAt(s, k))


BUILDS: list[Build] = [at, insert, erase, split, concat, mapped, optional, branches, shared]


@pytest.mark.parametrize("position", params([0, 1, -1], full=[0, 1]))
@pytest.mark.parametrize("compile_with", [reference, on_onnxruntime])
@pytest.mark.parametrize("build", BUILDS)
def test_gradients_agree_with_differences(build: Build, compile_with: Any, position: int) -> None:
    dtype = np.float64 if compile_with is reference else np.float32
    feeds: dict[str, Array] = {
        "x": normal(4, 3).value.astype(dtype),
        "y": normal(4, 3, seed=1).value.astype(dtype),
        "k": np.array(position),
    }
    model, (x, y, k) = new_model(feeds)
    op = Builder(model.graph)
    made = build(op, x, y, k)
    model.graph.outputs.extend(made if isinstance(made, tuple) else [made])
    options: dict[str, Any] = {} if compile_with is reference else {"tolerance": 1e-2, "step": 1e-2}
    found = check_gradient(model, feeds, compile_with=compile_with, **options)
    assert set(found) == {"x", "y"}
    verify_model(model)
