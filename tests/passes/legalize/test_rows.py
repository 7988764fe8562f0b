"""Gathers and scatters with one index for a whole row become row by row; others stay, and all compute what they did."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from graphc.frontends import load
from graphc.pipeline import run as run_pipeline
from graphc.training.inference import run_model
from tests.frontends.zoo import run

SCATTER = 'y = ScatterElements <axis = {axis}, reduction = "{reduction}"> (x, wide, u)'
EXPANDED = "s = Constant <value = int64[{rank}] {{{sizes}}}> () wide = Expand (i, s) "


def model(inputs: str, result: str, body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float[{result}] y) {{ {body} }}')


def scatter(reduction: str, axis: int = 0) -> onnx.ModelProto:
    body = EXPANDED.format(rank=2, sizes="6, 3" if axis == 0 else "4, 6") + SCATTER.format(axis=axis, reduction=reduction)
    if axis:
        return model("float[4,5] x, int64[1,6] i, float[4,6] u", "4,5", body)
    return model("float[5,3] x, int64[6,1] i, float[6,3] u", "5,3", body)


GATHER = model("float[5,3] x, int64[6,1] i", "6,3", EXPANDED.format(rank=2, sizes="6, 3") + "y = GatherElements (x, wide)")
CASES = {
    **{f"{how}-{axis}": scatter(how, axis) for how in ("none", "add", "mul", "max", "min") for axis in (0, 1)},
    "gather": GATHER,
    "vector": model("float[5] x, int64[6] i, float[6] u", "5", 'y = ScatterElements <reduction = "add"> (x, i, u)'),
    "tuples": model("float[5,3] x, int64[6,1] i", "6,3", "y = GatherND (x, i)"),
    "added tuples": model("float[5,3] x, int64[2,3,1] i, float[2,3,3] u", "5,3", 'y = ScatterND <reduction = "add"> (x, i, u)'),
}
OTHERS = {
    "an index for each element": model(
        "float[5,3] x, int64[6,3] i, float[6,3] u", "5,3", 'y = ScatterElements <reduction = "add"> (x, i, u)'
    ),
    "less than whole rows": model(
        "float[5,3] x, int64[6,1] i, float[6,2] u",
        "5,3",
        EXPANDED.format(rank=2, sizes="6, 2") + SCATTER.format(axis=0, reduction="add"),
    ),
    "one index along the axis": model("float[5,3] x, int64[5,1] i", "5,1", "y = GatherElements <axis = 1> (x, i)"),
}


def feeds(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    generator, found = np.random.default_rng(3), {}
    for value in proto.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.name == "i":
            found["i"] = generator.permutation(np.arange(np.prod(shape)) % 3 - 1).reshape(shape)
        else:
            found[value.name] = generator.standard_normal(shape).astype(np.float32)
    return found


def legal_ops(proto: onnx.ModelProto) -> set[str]:
    legal = load(proto)
    run_pipeline(legal, "legalize")
    return {node.op_type for node in legal.graph}


@pytest.mark.parametrize("name", CASES)
def test_rows(name: str) -> None:
    proto, given = CASES[name], feeds(CASES[name])
    if name.startswith("none"):  # ONNX leaves open which of two updates of a place stays
        given["i"] = np.arange(6).reshape(given["i"].shape) % 5
        given["u"] = np.where(given["i"] == 0, np.float32(7), given["u"])
    assert not legal_ops(proto) & {"ScatterElements", "GatherElements", "GatherND"}
    (wanted,) = run(load(proto), given)
    for backend in ("onnxruntime", "numpy"):
        np.testing.assert_allclose(run_model(proto, given, backend=backend)["y"], wanted, rtol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_indices_stay(name: str) -> None:
    assert legal_ops(OTHERS[name]) & {"ScatterElements", "GatherElements"}
