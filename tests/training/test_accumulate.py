"""Micro-batches: one reduction a step, started while the last backward pass still runs, with everything that hangs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.distributed.threads import run_threads
from graphc.ir.ops.accumulation import run_once
from tests.training import torch_models

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("accumulate")
    return torch_models.save(torch_models.make(torch_models.Cnn), folder / "cnn.onnx", torch.randn(4, 3, 8, 8))


def compiled(path: str, accumulate: int, **options: Any) -> graphc.Program:
    return graphc.compile(
        path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.05), accumulate=accumulate, **options
    )


def feeds(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    x, y = torch_models.batch((3, 8, 8), count, seed)
    return {"input": x, "label": y}


def steps_of(comm: Any, path: str, accumulate: int) -> list[str]:
    """Kind and name of every plan step that one training step runs, in order."""
    seen: list[str] = []

    def wrap(kind: str, name: str, run: Callable[[], None]) -> Callable[[], None]:
        def traced() -> None:
            seen.append(f"{kind} {name}")
            run()

        return traced

    with graphc.Trainer(compiled(path, accumulate, bucket_mb=0.002), comm=comm, threads=1, wrap=wrap) as trainer:
        trainer.step(feeds(8, comm.rank))
    return seen


def test_one_reduction_a_step_that_overlaps_the_last_backward_pass(path: str) -> None:
    once, often = (run_threads(2, lambda comm, k=k: steps_of(comm, path, k))[0] for k in (1, 4))
    kinds = lambda seen, kind: [s for s in seen if s.startswith(kind + " ")]  # noqa: E731
    for kind in ("start", "wait", "update", "check"):
        assert kinds(often, kind) == kinds(once, kind)
    assert len(kinds(often, "kernel")) > 3 * len(kinds(once, "kernel"))
    first_start = next(k for k, s in enumerate(often) if s.startswith("start"))
    backward = [k for k, s in enumerate(often) if "ConvGradWeight" in s]
    assert backward[-1] > first_start > backward[len(backward) * 3 // 4 - 1]  # in the last of four, and before its end


def test_micro_batches_of_batch_normalization_follow_pytorch(path: str) -> None:
    """Each micro-batch is normalised by itself, as in PyTorch's loop over ``(loss / k).backward()``."""
    module = torch_models.make(torch_models.Cnn)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with graphc.Trainer(compiled(path, 4), threads=1) as trainer:
        for step in range(5):
            batch = feeds(16, step)
            loss = trainer.step(batch)["loss"]
            optimizer.zero_grad()
            total = 0.0
            for part in (slice(k, k + 4) for k in range(0, 16, 4)):
                x, y = (torch.from_numpy(a[part]) for a in batch.values())
                piece = torch.nn.functional.cross_entropy(module(x), y) / 4
                piece.backward()
                total += piece.item()
            optimizer.step()
            assert abs(loss - total) < 1e-5 * total
        for name, parameter in module.named_parameters():
            want = parameter.detach().numpy()
            np.testing.assert_allclose(trainer.state.arrays[name], want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)


def test_what_runs_once_reads_nothing_of_a_single_micro_batch(path: str) -> None:
    program = compiled(path, 2, clip_norm=1.0, nonfinite="skip")
    once = run_once(program.model.graph)
    assert {"AllReduceStart", "AllReduceWait", "SGD", "RunningAverage", "Increment"} <= {n.op_type for n in once}
    for node in once:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            assert producer is None or producer in once or producer.op_type in ("Accumulate", "Constant"), node


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"precision": "bf16"}, {"recompute": "all"}, {"clip_norm": 0.5}])
def test_other_passes_see_the_whole_batch(options: dict[str, Any], path: str) -> None:
    """Without BatchNormalization's training mode micro-batches change nothing, whatever else runs."""
    results = []
    for accumulate in (1, 4):
        program = compiled(path, accumulate, freeze=["features.1.*", "features.5.*"], **options)
        with graphc.Trainer(program, threads=1) as trainer:
            losses = [trainer.step(feeds(8, step))["loss"] for step in range(4)]
            results.append((losses, trainer.state.snapshot()))
    (losses, state), (again, other) = results
    np.testing.assert_allclose(again, losses, rtol=1e-3 if "precision" in options else 1e-6)
    for key, value in state.items():
        if value.dtype.kind == "f":
            tolerance = 2e-3 if "precision" in options else 2e-6
            np.testing.assert_allclose(other[key], value, rtol=0, atol=tolerance * np.abs(value).max() + 1e-8, err_msg=key)


def test_a_bad_micro_batch_changes_nothing_and_is_named(path: str) -> None:
    with graphc.Trainer(compiled(path, 4), threads=1) as trainer:
        trainer.step(feeds(8))
        before = trainer.state_sha256()
        bad = feeds(8, 1)
        bad["input"][2, 0, 0, 0] = np.inf  # in the second of four
        with pytest.raises(graphc.errors.NonFiniteError, match="step 1, first in tensor 'input'"):
            trainer.step(bad)
        assert trainer.state_sha256() == before
        assert np.isfinite(trainer.step(feeds(8, 2))["loss"])


def test_a_batch_that_does_not_divide_is_refused_and_an_uneven_tail_is_not(path: str) -> None:
    data = feeds(22)
    with graphc.Trainer(compiled(path, 4), threads=1) as trainer:
        with pytest.raises(graphc.errors.UsageError, match=r"accumulate=4 does not divide the batch.*multiple of 4"):
            trainer.fit(graphc.data.ArrayBatches(data, 10))
        trainer.fit(graphc.data.ArrayBatches(data, 8))
        assert trainer.steps_done == 3


def test_a_fixed_batch_is_taken_in_micro_batches_of_its_size(path: str, tmp_path: Any) -> None:
    from graphc import frontends

    fixed = frontends.load(
        torch_models.save(torch_models.make(torch_models.Cnn), tmp_path / "cnn.onnx", torch.randn(4, 3, 8, 8))
    )
    with (
        graphc.Trainer(compiled(fixed, 2, batch=4), threads=1) as trainer,  # type: ignore[arg-type]
        graphc.Trainer(compiled(path, 2), threads=1) as free,
    ):
        assert trainer.step(feeds(8)) == free.step(feeds(8))
        with pytest.raises(graphc.errors.FeedError, match=r"has 6 samples.*fixed at batches of 4, 2 a step"):
            trainer.step(feeds(6))
        with pytest.raises(graphc.errors.UsageError, match=r"fixed at batches of 4.*take a batch of 8"):
            trainer.fit(graphc.data.ArrayBatches(feeds(16), 4))


def test_the_pass_runs_once(path: str) -> None:
    with pytest.raises(graphc.errors.UsageError, match="accumulates micro-batches already"):
        graphc.compile(
            path,
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.SGD(lr=0.1),
            passes="legalize,train_mode,loss,autodiff,optimizer,allreduce,accumulate{steps=2},accumulate{steps=2}",
        )
