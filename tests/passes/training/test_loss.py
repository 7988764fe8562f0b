"""The loss pass against ``torch.nn.functional``: values and gradients, in float64, with static and symbolic batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from graphc.errors import UsageError
from graphc.ir.builder import Builder
from graphc.ir.ops.losses import label_checks
from graphc.passes.training.autodiff import autodiff
from graphc.passes.training.loss import loss
from graphc.pipeline import Context
from tests.passes.training.loss_cases import WEIGHTS, Array, data, graph_of, outputs, run, scores, torch_loss


@pytest.mark.parametrize("shape", ["4,5", "N,5", "N,5,3", "N,5,H,W"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"ignore_index": 1},
        {"ignore_index": -100, "label_smoothing": 0.1},
        {"class_weight": WEIGHTS},
        {"class_weight": WEIGHTS, "ignore_index": 3, "label_smoothing": 0.3},
        {"label_smoothing": 0.2, "reduction": "sum"},
    ],
    ids=lambda o: "+".join(o) or "plain",
)
def test_softmax_cross_entropy_is_that_of_pytorch(shape: str, options: dict[str, Any]) -> None:
    sizes = {"4,5": (4, 5), "N,5": (7, 5), "N,5,3": (4, 5, 3), "N,5,H,W": (2, 5, 3, 4)}[shape]
    x, label = data(*sizes)
    if options.get("ignore_index") == -100:
        label.reshape(-1)[::3] = -100
    model = scores(shape)
    got = run(model, {"x": x, "label": label}, of="loss", **options)
    reference = {"ignore_index": -10, **options}
    if "class_weight" in reference:
        reference["weight"] = torch.tensor(reference.pop("class_weight"), dtype=torch.float64)
    want, gradient = torch_loss(F.cross_entropy, x, label, **reference)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 1}, {"class_weight": WEIGHTS, "ignore_index": 4}, {"reduction": "sum"}]
)
@pytest.mark.parametrize("shape", ["N,5", "2,5,3"])
def test_nll_is_that_of_pytorch(shape: str, options: dict[str, Any]) -> None:
    x, label = data(*((6, 5) if shape == "N,5" else (2, 5, 3)))
    got = run(scores(shape), {"x": x, "label": label}, of="loss", kind="nll", **options)
    reference = {"ignore_index": -10, **options}
    if "class_weight" in reference:
        reference["weight"] = torch.tensor(reference.pop("class_weight"), dtype=torch.float64)
    want, gradient = torch_loss(F.nll_loss, x, label, **reference)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"class_weight": WEIGHTS}, {"reduction": "sum"}])
@pytest.mark.parametrize("shape", ["N,5", "2,5,3"])
def test_probabilities_as_labels(shape: str, options: dict[str, Any]) -> None:
    sizes = (6, 5) if shape == "N,5" else (2, 5, 3)
    x, _ = data(*sizes)
    label = np.random.default_rng(1).dirichlet(np.ones(5), size=sizes[:1] + sizes[2:])
    label = np.moveaxis(label, -1, 1).copy()
    got = run(scores(shape), {"x": x, "label": label}, of="loss", label_kind="probabilities", **options)
    reference = dict(options)
    if "class_weight" in reference:
        reference["weight"] = torch.tensor(reference.pop("class_weight"), dtype=torch.float64)
    want, gradient = torch_loss(F.cross_entropy, x, label, **reference)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "function", "options"),
    [
        ("mse", F.mse_loss, {}),
        ("mse", F.mse_loss, {"reduction": "sum"}),
        ("l1", F.l1_loss, {}),
        ("huber", F.huber_loss, {}),
        ("huber", F.huber_loss, {"delta": 0.3}),
        ("bce_with_logits", F.binary_cross_entropy_with_logits, {}),
        ("bce_with_logits", F.binary_cross_entropy_with_logits, {"reduction": "sum"}),
    ],
)
@pytest.mark.parametrize("shape", ["N,3", "4,3"])
def test_elementwise_losses_are_those_of_pytorch(kind: str, function: Any, options: dict[str, Any], shape: str) -> None:
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(4, 3)) * 2, rng.uniform(size=(4, 3))
    if kind == "bce_with_logits":
        x[0] = 0.0  # where its formula has a kink and the loss has none
    got = run(scores(shape), {"x": x, "label": label}, of="loss", kind=kind, **options)
    want, gradient = torch_loss(function, x, label, **options)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", ["softmax_cross_entropy", "bce_with_logits"])
def test_extreme_scores_stay_finite(kind: str) -> None:
    x = np.array([[900.0, -900.0], [-900.0, 900.0]])
    label = np.array([0, 0]) if kind == "softmax_cross_entropy" else np.array([[1.0, 0.0], [0.0, 0.0]])
    got = run(scores("N,2"), {"x": x, "label": label}, of="loss", kind=kind)
    function = F.cross_entropy if kind == "softmax_cross_entropy" else F.binary_cross_entropy_with_logits
    want, gradient = torch_loss(function, x, label)
    np.testing.assert_allclose(got["loss"], want)
    np.testing.assert_allclose(got["x::grad"], gradient, atol=1e-14)


FUNCTIONS = {
    "softmax_cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_narrow_types_run_in_onnxruntime(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    width: Any = np.float32 if dtype == "float" else np.float16
    x = rng.normal(size=(6, 5)).astype(width)
    label: Array = rng.integers(0, 5, 6) if kind in ("softmax_cross_entropy", "nll") else rng.uniform(size=(6, 5)).astype(width)
    model = graph_of(f"{dtype}[N,5] x) => ({dtype}[N,5] z", "z = Identity(x)")
    options = {"label_smoothing": 0.1} if kind == "softmax_cross_entropy" else {}
    got = run(model, {"x": x, "label": label}, of="loss", kind=kind, **options)
    wide = label if label.dtype == np.int64 else label.astype(np.float64)
    want, gradient = torch_loss(FUNCTIONS[kind], x.astype(np.float64), wide, **options)
    tolerance = 1e-5 if dtype == "float" else 1e-2
    assert got["loss"].dtype == width
    np.testing.assert_allclose(got["loss"], want, rtol=tolerance)
    np.testing.assert_allclose(got["x::grad"], gradient, rtol=tolerance, atol=tolerance)


def test_the_marked_total_is_the_sum_and_the_loss_its_mean() -> None:
    x, label = data(6, 5)
    got = run(scores("N,5"), {"x": x, "label": label})
    want, gradient = torch_loss(F.cross_entropy, x, label, reduction="sum")
    np.testing.assert_allclose(got["loss"] * 6, want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", ["cross_entropy", "nll_loss"])
def test_onnx_own_losses_over_classes(function: str, reduction: str, weighted: bool) -> None:
    """A model that computes its loss with a standard op trains with ``output``."""
    head = {
        "cross_entropy": "each, log_prob = SoftmaxCrossEntropyLoss",
        "nll_loss": "log_prob = Identity(x) each = NegativeLogLikelihoodLoss",
    }[function]
    body = (
        f'{head}<ignore_index=2, reduction="{reduction}">(x, t{", w" * weighted}) square = Mul(each, each)'
        " a = ReduceSum<keepdims=0>(square) b = ReduceMean<keepdims=0>(log_prob) z = Add(a, b)"
    )
    model = graph_of("double[N,5,D] x, int64[N,D] t, double[5] w) => (double z", body)
    x, label = data(3, 5, 2)
    x /= 3
    assert label_checks(model.graph) == {"t": (0, 5, 2)}
    got = run(model, {"x": x, "t": label, "w": np.array(WEIGHTS)}, of="loss", kind="output")

    def scalar(leaf: Any, target: Any) -> Any:
        weight = torch.tensor(WEIGHTS, dtype=torch.float64) if weighted else None
        each = getattr(F, function)(leaf, target, weight=weight, ignore_index=2, reduction=reduction)
        return (each**2).sum() + (F.log_softmax(leaf, 1) if function == "cross_entropy" else leaf).mean()

    want, gradient = torch_loss(scalar, x, label)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, rtol=1e-10, atol=1e-14)


def test_all_labels_ignored_is_nan_as_in_pytorch() -> None:
    x, _ = data(3, 5)
    got = run(scores("N,5"), {"x": x, "label": np.full(3, 7)}, ignore_index=7)
    assert np.isnan(got["loss"])
    assert not got["x::grad"].any()


@pytest.mark.parametrize("kind", ["softmax_cross_entropy", "nll"])
@pytest.mark.parametrize("bad", [-1, 5, 10**12])
def test_a_label_out_of_range_never_indexes_and_shows_as_nan(kind: str, bad: int) -> None:
    x, label = data(4, 5)
    label[2] = bad
    got = run(scores("N,5"), {"x": x, "label": label}, kind=kind)
    assert np.isnan(got["loss"])
    assert np.isfinite(got["x::grad"][[0, 1, 3]]).all()


def test_second_derivatives_of_cross_entropy() -> None:
    x, label = data(3, 5)
    model = scores("N,5")
    loss(model, Context(), label_smoothing=0.2, class_weight=[1, 2, 1, 1, 3], ignore_index=0)
    autodiff(model, Context(), of=["loss"], wrt=["x"])
    op = Builder(model.graph)
    first = next(v for n in model.graph for v in n.outputs if v.name == "x::grad")
    op.emit("Mul", [first, first], outputs=["square"])
    autodiff(model, Context(), of=["square"], wrt=["x"])
    second = [v for n in model.graph for v in n.outputs if v.metadata_props.get("graphc.gradient_of") == "x"][-1]
    model.graph.outputs.append(second)
    got = outputs(model, {"x": x, "label": label})
    leaf = torch.tensor(x, requires_grad=True)
    weight = torch.tensor([1.0, 2, 1, 1, 3], dtype=torch.float64)
    value = F.cross_entropy(leaf, torch.tensor(label), weight=weight, label_smoothing=0.2, ignore_index=0)
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    (want,) = torch.autograd.grad((gradient**2).sum(), leaf)
    assert want.abs().max() > 1e-3
    np.testing.assert_allclose(list(got.values())[-1], want.numpy(), atol=1e-12)


# What the file ends with -------------------------------------------------------------------------------------------------


ENDINGS = {
    "softmax": "z = Softmax<axis=1>(x)",
    "log_softmax": "z = LogSoftmax<axis=-1>(x)",
    "log of softmax": "p = Softmax<axis=1>(x) z = Log(p)",
    "identity": "p = Softmax<axis=1>(x) z = Identity(p)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_trailing_softmax_is_absorbed(ending: str) -> None:
    x, label = data(6, 5)
    x *= 300  # the probabilities themselves underflow
    model = graph_of("double[N,5] x) => (double[N,5] z", ENDINGS[ending])
    got = run(model, {"x": x, "label": label}, of="loss")
    want, gradient = torch_loss(F.cross_entropy, x, label)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, atol=1e-14)


def test_nll_absorbs_a_log_softmax_and_refuses_a_softmax() -> None:
    x, label = data(6, 5)
    model = graph_of("double[N,5] x) => (double[N,5] z", "z = LogSoftmax<axis=1>(x)")
    got = run(model, {"x": x, "label": label}, of="loss", kind="nll")
    want, gradient = torch_loss(F.cross_entropy, x, label)
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, atol=1e-14)
    with pytest.raises(UsageError, match="softmax_cross_entropy"):
        loss(graph_of("double[N,5] x) => (double[N,5] z", "z = Softmax<axis=1>(x)"), Context(), kind="nll")


def test_a_trailing_sigmoid_is_absorbed_through_a_reshape() -> None:
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(4, 1)) * 900, np.array([1.0, 0.0, 1.0, 0.0])
    model = graph_of("double[N,1] x) => (double[N] z", "p = Sigmoid(x) axes = Constant<value_ints=[1]>() z = Squeeze(p, axes)")
    got = run(model, {"x": x, "label": label}, of="loss", kind="bce_with_logits")
    want, gradient = torch_loss(F.binary_cross_entropy_with_logits, x, label[:, None])
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], gradient, atol=1e-14)


@pytest.mark.parametrize("batch", ["2", "N"])
@pytest.mark.parametrize("ending", ["plain", "softmax", "coerced"])
def test_image_classifiers_that_end_in_1x1_maps_take_one_label_a_sample(batch: str, ending: str) -> None:
    body = {
        "plain": "z = Identity(x)",
        "softmax": "z = Softmax<axis=1>(x)",
        "coerced": "f = Flatten<axis=1>(x) p = Softmax<axis=1>(f) s = Shape(x) z = Reshape(p, s)",
    }[ending]
    model = graph_of(f"double[{batch},5,1,1] x) => (double[{batch},5,1,1] z", body)
    x, label = data(2, 5, 1, 1)
    got = run(model, {"x": x, "label": label[:, 0, 0]}, of="loss")
    want, gradient = torch_loss(F.cross_entropy, x[:, :, 0, 0], label[:, 0, 0])
    np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"][:, :, 0, 0], gradient, atol=1e-14)


def test_classes_last_by_axis_or_by_the_softmax() -> None:
    x, label = data(2, 3, 5, classes_at=2)
    want, gradient = torch_loss(F.cross_entropy, np.moveaxis(x, 2, 1), label)
    softmax = graph_of("double[N,T,5] x) => (double[N,T,5] z", "z = Softmax<axis=-1>(x)")
    for model, options in ((scores("N,T,5"), {"axis": -1}), (softmax, {})):
        got = run(model, {"x": x, "label": label}, of="loss", **options)
        np.testing.assert_allclose(got["loss"], want, rtol=1e-12)
        np.testing.assert_allclose(np.moveaxis(got["x::grad"], 2, 1), gradient, atol=1e-14)
