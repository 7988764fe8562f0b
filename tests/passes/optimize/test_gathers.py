"""Gathers as slices: the elements stay the same, gradients are PyTorch's, and what slices cannot do stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from graphc.pipeline import Context, PassCall, run
from graphc.training.inference import run_model
from tests.passes.optimize.beside_torch import ops_trained
from tests.tiers import params

WINDOWS = np.arange(3)[:, None] + np.arange(6)[None]

SLICED: dict[str, Any] = {
    "in a row": np.arange(2, 8),
    "backwards": np.arange(7, -1, -1),
    "every other one": np.arange(1, 8, 2),
    "from the end": np.arange(-8, -2),
    "halves that change places": np.concatenate([np.arange(4, 8), np.arange(4)]),
    "windows": WINDOWS,
    "windows along the other axis": WINDOWS.T,
    "one row of windows": np.arange(8)[None],
    "four equal ones in a row": np.arange(8)[:, None] * np.ones(1, np.int64),
}
LEFT: dict[str, Any] = {
    "no order": np.array([0, 3, 1, 4, 2, 7, 5, 6]),
    "too few": np.array([1, 2, 3]),
    "one again and again": np.zeros(8, np.int64),
    "an index outside": np.arange(1, 9),
    "a table of three axes": WINDOWS[None],
}


def model_of(indices: np.ndarray, shape: list[int | str], axis: int, weight: bool = False) -> ir.Model:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    nodes = [onnx.helper.make_node("Gather", ["w" if weight else "x", "i"], ["g"], axis=axis, name="picks")]
    nodes.append(onnx.helper.make_node("Add", ["g", "one"], ["y"]))
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    held = {"i": indices.astype(np.int64), "one": np.ones((), np.float32)}
    if weight:
        held["w"] = np.ones(shape, np.float32)
    graph = onnx.helper.make_graph(nodes, "g", [x], [out], [onnx.numpy_helper.from_array(v, k) for k, v in held.items()])
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10))
    run(model, [PassCall("legalize")])
    return model


def gathers_of(model: ir.Model) -> int:
    return sum(node.op_type == "Gather" for node in model.graph)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("case", SLICED)
def test_slices_take_the_same_elements(case: str, axis: int) -> None:
    shape = [4, 4, 4]
    shape[axis] = 8
    model, x = model_of(SLICED[case], shape, axis), np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    run(model, [PassCall("gathers"), PassCall("verify")], Context(done=["legalize"]))
    assert gathers_of(model) == 0
    np.testing.assert_array_equal(run_model(model, {"x": x})["y"], np.take(x, SLICED[case], axis) + 1)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("first", "hop", "width", "count", "slices"),
    [
        (0, 8, 16, 4, 3),
        (0, 8, 8, 5, 2),
        (3, 4, 12, 6, 4),
        (0, 4, 6, 9, 4),
        (1, 4, 7, 9, 4),  # the last block reaches beyond the end
        (0, 2, 2, 20, 2),
        (5, 12, 5, 3, 3),
    ],
)
def test_windows_are_slices_of_blocks(
    first: int, hop: int, width: int, count: int, slices: int, turned: bool, axis: int
) -> None:
    indices = first + hop * np.arange(count)[:, None] + np.arange(width)
    indices = indices.T if turned else indices
    shape = (40, 3) if axis == 0 else (2, 40, 3)
    model, x = model_of(indices, list(shape), axis), np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    run(model, [PassCall("gathers"), PassCall("verify")], Context(done=["legalize"]))
    ops = [node.op_type for node in model.graph]
    assert "Gather" not in ops
    assert ops.count("Slice") <= slices
    np.testing.assert_array_equal(run_model(model, {"x": x})["y"], np.take(x, indices, axis) + 1)


@pytest.mark.parametrize("case", LEFT)
def test_what_a_few_slices_cannot_do_stays(case: str) -> None:
    model = model_of(LEFT[case], [2, 8], 1)
    run(model, [PassCall("gathers")], Context(done=["legalize"]))
    assert gathers_of(model) == 1


def test_parameters_and_axes_of_unknown_length_stay() -> None:
    for model in (model_of(np.arange(8), [8, 2], 0, weight=True), model_of(np.arange(8), ["n", 2], 0)):
        run(model, [PassCall("gathers")], Context(done=["legalize"]))
        assert gathers_of(model) == 1


def test_tuples_of_one_index_become_a_gather_and_slices_where_they_are_in_a_row() -> None:
    x, picks = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32), np.array([[3, -1, 3], [0, 2, 7]])
    for indices in (None, picks, np.arange(2, 8)):
        feeds = {"x": x} if indices is not None else {"x": x, "i": picks[..., None]}
        held = [] if indices is None else [onnx.numpy_helper.from_array(indices[..., None], "i")]
        inputs = [
            onnx.helper.make_tensor_value_info(k, onnx.TensorProto.FLOAT if k == "x" else onnx.TensorProto.INT64, v.shape)
            for k, v in feeds.items()
        ]
        out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        graph = onnx.helper.make_graph([onnx.helper.make_node("GatherND", ["x", "i"], ["y"])], "g", inputs, [out], held)
        model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10))
        run(model, [PassCall("legalize"), PassCall("gathers"), PassCall("verify")])
        ops = {node.op_type for node in model.graph}
        assert "GatherND" not in ops
        assert ("Gather" in ops) == (indices is None or indices.ndim == 2)
        np.testing.assert_array_equal(run_model(model, feeds)["y"], x[picks if indices is None else indices])


class Patches(nn.Module):
    """Overlapping windows, and a shuffle of halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)[:, :, torch.cat([torch.arange(4, 8), torch.arange(4)])]
        return self.last(torch.nn.functional.unfold(h, 3, padding=1).transpose(1, 2).square().mean(1))


@pytest.mark.full
def test_windows_and_shuffles_train_as_in_pytorch() -> None:
    torch.manual_seed(0)
    module, x, label = Patches(), torch.randn(6, 2, 8, 8), torch.randint(0, 5, (6,))
    ops = ops_trained(module, x, label)
    assert not {"GatherND", "GatherGrad", "ScatterND", "ScatterElements"} & set(ops)


class Frames(nn.Module):
    """Windows that overlap, of the series and of the windows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(2, 4, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = self.first(x).unfold(-1, 16, 8)
        return self.last(frames.unfold(-1, 6, 5).square().mean((1, 2, 3)))


@pytest.mark.full
def test_frames_train_as_in_pytorch() -> None:
    torch.manual_seed(0)
    ops = ops_trained(Frames(), torch.randn(6, 2, 64), torch.randint(0, 5, (6,)))
    assert not {"GatherND", "GatherGrad", "ScatterND", "ScatterElements"} & set(ops)


POOLS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "of other sizes": (nn.AdaptiveAvgPool2d((7, 5)), (6, 2, 16, 13)),
    "to more pixels": (nn.AdaptiveAvgPool2d((7, 7)), (6, 2, 6, 5)),
    "of lines": (nn.AdaptiveAvgPool1d(5), (6, 2, 13)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", params(POOLS, large=["to more pixels"]))
def test_adaptive_pools_are_products_and_train_as_in_pytorch(name: str) -> None:
    torch.manual_seed(0)
    pool, shape = POOLS[name]
    x, label = torch.randn(shape), torch.randint(0, 5, shape[:1])
    convolution = (nn.Conv1d if len(shape) == 3 else nn.Conv2d)(2, 3, 1)
    last = nn.Linear(3 * pool(torch.zeros(1, 1, *shape[2:])).numel(), 5)
    ops = ops_trained(nn.Sequential(convolution, pool, nn.Flatten(), last), x, label)
    assert not {"Gather", "GatherND", "GatherGrad", "ScatterND", "ScatterElements"} & set(ops)


SUM = """<ir_version: 10, opset_import: ["": 21]>
g (float[6, 8, batch] x) => (float y{more})
<int64[3, 2, 2] i = {{{indices}}}, float none = {{0}}, bool[3, 1, 1] seen = {{1, 0, 1}}> {{
  w = GatherND (x, i)
  m = Where (seen, w, none)
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  a = Gather <axis = 1> (m, zero)
  b = Gather <axis = 1> (m, one)
  y = Add (a, {last})
}}"""
INDICES = "0, 1, 2, 3, 5, 7, -6, -8, 1, 1, 1, 1"


def sum_of_picks(indices: str = INDICES, last: str = "b", more: str = "") -> tuple[ir.Model, list[str]]:
    """A sum of elements that a GatherND picks, after the pass, and its ops."""
    model = ir.from_onnx_text(SUM.format(indices=indices, last=last, more=more))
    run(model, [PassCall("legalize"), PassCall("gathers")])
    return model, [node.op_type for node in model.graph]


def test_a_sum_of_picks_that_no_two_matrices_make_is_one_product() -> None:
    model, ops = sum_of_picks()
    assert "GatherND" not in ops
    assert ops.count("MatMul") == 1
    x = np.random.default_rng(0).standard_normal((6, 8, 4)).astype(np.float32)
    want = np.stack([x[0, 1] + x[2, 3], np.zeros(4), x[1, 1] + x[1, 1]])
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], want, rtol=1e-6)


@pytest.mark.parametrize(
    ("indices", "last", "more"),
    [
        (INDICES.replace("7", "8"), "b", ""),  # an index outside, which the GatherND reports
        (INDICES, "none", ""),  # no sum of picks
        (INDICES, "b", ", float b"),  # another result besides the sum
    ],
)
def test_what_is_no_sum_of_picks_stays(indices: str, last: str, more: str) -> None:
    assert "GatherND" in sum_of_picks(indices, last, more)[1]
