"""Training on a real GPU: captured as without capture, as on the CPU, in the memory that was predicted."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backend import BACKENDS
from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.device.cuda_graph import Recording
from graphc.backends.cupy.libraries.cublaslt import WORKSPACE
from graphc.bench.specs import SPECS
from graphc.errors import DeviceMemoryError
from graphc.report.memory import feed_shapes, memory_of
from tests.conftest import emulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::graphc.backends.cupy.device.cuda_graph.CaptureRefusedWarning"),
]

NETWORKS = ("mlp", "lenet", "transformer-small")


def compiled(path: str, backend: str = "cupy", **options: Any) -> graphc.Program:
    loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.01, momentum=0.9)
    return graphc.compile(path, loss=loss, optimizer=optimizer, backend=backend, **options)


def batch(name: str, count: int = 16) -> dict[str, Any]:
    return dict(zip(("input", "label"), SPECS[name].batch(count), strict=True))


def trained(program: graphc.Program, feeds: dict[str, Any], steps: int) -> tuple[list[float], dict[str, Any]]:
    with graphc.Trainer(program, threads=1) as trainer:
        return [trainer.step(feeds)["loss"] for _ in range(steps)], trainer.state.snapshot()


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}, {"nonfinite": "skip"}], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_captured_steps_are_those_launched_one_by_one_bit_for_bit(
    name: str, options: dict[str, Any], exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    program, feeds = compiled(exported(name), **options), batch(name)
    captured = trained(program, feeds, 6)
    monkeypatch.setattr(CudaDevice, "record", lambda self, runs: Recording(runs, None))
    launched = trained(program, feeds, 6)
    assert captured[0] == launched[0]
    for key, value in launched[1].items():
        np.testing.assert_array_equal(captured[1][key], value, err_msg=key)


def test_trainers_in_one_process_keep_to_their_streams() -> None:
    """What the first one allocates and fills, once there is a second, comes in the order of its own work."""
    import cupy

    from graphc.backends.cupy.device.cuda_device import CudaDevice

    first, second = CudaDevice(0), CudaDevice(0)
    flat = first.zeros(4096).view(np.float32)
    first.copy(flat, np.full(1024, 2, np.float32))
    result = first.zeros(4096).view(np.float32)
    row = first.record([first.bind_fill(flat, 3), first.bind_copy(result, flat), first.bind_fill(flat, 0.5)])
    for _ in range(3):
        row()
        assert (first.fetch(result) == 3).all()
        second.synchronize()
        assert (first.fetch(flat) == 0.5).all()
        assert (first.fetch(result) == 3).all()
    assert cupy.cuda.get_current_stream().ptr == second.stream.ptr, "as if nothing had been allocated since"


def test_a_trainer_that_is_gone_leaves_no_memory_behind(exported: Callable[[str], str], pool: Any) -> None:
    """At once, not when Python comes to look for cycles: the next one asks what is free before it allocates."""
    program, feeds = compiled(exported("mlp")), batch("mlp")
    gc.collect()
    before = pool.used_bytes()
    gc.disable()
    try:
        trained(program, feeds, 3)
        assert pool.used_bytes() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", NETWORKS)
def test_twenty_steps_follow_the_cpu(name: str, exported: Callable[[str], str]) -> None:
    feeds = batch(name)
    found, _ = trained(compiled(exported(name)), feeds, 20)
    wanted, _ = trained(compiled(exported(name), "onnxruntime"), feeds, 20)
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


@pytest.fixture
def pool() -> Iterator[Any]:
    """CuPy's pool, empty before the test and without a limit after it."""
    import cupy

    gc.collect()
    found = cupy.get_default_memory_pool()
    found.free_all_blocks()
    yield found
    found.set_limit(size=0)


LARGE = (("mlp", 1024), ("transformer", 32), ("squeezenet", 16))
SMALL = (("mlp", 64), ("transformer-small", 8), ("squeezenet", 1))


@pytest.mark.parametrize(("name", "count"), SMALL if emulated() else LARGE)
def test_the_memory_is_what_was_predicted_within_five_percent(
    name: str, count: int, exported: Callable[[str], str], pool: Any
) -> None:
    program = compiled(exported(name))
    predicted = memory_of(program.model, feed_shapes(program.model, count), backend="cupy")
    before = pool.used_bytes()
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(3):
            trainer.step(batch(name, count))
        used = pool.used_bytes() - before
    assert abs(used - predicted.total) <= 0.05 * used


def test_a_plan_that_does_not_fit_is_refused_before_anything_runs(exported: Callable[[str], str], pool: Any) -> None:
    name, count = ("transformer-small", 256) if emulated() else ("transformer", 64)
    program = compiled(exported(name))
    needed = memory_of(program.model, feed_shapes(program.model, count), backend="cupy").total
    half = memory_of(program.model, feed_shapes(program.model, count // 2), backend="cupy").total
    pool.set_limit(size=pool.total_bytes() + (needed + half) // 2)
    with graphc.Trainer(program, threads=1) as trainer:
        before, used = trainer.state_sha256(), pool.used_bytes()
        with pytest.raises(DeviceMemoryError, match=rf"needs .*{needed:,} bytes.*a batch of \d+ .*accumulate=") as refused:
            trainer.step(batch(name, count))
        assert trainer.state_sha256() == before
        left = pool.used_bytes() - used
        assert min(left, abs(left - WORKSPACE)) < 1 << 20, f"{left} bytes of a refused plan are held by {refused}"
        assert np.isfinite(trainer.step(batch(name, count // 4))["loss"])


def test_feeds_travel_beside_the_compute_stream() -> None:
    from graphc.backends.cupy.device.cuda_memory import CudaMemory

    memory = CudaMemory(0)
    nbytes = 512 << 20
    source, target, other = memory.pinned(nbytes), memory.zeros(nbytes), memory.zeros(nbytes)
    memory.send(target, source).wait()
    begin = time.perf_counter()
    memory.send(target, source).wait()
    alone = time.perf_counter() - begin
    work = memory.bind_copy(other, target)
    begin = time.perf_counter()
    event = memory.send(target, source)
    queued = time.perf_counter() - begin
    for _ in range(4):
        work()
    memory.synchronize()
    worked = time.perf_counter() - begin
    event.wait()
    assert queued < 0.2 * alone, "sending only queues"
    assert worked < alone, "the compute stream does not wait for it"


def test_fit_takes_every_batch_as_it_was_though_the_arrays_are_used_again(exported: Callable[[str], str]) -> None:
    def reused() -> Iterator[dict[str, Any]]:
        arrays = {name: np.empty_like(array) for name, array in batch("lenet").items()}
        for seed in range(8):
            for array, value in zip(arrays.values(), SPECS["lenet"].batch(16, seed), strict=True):
                np.copyto(array, value)
            yield arrays

    states = []
    for copied in (False, True):
        with graphc.Trainer(compiled(exported("lenet")), threads=1) as trainer:
            if copied:
                for feeds in reused():
                    trainer.step(feeds)
            else:
                trainer.fit(reused())
            states.append(trainer.state.snapshot())
    for key, value in states[1].items():
        np.testing.assert_array_equal(states[0][key], value, err_msg=key)


LOST = """
import contextlib, sys
import cupy, graphc
from graphc.bench.specs import SPECS
loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
program = graphc.compile(sys.argv[1], loss=loss, optimizer=optimizer, backend="cupy")
feeds = dict(zip(("input", "label"), SPECS["lenet"].batch(4)))
trainer = graphc.Trainer(program)
trainer.step(feeds)
cupy.RawKernel('extern "C" __global__ void bad(int* p) { p[0] = 1; }', "bad")((1,), (1,), (8,))
with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
    cupy.cuda.Device().synchronize()
trainer.step(feeds)
"""


def test_a_kernel_that_kills_the_context_names_step_and_cause(exported: Callable[[str], str]) -> None:
    command = [sys.executable, "-c", LOST, exported("lenet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert re.search(r"rank 0 lost its GPU in step 1 while it .*no checkpoint was saved", done.stderr), done.stderr


def test_onnxruntime_on_the_gpu_follows_the_cpu(exported: Callable[[str], str]) -> None:
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    for name in ("mlp", "lenet"):
        feeds = batch(name)
        found, _ = trained(compiled(exported(name), "onnxruntime-cuda"), feeds, 10)
        wanted, _ = trained(compiled(exported(name), "onnxruntime"), feeds, 10)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, err_msg=name)


def test_a_step_is_one_graph(exported: Callable[[str], str]) -> None:
    assert "cupy" in BACKENDS
    with graphc.Trainer(compiled(exported("lenet")), threads=1) as trainer:
        for _ in range(3):
            trainer.step(batch("lenet"))
        assert isinstance(trainer.backend, CupyBackend)
        (executor,) = trainer.plans.training.values()
        (recording,) = executor.runs
        assert isinstance(recording, Recording)
        assert recording.refusal is None
        assert recording._replay is not None


@pytest.mark.alone
def test_what_is_bound_is_free_again_when_it_is_gone(exported: Callable[[str], str], pool: Any) -> None:
    import gc

    import cupy

    from graphc.backends.cupy.libraries.cublaslt import MatmulPlan

    def used() -> tuple[int, int]:
        """Bytes of the device that are taken, and descriptions of products."""
        gc.collect()
        pool.free_all_blocks()
        free, total = cupy.cuda.runtime.memGetInfo()
        return total - free, sum(type(thing) is MatmulPlan for thing in gc.get_objects())

    program, feeds = compiled(exported("mlp"), precision="bf16"), batch("mlp")
    found = []
    for rebound in (50, 1, 1):
        with graphc.Trainer(program, threads=1) as trainer:
            for _ in range(rebound):
                trainer.plans.training.clear()
                trainer.step(feeds)
                found.append(used())
            trainer.step(feeds)  # recorded as a graph
        del trainer
        found.append(used())
    (first, plans), (last, _), (closed, none) = found[1], found[49], found[50]
    assert found[49][1] == plans > 0
    assert none == found[-1][1] == 0
    assert last - first < 1 << 20, "the driver's own bookkeeping aside"
    assert found[-1][0] - closed < 1 << 20
