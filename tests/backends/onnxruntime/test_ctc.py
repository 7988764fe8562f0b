"""Connectionist temporal classification: kernel and decomposition against PyTorch's in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from tests.backends.onnxruntime.node_cases import native, reference  # noqa: E402

Array = np.ndarray[Any, Any]
WIDTHS = {"one label": [1] * 6, "many": [5, 0, 3, 5, 1, 4], "none": [0] * 6, "all": [7] * 6}


@pytest.fixture(params=[1, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    made = ThreadPool(request.param)
    yield made
    made.close()


def by_kernel(arrays: list[Any], attributes: dict[str, Any], pool: ThreadPool) -> list[Array]:
    like = [np.zeros(len(arrays[1]), arrays[0].dtype), np.zeros_like(arrays[0])]
    return native("graphc::CTCLoss", arrays, attributes, pool, like)


def by_decomposition(arrays: list[Any], attributes: dict[str, Any], pool: ThreadPool) -> list[Array]:
    return reference("graphc::CTCLoss", arrays, attributes)


def expected(logits: Array, label: Array, counts: list[int], frames: Array, blank: int, time_axis: int) -> tuple[Array, Array]:
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    scores = (x if time_axis == 0 else x.transpose(0, 1)).log_softmax(2)
    labels = torch.tensor(np.where(label < 0, 0, label))
    losses = torch.nn.functional.ctc_loss(
        scores, labels, torch.tensor(frames), torch.tensor(counts), blank=blank, reduction="none", zero_infinity=True
    )
    losses.sum().backward()
    return losses.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("run", [by_kernel, by_decomposition])
@pytest.mark.parametrize("time_axis", [0, 1])
@pytest.mark.parametrize(
    ("case", "blank", "free"), [("one label", 0, True), ("many", 3, True), ("none", 0, False), ("all", 6, False)]
)
def test_losses_and_slopes_are_those_of_pytorch(
    run: Callable[..., list[Array]], time_axis: int, case: str, blank: int, free: bool, pool: ThreadPool
) -> None:
    rng = np.random.default_rng(3)
    time, samples, classes, counts = 12, 6, 7, WIDTHS[case]
    logits = rng.standard_normal((time, samples, classes) if time_axis == 0 else (samples, time, classes)) * 3
    label = rng.choice([c for c in range(classes) if c != blank], (samples, 7))
    label[3, :] = label[3, 0]  # repeated labels need blanks between them: five or seven do not fit into nine frames
    for row, count in zip(label, counts, strict=True):
        row[count:] = rng.integers(-100, 0, 7 - count)
        row[count + 1 :] = 2  # nothing behind the first negative number counts
    frames = np.array([12, 1, 7, 9, 12, 4]) if free else np.full(samples, time)
    wanted, slope = expected(logits, label, counts, frames, blank, time_axis)
    arrays = [logits.astype(np.float32), label.astype(np.int32), frames if free else None]
    found = run(arrays, {"time_axis": time_axis, "blank": blank, "zero_infinity": 1}, pool)
    np.testing.assert_allclose(found[0], wanted, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found[1], slope, rtol=0, atol=1e-5 if run is by_decomposition else 2e-6)


@pytest.mark.parametrize("run", [by_kernel, by_decomposition])
def test_long_improbable_sequences_keep_their_digits(run: Callable[..., list[Array]], pool: ThreadPool) -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((400, 2, 30)) * 8
    label, frames = rng.integers(1, 30, (2, 90)), np.array([400, 333])
    wanted, slope = expected(logits, label, [90, 90], frames, 0, 0)
    found = run([logits.astype(np.float32), label, frames], {}, pool)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)
    np.testing.assert_allclose(found[1], slope, rtol=0, atol=3e-6 if run is by_kernel else 3e-3)


@pytest.mark.parametrize("run", [by_kernel, by_decomposition])
def test_what_cannot_be_is_infinite_and_what_is_no_label_nan(run: Callable[..., list[Array]], pool: ThreadPool) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 5, 4)).astype(np.float32)
    label = np.array([[1, 1], [1, 4], [0, 1], [2, 3], [2, -1]])
    losses, slope = run([logits, label, np.array([2, 3, 3, 0, 3])], {}, pool)
    assert np.isposinf(losses[[0, 3]]).all()
    assert np.isnan(losses[[1, 2]]).all()
    assert np.isfinite(losses[4])
    assert (slope[:, :4] == 0).all()
    assert (slope[:, 4] != 0).all()
