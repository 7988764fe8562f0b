"""``graphc check``: its exit codes, what it reports, and that its command trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.cli.agreement import call, check_and_train
from tests.cli.models import MLP, parse
from tests.frontends.zoo import SMALL, path_of
from tests.tiers import params

Value = onnx.ValueInfoProto
rng = np.random.default_rng(0)


def weight(name: str, *shape: int, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array((rng.standard_normal(shape) * 3).astype(dtype), name)


def tensor(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> Value:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto], inputs: list[Value], outputs: list[Value], weights: list[onnx.TensorProto], **domains: int
) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(name.replace("_", "."), v) for name, v in domains.items())]
    return helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, weights), opset_imports=opsets, ir_version=8)


node = helper.make_node
LAYER = node("MatMul", ["x", "w"], ["s"])


def mlp() -> onnx.ModelProto:
    return parse(MLP)


def fixed_batch() -> onnx.ModelProto:
    return model([LAYER], [tensor("x", 4, 4)], [tensor("s", 4, 3)], [weight("w", 4, 3)])


def tokens() -> onnx.ModelProto:
    nodes = [node("Gather", ["table", "ids"], ["h"]), node("MatMul", ["h", "w"], ["logits"])]
    weights = [weight("table", 9, 4), weight("w", 4, 5)]
    return model(nodes, [tensor("ids", "n", "t", dtype=TensorProto.INT64)], [tensor("logits", "n", "t", 5)], weights)


def contrastive() -> onnx.ModelProto:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["y", "v"], ["b"]),
        node("Transpose", ["b"], ["bt"], perm=[1, 0]),
        node("MatMul", ["a", "bt"], ["logits_per_image"]),
    ]
    inputs, weights = [tensor("x", "b", 4), tensor("y", "b", 6)], [weight("w", 4, 3), weight("v", 6, 3)]
    return model(nodes, inputs, [tensor("logits_per_image", "b", "b")], weights)


def several_outputs() -> onnx.ModelProto:
    nodes = [LAYER, node("MatMul", ["s", "v"], ["boxes"]), node("Sigmoid", ["boxes"], ["p"])]
    outputs = [tensor("s", "n", 3), tensor("boxes", "n", 2), tensor("p", "n", 2)]
    return model(nodes, [tensor("x", "n", 4)], outputs, [weight("w", 4, 3), weight("v", 3, 2)])


def segmentation() -> onnx.ModelProto:
    nodes = [node("Conv", ["x", "w"], ["scores"], pads=[1, 1, 1, 1])]
    inputs = [tensor("x", "n", 3, "h", "w_")]
    return model(nodes, inputs, [tensor("scores", "n", 5, "h", "w_")], [weight("w", 5, 3, 3, 3)])


def only_the_best_class() -> onnx.ModelProto:
    nodes = [LAYER, node("ArgMax", ["s"], ["best"], axis=1, keepdims=0)]
    return model(nodes, [tensor("x", "n", 4)], [tensor("best", "n", dtype=TensorProto.INT64)], [weight("w", 4, 3)])


def sequence_output() -> onnx.ModelProto:
    parts = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    nodes = [LAYER, node("SplitToSequence", ["s"], ["parts"], axis=1)]
    return model(nodes, [tensor("x", "n", 4)], [parts], [weight("w", 4, 3)])


def quantised() -> onnx.ModelProto:
    nodes = [
        node("DequantizeLinear", ["q", "scale"], ["w"]),
        LAYER,
        node("QuantizeLinear", ["s", "scale"], ["sq"]),
        node("DequantizeLinear", ["sq", "scale"], ["y"]),
    ]
    weights = [weight("q", 4, 3, dtype=np.int8), numpy_helper.from_array(np.float32(0.1), "scale")]
    bias = [node("Add", ["y", "bias"], ["z"])]
    return model([*nodes, *bias], [tensor("x", "n", 4)], [tensor("z", "n", 3)], [*weights, weight("bias", 3)])


def own_loss() -> onnx.ModelProto:
    nodes = [
        LAYER,
        node("Sub", ["s", "t"], ["d"]),
        node("Mul", ["d", "d"], ["q"]),
        node("ReduceMean", ["q"], ["loss"], keepdims=0),
    ]
    inputs, outputs = [tensor("x", "n", 4), tensor("t", "n", 3)], [tensor("loss"), tensor("s", "n", 3)]
    return model(nodes, inputs, outputs, [weight("w", 4, 3)])


TRAINS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "mlp": (mlp, "softmax_cross_entropy"),
    "fixed batch": (fixed_batch, "softmax_cross_entropy"),
    "tokens": (tokens, "softmax_cross_entropy"),
    "contrastive": (contrastive, "softmax_cross_entropy"),
    "several outputs": (several_outputs, "bce_with_logits:logits=p"),
    "segmentation": (segmentation, "softmax_cross_entropy"),
    "best class": (only_the_best_class, "softmax_cross_entropy:logits=s"),
    "sequence output": (sequence_output, "softmax_cross_entropy:logits=s"),
    "quantised": (quantised, "softmax_cross_entropy"),
    "own loss": (own_loss, "output:name=loss"),
}


FIRST = ("mlp", "tokens", "own loss")


@pytest.mark.parametrize("name", params(TRAINS, full=TRAINS.keys() - set(FIRST)))
def test_the_command_that_check_prints_trains(name: str, tmp_path: Path) -> None:
    make, loss = TRAINS[name]
    onnx.save(make(), tmp_path / "m.onnx")
    found = check_and_train(tmp_path / "m.onnx", tmp_path)
    assert found.code == 0, found.error
    assert found.agrees, found.complaint
    assert found.report["loss"] == loss
    trained = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    before = {t.name: numpy_helper.to_array(t) for t in make().graph.initializer}
    assert any(not np.array_equal(trained[name], before[name]) for name in trained.keys() & before.keys())


def no_parameters() -> onnx.ModelProto:
    return model([node("Relu", ["x"], ["y"])], [tensor("x", "n", 4)], [tensor("y", "n", 4)], [])


def integers_only() -> onnx.ModelProto:
    kind = TensorProto.INT64
    values = [tensor("x", "n", 4, dtype=kind)], [tensor("s", "n", 3, dtype=kind)]
    return model([LAYER], *values, [weight("w", 4, 3, dtype=np.int64)])


def unknown_op() -> onnx.ModelProto:
    fuse = node("Fuse", ["x", "w"], ["s"], domain="acme")
    return model([fuse], [tensor("x", "n", 4)], [tensor("s", "n", 3)], [weight("w", 4, 3)], acme=1)


def behind_an_integer() -> onnx.ModelProto:
    nodes = [LAYER, node("Cast", ["s"], ["i"], to=TensorProto.INT64), node("Cast", ["i"], ["y"], to=TensorProto.FLOAT)]
    return model(nodes, [tensor("x", "n", 4)], [tensor("y", "n", 3)], [weight("w", 4, 3)])


def map_output() -> onnx.ModelProto:
    element = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    scores = helper.make_value_info("scores", helper.make_sequence_type_proto(element))
    nodes = [LAYER, node("ZipMap", ["s"], ["scores"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])]
    return model(nodes, [tensor("x", "n", 4)], [scores], [weight("w", 4, 3)], ai_onnx_ml=1)


UNTRAINABLE: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "no parameters": (no_parameters, "the model has no parameters"),
    "integers": (integers_only, "nothing to train"),
    "unknown op": (unknown_op, "unknown operator acme::Fuse"),
    "behind an integer": (behind_an_integer, "1 × not on a differentiable path to the loss"),
    "map output": (map_output, "zipmap"),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_cannot_train_ends_with_exit_code_3(name: str, tmp_path: Path) -> None:
    make, words = UNTRAINABLE[name]
    onnx.save(make(), tmp_path / "m.onnx")
    found = check_and_train(tmp_path / "m.onnx", tmp_path)
    assert found.code == 3, found.error
    assert words in found.error
    assert not found.report.get("trainable", False)
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 4), np.float32), label=np.zeros((4, 3), np.float32))
    loss = ("--data", str(tmp_path / "d.npz"), "--loss", "mse", "--optimizer", "sgd:lr=0.1")
    assert call("train", str(tmp_path / "m.onnx"), *loss)[0] != 0


def checked(tmp_path: Path, made: onnx.ModelProto, *options: str) -> dict[str, Any]:
    onnx.save(made, tmp_path / "m.onnx")
    code, out, err = call("check", str(tmp_path / "m.onnx"), "--format", "json", *options)
    assert code == 0, err
    return dict(json.loads(out))


def test_check_counts_what_the_loss_trains(tmp_path: Path) -> None:
    """The second layer lies behind the output of the chosen loss."""
    found = checked(tmp_path, several_outputs(), "--loss", "mse:prediction=s", "-v")
    assert found["trained_parameters"] == 1
    assert {p["name"]: p["trains"] for p in found["each_parameter"]} == {"w": True, "v": False}
    assert "mse:prediction=boxes" in found["other_losses"]
    assert set(found["seconds"]) >= {"legalize", "compile", "plan"}


def test_constants_that_may_be_meant_to_train_are_named(tmp_path: Path) -> None:
    """A named scalar of an unknown exporter does not train unless it is told to."""
    nodes, scale = [LAYER, node("Mul", ["s", "scale"], ["y"])], numpy_helper.from_array(np.float32(0.7), "scale")
    made = model(nodes, [tensor("x", "n", 4)], [tensor("y", "n", 3)], [weight("w", 4, 3), scale])
    found = checked(tmp_path, made, "-v")
    (warning,) = found["warnings"]
    assert "1 constant may be meant to train" in warning
    assert "--train scale" in warning
    assert {p["name"]: p["trains"] for p in found["each_parameter"]} == {"w": True, "scale": False}
    again = checked(tmp_path, made, "--train", "scale")
    assert (again["trained_parameters"], again["warnings"]) == (2, [])
    assert "--train scale" in again["command"]
    assert check_and_train(tmp_path / "m.onnx", tmp_path, "--train", "scale").agrees
    trained = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert trained["scale"] != np.float32(0.7)


def test_data_and_memory_are_those_of_the_batch(tmp_path: Path) -> None:
    found = checked(tmp_path, tokens(), "--batch-size", "6", "--shape", "ids=?,11")
    assert found["data"]["label"] == {"dtype": "int64", "shape": ["n", 11], "example": [6, 11], "low": 0, "high": 4}
    assert found["data"]["ids"]["example"] == [6, 11]
    assert found["memory"]["parameters"] >= 4 * (9 * 4 + 4 * 5)
    assert found["memory"]["optimizer"] >= 2 * 4 * (9 * 4 + 4 * 5)
    assert "--shape 'ids=?,11' --batch-size 6" in found["command"]


def test_inputs_without_samples_are_named(tmp_path: Path) -> None:
    nodes = [LAYER, node("Add", ["s", "shift"], ["y"])]
    made = model(nodes, [tensor("x", "n", 4), tensor("shift", 1, 3)], [tensor("y", "n", 3)], [weight("w", 4, 3)])
    found = checked(tmp_path, made)
    assert check_and_train(tmp_path / "m.onnx", tmp_path).agrees
    assert found["command"] is None
    assert "shift:float[1,3] has 1 rows for any number of samples" in found["unfed"]
    assert "graphc.Trainer" in call("check", str(tmp_path / "m.onnx"))[1]


def test_wrong_options_are_usage_errors(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx")
    for options, words in (
        (("--loss", "mse:prediction=nowhere"), "no value 'nowhere'"),
        (("--freeze", "nothing*"), "'nothing*'"),
        (("--shape", "z=1,2"), "there is no input 'z'"),
        (("--precision", "fp8"), "it is fp32, bf16 or fp16"),
    ):
        code, _, err = call("check", str(tmp_path / "m.onnx"), *options)
        assert (code, words in err) == (2, True), err


BACKEND = Path(onnx.__file__).parent / "backend" / "test" / "data"


def backend_models() -> list[Path]:
    """The models of ONNX's backend tests that PyTorch's modules and operators became."""
    return sorted(path for kind in ("converted", "operator") for path in (BACKEND / f"pytorch-{kind}").glob("*/model.onnx"))


@pytest.mark.full
@pytest.mark.parametrize("part", params(range(8), full=[1], large=range(2, 8)))
def test_check_and_train_agree_on_models_of_the_onnx_package(part: int, tmp_path: Path) -> None:
    """Check says yes and its command trains, or says no with exit code 3; an eighth of the models in the quick tier."""
    outcomes = {path.parent.name: check_and_train(path, tmp_path) for path in backend_models()[part::8]}
    assert {name: o.complaint or o.error for name, o in outcomes.items() if not o.agrees} == {}
    assert any(o.code == 0 for o in outcomes.values())


@pytest.mark.parametrize("name", params(SMALL, full=SMALL, large=["shufflenet", "inception_v1"]))
def test_check_and_train_agree_on_light_models(name: str, tmp_path: Path) -> None:
    found = check_and_train(path_of(name), tmp_path, "--initialize", "he")
    assert found.agrees, found.complaint or found.error


def test_ranks_that_only_bodies_tell_are_found_once(tmp_path: Path) -> None:
    """Inference of an If forgets the rank that its Conv told; the search for ranks ends all the same."""

    def branch(name: str) -> onnx.GraphProto:
        nodes = [node("Squeeze", ["x"], [f"u{name}"]), node("Conv", [f"u{name}", "w"], [f"v{name}"])]
        total = node("ReduceSum", [f"v{name}"], [f"y{name}"], keepdims=0)
        return helper.make_graph([*nodes, total], name, [], [helper.make_tensor_value_info(f"y{name}", TensorProto.FLOAT, [])])

    choice = node("If", ["c"], ["y"], then_branch=branch("t"), else_branch=branch("e"))
    inputs = [tensor("x", "n", 1, 2, "t"), tensor("c", dtype=TensorProto.BOOL)]
    onnx.save(model([choice], inputs, [tensor("y")], [weight("w", 2, 2, 3)]), tmp_path / "m.onnx")
    assert call("check", str(tmp_path / "m.onnx"))[0] in (0, 3)


def test_an_output_without_samples_is_trained_from_a_script(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Squeeze", ["h", "first"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "length", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["length", 3])],
        [
            numpy_helper.from_array(np.ones((4, 3), np.float32), "w"),
            numpy_helper.from_array(np.array([0]), "first"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    code, out, _ = call("check", str(tmp_path / "m.onnx"))
    assert code == 0
    said = " ".join(out.split())
    assert "'graphc train' cannot feed it: label:int64[length] has no axis of samples: the model is fixed at 1" in said
