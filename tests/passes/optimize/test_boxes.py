"""Assignments to slices train as choices, with PyTorch's losses; a scatter that writes no box stays as it is."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import graphc
from graphc.ir.facts import dims
from graphc.pipeline import Context, PassCall, run
from graphc.training.inference import run_model


class Assigned(nn.Module):
    """Boxes of a layer's result, some from others, at both ends and in one row; two of them overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        y = h.new_zeros(h.size())
        y[:, 1:4, 2:5] = h[:, :3, 1:4]
        y[:, 2:, 4:] = h[:, :-2, :2] * 2
        y[:, 0, :3] = h[:, 3, 3:]
        y[:, -1:, :1] = h[:, -1:, -1:]
        return (y * y).sum()


def test_slices_that_the_torchscript_exporter_writes_train_as_in_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x, path = Assigned(), torch.randn(4, 7, 5), tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (x,), path, dynamo=False, training=torch.onnx.TrainingMode.TRAINING, dynamic_axes={"x": {0: "batch"}},
            input_names=["x"], do_constant_folding=False,
        )  # fmt: skip
    program = graphc.compile(path, loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=0.01))
    left = {node.op_type for node in program.model.graph}
    assert left.isdisjoint({"ScatterND", "GatherND"})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with graphc.Trainer(program) as trainer:
        for rows in (4, 4, 3):
            loss = module(x[:rows])
            assert trainer.step({"x": x[:rows].numpy()})["loss"] == pytest.approx(loss.item(), rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class Unrolled(nn.Module):
    """A loop that writes each step's result in its place and reads the last one; some places are written twice, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        y = h.new_zeros(h.shape[0], 9, 6)
        y[:, 0] = h[:, 0]
        for t in range(1, 6):
            y[:, t] = torch.tanh(self.again(y[:, t - 1].clone()) + h[:, t])
        y[:, 3:5] = y[:, 1:3] * 2
        y[:, -1] = y[:, :6].sum(1)
        y[:, :, 2] = 0.5
        y[:, :, 4] = h[:, :1, 1]
        return y  # type: ignore[no-any-return]


def test_parts_that_a_loop_writes_are_put_side_by_side_once() -> None:
    torch.manual_seed(0)
    module, x, goal = Unrolled(), torch.randn(4, 7, 5), torch.randn(4, 9, 6)
    program = graphc.compile(
        module, example_inputs=(x,), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1), backend="onnxruntime"
    )
    nodes = list(program.inference.graph)
    assert not any("Scatter" in node.op_type for node in nodes)
    whole = [node.op_type for node in nodes if (dims(node.outputs[0]) or ())[1:] == (9, 6)]
    assert len(whole) < 8, whole  # eleven assignments
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with graphc.Trainer(program) as trainer:
        for rows in (4, 4, 3):
            loss = nn.functional.mse_loss(module(x[:rows]), goal[:rows])
            feeds = {"x": x[:rows].numpy(), "label": goal[:rows].numpy()}
            assert trainer.step(feeds)["loss"] == pytest.approx(loss.item(), rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


BOX = """
  a = Constant<value = int64[1,1] {{0}}>()  b = Constant<value = int64[3,1] {{{rows}}}>()
  c = Constant<value = int64[2] {{{columns}}}>()  last = Constant<value = int64[1] {{-1}}>()
  n = Shape<start=0, end=1>(u)  shape = Shape(u)
  ones = ConstantOfShape<value = int64[1] {{1}}>(n)  found = NonZero(ones)  turned = Transpose(found)
  high = Constant<value = int64[3] {{-1, 1, 1}}>()  samples = Reshape(turned, high)
  i = Expand(samples, shape)  j = Expand(b, shape)  k = Expand(c, shape)
  iu = Unsqueeze(i, last)  ju = Unsqueeze(j, last)  ku = Unsqueeze(k, last)
  places = Concat<axis = -1>(iu, ju, ku)  y = ScatterND{how}(x, places, u)
"""


def box(rows: str, columns: str, how: str, size: str) -> ir.Model:
    body = BOX.format(rows=rows, columns=columns, how=how)
    head = '<ir_version: 10, opset_import: ["": 21]> g '
    proto = onnx.parser.parse_model(f"{head}(float[{size},6,5] x, float[n,3,2] u) => (float[{size},6,5] y) {{ {body} }}")
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    run(model, [PassCall("legalize")])
    return model


@pytest.mark.parametrize(("size", "samples"), [("n", 5), ("m", 5), ("m", 3), ("5", 5), ("5", 3)])  # n: as many as are written
@pytest.mark.parametrize(
    ("rows", "columns", "how", "stays"),
    [
        ("1, 2, 3", "3, 4", "", False),
        ("-4, -3, -2", "0, 1", "", False),
        ("1, 3, 2", "0, 1", "", True),
        ("0, 2, 4", "0, 1", "", True),
        ("-1, 0, 1", "0, 1", "", True),
        ("0, 1, 2", "0, 1", '<reduction="add">', True),
    ],
)
def test_the_numbers_are_those_of_the_scatter(rows: str, columns: str, how: str, stays: bool, size: str, samples: int) -> None:
    model = box(rows, columns, how, size)
    run(model, [PassCall("boxes"), PassCall("verify")], Context(done=["legalize"]))
    assert any(node.op_type == "ScatterND" for node in model.graph) == stays
    random = np.random.default_rng(0)
    x, u = random.standard_normal((5, 6, 5)).astype(np.float32), random.standard_normal((samples, 3, 2)).astype(np.float32)
    expected = x.copy()
    place = np.ix_(range(samples), [int(k) for k in rows.split(",")], [int(k) for k in columns.split(",")])
    expected[place] = expected[place] + u if how else u
    np.testing.assert_array_equal(run_model(model, {"x": x, "u": u})["y"], expected)


@pytest.mark.parametrize(("rows", "columns"), [("4, 5, 6", "0, 1"), ("1, 2, 3", "4, 5"), ("-7, -6, -5", "0, 1")])
def test_a_box_beyond_the_ends_is_left_to_what_refuses_it(rows: str, columns: str) -> None:
    model = box(rows, columns, "", "n")
    nodes = [node.op_type for node in model.graph]
    run(model, [PassCall("boxes")], Context(done=["legalize"]))
    assert [node.op_type for node in model.graph] == nodes


ALONG = """
  a = Constant<value = int64[{lengths}] {{{indices}}}>()  shape = Shape(u)  places = {places}
  y = ScatterElements<axis = 1{how}>(x, places, u)
"""


@pytest.mark.parametrize(
    ("lengths", "indices", "places", "size", "how", "stays"),
    [
        ("1", "-2", "Expand(a, shape)", 1, "", False),
        ("1, 1, 1", "4", "Expand(a, shape)", 1, "", False),
        ("1, 2, 1", "3, 4", "Expand(a, shape)", 2, "", True),
        ("5, 2, 5", ", ".join(["1, 1, 1, 1, 1, 2, 2, 2, 2, 2"] * 5), "Identity(a)", 2, "", False),
        ("5, 2, 5", ", ".join(["2, 2, 2, 2, 2, 1, 1, 1, 1, 1"] * 5), "Identity(a)", 2, "", True),
        ("1", "-2", "Expand(a, shape)", 1, ', reduction = "add"', True),
        ("1", "7", "Expand(a, shape)", 1, "", True),
    ],
)
def test_one_place_along_an_axis(lengths: str, indices: str, places: str, size: int, how: str, stays: bool) -> None:
    """``y[:, -2] = u``, as PyTorch's newer exporter writes it."""
    batch = "5" if "5" in lengths else "n"
    body = ALONG.format(lengths=lengths, indices=indices, places=places, how=how)
    graph = f"(float[{batch},6,5] x, float[{batch},{size},5] u) => (float[{batch},6,5] y) {{ {body} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {graph}')
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    run(model, [PassCall("legalize"), PassCall("boxes")])
    assert any(node.op_type in ("ScatterElements", "GatherGrad") for node in model.graph) == stays
    if not stays:
        x, u = (np.random.default_rng(0).standard_normal((5, n, 5)).astype(np.float32) for n in (6, size))
        start = int(indices.split(",")[0]) % 6
        np.testing.assert_array_equal(
            run_model(model, {"x": x, "u": u})["y"], np.concatenate([x[:, :start], u, x[:, start + size :]], axis=1)
        )
