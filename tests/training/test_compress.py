"""What travels in place of float32 gradients: low types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import graphc
from graphc.data import share
from graphc.errors import UsageError
from graphc.plan import Plan, make_plan
from graphc.runtime.threads import run_threads
from graphc.trainer import make_backend
from tests.training import small

LOW = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def plan_of(program: Any, workers: int = 2) -> Plan:
    backend = make_backend("onnxruntime", threads=1)
    return make_plan(
        program.model, {"input": (8, small.INPUTS), "label": (8,)}, native=backend.prefers_native, world_size=workers
    )


@pytest.mark.parametrize("method", LOW)
@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_gradients_are_rounded_summed_in_float32_and_rounded_again(method: str, backend: str) -> None:
    """The first step of two workers against the same arithmetic in numpy, on PyTorch's gradients of each share."""
    x, y = small.batch(16, 0)
    low, total = LOW[method], dict.fromkeys(small.SHAPES, np.float32(0))
    for rank in range(2):
        reference, mine = small.Torch(lambda p: torch.optim.SGD(p, lr=0.1)), share(16, rank, 2)
        reference.backward(x[mine], y[mine])
        for name, parameter in reference.parameters.items():
            sums = parameter.grad.numpy() * np.float32(8)  # of the share's mean
            total[name] = total[name] + sums.astype(low).astype(np.float32)
    program = small.compiled("sgd:lr=0.1", compress=method, backend=backend)
    two = run_threads(2, lambda comm: small.train(comm, program, 1))
    assert two[0]["hash"] == two[1]["hash"]
    precision = float(ml_dtypes.finfo(low).eps)
    for name, before in small.weights().items():
        wanted = total[name].astype(low).astype(np.float32) / np.float32(16)
        got = (before - two[0]["state"][name]) / np.float32(0.1)
        # Gradients that lie at the middle of two numbers may be rounded either way; all others agree.
        np.testing.assert_allclose(got, wanted, rtol=0, atol=precision * np.abs(wanted).max())
        assert np.mean(np.abs(got - wanted) < 1e-5 * np.abs(wanted).max()) > 0.97


@pytest.mark.parametrize("method", LOW)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_training_stays_close_to_uncompressed(method: str, workers: int) -> None:
    (plain,) = run_threads(1, lambda comm: small.train(comm, small.compiled("adam:lr=0.01"), 20, (16, 13)))
    program = small.compiled("adam:lr=0.01", compress=method, clip_norm=0.5)
    ranks = run_threads(workers, lambda comm: small.train(comm, program, 20, (16, 13)))
    assert len({rank["hash"] for rank in ranks}) == 1
    losses = [m["loss"] for m in ranks[0]["metrics"]]
    np.testing.assert_allclose(losses, [m["loss"] for m in plain["metrics"]], rtol=0.05)


def test_a_bucket_is_converted_in_one_sweep_each_way() -> None:
    """Buckets, their number and their order are those without compression; the bytes are half."""
    plain, low = plan_of(small.compiled()), plan_of(small.compiled(compress="fp16"))

    def sent(plan: Plan) -> dict[str, int]:
        return {s.tag: sum(plan.places[v].nbytes for v in s.inputs) for s in plan.steps if s.kind == "start"}

    before, after = sent(plain), sent(low)
    assert list(before) == list(after)
    assert len(before) > 2
    for tag in before:
        assert after[tag] == (before[tag] if "metrics" in tag else before[tag] // 2)
    kernels = [s.nodes[0].op_type for s in low.steps if s.kind == "kernel"]
    assert kernels.count("Narrow") == kernels.count("Widen") == len(before) - 1
    first = next(k for k, s in enumerate(low.steps) if s.kind == "start" and "metrics" not in s.tag)
    assert any(s.kind == "segment" for s in low.steps[first:]), "the first bucket is under way during the backward pass"


def test_an_overflow_of_float16_stops_the_step() -> None:
    program = small.compiled("sgd:lr=0.1", compress="fp16")
    with graphc.Trainer(program, threads=1) as trainer:
        x, y = small.batch(8, 0)
        with pytest.raises(graphc.errors.NonFiniteError):
            trainer.step({"input": x * np.float32(1e6), "label": y})


def test_unknown_method() -> None:
    with pytest.raises(UsageError, match="did you mean 'bf16'"):
        small.compiled(compress="bf17")
