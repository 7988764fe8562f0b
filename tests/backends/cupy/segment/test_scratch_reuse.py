"""Values in the memory of results that are not written yet: never two at once in one place, and the same numbers."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backends.cupy.segment import scratch_reuse
from graphc.backends.cupy.segment.bind import BoundSegment
from graphc.backends.cupy.segment.scratch_reuse import OutputScratch
from graphc.bench.specs import SPECS
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.report.memory import feed_shapes, memory_of
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.tiers import params


@pytest.mark.full
def test_a_place_holds_one_value_at_a_time_and_none_from_when_its_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_reuse, "MIN_BYTES", 1)
    rng, in_outputs = random.Random(0), 0
    for _ in range(40):
        memory = np.zeros(1 << 16, np.uint8)
        room = memory[-memory.ctypes.data % 256 :]
        results, at = [], 0
        while at < 40_000:
            size = rng.randrange(64, 6000)
            results.append((room[at : at + size], rng.randrange(100)))
            at += size + rng.choice([0, 0, 0, 64])
        read = room[12_000:12_100]
        places = OutputScratch([room], results, [read])
        owner = np.full((100, room.nbytes), -1)  # call, byte → what lies there
        owner[:, 12_000:12_100] = -2
        for array, written in results:
            start = array.ctypes.data - room.ctypes.data
            owner[written:, start : start + array.nbytes] = -3
        for now in range(100):
            nbytes, until = rng.randrange(1, 9000), min(99, now + rng.randrange(30))
            found = places.take(nbytes, now, until)
            if found is not None:
                in_outputs += 1
                _, start = found
                region = owner[now : until + 1, start : start + nbytes]
                assert (region == -1).all()
                assert (room.ctypes.data + start) % 256 == 0
                region[:] = now
    assert in_outputs > 200


OPTIONS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"accumulate": 2, "clip_norm": 1.0},
    {"strategy": "zero:stage=2"},
    {"strategy": "zero:stage=3"},
]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("options", "workers"),
    params(product(OPTIONS, (1, 2)), large=[*((options, 1) for options in OPTIONS[1:]), *((OPTIONS[k], 2) for k in (0, 1, 3))]),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*pass through host memory")
def test_training_gives_the_same_bits_from_less_memory(
    options: dict[str, Any],
    workers: int,
    exported: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    register_backend: Callable[..., None],
) -> None:
    register_backend("pretended", lambda **_: cupy_on(HostDevice()))
    in_outputs, bind = [], BoundSegment.bind

    def noting(segment: BoundSegment, *arguments: Any) -> None:
        bind(segment, *arguments)
        in_outputs.append(len(segment._in_outputs))

    monkeypatch.setattr(BoundSegment, "bind", noting)
    program = graphc.compile(
        exported("lenet"),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.Adam(lr=1e-3),
        backend="pretended",
        bucket_mb=0.1 if workers > 1 else 25.0,
        **options,
    )
    x, y = SPECS["lenet"].batch(8)

    def trained(comm: Any) -> tuple[list[float], dict[str, Any]]:
        mine = share(8, comm.rank, comm.size) if comm is not None else slice(None)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            losses = [trainer.step({"input": x[mine], "label": y[mine]})["loss"] for _ in range(3)]
            return losses, trainer.state.snapshot(trainer.comm if workers > 1 else None)

    found = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(scratch_reuse, "MIN_BYTES", least)
        scratch = memory_of(program.model, feed_shapes(program.model, 4), backend="cupy", world_size=workers).scratch
        in_outputs.clear()
        found.append((scratch, trained(None) if workers == 1 else run_threads(2, trained)[0]))
        assert bool(sum(in_outputs)) == (least == 1)
    (less, (losses, state)), (more, (expected, wanted)) = found
    assert less <= more
    assert losses == expected
    for name, array in wanted.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
