"""The memory of a plan on a device, predicted with no device at hand, against what a pretended one is asked for."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphc
from graphc.backends.cupy import CupyBackend, CupyPlanner
from graphc.backends.cupy.device.cuda_memory import UNIT
from graphc.backends.cupy.libraries.registry import LibraryOp
from graphc.bench.specs import SPECS
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import DeviceMemoryError
from graphc.report.memory import feed_shapes, memory_of, predicted
from graphc.training.strategy import Strategy
from tests.backends.host_kernels import HostDevice
from tests.backends.strict import DeviceArray

pytestmark = pytest.mark.full

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def pretended(register_backend: Callable[..., None]) -> None:
    """A backend that ``compile`` knows; each test then puts one with its own device in its place."""
    register_backend("pretended", CupyBackend)


def compiled(path: str, optimizer: str = "adam:lr=1e-3", **options: Any) -> graphc.Program:
    loss = graphc.losses.SoftmaxCrossEntropy()
    return graphc.compile(path, loss=loss, optimizer=graphc.optim.parse(optimizer), **options)


class Equipped(HostDevice):
    """A device whose libraries take their workspaces, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: set[str] = set()

    def call_library(self, library: LibraryOp, node: ir.Node, inputs: Any, outputs: Any) -> Callable[[], None]:
        if library.workspace is not None and library.workspace[0] not in self._taken:
            self._taken.add(library.workspace[0])
            self.empty(library.workspace[1])
        return super().call_library(library, node, inputs, outputs)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_a_trainer_allocates_what_was_predicted(
    options: dict[str, Any], exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    device = Equipped()
    register_backend("pretended", lambda **_: CupyBackend(device=device))
    program = compiled(exported("lenet"), backend="pretended", **options)
    x, y = SPECS["lenet"].batch(8)
    parts = options.get("accumulate", 1)
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step({"input": x, "label": y})
        asked = sum(-(-max(array.nbytes, 1) // UNIT) * UNIT for array in device.allocations)
        pinned = sum(array.nbytes for array in device._pinned)
        before = len(device.allocations)
        trainer.step({"input": x, "label": y})
        assert len(device.allocations) == before, "nothing is allocated in a step"
    found = predicted(program.model, feed_shapes(program.model, 8 // parts), CupyPlanner(writes_cuda=False))
    assert found.total == asked
    assert found.pinned == pinned


@needs_compiler
@pytest.mark.parametrize("strategy", ["mirrored", pytest.param("zero:stage=2", marks=pytest.mark.large), "zero:stage=3"])
@pytest.mark.filterwarnings("ignore:.*pass through host memory")
def test_each_of_two_workers_allocates_what_was_predicted_for_it(
    strategy: str, exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, register_backend: Callable[..., None]
) -> None:
    register_backend("pretended", lambda **_: CupyBackend(device=Equipped()))
    program = compiled(exported("lenet"), backend="pretended", strategy=strategy, bucket_mb=0.1)
    x, y = SPECS["lenet"].batch(8)
    spread = Strategy.spread

    def passing(strategy: Strategy, *arguments: Any) -> None:
        """What rank 0 sends the others whole is free again afterwards."""
        allocations = strategy.trainer.backend.device.allocations  # type: ignore[attr-defined]
        before = len(allocations)
        spread(strategy, *arguments)
        del allocations[before:]

    monkeypatch.setattr(Strategy, "spread", passing)

    def worker(comm: Any) -> int:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            mine = share(8, comm.rank, comm.size)
            for _ in range(2):
                trainer.step({"input": x[mine], "label": y[mine]})
            return sum(-(-max(array.nbytes, 1) // UNIT) * UNIT for array in trainer.backend.device.allocations)  # type: ignore[attr-defined]

    asked = run_threads(2, worker)
    for rank in range(2):
        planner = CupyPlanner(writes_cuda=False)
        assert predicted(program.model, feed_shapes(program.model, 4), planner, world_size=2, rank=rank).total == asked[rank]


class Bare(HostDevice):
    """A device of ``limit`` bytes to which plans are bound as to a GPU, though nothing runs."""

    writes_cuda = True

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self._taken = limit, set[str]()
        self._live: list[tuple[weakref.ref[Any], int]] = []

    def available(self) -> int:
        return self.limit - sum(nbytes for array, nbytes in self._live if array() is not None)

    def empty(self, nbytes: int) -> DeviceArray:
        if rounded(nbytes) > self.available():
            raise DeviceMemoryError(nbytes, self.available())
        raw = np.empty(nbytes + 256, dtype=np.uint8)
        self._live.append((weakref.ref(raw), rounded(nbytes)))
        start = -raw.ctypes.data % 256
        return DeviceArray(raw[start : start + nbytes])

    zeros = empty

    def copy(self, target: Any, source: Any) -> None:
        """What the arrays hold does not matter."""

    def bind_copy(self, target: Any, source: Any) -> Callable[[], None]:
        return lambda: None

    def compile(self, texts: Any) -> Any:
        return dict.fromkeys(texts)

    def launch(self, kernel: Any, arrays: Any, shape: Any) -> Callable[[], None]:
        return lambda: None

    def call_library(self, library: LibraryOp, node: ir.Node, inputs: Any, outputs: Any) -> Callable[[], None]:
        if library.workspace is not None and library.workspace[0] not in self._taken:
            self._taken.add(library.workspace[0])
            self.empty(library.workspace[1])
        return library.bind(self, node, inputs, outputs) if library.launches_kernels else lambda: None

    def call_host(self, *_: Any) -> Callable[[], None]:
        return lambda: None


def rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // UNIT) * UNIT


def feeds_of(program: graphc.Program, batch: int) -> dict[str, Any]:
    graph = program.model.graph
    return {v.name: np.zeros(feed_shapes(program.model, batch)[v.name], v.dtype.numpy()) for v in graph.inputs}  # type: ignore[union-attr,index,misc]


def bind(program: graphc.Program, batch: int, limit: int, register_backend: Callable[..., None], workers: int = 1) -> None:
    """Bind the training plan for ``batch`` samples to devices of ``limit`` bytes; 0: the state alone."""
    register_backend("pretended", lambda **_: CupyBackend(device=Bare(limit)))

    def worker(comm: Any) -> None:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            if batch:
                trainer.plans.for_training(feeds_of(program, batch))

    if workers == 1:
        worker(None)
    else:
        run_threads(workers, worker)


CLAIM = r"""(?x) (?: a\ batch\ of\ (?P<batch>\d+)\ on\ each\ worker\ in\ place\ of\ \d+ | accumulate=(?P<steps>\d+)
    | recompute='(?P<recompute>[^']+)' | strategy='(?P<strategy>[^']+)' (?:\ on\ (?P<workers>\d+)\ workers)? )
    [^;.(]*? \d[\d.,]*\ [MG]iB\ \((?P<bytes>[\d,]+)\ bytes\) (?: \ on\ each\ of\ (?P<each>\d+)\ workers )?"""
"""What the message says helps, and with how many bytes."""


@pytest.mark.parametrize(
    ("name", "optimizer", "precision", "count", "part", "wanted"),
    [
        ("mlp", "adamw:lr=1e-3", "bf16", 1024, 0.8, {"batch", "steps"}),
        pytest.param(
            "transformer-small", "sgd:lr=0.1", None, 64, 0.9, {"batch", "steps", "recompute"}, marks=pytest.mark.large
        ),
        ("mlp", "adam:lr=1e-3", None, 2, 0.9, {"strategy"}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*pass through host memory")
def test_whoever_takes_the_advice_has_enough_memory(
    name: str,
    optimizer: str,
    precision: str | None,
    count: int,
    part: float,
    wanted: set[str],
    exported: Callable[[str], str],
    register_backend: Callable[..., None],
) -> None:
    program = compiled(exported(name), optimizer, backend="pretended", precision=precision)
    needed = predicted(program.model, feed_shapes(program.model, count), CupyPlanner())
    total = needed.total
    bind(program, count, total, register_backend)
    limit = needed.workspace + int((total - needed.workspace) * part) // UNIT * UNIT
    with pytest.raises(DeviceMemoryError) as caught:
        bind(program, count, limit, register_backend)
    message = str(caught.value)
    assert f"needs {total / 2**20:.1f} MiB ({total:,} bytes)" in message
    assert f"{limit:,} bytes) are available" in message
    helps, _, short = message.partition("What helps: ")[2].partition("Not enough by itself: ")
    found: set[str] = set()
    for claim in re.finditer(CLAIM, helps):
        needs, given = int(claim["bytes"].replace(",", "")), {k: v for k, v in claim.groupdict().items() if v is not None}
        assert needs <= limit
        found |= given.keys() - {"workers", "bytes", "each"}
        options: dict[str, Any] = {k: given[k] for k in ("recompute", "strategy") if k in given}
        if "steps" in given:
            options["accumulate"] = int(given["steps"])
        batch = int(given.get("batch", count)) // options.get("accumulate", 1)
        bind(program.recompile(**options), batch, needs, register_backend, int(given.get("workers", 1)))
        if "batch" in given:
            with pytest.raises(DeviceMemoryError):
                bind(program, batch + 2, limit, register_backend)
    assert found == wanted, message
    assert all(int(claim["bytes"].replace(",", "")) > limit for claim in re.finditer(CLAIM, short))


@pytest.mark.large
@needs_compiler
def test_a_plan_that_does_not_fit_changes_nothing(
    exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    program, device = compiled(exported("lenet"), backend="pretended"), Equipped()
    register_backend("pretended", lambda **_: CupyBackend(device=device))
    with graphc.Trainer(program, threads=1) as trainer:
        before = trainer.state.snapshot()
        device.limit = sum(rounded(array.nbytes) for array in device.allocations) + (305 << 20)
        with pytest.raises(DeviceMemoryError, match=r"a batch of \d+ on each worker in place of 512"):
            trainer.step(dict(zip(("input", "label"), SPECS["lenet"].batch(512), strict=True)))
        after = trainer.state.snapshot()
        assert all((before[name] == after[name]).all() for name in before)
        assert np.isfinite(trainer.step(dict(zip(("input", "label"), SPECS["lenet"].batch(4), strict=True)))["loss"])


def test_plans_for_other_batches_make_room_for_one_that_does_not_fit_beside_them(
    exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    program = compiled(exported("mlp"), backend="pretended")
    needed = predicted(program.model, feed_shapes(program.model, 4096), CupyPlanner()).total
    register_backend("pretended", lambda **_: CupyBackend(device=Bare(needed)))
    with graphc.Trainer(program, threads=1) as trainer:
        for batch in (2048, 1024):
            trainer.plans.for_training(feeds_of(program, batch))
        arenas = {plan.places.buffers["arena"].data.ptr for plan in trainer.plans.training.values()}
        assert len(arenas) == 1
        largest = trainer.plans.for_training(feeds_of(program, 4096))
        assert list(trainer.plans.training.values()) == [largest]
        with pytest.raises(DeviceMemoryError, match="a batch of"):
            trainer.plans.for_training(feeds_of(program, 8192))


@pytest.mark.filterwarnings("ignore:.*pass through host memory")
def test_state_that_does_not_fit_is_told_before_there_is_a_plan(
    exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    program = compiled(exported("mlp"), backend="pretended")
    with pytest.raises(DeviceMemoryError) as caught:
        bind(program, 0, 3 << 20, register_backend)
    message = str(caught.value)
    assert "parameters and optimizer state take" in message
    assert "3.0 MiB (3,145,728 bytes) are available" in message
    claims = list(re.finditer(CLAIM, message))
    assert {claim["strategy"] for claim in claims} == {"zero:stage=3", "zero:stage=1,offload=true"}
    for claim in claims:
        needs, workers = int(claim["bytes"].replace(",", "")), int(claim["each"] or 1)
        assert needs <= 3 << 20
        bind(program.recompile(strategy=claim["strategy"]), 0, needs, register_backend, workers)


@pytest.mark.parametrize(("strategy", "workers"), [("zero:stage=1,offload=true", 1), ("zero:stage=3", 2)])
@pytest.mark.filterwarnings("ignore:.*pass through host memory")
def test_evaluation_copies_each_parameter_once_and_that_is_predicted(
    strategy: str, workers: int, exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    register_backend("pretended", lambda **_: CupyBackend(device=Bare(1 << 40)))

    def taken(strategy: str, workers: int) -> list[int]:
        """What evaluation with batches of two sizes takes, and no plan of its own would."""
        program = compiled(exported("mlp"), backend="pretended", precision="bf16", strategy=strategy)

        def worker(comm: Any) -> int:
            with graphc.Trainer(program, comm=comm, threads=1) as trainer:
                before = trainer.backend.memory.available()
                trainer.state.gather(trainer.comm, program.inference.graph.initializers)
                for batch in (16, 8):
                    trainer.plans.for_evaluation(feeds_of(program, batch))
                return before - trainer.backend.memory.available()  # type: ignore[operator]

        return run_threads(workers, worker) if workers > 1 else [worker(None)]

    program = compiled(exported("mlp"), precision="bf16", strategy=strategy)
    wanted = memory_of(program.model, feed_shapes(program.model, 16), backend="cupy", world_size=workers).evaluation
    assert wanted > 1 << 20
    (plain,) = taken("mirrored", 1)
    for found in taken(strategy, workers):
        assert abs(found - plain - wanted) < 0.05 * wanted


def test_inspect_predicts_the_memory_of_a_gpu_on_a_machine_without_one(
    exported: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from graphc import frontends
    from graphc.cli import main

    program = compiled(exported("lenet"))
    frontends.save(program.model, tmp_path / "training.onnx")
    command = ["inspect", str(tmp_path / "training.onnx"), "--memory", "--backend", "cupy", "--batch", "32"]
    assert main([*command, "--format", "json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    found = memory_of(program.model, feed_shapes(program.model, 32), backend="cupy")
    assert shown["total"] == found.total
    assert shown["scratch"] == found.scratch > 0
    assert shown["workspace"] >= 32 << 20
    assert main(command) == 0
    text = capfd.readouterr().out
    assert "pinned" in text
    assert "CUDA context" in text
