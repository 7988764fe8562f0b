"""What travels in place of float32 gradients: low types, and the factors of PowerSGD."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import graphc
from graphc.backend import make_backend
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from graphc.ir.facts import static_dims
from graphc.plan.partition import Plan, make_plan
from graphc.runtime import checkpoint
from tests.runtime.mpi_run import map_ranks
from tests.training import small

pytestmark = pytest.mark.full

Array = np.ndarray[Any, Any]

LOW = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def plan_of(program: Any, workers: int = 2) -> Plan:
    backend = make_backend("onnxruntime", threads=1)
    return make_plan(program.model, {"input": (8, small.INPUTS), "label": (8,)}, backend, world_size=workers)


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
    """Buckets, their number and their order are those without compression; the bytes are half, and memory no more than that."""
    plain, low = plan_of(small.compiled()), plan_of(small.compiled(compress="fp16"))

    def sent(plan: Plan) -> dict[str, int]:
        return {s.transfer.tag: s.transfer.nbytes for s in plan.steps if s.transfer is not None and s.kind == "start"}

    before, after = sent(plain), sent(low)
    assert list(before) == list(after)
    assert len(before) > 2
    for tag in before:
        assert after[tag] == (before[tag] if "metrics" in tag else before[tag] // 2)
    kernels = [s for s in low.steps if s.kind == "kernel"]
    rounding = [s for s in kernels if s.nodes[0].op_type == "RoundTo"]
    widening = [s for s in kernels if s.nodes[0].op_type == "Widen"]
    assert len(rounding) == len(widening) == len(before) - 1
    read = sorted(str(low.places[v]) for s in rounding for v in s.inputs)
    assert read == sorted(str(low.places[v]) for s in widening for v in s.outputs)
    first = next(k for k, s in enumerate(low.steps) if s.transfer is not None and "metrics" not in s.transfer.tag)
    assert any(s.kind == "segment" for s in low.steps[first:]), "the first bucket is under way during the backward pass"


def test_an_overflow_of_float16_stops_the_step() -> None:
    program = small.compiled("sgd:lr=0.1", compress="fp16")
    with graphc.Trainer(program, threads=1) as trainer:
        x, y = small.batch(8, 0)
        with pytest.raises(graphc.errors.NonFiniteError):
            trainer.step({"input": x * np.float32(1e6), "label": y})


def gradients(parameters: Mapping[str, Array], step: int, workers: int) -> list[dict[str, Array]]:
    """PyTorch's gradient of each rank's share, summed over its samples."""
    x, y = small.batch(16, step)
    found = []
    for rank in range(workers):
        reference, mine = small.Torch(lambda p: torch.optim.SGD(p, lr=0.1)), share(16, rank, workers)
        for name, parameter in reference.parameters.items():
            parameter.data = torch.tensor(parameters[name])
        reference.backward(x[mine], y[mine])
        count = mine.stop - mine.start
        found.append({name: count * p.grad.numpy().astype(np.float64) for name, p in reference.parameters.items()})
    return found


def gram_schmidt(matrix: Array) -> Array:
    """As in the appendix of the paper."""
    result = matrix.copy()
    for k in range(result.shape[1]):
        result[:, k] /= np.linalg.norm(result[:, k])
        for j in range(k + 1, result.shape[1]):
            result[:, j] -= (result[:, k] @ result[:, j]) * result[:, k]
    return result


class PowerSGD:
    """Algorithms 1 and 2 of Vogels et al. 2019 in float64, with means over the workers and plain SGD."""

    def __init__(self, factors: Mapping[str, Array], workers: int) -> None:
        self.q = {name: q.astype(np.float64) for name, q in factors.items()}
        self.error = [{name: np.zeros(small.SHAPES[name]) for name in self.q} for _ in range(workers)]

    def mean(self, grads: list[dict[str, Array]]) -> dict[str, Array]:
        """What the update takes: the decompressed mean over the workers."""
        found = {name: np.mean([g[name] for g in grads], axis=0) for name in small.SHAPES}
        for name, q in self.q.items():
            deltas = [g[name] + e[name] for g, e in zip(grads, self.error, strict=True)]
            p = gram_schmidt(np.mean([d @ q for d in deltas], axis=0))
            self.q[name] = np.mean([d.T @ p for d in deltas], axis=0)
            found[name] = p @ self.q[name].T
            for delta, error in zip(deltas, self.error, strict=True):
                error[name] = delta - found[name]
        return found


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_powersgd_is_the_published_algorithm(workers: int, backend: str) -> None:
    program = small.compiled("sgd:lr=0.1", compress="powersgd:rank=2", backend=backend)
    initial = {n: v.const_value.numpy() for n, v in program.model.graph.initializers.items() if n.endswith("::powersgd")}
    assert {n: v.shape for n, v in initial.items()} == {"w1::powersgd": (small.HIDDEN, 2), "w2::powersgd": (small.CLASSES, 2)}
    published = PowerSGD({n.partition("::")[0]: v for n, v in initial.items()}, workers)
    parameters = {n: v.astype(np.float64) for n, v in small.weights().items()}
    for step in range(6):
        update = published.mean(gradients({n: p.astype(np.float32) for n, p in parameters.items()}, step, workers))
        for name in parameters:
            parameters[name] -= 0.1 * update[name] * workers / 16
    ranks = run_threads(workers, lambda comm: small.train(comm, program, 6))
    assert len({rank["hash"] for rank in ranks}) == 1
    assert small.largest_difference(ranks[0]["state"], parameters) < 2e-5
    for name in published.q:
        mine = np.sum([rank["state"][f"{name}::residual"] for rank in ranks], axis=0)
        theirs = np.sum([error[name] for error in published.error], axis=0)
        np.testing.assert_allclose(mine, theirs, atol=2e-4 * np.abs(theirs).max())


def test_powersgd_loses_nothing() -> None:
    """What was sent and what remains is the gradient and what remained before, over all ranks."""
    program = small.compiled("sgd:lr=0.1", compress="powersgd:rank=1")
    after = [run_threads(2, lambda comm, k=k: small.train(comm, program, k)) for k in (0, 1, 2)]
    for before, now, step in zip(after, after[1:], range(2), strict=False):
        grads = gradients(before[0]["state"], step, 2)
        for name in ("w1", "w2"):
            residual = [sum(r["state"][f"{name}::residual"].astype(np.float64) for r in rs) for rs in (before, now)]
            sent = (before[0]["state"][name].astype(np.float64) - now[0]["state"][name]) / 0.1 * 16
            total = sum(g[name] for g in grads) + residual[0]
            np.testing.assert_allclose(sent + residual[1], total, atol=1e-4 * np.abs(total).max())


@pytest.mark.parametrize("workers", [1, 4])
def test_residuals_survive_a_checkpoint_for_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    """Saved by two, restored by one and by four: the sum over the ranks is kept, and so is the path of the training."""
    program = small.compiled("sgd:lr=0.1", compress="powersgd:rank=1")

    def first(comm: Any) -> dict[str, Array]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            run(trainer, comm, range(3))
            trainer.save(tmp_path)
            run(trainer, comm, range(3, 6))
            return trainer.state.snapshot(comm)

    def second(comm: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            trainer.restore(tmp_path)
            restored = trainer.state.snapshot(comm)
            run(trainer, comm, range(3, 6))
            return restored, trainer.state.snapshot(comm)

    def run(trainer: Any, comm: Any, steps: range) -> None:
        for step in steps:
            x, y = small.batch(16, step)
            mine = share(16, comm.rank, comm.size)
            trainer.step({"input": x[mine], "label": y[mine]})

    went_on = run_threads(2, first)[0]
    restored, resumed = run_threads(workers, second)[0]
    saved, _ = checkpoint.load(tmp_path)
    assert np.abs(saved["w1::residual"]).max() > 0
    np.testing.assert_allclose(restored["w1::residual"], saved["w1::residual"], rtol=1e-6)
    assert small.largest_difference(resumed, went_on) < 1e-5


def test_powersgd_begins_after_some_steps_in_full() -> None:
    """The first steps are those without compression; what follows begins with empty residuals and the factors as they were."""
    late, plain = (small.compiled("sgd:lr=0.1", compress=c) for c in ("powersgd:rank=1,start=3", None))
    full = run_threads(2, lambda comm: small.train(comm, plain, 3))[0]
    (first, _) = run_threads(2, lambda comm: small.train(comm, late, 3))
    assert small.largest_difference(first["state"], full["state"]) < 1e-6
    assert not first["state"]["w1::residual"].any()
    sent: list[set[str]] = []

    def train(comm: Any) -> None:
        if comm.rank == 0:
            comm.observer = lambda handle: sent[-1].add(handle.what.rpartition(".")[2]) if "powersgd" in handle.what else None
        with graphc.Trainer(late, comm=comm, threads=1) as trainer:
            for step in range(5):
                if comm.rank == 0:
                    sent.append(set())
                x, y = small.batch(16, step)
                mine = share(16, comm.rank, 2)
                trainer.step({"input": x[mine], "label": y[mine]})
                comm.barrier()

    run_threads(2, train)
    assert sent == [{"full"}] * 3 + [{"P", "S"}] * 2


def test_powersgd_where_it_does_not_pay() -> None:
    """Vectors and matrices that are no smaller as factors travel as they are; the first factors start in the backward pass."""
    program = small.compiled("sgd:lr=0.1", compress="powersgd:rank=4", bucket_mb=25)  # 4·(20 + 5) = 100 elements of w2
    assert "w1::residual" in program.model.graph.initializers
    assert "w2::residual" not in program.model.graph.initializers
    plan = plan_of(program)
    sizes = {s.transfer.tag: sum(int(np.prod(static_dims(v))) for v in s.inputs) for s in plan.steps if s.kind == "start"}
    assert sizes["data/powersgd0.P"] == 4 * small.INPUTS
    assert sizes["data/powersgd0.S"] == 4 * small.HIDDEN
    assert sizes["data/b0"] == small.HIDDEN + small.CLASSES + small.HIDDEN * small.CLASSES


def test_powersgd_of_a_gradient_of_lower_rank() -> None:
    """One sample gives matrices of rank 1: factors of rank 3 must neither divide by zero nor count a direction twice."""
    program = small.compiled("sgd:lr=0.1", compress="powersgd:rank=3")
    plain = small.compiled("sgd:lr=0.1")
    (low,) = run_threads(1, lambda comm: small.train(comm, program, 3, (1,)))
    (full,) = run_threads(1, lambda comm: small.train(comm, plain, 3, (1,)))
    assert small.largest_difference(low["state"], full["state"]) < 1e-4


class TopK:
    """Each worker sends the k largest elements of gradient and memory, and remembers the others (float64)."""

    def __init__(self, ratio: float, workers: int) -> None:
        self.ratio = ratio
        self.memory = [{name: np.zeros(shape) for name, shape in small.SHAPES.items()} for _ in range(workers)]

    def total(self, grads: list[dict[str, Array]]) -> dict[str, Array]:
        found = {name: np.zeros(shape) for name, shape in small.SHAPES.items()}
        for grad, memory in zip(grads, self.memory, strict=True):
            for name in small.SHAPES:
                if grad[name].ndim < 2:
                    found[name] += grad[name]
                    continue
                memory[name] += grad[name]
                flat, count = memory[name].reshape(-1), int(np.ceil(self.ratio * memory[name].size))
                largest = np.argsort(-np.abs(flat), kind="stable")[:count]
                found[name].reshape(-1)[largest] += flat[largest]
                flat[largest] = 0
        return found


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_topk_is_the_published_algorithm(workers: int, backend: str) -> None:
    program = small.compiled("sgd:lr=0.1", compress="topk:ratio=0.05", backend=backend)
    published = TopK(0.05, workers)
    parameters = {n: v.astype(np.float64) for n, v in small.weights().items()}
    for step in range(6):
        update = published.total(gradients({n: p.astype(np.float32) for n, p in parameters.items()}, step, workers))
        for name in parameters:
            parameters[name] -= 0.1 * update[name] / 16
    ranks = run_threads(workers, lambda comm: small.train(comm, program, 6))
    assert len({rank["hash"] for rank in ranks}) == 1
    assert small.largest_difference(ranks[0]["state"], parameters) < 1e-5
    for rank, memory in zip(ranks, published.memory, strict=True):
        for name in ("w1", "w2"):
            np.testing.assert_allclose(rank["state"][f"{name}::residual"], memory[name], atol=1e-5)


def test_topk_sends_places_and_values_where_that_is_less() -> None:
    """Bytes handed to the communicator in one step: 8 for each element sent, of all ranks, against 4 for each element."""

    def bytes_of(compress: str | None) -> dict[str, int]:
        found: dict[str, int] = {}

        def train(comm: Any) -> None:
            if comm.rank == 0:
                comm.observer = lambda handle: found.update({handle.what: handle.nbytes})
            small.train(comm, small.compiled("sgd:lr=0.1", compress=compress, bucket_mb=25), 1)

        run_threads(2, train)
        return {what: size for what, size in found.items() if "data/b" in what}

    elements = small.INPUTS * small.HIDDEN + small.HIDDEN * small.CLASSES
    sparse = bytes_of("topk:ratio=0.05")
    sent = 12 + 5  # 5 % of 240 and of 100 elements
    (gathered,) = (size for what, size in sparse.items() if "all_gather" in what or "gather" in what)
    assert gathered == 2 * 4 * (1 + 2 * sent)  # two ranks, a count and pairs of 32 bits
    assert sum(bytes_of(None).values()) >= 4 * elements
    assert "all_gather" not in " ".join(bytes_of("topk:ratio=0.9"))  # dense again: no less


def test_unknown_method() -> None:
    with pytest.raises(UsageError, match="did you mean 'bf16'"):
        small.compiled(compress="bf17")


def over_mpi(comm: Any, compress: str) -> dict[str, Any]:
    return small.train(comm, small.compiled("adam:lr=0.01", clip_norm=0.5, compress=compress), 5, (14,))


@pytest.mark.mpi
@pytest.mark.large
@pytest.mark.parametrize("compress", ["fp16", "powersgd:rank=1", "topk:ratio=0.05"])
def test_mpi_processes_do_what_threads_do(compress: str) -> None:
    threads = run_threads(2, lambda comm: over_mpi(comm, compress))
    processes = map_ranks(2, over_mpi, compress)
    assert processes[0]["hash"] == processes[1]["hash"]
    assert small.largest_difference(processes[0]["state"], threads[0]["state"]) < 1e-6


@pytest.mark.parametrize("compress", [None, "bf16", "powersgd:rank=1", "topk:ratio=0.05"])
def test_micro_batches_are_summed_before_anything_is_clipped_or_compressed(compress: str | None) -> None:
    options = {"compress": compress, "clip_norm": 0.3, "nonfinite": "skip"}
    whole, parts = (small.compiled("sgd:lr=0.1", accumulate=n, **options) for n in (1, 4))
    one = run_threads(2, lambda comm: small.train(comm, whole, 4, (16,)))
    many = run_threads(2, lambda comm: small.train(comm, parts, 4, (16,)))
    assert len({rank["hash"] for rank in many}) == 1
    norms = [[m["grad_norm"] for m in ranks[0]["metrics"]] for ranks in (one, many)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-2 if compress == "bf16" else 1e-4)
    assert small.largest_difference(many[0]["state"], one[0]["state"]) < (1e-3 if compress == "bf16" else 1e-5)
