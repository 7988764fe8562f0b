"""What is fed must have the sizes that the model and its loss expect, before any native code reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import losses
from graphc.errors import FeedError, GraphcError
from graphc.ir.dim_expressions import evaluate

torch = pytest.importorskip("torch")
Array = np.ndarray[Any, Any]

rng = np.random.default_rng(3)


def normal(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def trainer_of(text: str, loss: losses.Loss, weight: Array) -> graphc.Trainer:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return graphc.Trainer(graphc.compile(model, loss=loss, optimizer=graphc.optim.SGD(lr=0.1)), threads=1)


def refused(trainer: graphc.Trainer, feeds: Mapping[str, Array], match: str, error: type[GraphcError] = FeedError) -> None:
    before = trainer.state_sha256()
    with pytest.raises(error, match=match):
        trainer.step(feeds)
    assert trainer.state_sha256() == before


FLAT = """(float[k,N,4] x) => (float[M,3] y)
    { h = MatMul (x, w)  s = Constant <value = int64[2] {-1, 3}> ()  y = Reshape (h, s) }"""
"""Positions of all sequences in one row, as language models end."""


@pytest.mark.parametrize("loss", [losses.SoftmaxCrossEntropy(), losses.NLL(), losses.MSE()], ids=str)
def test_labels_have_the_size_that_the_symbols_of_the_inputs_give(loss: losses.Loss) -> None:
    x, w = normal(2, 3, 4), normal(4, 3)

    def label(n: int) -> Array:
        return normal(n, 3) if isinstance(loss, losses.MSE) else np.arange(n) % 3

    with trainer_of(FLAT, loss, w) as trainer:
        for size in (5, 7, 1):
            refused(trainer, {"x": x, "label": label(size)}, r"feed 'label'.*wants N\*k = 6 on axis 0, where N = 3, k = 2")
        target = label(6)
        found = trainer.step({"x": x, "label": target})["loss"]
    y, functional = torch.from_numpy((x @ w).reshape(6, 3)), torch.nn.functional
    oracle = {"mse": functional.mse_loss, "nll": functional.nll_loss, "softmax_cross_entropy": functional.cross_entropy}
    assert found == pytest.approx(float(oracle[loss.kind](y, torch.from_numpy(target))), rel=1e-5)


@pytest.mark.parametrize("weights", [[2.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
@pytest.mark.parametrize("kind", ["cross_entropy", "nll", "smoothed", "per_sample", "probabilities"])
def test_class_weights_are_as_many_as_the_classes(weights: Sequence[float], kind: str) -> None:
    made = {
        "cross_entropy": losses.SoftmaxCrossEntropy(class_weight=weights),
        "nll": losses.NLL(class_weight=weights),
        "smoothed": losses.SoftmaxCrossEntropy(class_weight=weights, label_smoothing=0.1),
        "per_sample": losses.SoftmaxCrossEntropy(class_weight=weights, sample_weight="each"),
        "probabilities": losses.SoftmaxCrossEntropy(class_weight=weights, label_kind="probabilities"),
    }[kind]
    feeds: dict[str, Array] = {"x": normal(4, 3), "label": np.array([0, 1, 2, 2])}
    if kind == "per_sample":
        feeds["each"] = np.ones(4, np.float32)
    if kind == "probabilities":
        feeds["label"] = np.full((4, 3), 1 / 3, np.float32)
    with trainer_of("(float[n,c] x) => (float[n,c] y) { y = Mul (x, w) }", made, normal(1)) as trainer:
        refused(trainer, feeds, rf"'class_weight' has shape \[{len(weights)}\], but \[3\] is that of y")


def test_a_class_weight_for_every_symbolic_class_is_taken() -> None:
    x, label, w = normal(4, 3), np.array([0, 1, 2, 2]), np.ones(1, np.float32)
    made = losses.SoftmaxCrossEntropy(class_weight=[1.0, 2.0, 3.0])
    with trainer_of("(float[n,c] x) => (float[n,c] y) { y = Mul (x, w) }", made, w) as trainer:
        refused(trainer, {"x": x, "label": np.array([0, 1, 2, 3])}, r"label 3 at label\[3\] is outside 0 … 2$")
        found = trainer.step({"x": x, "label": label})["loss"]
    weight = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(x), torch.from_numpy(label), weight)
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("loss", [losses.MSE(), losses.L1(), losses.Huber(), losses.BCEWithLogits()], ids=str)
@pytest.mark.parametrize("shape", [(1, 6), (4, 1), (1, 1), (2, 12)])
def test_a_label_is_not_broadcast_to_a_prediction_whose_size_is_data(loss: losses.Loss, shape: tuple[int, int]) -> None:
    text = "(float[n,4] x, int64[2] size) => (float[a,b] y) { h = MatMul (x, w)  y = Reshape (h, size) }"
    w, x = normal(4, 6), normal(4, 4)
    with trainer_of(text, loss, w) as trainer:
        feeds = {"x": x, "size": np.array([4, 6])}
        refused(trainer, {**feeds, "label": np.ones(shape, np.float32)}, "MatchShape", GraphcError)
        assert np.isfinite(trainer.step({**feeds, "label": np.ones((4, 6), np.float32)})["loss"])


def test_a_label_with_a_symbol_of_its_own_is_not_broadcast() -> None:
    text = "(float[n,4] x, float[n,m] label) => (float[n,3] y) { y = MatMul (x, w) }"
    with trainer_of(text, losses.MSE(), normal(4, 3)) as trainer:
        refused(trainer, {"x": normal(2, 4), "label": normal(2, 1)}, r"'label' has shape \[2, 1\], but \[2, 3\] is that of y")
        trainer.step({"x": normal(2, 4), "label": normal(2, 3)})


def test_the_sample_weights_are_as_many_as_the_samples() -> None:
    text = "(float[n,4] x, float[m] each) => (float[n,3] y) { y = MatMul (x, w) }"
    with trainer_of(text, losses.MSE(sample_weight="each"), normal(4, 3)) as trainer:
        feeds = {"x": normal(2, 4), "label": normal(2, 3)}
        refused(trainer, {**feeds, "each": np.ones(1, np.float32)}, r"'each' has shape \[1\], but \[2\] is that of")
        trainer.step({**feeds, "each": np.ones(2, np.float32)})


def test_arithmetic_that_the_file_writes_is_compared_with_what_is_fed() -> None:
    text = '(float[n,past] x, float[n,"past + 1"] z) => (float[n,p] y) { a = Concat <axis = 1> (x, z)  y = Mul (a, w) }'
    with trainer_of(text, losses.MSE(prediction="y"), normal(1)) as trainer:
        feeds = {"x": normal(2, 3), "label": normal(2, 7)}
        refused(trainer, {**feeds, "z": normal(2, 3)}, r"wants past \+ 1 = 4 on axis 1, where past = 3 .*--shape z")
        trainer.step({**feeds, "z": normal(2, 4)})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("k*N", 24), ("2*N", 12), ("past_len + 1", 8), ("(N - 1)//2 + 1", 3), ("Max(1, N)", 6), ("floor(N/4)", 1),
        ("Mod(N, 4)", 2),
        ("ceiling(N/4)", 2), ("a.b*2", 6), ("v0*N", 12), ("N", 6),
        ("N/4", None), ("N - M", None), ("seq-1", None), ("N**9", None), ("1+", None), ("N(2)", None), ("", None),
        ("(" * 150, None),
    ],
)  # fmt: skip
def test_sizes_are_evaluated(text: str, size: int | None) -> None:
    assert evaluate(text, {"N": 6, "k": 4, "past_len": 7, "a.b": 3, "seq": 5, "v0": 2}) == size


@pytest.mark.parametrize("step", ["s = Squeeze(m, zero)", "s = Reshape(m, shape)"])
def test_a_symbol_that_the_nodes_do_not_keep_is_told(step: str) -> None:
    """Exporters write a name for the batch over nodes that were traced with one sample."""
    text = f"""(float[N,5,4] x) => (float[1,5,3] y)
        <int64[1] zero = {{0}}, int64[2] shape = {{5, 3}}> {{ m = MatMul(x, w) {step} y = Unsqueeze(s, zero) }}"""
    weight, feeds = normal(4, 3), {"x": normal(8, 5, 4), "label": normal(1, 5, 3)}
    trainer = trainer_of(text, losses.MSE(), weight)
    refused(trainer, feeds, match="declares any N but computes with N = 1 only: train it at that size")
    feeds["x"] = feeds["x"][:1]
    expected = ((feeds["x"] @ weight - feeds["label"]) ** 2).mean()
    assert trainer.step(feeds)["loss"] == pytest.approx(float(expected), rel=1e-5)
