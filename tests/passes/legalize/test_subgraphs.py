"""Sequences and bodies as legalize leaves them: the same numbers as before, in plain onnxruntime, with what is known gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest

from graphc import frontends
from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.state import add_initializer
from graphc.ir.subgraphs import finish_body, new_body
from graphc.ir.verify import verify_model
from graphc.passes.legalize.legalize import legalize
from graphc.pipeline import Context
from tests.gradient_check import Array, new_model, normal, on_onnxruntime, reference
from tests.passes.legalize.legalize_cases import build

COUNT = ("t", ir.TensorType(ir.DataType.INT64), ir.Shape([]))
GOING = ("going", ir.TensorType(ir.DataType.BOOL), ir.Shape([]))
SEQUENCE_OPS = {"SequenceConstruct", "SequenceAt", "SplitToSequence", "ConcatFromSequence", "SequenceMap", "SequenceLength"}
SEQUENCE_OPS |= {"SequenceInsert", "SequenceErase", "SequenceEmpty", "Optional", "OptionalGetElement"}


def splits(op: Builder, x: ir.Value) -> list[ir.Value]:
    halves = op.SplitToSequence(x, np.int64(2), axis=1)
    rows = op.SplitToSequence(x, axis=0, keepdims=0)
    given = op.SplitToSequence(x, op.const([1, 2, 2]), axis=-1)
    return [
        op.Exp(op.SequenceAt(halves, np.int64(-1))),
        op.ConcatFromSequence(rows, axis=1, new_axis=1),
        op.SequenceAt(given, np.int64(1)),
        op.Add(op.SequenceLength(rows), op.SequenceLength(halves)),
    ]


def split_again(op: Builder, x: ir.Value) -> list[ir.Value]:
    """How many parts there are is known when the first sequence is gone, as in rotary embeddings."""
    half = op.SequenceAt(op.SplitToSequence(x, np.int64(2), axis=0), np.int64(1))
    parts = op.SplitToSequence(op.Reshape(half, [5, -1]), np.int64(1), axis=1)
    return [op.Sub(op.SequenceAt(parts, np.int64(1)), op.SequenceAt(parts, np.int64(0)))]


def edits(op: Builder, x: ir.Value) -> list[ir.Value]:
    s = op.SequenceInsert(op.SequenceConstruct(x, op.Exp(x)), op.Sin(x), np.int64(-1))
    s = op.SequenceInsert(op.SequenceErase(s, np.int64(0)), op.Cos(x))
    return [op.ConcatFromSequence(s, axis=0), op.SequenceAt(op.SequenceErase(s), np.int64(-1))]


def mapped(op: Builder, x: ir.Value) -> list[ir.Value]:
    body, inner, (a, b) = new_body(op, [("a", x.type, None), ("b", x.type, None)])
    finish_body(inner, [inner.Mul(inner.Mul(a, b), x), inner.Exp(a)])
    first, second = op.SequenceMap(op.SequenceConstruct(x, op.Sin(x)), op.Cos(x), body=body, _outputs=2)
    return [op.ConcatFromSequence(first, axis=0), op.SequenceAt(second, np.int64(1))]


def optional(op: Builder, x: ir.Value) -> list[ir.Value]:
    return [op.Exp(op.OptionalGetElement(op.Optional(x))), op.Sin(op.OptionalGetElement(x))]


def decided(op: Builder, x: ir.Value) -> list[ir.Value]:
    """An If in an If, both conditions known, whose sequences are known too."""
    one, first, _ = new_body(op, [])
    deep, inside, _ = new_body(first, [])
    finish_body(inside, [inside.SequenceConstruct(x, inside.Exp(x))])
    other, outside, _ = new_body(first, [])
    finish_body(outside, [outside.SequenceConstruct(x)])
    (s,) = first.emit("If", [np.bool_(True)], {"then_branch": deep, "else_branch": other}, outputs=1)
    finish_body(first, [s])
    second, last, _ = new_body(op, [])
    finish_body(last, [last.SequenceConstruct(x, x, x)])
    (t,) = op.emit("If", [np.bool_(True)], {"then_branch": one, "else_branch": second}, outputs=1)
    return [op.ConcatFromSequence(t, axis=1)]


def appended(axis: int, new_axis: int) -> Callable[[Builder, ir.Value], list[ir.Value]]:
    def build(op: Builder, x: ir.Value) -> list[ir.Value]:
        """Two loops' worth of sequences that grow at the end, beside a state."""
        empty = op.SequenceEmpty(dtype=int(x.dtype or 1))
        body, inner, (_, going, s, state, u) = new_body(
            op, [COUNT, GOING, ("s", empty.type, None), ("state", x.type, x.shape), ("u", empty.type, None)]
        )
        after = inner.Tanh(state)
        outputs = [going, inner.SequenceInsert(s, inner.Exp(after)), after, inner.SequenceInsert(u, inner.Sin(after))]
        finish_body(inner, outputs)
        made = op.emit("Loop", [np.int64(3), None, empty, x, empty], {"body": body}, outputs=3)
        join = {"axis": axis, "new_axis": new_axis}
        return [op.ConcatFromSequence(made[0], **join), op.Exp(made[1]), op.ConcatFromSequence(made[2], **join)]

    return build


def unrolled(op: Builder, x: ir.Value) -> list[ir.Value]:
    """A Loop whose sequence is read inside it, with a scan output."""
    start = op.SequenceConstruct(x, op.Sin(x))
    body, inner, (t, going, s) = new_body(op, [COUNT, GOING, ("s", start.type, None)])
    new = inner.Mul(inner.SequenceAt(s, np.int64(-2)), inner.Cast(inner.Add(t, np.int64(1)), to=int(x.dtype or 1)))
    finish_body(inner, [going, inner.SequenceErase(inner.SequenceInsert(s, new), np.int64(0)), inner.Exp(new)])
    made = op.emit("Loop", [np.int64(4), None, start], {"body": body}, outputs=2)
    return [op.ConcatFromSequence(made[0], axis=0), op.Identity(made[1])]


CASES = {
    "splits": splits,
    "split-again": split_again,
    "edits": edits,
    "mapped": mapped,
    "optional": optional,
    "decided": decided,
    "appended-0": appended(0, 0),
    "appended-1": appended(1, 0),
    "stacked-0": appended(0, 1),
    "stacked-last": appended(-1, 1),
    "unrolled": unrolled,
}


@pytest.mark.parametrize("compile_with", [reference, on_onnxruntime])
@pytest.mark.parametrize("name", CASES)
def test_known_sequences_become_tensors_of_the_same_value(name: str, compile_with: Callable[[ir.Model], Any]) -> None:
    feeds: dict[str, Array] = {"x": normal(4, 5).value.astype(np.float32)}
    model, (x,) = new_model(feeds)
    model.graph.outputs.extend(CASES[name](Builder(model.graph), x))
    labels = [v.name for v in model.graph.outputs]
    expected = compile_with(model)(feeds)
    legalize(model, Context())
    verify_model(model)
    assert [v.name for v in model.graph.outputs] == labels
    left = {n.op_type for n in model.graph.all_nodes()}
    assert not left & (SEQUENCE_OPS | {"If"}), left
    assert all(v.shape is not None and v.shape.is_static() for v in model.graph.outputs)
    for label, array in compile_with(model)(feeds).items():
        np.testing.assert_allclose(array, expected[label], rtol=1e-6, err_msg=label)


def test_a_position_that_depends_on_data_stays() -> None:
    feeds = {"x": normal(4, 5).value, "k": np.array(2)}
    model, (x, k) = new_model(feeds)
    op = Builder(model.graph)
    model.graph.outputs.append(op.Identity(op.SequenceAt(op.SplitToSequence(x, axis=0), k)))
    legalize(model, Context())
    np.testing.assert_array_equal(next(iter(reference(model)(feeds).values())), feeds["x"][2:3])


def test_weights_of_bodies_become_weights_of_the_graph_under_free_names() -> None:
    feeds = {"x": normal(2, 3).value, "flag": np.array(True)}
    model, (x, flag) = new_model(feeds)
    op = Builder(model.graph)
    branches = []
    for seed in (1, 2):
        graph, inner, _ = new_body(op, [])
        finish_body(inner, [inner.Mul(x, add_initializer(graph, "w", normal(3, seed=seed).value))])
        branches.append(graph)
    model.graph.outputs.extend(
        op.emit("If", [flag], dict(zip(("then_branch", "else_branch"), branches, strict=True)), outputs=1)
    )
    expected = [reference(model)({**feeds, "flag": np.array(f)}) for f in (True, False)]
    legalize(model, Context())
    verify_model(model)
    assert list(model.graph.initializers) == ["w", "w.1"]
    assert [reference(model)({**feeds, "flag": np.array(f)}).keys() for f in (True, False)] == [e.keys() for e in expected]
    for f, e in zip((True, False), expected, strict=True):
        for name, array in reference(model)({**feeds, "flag": np.array(f)}).items():
            np.testing.assert_array_equal(array, e[name])


def batched_scan(lengths: bool = False) -> onnx.ModelProto:
    """A running sum, as Scan of opset 8 writes it: over the first axis of each sample of a batch."""
    f = onnx.TensorProto.FLOAT
    body = oh.make_graph(
        [oh.make_node("Add", ["s", "x"], ["sum"]), oh.make_node("Identity", ["sum"], ["y"])],
        "body",
        [oh.make_tensor_value_info(n, f, [2]) for n in ("s", "x")],
        [oh.make_tensor_value_info(n, f, [2]) for n in ("sum", "y")],
    )
    node = oh.make_node(
        "Scan", ["n" if lengths else "", "s0", "xs"], ["last", "ys"], body=body, num_scan_inputs=1, directions=[1]
    )
    inputs = [oh.make_tensor_value_info("s0", f, [3, 2]), oh.make_tensor_value_info("xs", f, [3, 4, 2])]
    inputs += [oh.make_tensor_value_info("n", onnx.TensorProto.INT64, [3])] if lengths else []
    outputs = [oh.make_tensor_value_info("last", f, [3, 2]), oh.make_tensor_value_info("ys", f, [3, 4, 2])]
    graph = oh.make_graph([node], "scan", inputs, outputs)
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 8)], ir_version=4)


def test_the_batched_scan_of_opset_8() -> None:
    model = ir.from_proto(batched_scan())
    legalize(model, Context())
    verify_model(model)
    feeds = {"s0": normal(3, 2).value.astype(np.float32), "xs": normal(3, 4, 2).value.astype(np.float32)}
    sums = feeds["s0"][:, None] + np.cumsum(feeds["xs"][:, ::-1], axis=1)  # backwards; outputs in the order of iterations
    for run in (reference(model), on_onnxruntime(model)):
        results = run(feeds)
        np.testing.assert_allclose(results["last"], sums[:, -1], rtol=1e-6)
        np.testing.assert_allclose(results["ys"], sums, rtol=1e-6)


def test_sequences_of_different_length_in_a_batched_scan_are_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="sequence_lens"):
        legalize(ir.from_proto(batched_scan(lengths=True)), Context())


def test_a_rank_that_only_a_body_tells_is_learnt_once() -> None:
    """Inference of a node with bodies forgets the rank again, which must not start another round for ever."""
    x, w = {"x": ("n", 2, "t"), "c": ()}, {"w": np.ones((2, 2, 3), np.float32)}
    nodes = [oh.make_node("Squeeze", ["x"], ["s"]), oh.make_node("Conv", ["s", "w"], ["a"])]
    then = oh.make_graph(nodes, "then", [], [oh.make_tensor_value_info("a", onnx.TensorProto.FLOAT, None)])
    nodes = [oh.make_node("Conv", ["x", "w"], ["b"])]
    other = oh.make_graph(nodes, "else", [], [oh.make_tensor_value_info("b", onnx.TensorProto.FLOAT, None)])
    node = oh.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    model = build([node], x, ["y"], w, opset=17, types={"c": onnx.TensorProto.BOOL})
    model.graph.input[0].type.tensor_type.ClearField("shape")
    legalised = frontends.load(model)
    legalize(legalised, Context())
    squeezed = next(n for n in legalised.graph.all_nodes() if n.op_type == "Squeeze").outputs[0]
    assert squeezed.shape is not None
    assert len(squeezed.shape) == 3  # Conv's weight has rank 3
