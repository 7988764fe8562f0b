"""Weights of samples in every loss over samples, against ``torch.nn.functional`` with ``reduction="none"``, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from graphc.errors import UsageError
from graphc.passes.training.loss import loss
from graphc.pipeline import Context
from tests.passes.training.loss_cases import WEIGHTS, data, run, scores

SAMPLES = np.array([0.5, 0.0, 2.0, 1.0, 3.0, 0.0], dtype=np.float32)


def check(model: Any, feeds: dict[str, Any], want: torch.Tensor, leaf: torch.Tensor, **options: Any) -> None:
    """The weighted mean, and its gradient, are PyTorch's; samples of weight zero get no gradient."""
    got = run(model, {**feeds, "w": SAMPLES}, of="loss", sample_weight="w", **options)
    want.backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(got["loss"], float(want.detach()), rtol=1e-12)
    np.testing.assert_allclose(got["x::grad"], leaf.grad.numpy(), rtol=1e-10, atol=1e-14)
    assert not got["x::grad"][SAMPLES == 0].any()


def column(values: torch.Tensor) -> torch.Tensor:
    """The weights as they broadcast over ``values``, which have the sample first."""
    return torch.tensor(SAMPLES, dtype=torch.float64).reshape(-1, *[1] * (values.ndim - 1)).expand_as(values)


@pytest.mark.parametrize("shape", ["N,5", "6,5,3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 1}, {"class_weight": WEIGHTS, "label_smoothing": 0.2, "ignore_index": 3}, {"label_smoothing": 0.1}],
    ids=lambda o: "+".join(o) or "plain",
)
@pytest.mark.parametrize("kind", ["softmax_cross_entropy", "nll"])
def test_over_classes(shape: str, options: dict[str, Any], kind: str) -> None:
    if kind == "nll":
        options = {k: v for k, v in options.items() if k != "label_smoothing"}
    x, label = data(*((6, 5) if shape == "N,5" else (6, 5, 3)))
    leaf, target = torch.tensor(x, requires_grad=True), torch.tensor(label)
    reference: dict[str, Any] = {"ignore_index": -10, **options}
    by_class = torch.tensor(reference.pop("class_weight", [1.0] * 5), dtype=torch.float64)
    function = F.cross_entropy if kind == "softmax_cross_entropy" else F.nll_loss
    losses = function(leaf, target, reduction="none", weight=by_class, **reference)
    counts = by_class[target] * (target != reference["ignore_index"])
    want = (losses * column(losses)).sum() / (counts * column(counts)).sum()
    check(scores(shape), {"x": x, "label": label}, want, leaf, kind=kind, **options)


def test_over_probabilities() -> None:
    x, _ = data(6, 5)
    label = torch.softmax(torch.tensor(data(6, 5, seed=1)[0]), dim=1)
    leaf = torch.tensor(x, requires_grad=True)
    losses = F.cross_entropy(leaf, label, reduction="none")
    want = (losses * column(losses)).sum() / SAMPLES.sum()
    check(scores("N,5"), {"x": x, "label": label.numpy()}, want, leaf, label_kind="probabilities")


@pytest.mark.parametrize(
    ("kind", "function"),
    [("mse", F.mse_loss), ("l1", F.l1_loss), ("huber", F.huber_loss), ("bce_with_logits", F.binary_cross_entropy_with_logits)],
)
@pytest.mark.parametrize("shape", ["N", "N,4", "6,4,2"])
def test_over_elements(kind: str, function: Any, shape: str) -> None:
    sizes = {"N": (6,), "N,4": (6, 4), "6,4,2": (6, 4, 2)}[shape]
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=sizes), rng.random(size=sizes)
    leaf = torch.tensor(x, requires_grad=True)
    losses = function(leaf, torch.tensor(label), reduction="none")
    want = (losses * column(losses)).sum() / column(losses).sum()
    check(scores(shape), {"x": x, "label": label}, want, leaf, kind=kind)


def test_metrics_are_weighted() -> None:
    x, label = data(6, 5)
    right = x.argmax(axis=1)
    label = np.where([True, False, False, True, True, True], right, (right + 1) % 5)
    got = run(scores("N,5"), {"x": x, "label": label, "w": SAMPLES}, sample_weight="w", metrics=True)
    assert got["accuracy"] == pytest.approx((0.5 + 1 + 3) / SAMPLES.sum())


@pytest.mark.parametrize(
    ("signature", "options", "message"),
    [
        ("N,5", {"kind": "output", "sample_weight": "w"}, "has no option 'sample_weight'"),
        ("N,5", {"sample_weight": "x"}, "must be floating point, one number per sample"),
    ],
)
def test_weights_that_are_none(signature: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loss(scores(signature), Context(), **options)
