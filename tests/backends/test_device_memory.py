"""The memory of a plan on a device, predicted with no device at hand, against what a pretended one is asked for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import graphc
from graphc.backend import BACKENDS
from graphc.backends.cupy import CupyBackend, CupyPlanner
from graphc.backends.cupy.epilogues import by_rule
from graphc.backends.cupy.memory import UNIT
from graphc.backends.cupy.nodes import Library
from graphc.backends.cupy.products import Product
from graphc.bench.specs import SPECS
from graphc.data import share
from graphc.errors import DeviceMemoryError
from graphc.memory import feed_shapes, memory_of, predicted
from graphc.runtime.threads import run_threads
from tests.backends.host_kernels import HostDevice

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def compiled(path: str, optimizer: str = "adam:lr=1e-3", **options: Any) -> graphc.Program:
    loss = graphc.losses.SoftmaxCrossEntropy()
    return graphc.compile(path, loss=loss, optimizer=graphc.optim.parse(optimizer), **options)


class Equipped(HostDevice):
    """A device whose libraries take their workspaces, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: set[str] = set()

    def pays(self, joined: Sequence[Product], apart: Sequence[Product], saved: int) -> bool:
        return by_rule(joined, apart, saved)  # as where nothing can be measured

    def node(self, node: ir.Node, library: Library | None, inputs: Any, outputs: Any) -> Callable[[], None]:
        if library is not None and library.workspace is not None and library.workspace[0] not in self._taken:
            self._taken.add(library.workspace[0])
            self.empty(library.workspace[1])
        return super().node(node, library, inputs, outputs)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_a_trainer_allocates_what_was_predicted(
    options: dict[str, Any], exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Equipped()
    monkeypatch.setitem(BACKENDS._items, "pretended", lambda **_: CupyBackend(device=device))
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


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("strategy", ["mirrored", "zero:stage=2", "zero:stage=3"])
@pytest.mark.filterwarnings("ignore:.*pass through host memory")
def test_each_of_two_workers_allocates_what_was_predicted_for_it(
    strategy: str, exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS._items, "pretended", lambda **_: CupyBackend(device=Equipped()))
    program = compiled(exported("lenet"), backend="pretended", strategy=strategy, bucket_mb=0.1)
    x, y = SPECS["lenet"].batch(8)
    broadcast = graphc.Trainer._broadcast

    def passing(trainer: Any, *arguments: Any) -> None:
        """What rank 0 sends the others whole is free again afterwards."""
        allocations = trainer.backend.device.allocations
        before = len(allocations)
        broadcast(trainer, *arguments)
        del allocations[before:]

    monkeypatch.setattr(graphc.Trainer, "_broadcast", passing)

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


@pytest.mark.full
@needs_compiler
def test_a_plan_that_does_not_fit_says_what_it_needs_and_what_helps_before_anything_runs(
    exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(exported("transformer-small"), optimizer="sgd:lr=0.1,momentum=0.9", backend="pretended")
    shapes = feed_shapes(program.model, 64)
    total = predicted(program.model, shapes, CupyPlanner()).total
    device = Equipped()
    device.limit = (total + predicted(program.model, feed_shapes(program.model, 32), CupyPlanner()).total) // 2
    monkeypatch.setitem(BACKENDS._items, "pretended", lambda **_: CupyBackend(device=device))
    x, y = SPECS["transformer-small"].batch(64)
    with graphc.Trainer(program, threads=1) as trainer:
        before = trainer.state.snapshot()
        with pytest.raises(DeviceMemoryError) as caught:
            trainer.step({"input": x, "label": y})
        after = trainer.state.snapshot()
    assert all((before[name] == after[name]).all() for name in before)
    message = str(caught.value)
    assert f"{total:,}" in message, "predicted"
    assert f"{device.limit:,}" in message, "available"
    fits = int(re.search(r"a batch of (\d+) on each worker in place of 64", message)[1])
    assert 1 <= fits < 64
    assert predicted(program.model, feed_shapes(program.model, fits), CupyPlanner()).total <= device.limit
    assert predicted(program.model, feed_shapes(program.model, fits + 2), CupyPlanner()).total > device.limit
    steps = int(re.search(r"accumulate=(\d+)", message)[1])
    assert -(-64 // steps) <= fits
    assert "recompute='all' needs" in message


def test_state_that_does_not_fit_is_told_before_there_is_a_plan(
    exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = HostDevice()
    device.limit = 100_000
    monkeypatch.setitem(BACKENDS._items, "pretended", lambda **_: CupyBackend(device=device))
    with pytest.raises(DeviceMemoryError, match=r"parameters and optimizer state take .*100,000 bytes.*zero:stage=3.*offload"):
        graphc.Trainer(compiled(exported("lenet"), backend="pretended"), threads=1)


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
