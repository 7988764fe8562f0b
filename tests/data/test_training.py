"""Training on shards: resuming on another number of workers, padding, learning-rate schedules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.bench.specs import SPECS
from graphc.cli import main
from graphc.data import shard
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from graphc.optim import Schedule
from tests.cli.models import write_blobs, write_mlp

pytestmark = pytest.mark.full

SAMPLES = 46


def program(path: str, **loss: Any) -> graphc.Program:
    return graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(**loss), optimizer=graphc.optim.Adam(lr=1e-3))


def data(comm: Any, batch: int = 8, **options: Any) -> graphc.data.Shards:
    x, y = SPECS["mlp"].batch(SAMPLES, 0)
    return shard({"input": x, "label": y}, global_batch=batch, rank=comm.rank, size=comm.size, seed=3, **options)


def steps(comm: Any, trained: graphc.Program, *, count: int | None, load: Path | None = None, save: Path | None = None) -> Any:
    """Losses of ``count`` steps, or of the rest of two epochs."""
    with graphc.Trainer(trained, comm=comm, threads=1) as trainer:
        shards = data(comm, prefetch=comm.rank)
        trainer.attach(shards)
        if load is not None:
            trainer.restore(load)
        losses = []
        while shards.position[0] < 2 and (count is None or len(losses) < count):
            for batch in shards:
                losses.append(trainer.step(batch.feeds, offset=batch.offset)["loss"])
                if len(losses) == count:
                    break
        if save is not None:
            trainer.save(save)
        return losses, trainer.state.snapshot()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_resumed_inside_an_epoch_on_another_world(
    before: int, after: int, exported: Callable[[str], str], tmp_path: Path
) -> None:
    """8 of 12 steps on one world, the rest on another: the losses of one worker that never stopped."""
    trained = program(exported("mlp"))
    (whole,) = run_threads(1, lambda comm: steps(comm, trained, count=None))
    assert len(whole[0]) == 12
    first = run_threads(before, lambda comm: steps(comm, trained, count=8, save=tmp_path))
    second = run_threads(after, lambda comm: steps(comm, trained, count=None, load=tmp_path))
    np.testing.assert_allclose(first[0][0] + second[0][0], whole[0], rtol=1e-4)
    for name, value in whole[1].items():
        if value.dtype.kind == "f" and "::" not in name:
            np.testing.assert_allclose(second[0][1][name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_fit_goes_on_where_the_checkpoint_stands(exported: Callable[[str], str], tmp_path: Path) -> None:
    trained = program(exported("mlp"))
    with graphc.Trainer(trained, threads=1) as trainer:
        shards = data(trainer.comm)
        trainer.fit(shards, epochs=1)
        for batch in shards:
            trainer.step(batch.feeds)
            if batch.stop == 24:
                break
        trainer.save(tmp_path)
        trainer.fit(shards)
        digest = trainer.state_sha256()
    seen: list[Any] = []
    with graphc.Trainer(trained, threads=1) as trainer:
        trainer.restore(tmp_path)
        x, y = SPECS["mlp"].batch(SAMPLES, 0)
        with pytest.raises(UsageError, match="24 samples into an epoch with seed 3, and this data has seed 0"):
            trainer.fit(shard({"input": x, "label": y}, global_batch=8))
        trainer.fit(data(trainer.comm), callbacks=[seen.append])
        assert trainer.state_sha256() == digest
        assert [e["epoch"] for e in seen] == [2]


def careless(comm: Any, trained: graphc.Program) -> list[int]:
    x, y = SPECS["mlp"].batch(8, 0)
    with graphc.Trainer(trained, comm=comm, threads=1) as trainer:
        with pytest.raises(UsageError, match=rf"rank 0 of 1, this worker is rank {comm.rank} of 2"):
            trainer.fit(graphc.data.ArrayBatches({"input": x, "label": y}, 8))
        found = shard({"input": x, "label": y}, global_batch=8, shuffle=False)
        trainer.fit(found)
        return [found.rank, found.size]


def test_shards_know_their_worker(exported: Callable[[str], str]) -> None:
    """Every worker training on all of the data would go unnoticed; the world is asked, and a mistake refused."""
    trained = program(exported("mlp"))
    assert run_threads(2, lambda comm: careless(comm, trained)) == [[0, 2], [1, 2]]
    with pytest.raises(UsageError, match="go together"):
        shard({"x": np.zeros(4)}, global_batch=2, size=2)


def padded(comm: Any, trained: graphc.Program, **options: Any) -> Any:
    with graphc.Trainer(trained, comm=comm, threads=1) as trainer:
        shapes = set()
        losses = []
        for batch in data(comm, 12, **options):
            shapes.add(batch.feeds["input"].shape)
            losses.append(trainer.step(batch.feeds, offset=batch.offset)["loss"])
        return losses, shapes, trainer.state.snapshot()


def test_padding_does_not_count(exported: Callable[[str], str]) -> None:
    """46 samples in batches of 12 on three workers: one shape, and the numbers of one worker without padding."""
    trained = program(exported("mlp"), ignore_index=-1)
    (one,) = run_threads(1, lambda comm: padded(comm, trained))
    three = run_threads(3, lambda comm: padded(comm, trained, tail="pad", padding={"label": -1}))
    assert all(result[1] == {(4, 784)} for result in three)
    np.testing.assert_allclose(three[0][0], one[0], rtol=1e-5)
    for name, value in one[2].items():
        if value.dtype.kind == "f" and "::" not in name:
            np.testing.assert_allclose(three[0][2][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("tail", ["weight-zero", "keep"])
def test_a_tail_smaller_than_the_world(tail: str, exported: Callable[[str], str]) -> None:
    """46 samples in batches of 15: one is left for three workers. ``keep`` has nothing to join it to after a resume there."""
    trained = program(exported("mlp"))

    def steps_of(comm: Any) -> Any:
        with graphc.Trainer(trained, comm=comm, threads=1) as trainer:
            shards = data(comm, 15, tail=tail)
            start = 45 if tail == "keep" else 0
            shards.load_state_dict(shards.state_dict() | {"samples": start})
            sizes = []
            losses = []
            for batch in shards:
                sizes.append(len(batch.feeds["label"]))
                losses.append(trainer.step(batch.feeds, offset=batch.offset)["loss"])
            return losses, sizes, trainer.state.snapshot()

    (one,) = run_threads(1, steps_of)
    three = run_threads(3, steps_of)
    assert [result[1][-1] for result in three] == [1, 0, 0]
    np.testing.assert_allclose(three[0][0], one[0], rtol=1e-5)
    for name, value in one[2].items():
        if value.dtype.kind == "f" and "::" not in name:
            np.testing.assert_allclose(three[0][2][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def weighed(comm: Any, trained: graphc.Program) -> Any:
    x, y = SPECS["mlp"].batch(9, 0)
    weight = np.array([3, 0, 0.5, 1, 2, 0, 0, 0.25, 1], np.float32)
    with graphc.Trainer(trained, comm=comm, threads=1) as trainer:
        shards = shard({"input": x, "label": y, "w": weight}, global_batch=9, rank=comm.rank, size=comm.size, shuffle=False)
        return [trainer.fit(shards)["loss"] for _ in range(4)], trainer.state.snapshot()


def test_weights_of_samples_average_exactly(exported: Callable[[str], str]) -> None:
    """Weights that sum to very different numbers on three workers, on shares of equal size: a mean of means would be wrong."""
    loss = graphc.losses.SoftmaxCrossEntropy(sample_weight="w")
    # Adam would divide a gradient that is all rounding by its own size.
    trained = graphc.compile(exported("mlp"), loss=loss, optimizer=graphc.optim.SGD(lr=0.05, momentum=0.9))
    (one,) = run_threads(1, lambda comm: weighed(comm, trained))
    three = run_threads(3, lambda comm: weighed(comm, trained))
    np.testing.assert_allclose(three[0][0], one[0], rtol=1e-5)
    for name, value in one[1].items():
        if value.dtype.kind == "f" and "::" not in name:
            np.testing.assert_allclose(three[0][1][name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)


def failing(comm: Any, trained: graphc.Program) -> None:
    x, y = SPECS["mlp"].batch(16, 0)

    class Samples:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, k: int) -> Any:
            if k == 14:
                raise OSError("the disk is gone")
            return x[k], y[k]

    with graphc.Trainer(trained, comm=comm, threads=1) as trainer:
        names = ("input", "label")
        trainer.fit(shard(Samples(), names=names, global_batch=8, rank=comm.rank, size=comm.size, shuffle=False, prefetch=1))


def test_a_failing_loader_of_one_worker_ends_all(exported: Callable[[str], str]) -> None:
    with pytest.raises(graphc.GraphcError, match="batch 1 of epoch 0, sample 14: OSError: the disk is gone"):
        run_threads(2, lambda comm: failing(comm, program(exported("mlp"))))


# Learning rates -------------------------------------------------------------------------------------------------------


def pytorch_rates(schedule: Callable[[Any], Any], lr: float, count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler, found = schedule(optimizer), []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_rates_are_those_of_pytorch() -> None:
    lrs = torch.optim.lr_scheduler
    cosine = Schedule(0.1, decay="cosine", total_steps=20)
    np.testing.assert_allclose(
        [cosine(k) for k in range(20)], pytorch_rates(lambda o: lrs.CosineAnnealingLR(o, 20), 0.1, 20), rtol=1e-6
    )
    stairs = Schedule(0.1, decay="step", decay_steps=5, gamma=0.3)
    np.testing.assert_allclose(
        [stairs(k) for k in range(20)], pytorch_rates(lambda o: lrs.StepLR(o, 5, 0.3), 0.1, 20), rtol=1e-6
    )
    # The rule of Goyal et al.: batches of 256 take 0.1, so batches of 1024 take 0.4, on a line from 0.1 over ten steps.
    large = Schedule(0.1, global_batch=1024, base_batch=256, warmup_steps=10)
    np.testing.assert_allclose(
        [large(k) for k in range(12)],
        pytorch_rates(lambda o: lrs.LinearLR(o, 0.25, 1.0, 10), 0.4, 13)[1:],
        rtol=1e-6,
    )
    assert Schedule(0.1, warmup_steps=4)(0) == pytest.approx(0.025)
    assert math.isclose(Schedule(0.1, global_batch=64, base_batch=256)(0), 0.025)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 8}, "both"),
        ({"decay": "cosin", "total_steps": 3}, "did you mean 'cosine'"),
        ({"decay": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps above"),
        ({"decay": "step"}, "decay_steps"),
    ],
)
def test_schedules_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule(0.1, **options)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    return tmp_path


def run(capfd: pytest.CaptureFixture[str], *more: object, lr: float = 0.05, epochs: int = 2) -> list[dict[str, Any]]:
    """Events of a run on 96 samples."""
    fixed = ["train", "mlp.onnx", "--loss", "softmax_cross_entropy:logits=logits,label=label", "--optimizer", f"sgd:lr={lr}"]
    options = [*fixed, "--epochs", str(epochs), "--backend", "numpy", "--format", "json", *map(str, more)]
    if "--data" not in options:
        options += ["--data", "d.npz"]
    assert main(options) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_command_line_scaling(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scaled = run(capfd, "--batch-size", 32, "--scale-lr-from", 16)
    by_hand = run(capfd, "--batch-size", 32, lr=0.1)
    plain = run(capfd, "--batch-size", 32)
    assert scaled[-2]["loss"] == by_hand[-2]["loss"]
    assert plain[-2]["loss"] != by_hand[-2]["loss"]


def test_command_line_warmup_survives_a_resume(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--batch-size", 16, "--warmup-steps", 9)  # which end in the second of two epochs
    whole = run(capfd, *options)
    run(capfd, *options, "--checkpoint", "c", epochs=1)
    rest = run(capfd, *options, "--resume", "c")
    assert rest[-1]["state_sha256"] == whole[-1]["state_sha256"]
    assert rest[-1]["state_sha256"] != run(capfd, "--batch-size", 16)[-1]["state_sha256"]


def test_command_line_data(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder, reading ahead, the batch of one worker, and each tail, against the plain run."""
    plain = run(capfd, "--batch-size", 20)
    (here / "folder").mkdir()
    with np.load("d.npz") as arrays:
        for name in arrays.files:
            np.save(here / "folder" / f"{name}.npy", arrays[name])
    ahead = run(capfd, "--per-worker-batch", 20, "--data", "folder", "--prefetch", 2)
    assert ahead[-1]["state_sha256"] == plain[-1]["state_sha256"]
    two = run(capfd, "--per-worker-batch", 10, "-n", 2, "--transport", "threads")
    assert two[-2]["loss"] == pytest.approx(plain[-2]["loss"], rel=1e-5)
    pad = run(capfd, "--batch-size", 20, "--tail", "pad", "-n", 2, "--transport", "threads")
    assert pad[-2]["loss"] == pytest.approx(plain[-2]["loss"], rel=1e-5)
    single = [
        run(capfd, "--batch-size", 19, *more)[-2]["loss"]
        for more in ((), ("-n", 3, "--transport", "threads", "--tail", "weight-zero"))
    ]
    assert single[1] == pytest.approx(single[0], rel=1e-5)
    numbers = ("--batch-size", 20, "--loss", "mse:prediction=logits,label=label", "--data", "numbers.npz")
    with np.load("d.npz") as arrays:
        np.savez("numbers.npz", x=arrays["x"], label=np.eye(3, dtype=np.float32)[arrays["label"]])
    weighed = run(capfd, *numbers, "--tail", "pad", "-n", 3, "--transport", "threads")
    assert weighed[-2]["loss"] == pytest.approx(run(capfd, *numbers)[-2]["loss"], rel=1e-5)
    assert (plain[-1]["steps"], run(capfd, "--batch-size", 20, "--tail", "drop")[-1]["steps"]) == (10, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", 8, "--per-worker-batch", 4), "one of the two"),
        (("--tail", "dorp"), "did you mean 'drop'"),
        (("--tail", "drop", "--batch-size", 97), "leaves none"),
        (("--tail", "pad", "--loss", "output:name=logits"), "a loss over samples"),
    ],
)
def test_command_line_mistakes(
    here: Path, capfd: pytest.CaptureFixture[str], options: tuple[object, ...], message: str
) -> None:
    line = ["train", "mlp.onnx", "--data", "d.npz", "--loss", "softmax_cross_entropy", "--optimizer", "sgd", *map(str, options)]
    assert main(line) == 2
    assert message in capfd.readouterr().err
