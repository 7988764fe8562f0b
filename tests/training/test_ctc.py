"""The loss of label sequences whose places in time are not known: as a user trains with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import graphc  # noqa: E402
from graphc import errors, frontends  # noqa: E402
from graphc.distributed.threads import run_threads  # noqa: E402
from graphc.errors import UsageError  # noqa: E402
from tests.training.sequence_labels import FRAMES, LABELS, Speech, data, padded  # noqa: E402

F = torch.nn.functional


def wanted(module: Any, reduction: str, frames: Any = FRAMES, weights: Any = None) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of PyTorch in double precision."""
    layers = Speech(False, "log").double()
    layers.load_state_dict(module.state_dict())
    scores = layers(torch.tensor(data()["sound"]).double()).transpose(0, 1)
    counts = torch.tensor([len(row) for row in LABELS])
    losses = F.ctc_loss(scores, torch.tensor(padded(0)), frames, counts, reduction="none")
    if reduction == "mean":
        losses = losses / counts.clamp(min=1)
    weights = torch.ones(5).double() if weights is None else weights
    loss = (losses * weights).sum() / (weights.sum() if reduction == "mean" else 1)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in layers.named_parameters()}


def gradients(module: Any, trainer: Any) -> dict[str, Any]:
    """What a step of plain descent with a rate of one subtracted."""
    return {name: p.detach().numpy() - trainer.trained_values()[name] for name, p in module.named_parameters()}


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=2e-6 * max(1.0, float(np.abs(gradient).max())))


def compiled(module: Any, **options: Any) -> Any:
    loss = graphc.losses.CTC(lengths="frames", **options)
    sound = torch.zeros(5, 17, 6)
    return graphc.compile(module, example_inputs=(sound,), loss=loss, optimizer=graphc.optim.SGD(lr=1.0))


@pytest.mark.parametrize("end", ["scores", "log", "softmax"])
@pytest.mark.parametrize(("time_first", "reduction"), [(True, "mean"), (False, "sum")])
def test_a_step_is_that_of_pytorch(end: str, time_first: bool, reduction: str) -> None:
    torch.manual_seed(4)
    module = Speech(time_first, end)
    loss, expected = wanted(module, reduction)
    with graphc.Trainer(compiled(module, reduction=reduction)) as trainer:
        np.testing.assert_allclose(trainer.step(data())["loss"], loss, rtol=2e-6)
        close(gradients(module, trainer), expected)


def test_every_frame_counts_without_lengths_and_samples_may_weigh() -> None:
    torch.manual_seed(4)
    module = Speech(True, "scores")
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
    loss, expected = wanted(module, "mean", torch.full((5,), 17), weights.double())
    program = graphc.compile(
        module,
        example_inputs=(torch.zeros(5, 17, 6),),
        loss=graphc.losses.CTC(sample_weight="weight"),
        optimizer=graphc.optim.SGD(lr=1.0),
    )
    feeds = {"sound": data()["sound"], "label": padded(-1), "weight": weights.numpy()}
    with graphc.Trainer(program) as trainer:
        np.testing.assert_allclose(trainer.step(feeds)["loss"], loss, rtol=2e-6)
        close(gradients(module, trainer), expected)


def test_two_workers_with_uneven_shares_take_the_step_of_one() -> None:
    torch.manual_seed(4)
    module = Speech(False, "log")
    loss, expected = wanted(module, "mean")
    program = compiled(module)

    def work(comm: Any) -> tuple[float, dict[str, Any]]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            mine = slice(0, 2) if comm.rank == 0 else slice(2, 5)
            return trainer.step({name: a[mine] for name, a in data().items()})["loss"], gradients(module, trainer)

    for found, gradient in run_threads(2, work):
        np.testing.assert_allclose(found, loss, rtol=2e-6)
        close(gradient, expected)


def test_it_learns_and_says_what_does_not_fit() -> None:
    torch.manual_seed(4)
    program = graphc.compile(
        Speech(False, "scores"),
        example_inputs=(torch.zeros(5, 17, 6),),
        loss=graphc.losses.parse("ctc:lengths=frames,zero_infinity=true"),
        optimizer=graphc.optim.Adam(lr=0.03),
    )
    with graphc.Trainer(program) as trainer:
        losses = [trainer.step(data())["loss"] for _ in range(40)]
        assert losses[-1] < 0.5 * losses[0]
        short = data() | {"frames": np.array([2, 9, 12, 17, 16])}  # three equal labels need five frames
        assert np.isfinite(trainer.step(short)["loss"])
        wrong = padded()
        wrong[2, 0] = 7
        with pytest.raises(errors.FeedError, match=r"label 7 at label\[2, 0\] is outside 0 … 6"):
            trainer.step(data() | {"label": wrong})
    with graphc.Trainer(compiled(Speech(False, "scores"))) as trainer, pytest.raises(errors.NonFiniteError):
        trainer.step(short)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blank": 7}, "blank=7 is none of the classes"),
        ({"time_axis": 2}, "neither 0 nor 1"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, errors.ModelError), match=message):
        compiled(Speech(False, "scores"), **options)


def test_a_module_with_the_loss_of_pytorch_says_what_to_do() -> None:
    class Whole(Speech):
        def forward(self, sound: Any) -> Any:
            return F.ctc_loss(super().forward(sound), torch.tensor(padded(0)), FRAMES, torch.tensor([6, 2, 0, 4, 5]))

    with pytest.raises(errors.ModelError, match="train it with the loss graphc"):
        frontends.export(Whole(True, "log"), (torch.zeros(5, 17, 6),))


def test_a_fixed_batch_needs_the_time_axis() -> None:
    model = frontends.export(Speech(False, "scores"), (torch.zeros(5, 17, 6),), dynamic_batch=False)
    with pytest.raises(UsageError, match="Say time_axis=0 or time_axis=1"):
        graphc.compile(model, loss=graphc.losses.CTC(), optimizer=graphc.optim.SGD(lr=1.0))
    graphc.compile(model, loss=graphc.losses.CTC(time_axis=1), optimizer=graphc.optim.SGD(lr=1.0))
