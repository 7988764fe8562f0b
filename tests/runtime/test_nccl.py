"""NCCL as far as it goes without a GPU: the calls, evaluated in numpy as NCCL defines them; what the GPU's counters tell."""

from __future__ import annotations

import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphc.device import HostMemory
from graphc.distributed.communicator import Handle
from graphc.distributed.health.flight_recorder import FlightRecorder
from graphc.distributed.health.hang_report import explain_timeout
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.nccl.bindings import NcclComm, NcclLibrary
from graphc.distributed.nccl.calls import DATATYPES, OPERATIONS, plan_calls, supports
from graphc.distributed.nccl.device_transport import Offer, choose, for_memory
from graphc.distributed.nccl.progress import SHIFT, NcclProgress
from graphc.distributed.reductions import even_parts
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.errors import MissingExtraError, UsageError, WorldError
from tests.backends.strict import StrictMemory
from tests.runtime.pretend_gpu import perform

pytestmark = pytest.mark.full

PARTS = {
    "even": [(0, 4), (4, 8), (8, 12)],
    "even and a rest": [(0, 3), (3, 6), (6, 9)],
    "uneven": [(0, 5), (5, 9), (9, 12)],
    "one is empty": [(0, 7), (7, 7), (7, 12)],
    "all of one rank": [(0, 12), (12, 12), (12, 12)],
    "nothing": [(0, 0), (0, 0), (0, 0)],
    "a gap": [(1, 3), (5, 9), (9, 12)],
    "equal parts elsewhere": [(3, 6), (6, 9), (9, 12)],
}


def arrays_of(dtype: str) -> list[Any]:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return [np.random.default_rng(rank).integers(1, 9, 12).astype(kind) for rank in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_reductions(dtype: str, op: str) -> None:
    if (dtype, op) == ("int64", "mean"):
        return
    numpy = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}[op]
    for kind, (_, parts) in itertools.product(("allreduce", "reduce_scatter"), PARTS.items()):
        arrays = arrays_of(dtype)
        expected = numpy(np.stack([a.astype(np.float64) for a in arrays]), 0).astype(arrays[0].dtype)
        perform(arrays, [plan_calls(kind, op, a.dtype, a.size, parts, 0, rank) for rank, a in enumerate(arrays)])
        for rank, array in enumerate(arrays):
            part = slice(*parts[rank]) if kind == "reduce_scatter" else slice(None)
            np.testing.assert_array_equal(array[part], expected[part])


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "bfloat16", "complex64"])
def test_what_moves_is_of_any_type(dtype: str, parts: list[tuple[int, int]]) -> None:
    arrays = arrays_of(dtype)
    before = [a.copy() for a in arrays]
    perform(arrays, [plan_calls("all_gather", "sum", a.dtype, a.size, parts, 0, rank) for rank, a in enumerate(arrays)])
    for rank, array in enumerate(arrays):
        expected = before[rank]
        for owner, (start, stop) in enumerate(parts):
            expected[start:stop] = before[owner][start:stop]
        np.testing.assert_array_equal(array, expected)  # what belongs to nobody is untouched
    arrays = arrays_of(dtype)
    perform(arrays, [plan_calls("broadcast", "sum", a.dtype, a.size, parts, 2, rank) for rank, a in enumerate(arrays)])
    for array in arrays:
        np.testing.assert_array_equal(array, arrays_of(dtype)[2])


def test_equal_parts_are_one_call() -> None:
    """As ZeRO divides its buckets; only other divisions are a group of calls."""
    float32 = np.dtype(np.float32)
    for kind in ("reduce_scatter", "all_gather"):
        assert len(plan_calls(kind, "sum", float32, 12, even_parts(12, 3), 0, 1)) == 1
        assert len(plan_calls(kind, "sum", float32, 12, PARTS["uneven"], 0, 1)) == 3
        assert len(plan_calls(kind, "sum", float32, 12, PARTS["all of one rank"], 0, 1)) == 1
    assert [supports("allreduce", op) for op in ("sum", "tree", "adasum")] == [True, False, False]
    assert supports("all_gather", "")


def test_nccl4py_accepts_the_calls() -> None:
    """Where it is installed: NCCL itself refuses the calls, for want of a communicator or a GPU, not their form."""
    try:
        library = NcclLibrary()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"nccl4py or libnccl is not installed ({error})")
    assert len(library.unique_id()) == 128
    nccl = library.nccl
    assert {name: int(getattr(nccl.DataType, name.capitalize())) for name in DATATYPES} == DATATYPES
    comm = NcclComm(nccl, nccl.Comm(0))
    for kind, parts in itertools.product(("allreduce", "reduce_scatter", "all_gather", "broadcast"), PARTS.values()):
        calls = plan_calls(kind, "sum", np.dtype(np.float32), 12, parts, 0, 0)
        if len(calls) == 1:
            with pytest.raises(nccl.NCCLError, match="InvalidArgument"):
                comm.bind(calls, 1 << 20, 0)()


# Counters -------------------------------------------------------------------------------------------------------------


class Gpu:
    """What the counting kernels do, one collective after the other."""

    def __init__(self) -> None:
        self.seen = np.zeros(2, np.uint64)
        self.recorder = FlightRecorder()
        self.progress = NcclProgress(self.seen, self.recorder, number=7)
        self.handles = [Handle(lambda: None, "allreduce", "sum", tag, 4096) for tag in ("b0", "b1", "b2")]
        self.numbers = [self.progress.number_of(handle) for handle in self.handles]
        self.count = 0

    def begins(self, which: int) -> None:
        self.count += 1
        self.seen[0] = self.count << SHIFT | self.numbers[which]

    def ends(self) -> None:
        self.seen[1] = self.count


def test_what_is_under_way_is_noted_once() -> None:
    gpu = Gpu()
    assert gpu.progress.poll(0, 1.0) is None
    gpu.begins(0)
    assert gpu.progress.poll(0, 2.0) is gpu.handles[0]
    assert gpu.progress.poll(0, 3.0) is gpu.handles[0]
    gpu.ends()
    assert gpu.progress.poll(0, 4.0) is None
    gpu.begins(1)  # passes between two looks
    gpu.ends()
    gpu.begins(2)
    assert gpu.progress.poll(1, 5.0) is gpu.handles[2]
    assert [(e.sequence, e.step, e.tag, e.nbytes, e.start, e.end, e.communicator) for e in gpu.recorder.entries()] == [
        (1, 0, "b0", 4096, 2.0, 4.0, 7),
        (3, 1, "b2", 4096, 5.0, None, 7),
    ]
    assert gpu.handles[2].since == 5.0


def test_a_collective_that_is_replayed_is_another_one_each_time() -> None:
    gpu = Gpu()
    for now in (1.0, 2.0, 3.0):
        gpu.begins(0)
        assert gpu.progress.poll(0, now) is gpu.handles[0]
        assert gpu.handles[0].since == now  # its deadline counts from here
        gpu.ends()
    assert [e.sequence for e in gpu.recorder.entries()] == [1, 2, 3]


def test_the_late_rank_is_named_from_the_counters() -> None:
    ranks = [Gpu(), Gpu()]
    for gpu in ranks:
        gpu.begins(0)
        gpu.progress.poll(4, 1.0)
        gpu.ends()
        gpu.progress.poll(4, 1.5)
    ranks[0].begins(1)
    ranks[0].progress.poll(4, 2.0)
    logs = {rank: gpu.recorder.entries() for rank, gpu in enumerate(ranks)}
    text = explain_timeout(logs[0][-1], 3.0, logs, {}, {}, 5.0, range(2))
    assert text == (
        "rank 1 did not come to allreduce(sum) 'b1' of step 4 (4096 bytes) within 3 s: rank 1 is busy with something else; "
        "its last was allreduce(sum) 'b0' of step 4 (4096 bytes), which ended 3.5 s ago"
    )


def test_collectives_that_are_called_alike_share_a_number() -> None:
    """Plans for several shapes prepare the same collectives over the same state."""
    gpu = Gpu()
    assert gpu.numbers == [0, 1, 2]
    assert gpu.progress.number_of(Handle(lambda: None, "allreduce", "sum", "b1", 4096)) == 1
    assert gpu.progress.number_of(Handle(lambda: None, "allreduce", "sum", "b1", 8192)) == 3


# The choice -----------------------------------------------------------------------------------------------------------

OWN = [Offer("gpu-a", True), Offer("gpu-b", True), Offer("gpu-c", True)]
SHARED = [Offer("gpu-a", True), Offer("gpu-b", True), Offer("gpu-a", True)]
LACKING = [Offer("gpu-a", True), Offer("gpu-b", False), Offer("gpu-c", True)]
NO_GPU = [Offer(None, False)] * 3


@pytest.mark.parametrize(
    ("host", "offers", "wanted", "choice"),
    [
        ("mpi", OWN, "auto", "nccl"),
        ("tcp", OWN, "auto", "nccl"),
        ("mpi", OWN, "nccl", "nccl"),
        ("mpi", OWN, "mpi", "staged"),
        ("tcp", OWN, "tcp", "staged"),
        ("threads", OWN, "auto", "staged: they are threads of one process, and it wants a process for each GPU"),
        ("threads", OWN, "threads", "staged"),
        ("mpi", SHARED, "auto", r"staged: ranks 0, 2 share a GPU, .*start at most 2 workers on 2 GPUs"),
        ("mpi", SHARED, "mpi", "staged"),
        ("mpi", LACKING, "auto", r"staged: rank 1 cannot load NCCL; run: pip install 'graphc\[gpu\]'"),
        ("mpi", NO_GPU, "auto", "staged: the arrays of ranks 0, 1, 2 are not on an NVIDIA GPU"),
        ("mpi", NO_GPU, "mpi", "staged"),
        ("threads", OWN, "nccl", UsageError("NCCL cannot connect these workers: they are threads of one process")),
        ("mpi", SHARED, "nccl", UsageError("NCCL cannot connect these workers: ranks 0, 2 share a GPU")),
        ("mpi", LACKING, "nccl", MissingExtraError(r"rank 1 cannot load NCCL; run: pip install 'graphc\[gpu\]'")),
        ("mpi", NO_GPU, "nccl", UsageError("the arrays of ranks 0, 1, 2 are not on an NVIDIA GPU")),
        ("mpi", OWN, "tcp", UsageError("the transport is 'tcp', but these workers talk by mpi")),
    ],
)
def test_what_is_chosen(host: str, offers: list[Offer], wanted: Any, choice: Any) -> None:
    told = [Offer(offer.device, offer.nccl, wanted) for offer in offers]
    if isinstance(choice, Exception):
        with pytest.raises(type(choice), match=str(choice)):
            choose(host, told)
        return
    found, remark = choose(host, told)
    expected, _, text = choice.partition(": ")
    assert found == expected
    assert bool(remark) == bool(text)
    assert re.search(text, remark)


def test_workers_that_were_told_different_things() -> None:
    with pytest.raises(WorldError, match="the transport is 'auto' on rank 0 and 'mpi' on rank 1"):
        choose("mpi", [Offer("a", True), Offer("b", True, "mpi")])


def test_arrays_of_the_host_need_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: ThreadCommunicator) -> None:
        assert for_memory(comm, HostMemory()) is comm
        with pytest.raises(UsageError, match="'nccl' moves arrays of GPUs"):
            for_memory(comm, HostMemory(), transport="nccl")
        with pytest.raises(UsageError, match="is 'mpi', but these workers talk by threads"):
            for_memory(comm, HostMemory(), transport="mpi")

    run_threads(2, work)
    alone = NullCommunicator()
    assert for_memory(alone, StrictMemory()) is alone  # type: ignore[arg-type]
    monkeypatch.setenv("GRAPHC_TRANSPORT", "nccl")
    with pytest.raises(UsageError, match="'nccl' moves arrays of GPUs"):
        for_memory(alone, HostMemory())


def test_arrays_of_another_device_are_staged() -> None:
    def work(comm: ThreadCommunicator) -> str:
        return type(for_memory(comm, StrictMemory())).__name__  # type: ignore[arg-type]

    with pytest.warns(UserWarning, match="gradients pass through host memory"):
        assert run_threads(2, work) == ["StagedCommunicator"] * 2
