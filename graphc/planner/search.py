"""Proposes how to divide a training job over devices: mesh, strategy, schedule, micro-batches, recomputation.

Every candidate is played on a clock by one cost model. Candidates that do not fit the memory are left out; if none fits, the
error says the smallest number of devices on which one does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphc import parallel
from graphc.errors import UsageError, counted
from graphc.mesh import Mesh
from graphc.options import CompileOptions
from graphc.pipe.clock import in_flight, play
from graphc.pipe.tables import Action, PipeSchedule
from graphc.planner.costs import ModelCosts, StageCosts
from graphc.planner.network import Network
from graphc.planner.scaling import BACKWARD, BUCKET
from graphc.report.trace import Span

MOST_MICRO_BATCHES = 64
"""The most micro-batches of a step that are considered, for each rank of a pipeline."""


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide the job.

    Attributes:
        mesh: with nodes, ZeRO divides the state inside a node, and gradients are reduced inside the nodes first.
        zero: stage of ZeRO; 0: ``mirrored``.
        micro_batches: of each worker and step.
        samples: of a micro-batch.
        schedule: of a pipeline.
    """

    mesh: Mesh
    zero: int
    micro_batches: int
    samples: int
    recompute: bool = False
    schedule: str = "1f1b"

    @property
    def strategy(self) -> str:
        return f"zero:stage={self.zero}" if self.zero else "mirrored"

    def options(self) -> dict[str, Any]:
        """The options of ``graphc train`` that carry it out."""
        found: dict[str, Any] = {
            "workers": self.mesh.size,
            "mesh": str(self.mesh),
            "batch-size": self.mesh.replicas * self.micro_batches * self.samples,
            "accumulate": self.micro_batches,
            "strategy": self.strategy,
        }
        if self.mesh.pipe > 1:
            found["schedule"] = self.schedule
        if self.mesh.node > 1 and not self.zero:
            found["allreduce"] = "hierarchical"
        if self.recompute:
            found["recompute"] = "all"
        return found


@dataclass(frozen=True, slots=True)
class Lane:
    """What one rank of a pipeline does in a step, in seconds from its beginning; its replicas do the same."""

    computing: list[Span]
    communicating: list[Span]


@dataclass(frozen=True, slots=True)
class Predicted:
    """A choice with its prediction.

    Attributes:
        seconds: time of a step.
        bubble: share of the time in which ranks of a pipeline wait for each other.
        exposed: seconds of communication that no computation hides, on the rank that has most.
        memory: bytes of the rank that needs most.
        lanes: one for each rank of the pipe axis.
    """

    choice: Division
    seconds: float
    bubble: float
    exposed: float
    memory: float
    lanes: list[Lane]


def best(costs: ModelCosts, network: Network, devices: int, memory: float, batch: int) -> list[Predicted]:
    """All choices that fit, the fastest first; of equally fast ones, those that need less memory.

    Args:
        memory: bytes of a device.
        batch: samples of a step on all workers.

    Raises:
        UsageError: nothing fits, or ``batch`` cannot be divided among the devices.
    """
    network.check(devices)
    choices = list(_choices(costs, network.node, devices, batch))
    if not choices:
        raise UsageError(
            f"--batch-size {batch} cannot be shared by {devices} devices evenly; take a multiple of {devices}, or fewer devices"
        )
    fitting = [choice for choice in choices if memory_of_choice(costs, choice) <= memory]
    if not fitting:
        raise UsageError(_too_small(costs, network.node, choices, devices, memory, batch))
    found = [predict(costs, network, choice) for choice in fitting]
    return sorted(found, key=lambda p: (round(p.seconds, 9), p.memory))


def _choices(costs: ModelCosts, node: int, devices: int, batch: int) -> Iterator[Division]:
    for pipe, tensor in itertools.product((1, *costs.pipes), (1, *costs.tensors)):
        data, rest = divmod(devices, pipe * tensor)
        if rest or batch % data:
            continue
        share = batch // data
        counts = [m for m in range(1, min(share, MOST_MICRO_BATCHES * pipe) + 1) if share % m == 0 and m >= (pipe > 1) * pipe]
        flat = Mesh(data=data, pipe=pipe, tensor=tensor)
        nodes = _with_nodes(flat, node) if tensor == 1 else None
        inside = (flat, nodes) if pipe == 1 else (flat,)
        divided = [(nodes or flat, 0), *((mesh, zero) for mesh in inside if mesh is not None for zero in (1, 2, 3))]
        for count in counts:
            for mesh, zero in divided if data > 1 else divided[:1]:
                for recompute in (False, True) if costs.recomputed is not None else (False,):
                    if refusal(pipe, tensor, zero, recompute):
                        continue
                    for schedule in SCHEDULES if pipe > 1 else SCHEDULES[:1]:
                        yield Division(mesh, zero, count, share // count, recompute, schedule)


SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
"""Schedules that are considered: those with one stage a rank."""


@functools.cache
def refusal(pipe: int, tensor: int, zero: int, recompute: bool) -> str:
    """Why graphc does not run such a combination; empty where it does."""
    options = CompileOptions(strategy=f"zero:stage={zero}" if zero else "mirrored", recompute="all" if recompute else None)
    mesh = Mesh(data=2, pipe=pipe, tensor=tensor)
    try:
        parallel.check_tensor(options, mesh)
        parallel.check_mesh(options, mesh)
    except UsageError as error:
        return str(error)
    return ""


def refused(costs: ModelCosts) -> list[str]:
    """Why combinations of what is considered are left out, each reason once."""
    found: dict[str, None] = {}
    axes = itertools.product((1, *sorted(costs.pipes)[:1]), (1, *sorted(costs.tensors)[:1]))
    for pipe, tensor in axes:
        for zero, recompute in itertools.product(range(4), (False, True)):
            reason = refusal(pipe, tensor, zero, recompute)
            if reason and not (zero and recompute):
                found[reason] = None
    return list(found)


def _with_nodes(mesh: Mesh, node: int) -> Mesh | None:
    """The mesh with nodes of ``node`` devices; None: the replicas lie in one node, or do not fill nodes evenly."""
    if mesh.size <= node or node % mesh.pipe or mesh.size % node or node == mesh.pipe:
        return None
    return mesh.split(node)


def _stages(costs: ModelCosts, choice: Division) -> tuple[StageCosts, ...]:
    """The costs of the ranks of a pipeline, or of the only one; those of the tensor axis are scaled as the whole model is."""
    if choice.mesh.pipe > 1:
        found = costs.pipes[choice.mesh.pipe]
    else:
        found = (costs.recomputed,) if choice.recompute and costs.recomputed is not None else (costs.alone,)
    if choice.mesh.tensor == 1:
        return found
    divided = costs.tensors[choice.mesh.tensor].stage
    return tuple(stage.scaled(divided, costs.alone) for stage in found)


@functools.cache
def _in_flight(schedule: str, ranks: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations each rank holds at once."""
    table = PipeSchedule(schedule).table(ranks, micro_batches)
    return tuple(in_flight(row, rank) for rank, row in enumerate(table))


def memory_of_choice(costs: ModelCosts, choice: Division) -> float:
    """Bytes of the rank that needs most; of ZeRO's third stage, two gathered buckets besides."""
    found, pipe = 0.0, choice.mesh.pipe
    flights = _in_flight(choice.schedule, pipe, choice.micro_batches) if pipe > 1 else (0,)
    kept = 1.0
    if choice.recompute and costs.recomputed is not None and costs.alone.rest.each:
        kept = min(1.0, costs.recomputed.rest.each / costs.alone.rest.each)
    for stage, flight in zip(_stages(costs, choice), flights, strict=True):
        terms = ((stage.parameters, 3), (stage.gradients, 2), (stage.optimizer, 1))
        state = sum(nbytes / (choice.mesh.data if choice.zero >= least else 1) for nbytes, least in terms)
        gathered = 2 * max(BUCKET, costs.largest) if choice.zero == 3 else 0.0
        rest = stage.rest.at(choice.samples)
        if pipe > 1:
            rest += (flight * kept - stage.held) * stage.stash.at(choice.samples)
        found = max(found, state + min(gathered, stage.parameters) + rest)
    return found


def _too_small(costs: ModelCosts, node: int, choices: list[Division], devices: int, memory: float, batch: int) -> str:
    least = min(memory_of_choice(costs, choice) for choice in choices)
    start = (
        f"the model does not fit {counted(devices, 'device')} of {memory / 1e9:g} GB: the least is {least / 1e9:.3g} GB on each"
    )
    for more in range(devices + 1, batch * max(costs.pipes, default=1) * max(costs.tensors, default=1) + 1):
        if any(memory_of_choice(costs, choice) <= memory for choice in _choices(costs, node, more, batch)):
            return f"{start}; the smallest number of devices that can train it is {more}"
    return f"{start}, and with --batch-size {batch} no number of devices is enough; take a larger batch size or more memory"


def predict(costs: ModelCosts, network: Network, choice: Division) -> Predicted:
    """Play one step of ``choice``."""
    stages = _stages(costs, choice)
    ranks, data, tensor = choice.mesh.pipe, choice.mesh.data, choice.mesh.tensor
    stride = ranks * tensor
    micro, exchanged = costs.micro.at(choice.samples), 0.0
    if tensor > 1:
        divided = costs.tensors[tensor]
        each = divided.exchanged.at(choice.samples) / max(1, divided.messages)
        exchanged = divided.messages * network.allreduce(each, tensor)
        micro = micro * divided.stage.share + exchanged
    forward, backward = micro * (1 - BACKWARD), micro * BACKWARD
    if choice.recompute:
        backward += forward
    gather = [network.one_way(stage.parameters, data, stride) if choice.zero == 3 else 0.0 for stage in stages]

    def cost(action: Action) -> float:
        share = stages[action.stage].share
        return {"F": forward, "B": backward - later, "W": later, "U": 0.0}[action.kind] * share

    schedule = PipeSchedule(choice.schedule)
    later = micro * BACKWARD / 2 if schedule.splits_weights else 0.0
    played = play(schedule.table(ranks, choice.micro_batches), cost)
    lanes, ends, exposed = [], [], 0.0
    for rank, stage in enumerate(stages):
        computing, communicating = list[Span](), list[Span]()
        late = 0.0
        for action in (a for a in played.table[rank] if a.kind in "FBW"):
            start = played.start[action] + late
            stop = played.end[action] + late
            computing.append(Span("segment", str(action), start, stop))
            if gather[rank]:  # parameters of the next bucket come while this one computes; the first one is waited for
                first = gather[rank] / max(1, round(stage.parameters / BUCKET))
                ready = start + first + max(stop - start, gather[rank] - first)
                communicating.append(Span("collective", f"AllGather {action}", start, start + gather[rank], stage.parameters))
                computing.append(Span("wait", f"AllGather {action}", stop, ready))
                late += ready - stop
        last = computing[-1].stop
        begun = max(s.start for s in computing if s.kind == "segment")
        end = _reduced(network, choice, stage, begun, last, communicating)
        if end > last:
            computing.append(Span("wait", "gradients", last, end))
        update = costs.update * stage.share / (data if choice.zero else 1)
        computing.append(Span("update", "updates", end, end + update))
        done = end + update
        if choice.zero in (1, 2):
            after = done + network.one_way(stage.parameters, data, stride)
            communicating.append(Span("collective", "AllGather parameters", done, after, stage.parameters))
            computing.append(Span("wait", "AllGather parameters", done, after))
            done = after
        waited = sum(s.stop - s.start for s in computing if s.kind == "wait")
        exposed = max(exposed, waited + choice.micro_batches * exchanged * stage.share)
        ends.append(done)
        lanes.append(Lane(computing, communicating))
    return Predicted(choice, max(ends), played.idle(), exposed, memory_of_choice(costs, choice), lanes)


def _reduced(
    network: Network, choice: Division, stage: StageCosts, begun: float, last: float, communicating: list[Span]
) -> float:
    """Reduce the gradients in buckets, beside the last backward pass; return when the last one has arrived."""
    mesh = choice.mesh
    if mesh.replicas == 1:
        return last
    count = max(1, round(stage.gradients / BUCKET))
    nbytes, free = stage.gradients / count, begun
    if choice.zero:
        each = network.one_way(nbytes, mesh.data, mesh.pipe * mesh.tensor) + network.across(nbytes / mesh.data, mesh.node)
    else:
        each = network.allreduce(nbytes, mesh.replicas, mesh.pipe * mesh.tensor)
    name = "ReduceScatter" if choice.zero else "AllReduce"
    for k in range(count):
        start = max(free, begun + (last - begun) * (k + 1) / count)
        free = start + each
        communicating.append(Span("collective", f"{name} b{k}", start, free, stage.gradients // count))
    return max(last, free)


def steps(predicted: Predicted, count: int) -> Iterator[tuple[int, Lane]]:
    """The rank and lane of every worker, for ``count`` steps one behind the other."""
    mesh = predicted.choice.mesh
    lanes = []
    for lane in predicted.lanes:
        computing, communicating = list[Span](), list[Span]()
        for number in range(count):
            shift = number * predicted.seconds
            computing.append(Span("step", f"step {number}", shift, shift + predicted.seconds))
            computing += [s._replace(start=s.start + shift, stop=s.stop + shift) for s in lane.computing]
            communicating += [s._replace(start=s.start + shift, stop=s.stop + shift) for s in lane.communicating]
        lanes.append(Lane(computing, communicating))
    for rank in range(mesh.size):
        yield rank, lanes[mesh.coordinate("pipe", rank)]


def as_row(predicted: Predicted) -> Mapping[str, Any]:
    """The prediction as plain values."""
    return {
        "options": predicted.choice.options(),
        "step_ms": predicted.seconds * 1e3,
        "bubble": predicted.bubble,
        "exposed_ms": predicted.exposed * 1e3,
        "memory_bytes": round(predicted.memory),
    }
