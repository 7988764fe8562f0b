"""What the loss pass makes of labels, names and outputs, what it refuses, and losses as the command line names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import graphc
from graphc import losses, pipeline
from graphc.errors import GraphcError, ModelError, UsageError
from graphc.ir.names import LOSS_TOTAL
from graphc.ir.ops.losses import label_checks
from graphc.passes.training.autodiff import autodiff
from graphc.passes.training.loss import loss
from graphc.pipeline import Context
from tests.passes.training.loss_cases import HEAD, WEIGHTS, data, graph_of, outputs, run, scores, torch_loss

# Labels, names and outputs ----------------------------------------------------------------------------------------------


def test_the_new_label_shares_the_batch_dimension() -> None:
    model = scores("N,5,H")
    loss(model, Context())
    (label,) = [v for v in model.graph.inputs if v.name == "label"]
    assert label.dtype == ir.DataType.INT64
    assert str(label.shape) == "[N,H]"
    assert [v.name for v in model.graph.outputs] == ["loss"]
    assert label_checks(model.graph) == {"label": (0, 5, None)}


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_an_input_of_the_model_serves_as_label(dtype: str) -> None:
    x, label = data(4, 5)
    model = scores("N,5", f", {dtype}[N,1] target")
    got = run(model, {"x": x, "target": label[:, None].astype(dtype)}, of="loss", label="target", ignore_index=2)
    want, _ = torch_loss(F.cross_entropy, x, label, ignore_index=2)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)


def test_label_checks_see_through_casts_and_squeezes() -> None:
    model = scores("N,5", ", uint8[N,1] target")
    loss(model, Context(), label="target", ignore_index=255)
    assert label_checks(model.graph) == {"target": (0, 5, 255)}


def test_a_float_input_of_the_model_is_taken_as_probabilities() -> None:
    x, _ = data(4, 5)
    target = np.random.default_rng(1).dirichlet(np.ones(5), size=4)
    got = run(scores("N,5", ", double[N,5] target"), {"x": x, "target": target}, of="loss", label="target")
    want, _ = torch_loss(F.cross_entropy, x, target)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)


def test_an_autoencoder_compares_with_its_own_input() -> None:
    model = graph_of("double[N,5] x) => (double[N,5] z", "two = Constant<value_float=2.0>() t = CastLike(two, x) z = Mul(x, t)")
    x, _ = data(4, 5)
    got = run(model, {"x": x}, kind="mse", label="x")
    np.testing.assert_allclose(got["loss"], (x**2).mean(), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options", "correct"),
    [
        ("softmax_cross_entropy", {}, 3 / 4),
        ("softmax_cross_entropy", {"ignore_index": 2}, 2 / 3),
        ("nll", {}, 3 / 4),
    ],
)
def test_accuracy(kind: str, options: dict[str, Any], correct: float) -> None:
    x = np.eye(3)[[0, 1, 2, 0]]
    model = scores("N,3")
    got = run(model, {"x": x, "label": np.array([0, 0, 2, 0])}, kind=kind, metrics=True, **options)
    np.testing.assert_allclose(got["accuracy"], correct, rtol=1e-6)


def test_accuracy_of_a_binary_classifier_and_of_probabilities() -> None:
    x = np.array([[1.0, -1.0], [2.0, 3.0]])
    got = run(scores("N,2"), {"x": x, "label": np.array([[1.0, 1], [1, 1]])}, kind="bce_with_logits", metrics=True)
    assert got["accuracy"] == 0.75
    label = np.array([[0.9, 0.1], [0.8, 0.2]])
    got = run(scores("N,2"), {"x": x, "label": label}, label_kind="probabilities", metrics=True)
    assert got["accuracy"] == 0.5


def test_several_outputs_need_a_name_and_can_be_kept() -> None:
    def two() -> ir.Model:
        return graph_of("double[N,5] x) => (double[N,5] loss, double[N,5] features", "loss = Relu(x) features = Neg(x)")

    with pytest.raises(UsageError, match=r"2 outputs \(loss, features\).*logits=NAME"):
        loss(two(), Context())
    model = two()
    loss(model, Context(), logits="features", keep_outputs=True)
    assert [v.name for v in model.graph.outputs] == ["loss", "loss.before", "features"]
    model = two()
    loss(model, Context(), logits="features")
    assert [v.name for v in model.graph.outputs] == ["loss"]


OWN_ANSWERS = {
    # what scikit-learn's converters write: the best class, and its probability
    "its class": ("int64[N] label, double[N,5] p", "z = MatMul(x, w) p = Softmax(z) label = ArgMax<axis=1, keepdims=0>(p)"),
    "through a view": (
        "int64[N,1] label, double[N,5] p",
        "z = MatMul(x, w) p = Softmax(z) a = ArgMax<axis=1, keepdims=1>(z) label = Identity(a)",
    ),
    "its output": ("double[N,5] label", "label = MatMul(x, w)"),
}


@pytest.mark.parametrize("case", OWN_ANSWERS)
def test_the_models_own_answer_is_no_target(case: str) -> None:
    outputs_, body = OWN_ANSWERS[case]
    w = np.random.default_rng(0).standard_normal((4, 5))
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (double[N,4] x) => ({outputs_})
        <double[4,5] w = {{{",".join(map(str, w.flat))}}}> {{ {body} }}"""
    )
    kind, option = (
        (losses.MSE, {"prediction": "label"}) if case == "its output" else (losses.SoftmaxCrossEntropy, {"logits": "p"})
    )
    with pytest.raises(UsageError, match=r"the model computes 'label' itself.*label=target"):
        graphc.compile(model, loss=kind(**option), optimizer=graphc.optim.SGD())
    x, label = data(6, 4)
    target = np.zeros((6, 5)) if kind is losses.MSE else label
    program = graphc.compile(model, loss=kind(**option, label="target"), optimizer=graphc.optim.SGD())
    with graphc.Trainer(program, threads=1) as trainer:
        got = trainer.step({"x": x, "target": target})["loss"]
    function = F.mse_loss if kind is losses.MSE else F.cross_entropy
    np.testing.assert_allclose(got, function(torch.tensor(x @ w), torch.tensor(target)).item(), rtol=1e-9)


def test_a_target_that_the_model_prepares_from_its_inputs_is_one() -> None:
    model = graph_of("double[N,5] x, double[N,5] t) => (double[N,5] z", "z = Neg(x) scaled = Add(t, t)")
    x, _ = data(4, 5)
    got = run(model, {"x": x, "t": x}, of=None, kind="mse", prediction="z", label="scaled")
    np.testing.assert_allclose(got["loss"], (9 * x**2).mean(), rtol=1e-9)


@pytest.mark.parametrize("shape", ["", "1"])
def test_any_scalar_of_the_model_is_a_loss(shape: str) -> None:
    keep = "keepdims=0" if not shape else "keepdims=1"
    model = graph_of(f"double[6] x) => (double[{shape}] loss", f"q = Mul(x, x) loss = ReduceMean<{keep}>(q)")
    x, _ = data(6, 1)
    got = run(model, {"x": x[:, 0]}, of="loss", kind="output")
    np.testing.assert_allclose(got["loss"], (x**2).mean(), rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], x[:, 0] / 3, rtol=1e-10)
    assert got["loss"].shape == ()


def test_a_second_model_as_loss(tmp_path: Any) -> None:
    text = (
        HEAD
        + """ loss_model (double[N,5] z, double[N,5] target) => (double value)
        <double[5] scale = {1.0, 2.0, 3.0, 4.0, 5.0}>
        { d = Sub(z, target) s = Mul(d, scale) q = Mul(s, s) value = ReduceMean<keepdims=0>(q) }"""
    )
    path = tmp_path / "loss.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    model = scores("N,5")
    x, _ = data(3, 5)
    target = x + 1
    got = run(model, {"x": x, "target": target}, of="loss", kind="model", path=str(path))
    np.testing.assert_allclose(got["loss"], np.mean(np.arange(1, 6) ** 2.0), rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], np.broadcast_to(-2 * np.arange(1, 6) ** 2.0 / 15, (3, 5)), rtol=1e-10)
    assert list(model.graph.initializers) == ["graphc.live"], "weights of the loss do not train"


def test_class_weights_from_an_initializer_do_not_train() -> None:
    x, label = data(4, 5)
    model = scores("N,5")
    tensor = ir.tensor(np.array(WEIGHTS), name="balance")
    value = ir.Value(name="balance", type=ir.TensorType(tensor.dtype), shape=ir.Shape([5]), const_value=tensor)
    model.graph.register_initializer(value)
    got = run(model, {"x": x, "label": label}, of="loss", class_weight="balance")
    want, _ = torch_loss(F.cross_entropy, x, label, weight=torch.tensor(WEIGHTS, dtype=torch.float64))
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    assert not list(value.uses())


def test_the_marked_total_survives_saving(tmp_path: Any) -> None:
    model = scores("N,5")
    loss(model, Context(), label_smoothing=0.1, ignore_index=2)
    ir.save(model, tmp_path / "m.onnx")
    again = ir.load(tmp_path / "m.onnx")
    x, label = data(4, 5)
    assert [v.metadata_props[LOSS_TOTAL] for n in again.graph for v in n.outputs if LOSS_TOTAL in v.metadata_props] == ["1"]
    autodiff(again, Context(), wrt=["x"])
    want, _ = torch_loss(F.cross_entropy, x, label, label_smoothing=0.1, ignore_index=2)
    np.testing.assert_allclose(outputs(again, {"x": x, "label": label})["loss"], want, rtol=1e-12)


# Bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "softmax_crossentropy"}, "did you mean 'softmax_cross_entropy'"),
        ({"kind": "mse", "delta": 1.0}, "'mse' has no option 'delta'"),
        ({"logits": "y"}, "no value 'y'"),
        ({"axis": 2}, "axis=2 does not exist"),
        ({"reduction": "average"}, "mean or sum"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"class_weight": [1.0, 2.0]}, "there are 5 classes"),
        ({"class_weight": "balance"}, "'balance' is not an initializer"),
        ({"label_kind": "classes"}, "did you mean 'class'"),
        ({"kind": "mse", "label": "wide"}, "must have one shape"),
        ({"label": "wide"}, "floating point"),
        ({"label": "indices"}, "does not fit logits"),
        ({"kind": "huber", "delta": 0.0}, "above 0"),
        ({"kind": "output"}, "is not a floating-point scalar"),
        ({"kind": "model"}, "needs path"),
        ({"kind": "model", "path": "nowhere.onnx"}, "does not exist"),
        ({"label_kind": "probabilities", "ignore_index": 1}, "needs class indices"),
    ],
)
def test_bad_requests_say_what_is_wrong(options: dict[str, Any], message: str) -> None:
    model = scores("4,5", ", double[4,1] wide, int64[3] indices")
    if options.get("label") == "wide" and "kind" not in options:
        options = {**options, "label_kind": "class"}
    with pytest.raises(UsageError, match=message):
        loss(model, Context(), **options)


def test_softmax_over_another_axis_than_asked_for() -> None:
    model = graph_of("double[N,3,5] x) => (double[N,3,5] z", "z = Softmax<axis=2>(x)")
    with pytest.raises(UsageError, match=r"over axis 2 .* but the loss is over axis 1"):
        loss(model, Context(), axis=1)


def test_a_broken_loss_model_is_reported(tmp_path: Any) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07 not onnx")
    with pytest.raises(ModelError, match="cannot be read"):
        loss(scores("N,5"), Context(), kind="model", path=str(tmp_path / "broken.onnx"))


# The outside ------------------------------------------------------------------------------------------------------------


def bound(step: pipeline.PassCall) -> dict[str, Any]:
    """The options of a step as values, without the kind."""
    return {key: value for key, value in pipeline.PASSES[step.name].bind(step.options).items() if key != "kind"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "softmax_cross_entropy:logits=L,label=Y,ignore_index=-100",
            losses.SoftmaxCrossEntropy(logits="L", label="Y", ignore_index=-100),
        ),
        ("softmax_cross_entropy:class_weight=1|2.5", losses.SoftmaxCrossEntropy(class_weight=[1.0, 2.5])),
        ("softmax_cross_entropy:class_weight=balance", losses.SoftmaxCrossEntropy(class_weight="balance")),
        ("nll", losses.NLL()),
        ("bce_with_logits:metrics", losses.BCEWithLogits(metrics=True)),
        ("mse:reduction=sum", losses.MSE(reduction="sum")),
        ("l1:prediction=p", losses.L1(prediction="p")),
        ("huber:delta=0.5", losses.Huber(delta=0.5)),
        ("output:name=score", losses.Output(name="score")),
        ("model:path=loss.onnx", losses.Model("loss.onnx")),
    ],
)
def test_command_line_form(text: str, expected: losses.Loss) -> None:
    assert losses.parse(text) == expected
    (step,) = pipeline.parse(str(expected.step()))
    assert losses.LOSSES[step.options["kind"]](**bound(step)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softmax", "did you mean 'softmax_cross_entropy'"),
        ("mse:lable=y", "did you mean 'label'"),
        ("huber:delta=wide", "delta='wide' is not a number"),
        ("huber:delta", "delta"),
        ("mse:label=a,label=b", "given twice"),
        ("model", "path=FILE"),
    ],
)
def test_command_line_errors(text: str, message: str) -> None:
    with pytest.raises(GraphcError, match=message):
        losses.parse(text)
