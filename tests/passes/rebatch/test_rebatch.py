"""rebatch: a model for one batch size computes, for another, what it computed for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from graphc.errors import ModelError, UsageError
from graphc.frontends.onnx import load
from graphc.ir.facts import dims
from graphc.passes.rebatch.rebatch import rebatch as rebatch_pass
from graphc.passes.rebatch.repair import batch_place
from graphc.pipeline import Context
from graphc.pipeline import run as run_pipeline
from tests.frontends.zoo import HUGE, LARGE, SMALL, legal, path_of, run, with_random_weights
from tests.passes.legalize.legalize_cases import build, normal
from tests.tiers import params

pytestmark = pytest.mark.full


def rebatch(model: ir.Model, batch: int | str, inputs: Sequence[str] | None = None) -> ir.Model:
    copy = model.clone()
    rebatch_pass(copy, Context(), batch=batch, inputs=inputs)
    onnx.checker.check_model(ir.to_proto(copy))
    return copy


def check_like_single_samples(model: ir.Model, feeds: dict[str, np.ndarray], parts: int, atol: float = 1e-5) -> None:
    """Feeds of ``parts`` old batches give, in one run of the rebatched model, what the old model gives for each."""
    size = len(next(iter(feeds.values())))
    each = [run(model, {k: np.split(v, parts)[p] for k, v in feeds.items()}) for p in range(parts)]
    want = [np.concatenate(part) for part in zip(*each, strict=True)]
    for batch in (size, "batch"):
        for have, expected in zip(run(rebatch(model, batch), feeds), want, strict=True):
            np.testing.assert_allclose(have, expected, rtol=1e-4, atol=atol * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("name", "batch"),
    params(product((*SMALL, *LARGE), (2, "batch")), large=[*product(HUGE, (2, "batch")), *((name, 2) for name in LARGE)]),
)
def test_zoo_models_take_another_batch(name: str, batch: int | str) -> None:
    model = legal(load(path_of(name)))
    old = dims(model.graph.outputs[0])
    rebatch_pass(model, Context(), batch=batch)
    assert dims(model.graph.inputs[0]) == (batch, 3, 224, 224)
    assert dims(model.graph.outputs[0]) == (batch, *old[1:])
    shapes = [dims(v) for node in model.graph for v in node.outputs]
    assert all(shape is not None and None not in shape for shape in shapes)


@pytest.mark.parametrize("name", params((*SMALL, *LARGE), large=LARGE))
def test_zoo_models_compute_the_same_for_each_sample(name: str) -> None:
    _, model = with_random_weights(name)
    (x,) = model.graph.inputs
    check_like_single_samples(model, {x.name: normal(2, *dims(x)[1:])}, 2)


def shapes(*targets: Sequence[int]) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """A chain of Reshapes from x to y."""
    nodes = [
        helper.make_node("Reshape", ["x" if k == 0 else f"r{k}", f"t{k}"], [f"r{k + 1}" if k < len(targets) - 1 else "y"])
        for k in range(len(targets))
    ]
    return nodes, {f"t{k}": np.array(t) for k, t in enumerate(targets)}


@pytest.mark.parametrize("targets", [[[1, -1]], [[1, 2, 6], [1, 12]], [[-1], [1, 3, 4]], [[3, 4], [1, 12]], [[12, 1], [1, 12]]])
def test_baked_reshapes(targets: list[list[int]]) -> None:
    nodes, weights = shapes(*targets)
    model = legal(load(build(nodes, {"x": [1, 3, 4]}, ["y"], weights, opset=13)))
    check_like_single_samples(model, {"x": normal(3, 3, 4)}, 3)


@pytest.mark.parametrize("shape", [[1, 3, 4], [1, 1, 4], [2, 3, 4]])
def test_a_squeeze_without_axes(shape: list[int]) -> None:
    """It takes the axes that had one entry when the model was exported: of several samples, never the batch's."""
    nodes = [helper.make_node("Squeeze", ["x"], ["s"], name="squeeze"), helper.make_node("Relu", ["s"], ["y"])]
    model = legal(load(build(nodes, {"x": shape}, ["y"], opset=13)))
    x = normal(3 * shape[0], *shape[1:])
    kept = [len(x), *(d for d in shape[1:] if d > 1)]
    np.testing.assert_array_equal(run(rebatch(model, len(x)), {"x": x})[0], np.maximum(x.reshape(kept), 0))


def test_a_target_that_copies_the_batch_beside_an_unknown_size() -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["time_first"], perm=[1, 0, 2, 3]),
        helper.make_node("Reshape", ["time_first", "t"], ["z"]),
        helper.make_node("Transpose", ["z"], ["y"], perm=[1, 0, 2]),
    ]
    model = legal(load(build(nodes, {"x": [1, "steps", 2, 3]}, ["y"], {"t": np.array([0, 0, -1])}, opset=13)))
    check_like_single_samples(model, {"x": normal(3, 5, 2, 3)}, 3)


def test_reshape_of_a_transposed_batch() -> None:
    """Multi-head attention as exported for one batch: time first, heads merged into the batch and taken out again."""
    steps, batch, heads, size = 5, 2, 3, 4
    nodes = [
        helper.make_node("Transpose", ["x"], ["time_first"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["time_first", "t0"], ["split"]),
        helper.make_node("Transpose", ["split"], ["per_head"], perm=[1, 0, 2]),
        helper.make_node("Softmax", ["per_head"], ["soft"], axis=1),
        helper.make_node("Transpose", ["soft"], ["back"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["back", "t1"], ["rows"]),
        helper.make_node("MatMul", ["rows", "w"], ["projected"]),
        helper.make_node("Reshape", ["projected", "t2"], ["z"]),
        helper.make_node("Transpose", ["z"], ["y"], perm=[1, 0, 2]),
    ]
    for exported in (1, batch):
        weights = {
            "t0": np.array([steps, exported * heads, size]),
            "t1": np.array([steps * exported, heads * size]),
            "t2": np.array([steps, exported, heads * size]),
            "w": normal(heads * size, heads * size),
        }
        model = legal(load(build(nodes, {"x": [exported, steps, heads * size]}, ["y"], weights, opset=13)))
        check_like_single_samples(model, {"x": normal(4, steps, heads * size)}, 4 // exported)


@pytest.mark.parametrize(
    ("position", "result", "batch", "place"),
    [
        (1, [1, 1024], 1, 0),
        (1, [1024], 1, 0),
        (16, [16, 1, 32], 1, 1),
        (16, [16, 4, 8], 1, 1),  # batch × heads
        (16, [16, 32], 1, 0),  # time × batch: the last axis is left alone
        (16, [32, 32], 2, 0),
        (16, [16, 8, 8], 2, 1),
        (16, [3, 7], 2, None),
    ],
)
def test_where_the_batch_goes(position: int, result: list[int], batch: int, place: int | None) -> None:
    assert batch_place(position, result, batch) == place


def test_class_tokens_recurrent_states_slices_and_sizes() -> None:
    token = [helper.make_node("Concat", ["token", "x"], ["y"], axis=1)]
    model = legal(load(build(token, {"x": [1, 3, 4]}, ["y"], {"token": normal(1, 1, 4)}, opset=13)))
    check_like_single_samples(model, {"x": normal(3, 3, 4)}, 3)

    lstm = [
        helper.make_node("Transpose", ["x"], ["time_first"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["time_first", "w", "r", "", "", "h", "c"], ["", "last"], hidden_size=2),
        helper.make_node("Transpose", ["last"], ["y"], perm=[1, 0, 2]),
    ]
    weights = {"w": normal(1, 8, 4), "r": normal(1, 8, 2), "h": normal(1, 1, 2), "c": normal(1, 1, 2, seed=3)}
    check_like_single_samples(legal(load(build(lstm, {"x": [1, 3, 4]}, ["y"], weights, opset=14))), {"x": normal(3, 3, 4)}, 3)

    slices = [helper.make_node("Slice", ["x", "starts", "ends"], ["y"])]
    weights = {"starts": np.array([0, 1]), "ends": np.array([1, 3])}
    check_like_single_samples(legal(load(build(slices, {"x": [1, 3, 4]}, ["y"], weights, opset=13))), {"x": normal(2, 3, 4)}, 2)

    resize = [helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="nearest")]
    weights = {"sizes": np.array([1, 2, 6, 6])}
    check_like_single_samples(
        legal(load(build(resize, {"x": [1, 2, 3, 3]}, ["y"], weights, opset=13))), {"x": normal(2, 2, 3, 3)}, 2
    )


def test_a_dynamic_batch_is_fixed_or_renamed() -> None:
    model = legal(load(build([helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", 3], "z": ["N"]}, ["y"], opset=13)))
    assert dims(rebatch(model, 4).graph.outputs[0]) == (4, 3)
    renamed = rebatch(model, "batch")
    assert [dims(v) for v in (*renamed.graph.inputs, *renamed.graph.outputs)] == [("batch", 3), ("batch",), ("batch", 3)]


def test_inputs_can_be_chosen() -> None:
    nodes = [helper.make_node("MatMul", ["x", "table"], ["y"])]
    model = legal(load(build(nodes, {"x": [4, 4], "table": [4, 4]}, ["y"], opset=13)))
    chosen = rebatch(model, 2, ["x"])
    assert [dims(v) for v in chosen.graph.inputs] == [(2, 4), (4, 4)]
    with pytest.raises(UsageError, match=r"no graph input matches 'tabel'; did you mean 'table'"):
        rebatch(model, 2, ["tabel"])


def test_parameters_keep_their_shapes() -> None:
    """A Reshape of a weight is none of the batch's business."""
    nodes = [helper.make_node("Reshape", ["w", "t"], ["m"]), helper.make_node("MatMul", ["x", "m"], ["y"])]
    model = legal(load(build(nodes, {"x": [1, 4]}, ["y"], {"w": normal(1, 4, 3), "t": np.array([4, 3])}, opset=13)))
    check_like_single_samples(model, {"x": normal(2, 4)}, 2)


@pytest.mark.parametrize(
    ("nodes", "lost_at"),
    [
        ([helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1, name="mean")], "mean"),
        ([helper.make_node("Gather", ["x", "zero"], ["m"], axis=0, name="pick")], "pick"),
        ([helper.make_node("Squeeze", ["x", "axes"], ["m"], name="squeeze")], "squeeze"),
        ([helper.make_node("Transpose", ["x"], ["m"], perm=[1, 0, 2], name="turn")], "turn|again"),
    ],
)
def test_the_node_that_loses_the_batch_is_named(nodes: list[onnx.NodeProto], lost_at: str) -> None:
    opset = 11 if nodes[0].op_type == "ReduceMean" else 13
    again = [helper.make_node("Reshape", ["m", "t"], ["r"]), helper.make_node("Relu", ["r"], ["y"], name="again")]
    if nodes[0].op_type == "Transpose":
        again = [helper.make_node("Identity", ["m"], ["y"], name="again")]
    weights = {"zero": np.array(0), "axes": np.array([0]), "t": np.array([1, 12])}
    shape = [1, 1, 12] if nodes[0].op_type == "Transpose" else [1, 3, 4]
    model = legal(load(build([*nodes, *again], {"x": shape}, ["y"], weights, opset=opset)))
    with pytest.raises(ModelError, match=rf"lost at ({lost_at}): (.|\n)*output y(.|\n)*export the model with a dynamic batch"):
        rebatch(model, "batch")


def test_a_constant_of_the_old_batch_size_is_named() -> None:
    nodes = [helper.make_node("Add", ["x", "c"], ["y"], name="sum")]
    model = legal(load(build(nodes, {"x": [2, 3]}, ["y"], {"c": normal(2, 3)}, opset=13)))
    with pytest.raises(ModelError, match=r"sum: .*\n?.*c:float\[2,3\] has other entries for each of the 2 samples"):
        rebatch(model, 5)


@pytest.mark.parametrize("batch", [0, -1, "two words"])
def test_no_size_and_no_name(batch: int | str) -> None:
    model = legal(load(build([helper.make_node("Relu", ["x"], ["y"])], {"x": [1, 3]}, ["y"], opset=13)))
    with pytest.raises(UsageError, match="neither a positive size nor a name"):
        rebatch(model, batch)


def test_the_text_form() -> None:
    model = load(build([helper.make_node("Relu", ["x"], ["y"])], {"x": [1, 3]}, ["y"], opset=13))
    run_pipeline(model, "legalize,rebatch{batch=8}")
    assert dims(model.graph.outputs[0]) == (8, 3)
    tables = {"a": [1, 3], "b": [1, 3], "table": [1, 3]}
    model = load(build([helper.make_node("Sum", list(tables), ["y"])], tables, ["y"], opset=13))
    run_pipeline(model, "legalize,rebatch{inputs=a|b}")  # what the message of a failure proposes
    assert [dims(v) for v in model.graph.inputs] == [("batch", 3), ("batch", 3), (1, 3)]
    with pytest.raises(UsageError, match="needs legalize before it"):
        run_pipeline(model, "rebatch")
