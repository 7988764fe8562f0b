"""If, Loop and Scan against central differences and PyTorch, captured weights and nested bodies included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from graphc.errors import ModelError, UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.subgraphs import captured, finish_body, new_body
from graphc.ir.verify import verify_model
from graphc.passes.gradients.reverse_mode import differentiate
from tests.gradient_check import Array, check_gradient, gradients, new_model, normal, on_onnxruntime, reference

COUNT = ("t", ir.TensorType(ir.DataType.INT64), ir.Shape([]))
GOING = ("going", ir.TensorType(ir.DataType.BOOL), ir.Shape([]))


def like(value: ir.Value, *, drop: int | None = None) -> tuple[str, Any, Any]:
    """An input of a body for ``value``, without axis ``drop``."""
    assert value.shape is not None
    return f"{value.name}_in", value.type, ir.Shape([d for k, d in enumerate(value.shape.dims) if k != drop])


def check(model: ir.Model, feeds: dict[str, Array], **options: Any) -> None:
    check_gradient(model, feeds, **options)
    verify_model(model)


def single(feeds: dict[str, Array]) -> dict[str, Array]:
    return {name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in feeds.items()}


# If -------------------------------------------------------------------------------------------------------------------


def choice(feeds: dict[str, Array], *, symbolic: int = 0) -> ir.Model:
    """y = x·w if flag else x∘x, z = x if flag else w, where the shapes of y differ when those of x and x·w do."""
    model, (x, w, flag) = new_model(feeds, symbolic=symbolic)
    op = Builder(model.graph)
    branches = []
    for first in (True, False):
        graph, inner, _ = new_body(op, [])
        finish_body(inner, [inner.MatMul(x, w), x] if first else [inner.Mul(x, x), inner.Sin(w)])
        branches.append(graph)
    made = op.emit("If", [flag], {"then_branch": branches[0], "else_branch": branches[1]}, outputs=2)
    model.graph.outputs.extend(made)
    return model


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("symbolic", [0, 2])
@pytest.mark.parametrize("flag", [True, False])
def test_if_follows_the_branch_that_ran(flag: bool, symbolic: int, width: int) -> None:
    feeds = {"x": normal(2, 3).value, "w": normal(3, width, seed=1).value, "flag": np.array(flag)}
    check(choice(feeds, symbolic=symbolic), feeds)
    check(choice(single(feeds)), single(feeds), compile_with=on_onnxruntime, tolerance=5e-3, step=1e-2)


# Scan -----------------------------------------------------------------------------------------------------------------


def recurrence(
    feeds: dict[str, Array], *, axis: int = 0, way: int = 0, out_axis: int = 0, out_way: int = 0, symbolic: int = 0
) -> ir.Model:
    """s ← tanh(s·w + x[t]), y[t] = s∘x[t], with a counter that is carried beside s and scales x."""
    model, (x, w, s) = new_model(feeds, symbolic=symbolic)
    op = Builder(model.graph)
    graph, inner, (before, count, step) = new_body(op, [like(s), COUNT, like(x, drop=axis)])
    scaled = inner.Mul(step, inner.Cast(inner.Add(count, np.int64(1)), to=int(x.dtype or 1)))
    after = inner.Tanh(inner.Add(inner.MatMul(before, w), scaled))
    finish_body(inner, [after, inner.Add(count, np.int64(1)), inner.Mul(after, step)])
    attributes = {
        "body": graph,
        "num_scan_inputs": 1,
        "scan_input_axes": [axis],
        "scan_input_directions": [way],
        "scan_output_axes": [out_axis],
        "scan_output_directions": [out_way],
    }
    made = op.emit("Scan", [s, np.int64(0), x], attributes, outputs=3)
    model.graph.outputs.extend([made[0], made[2]])
    return model


def sequence_feeds(axis: int = 0) -> dict[str, Array]:
    x = np.moveaxis(normal(4, 2, 3).value, 0, axis)
    return {"x": x, "w": normal(3, 3, seed=1).value, "s": normal(2, 3, seed=2).value}


@pytest.mark.parametrize(("axis", "way"), [(0, 0), (0, 1), (1, 0), (-1, 1)])
@pytest.mark.parametrize(("out_axis", "out_way"), [(0, 0), (2, 1)])
def test_scan_axes_and_directions(axis: int, way: int, out_axis: int, out_way: int) -> None:
    options = {"axis": axis % 3, "way": way, "out_axis": out_axis, "out_way": out_way}
    feeds = sequence_feeds(axis)
    check(recurrence(feeds, **options), feeds)
    check(recurrence(single(feeds), **options), single(feeds), compile_with=on_onnxruntime, tolerance=5e-3, step=1e-2)


@pytest.mark.parametrize("compile_with", [reference, on_onnxruntime])
def test_scan_of_symbolic_length_serves_every_length(compile_with: Callable[[ir.Model], Any]) -> None:
    feeds = single(sequence_feeds())
    model, (x, w, s) = new_model(feeds)
    x.shape, s.shape = ir.Shape(["time", "batch", 3]), ir.Shape(["batch", 3])
    op = Builder(model.graph)
    graph, inner, (before, step) = new_body(op, [like(s), like(x, drop=0)])
    after = inner.Tanh(inner.Add(inner.MatMul(before, w), step))
    finish_body(inner, [after, after])
    _, y = op.emit("Scan", [s, x], {"body": graph, "num_scan_inputs": 1}, outputs=2)
    found = differentiate(model.graph, [y], [x, w, s])
    verify_model(model)
    model.graph.outputs[:] = [found[v] for v in (x, w, s)]
    run = compile_with(model)
    for time, batch in ((1, 2), (5, 3)):
        sized = {
            "x": normal(time, batch, 3).value.astype(np.float32),
            "w": feeds["w"],
            "s": normal(batch, 3).value.astype(np.float32),
        }
        results = list(run(sized).values())
        a, b, h = tensors = [torch.tensor(sized[n], requires_grad=True) for n in ("x", "w", "s")]
        total = torch.zeros(())
        for t in range(time):
            h = torch.tanh(h @ b + a[t])
            total = total + h.sum()
        total.backward()
        for ours, theirs in zip(results, tensors, strict=True):
            np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


def test_scan_without_states_and_with_unused_outputs() -> None:
    feeds = {"x": normal(4, 3).value, "w": normal(3, seed=1).value}
    model, (x, w) = new_model(feeds)
    op = Builder(model.graph)
    graph, inner, (step,) = new_body(op, [like(x, drop=0)])
    finish_body(inner, [inner.Exp(step), inner.Mul(step, w)])
    _, y = op.emit("Scan", [x], {"body": graph, "num_scan_inputs": 1}, outputs=2)
    model.graph.outputs.append(y)
    check(model, feeds)
    backward = next(n for n in reversed(model.graph) if n.op_type == "Scan")
    inside = {n.op_type for n in backward.attributes["body"].as_graph()}
    assert "Exp" not in inside, "nothing is computed for an output that no loss depends on"


def test_only_what_the_backward_pass_reads_is_saved() -> None:
    feeds = sequence_feeds()
    model, (x, w, s) = new_model(feeds)
    op = Builder(model.graph)
    graph, inner, (before, step) = new_body(op, [like(s), like(x, drop=0)])
    after = inner.Add(before, inner.MatMul(step, w))  # linear: no gradient needs the state
    finish_body(inner, [after])
    (final,) = op.emit("Scan", [s, x], {"body": graph, "num_scan_inputs": 1}, outputs=1)
    model.graph.outputs.append(final)
    check(model, feeds)
    forward = next(n for n in model.graph if n.op_type == "Scan")
    assert len(forward.outputs) == 1


# Loop -----------------------------------------------------------------------------------------------------------------


def repeat(
    feeds: dict[str, Array], limit: int | None, *, until: float | None = None, symbolic: int = 0, known: bool = True
) -> ir.Model:
    """s ← sin(s·w)·(t + 1)/2, y[t] = eˢ, while Σs² < until; ``known``: the limit is a constant."""
    model, (s, w, *rest) = new_model(feeds, symbolic=symbolic)
    op = Builder(model.graph)
    graph, inner, (t, going, before) = new_body(op, [COUNT, GOING, like(s)])
    factor = inner.Mul(inner.Cast(inner.Add(t, np.int64(1)), to=int(s.dtype or 1)), 0.5)
    after = inner.Mul(inner.Sin(inner.MatMul(before, w)), factor)
    more = going if until is None else inner.Less(inner.ReduceSumSquare(after, keepdims=0), until)
    finish_body(inner, [more, after, inner.Exp(after)])
    trips = None if limit is None else op.const(np.int64(limit)) if known else rest[0]
    made = op.emit("Loop", [trips, np.bool_(True), s], {"body": graph}, outputs=2)
    model.graph.outputs.extend(made)
    return model


def loop_feeds() -> dict[str, Array]:
    return {"s": normal(2, 3).value, "w": normal(3, 3, seed=1).value}


@pytest.mark.parametrize("symbolic", [0, 2])
@pytest.mark.parametrize(("limit", "until"), [(4, None), (1, None), (6, 4.0), (6, 1e9), (None, 4.0)])
def test_loop_with_and_without_an_early_end(limit: int | None, until: float | None, symbolic: int) -> None:
    feeds = loop_feeds()
    check(repeat(feeds, limit, until=until, symbolic=symbolic), feeds)


@pytest.mark.parametrize(("limit", "until"), [(3, None), (6, 4.0), (None, 4.0)])
def test_loop_on_onnxruntime(limit: int | None, until: float | None) -> None:
    feeds = single(loop_feeds())
    check(repeat(feeds, limit, until=until), feeds, compile_with=on_onnxruntime, tolerance=1e-2, step=1e-2)


@pytest.mark.parametrize("limit", [0, 3])
def test_loop_whose_limit_is_an_input(limit: int) -> None:
    feeds = {**loop_feeds(), "n": np.array(limit)}
    model = repeat(feeds, limit, known=False)
    model.graph.outputs.pop()
    check(model, feeds)


def test_a_loop_that_carries_a_growing_tensor_is_refused() -> None:
    feeds = loop_feeds()
    model, (s, w) = new_model(feeds)
    op = Builder(model.graph)
    graph, inner, (_, going, before) = new_body(op, [COUNT, GOING, like(s)])
    finish_body(inner, [going, inner.Concat(before, inner.MatMul(s, w), axis=0)])
    (y,) = op.emit("Loop", [np.int64(3), None, s], {"body": graph}, outputs=1)
    with pytest.raises(UnsupportedOpError, match=r"shape of what it carries as 's_in' changes") as caught:
        differentiate(model.graph, [y], [w])
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("limit", "until"), [(3, None), (6, 4.0)])
def test_a_value_that_no_iteration_reads_may_be_a_placeholder_at_first(limit: int, until: float | None, alone: bool) -> None:
    """Exporters of Paddle carry what a loop assigns, which before it is a number of no meaning."""
    feeds = loop_feeds()
    model, (s, w) = new_model(feeds)
    op = Builder(model.graph)
    nothing = op.const(np.float64(0))
    graph, inner, (_, going, before, _) = new_body(op, [COUNT, GOING, like(s), ("assigned", nothing.type, ir.Shape([]))])
    after = inner.Sin(inner.MatMul(before, w))
    more = going if until is None else inner.Less(inner.ReduceSumSquare(after, keepdims=0), until)
    finish_body(inner, [more, after, inner.Mul(inner.Exp(after), before)])
    made = op.emit("Loop", [np.int64(limit), np.bool_(True), s, nothing], {"body": graph}, outputs=2)
    assert made[1].shape == s.shape
    model.graph.outputs.extend(made[1:] if alone else made)
    check(model, feeds)


# Bodies in bodies -----------------------------------------------------------------------------------------------------


def nested(feeds: dict[str, Array]) -> ir.Model:
    """A Scan whose body has an If, one of whose branches has a Loop; w is captured at every level."""
    model, (x, w, s) = new_model(feeds)
    op = Builder(model.graph)
    graph, inner, (before, step) = new_body(op, [like(s), like(x, drop=0)])
    one, first, _ = new_body(inner, [])
    body, deep, (_, going, value) = new_body(first, [COUNT, GOING, like(s)])
    finish_body(deep, [going, deep.Tanh(deep.Add(deep.MatMul(value, w), step))])
    finish_body(first, list(first.emit("Loop", [np.int64(2), None, before], {"body": body}, outputs=1)))
    other, second, _ = new_body(inner, [])
    finish_body(second, [second.MatMul(second.Mul(before, step), w)])
    large = inner.Greater(inner.ReduceSum(step, keepdims=0), 0.0)
    (after,) = inner.emit("If", [large], {"then_branch": one, "else_branch": other}, outputs=1)
    finish_body(inner, [after, inner.Mul(after, before)])
    model.graph.outputs.extend(op.emit("Scan", [s, x], {"body": graph, "num_scan_inputs": 1}, outputs=2))
    return model


def test_nested_bodies() -> None:
    feeds = sequence_feeds()
    taken = {bool(step.sum() > 0) for step in feeds["x"]}
    assert taken == {True, False}, "the test wants both branches to run"
    check(nested(feeds), feeds)
    check(nested(single(feeds)), single(feeds), compile_with=on_onnxruntime, tolerance=1e-2, step=1e-2)


def test_captured_values_are_listed_once_in_order_at_any_depth() -> None:
    model = nested(sequence_feeds())
    scan = next(n for n in model.graph if n.op_type == "Scan")
    assert [v.name for v in captured(scan)] == ["w"]
    choice = next(n for n in scan.attributes["body"].as_graph() if n.op_type == "If")
    assert [v.name for v in captured(choice)] == ["s_in", "w", "x_in"]


@pytest.mark.parametrize("build", [recurrence, nested, lambda feeds: repeat({"s": feeds["s"], "w": feeds["w"]}, 3)])
def test_gradient_of_a_gradient(build: Callable[[dict[str, Array]], ir.Model]) -> None:
    feeds = sequence_feeds()
    model = build(feeds)
    feeds = {v.name or "": feeds[v.name or ""] for v in model.graph.inputs}
    graph = model.graph
    w = next(v for v in graph.inputs if v.name == "w")
    first = differentiate(graph, list(graph.outputs), [w])[w]
    graph.outputs[:] = [first]
    check(model, feeds, tolerance=2e-6)


def test_a_shared_weight_inside_and_outside_gets_both_gradients() -> None:
    feeds = sequence_feeds()
    model = recurrence(feeds)
    w = model.graph.inputs[1]
    op = Builder(model.graph)
    outside = op.Mul(w, w)
    (found,) = gradients(model, feeds, [model.graph.outputs[0], outside], [w])
    t = {n: torch.tensor(a, requires_grad=True) for n, a in feeds.items()}
    h = t["s"]
    for k in range(4):
        h = torch.tanh(h @ t["w"] + t["x"][k] * (k + 1))
    (h.sum() + (t["w"] ** 2).sum()).backward()
    np.testing.assert_allclose(found, t["w"].grad.numpy(), rtol=1e-10)  # type: ignore[union-attr]


def test_a_missing_rule_inside_a_body_is_named() -> None:
    feeds = {"x": normal(3, 4).value}
    model, (x,) = new_model(feeds)
    op = Builder(model.graph)
    graph, inner, (step,) = new_body(op, [like(x, drop=0)])
    finish_body(inner, [_unknown(inner, step)])
    (y,) = op.emit("Scan", [x], {"body": graph, "num_scan_inputs": 1}, outputs=1)
    with pytest.raises(UnsupportedOpError, match=r"no gradient for .*AllGatherThing"):
        differentiate(model.graph, [y], [x])


def _unknown(op: Builder, x: ir.Value) -> ir.Value:
    """The output of a node of a domain without declarations."""
    node = ir.Node("nowhere", "AllGatherThing", [x], name="strange")
    (y,) = node.outputs
    y.name, y.type, y.shape = "strange_y", x.type, x.shape
    op.graph.append(node)
    return y


def test_verify_looks_into_bodies() -> None:
    model = recurrence(sequence_feeds())
    scan = next(n for n in model.graph if n.op_type == "Scan")
    body = scan.attributes["body"].as_graph()
    verify_model(model)
    matmul = next(n for n in body if n.op_type == "MatMul")
    matmul.replace_input_with(1, next(iter(body.inputs)))
    with pytest.raises(ModelError, match="MatMul"):
        verify_model(model)
