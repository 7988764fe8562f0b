"""Proposes how to divide a training job over devices: mesh, strategy, schedule, micro-batches, recomputation.

Every candidate is played on a clock by one cost model. Candidates that do not fit the memory are left out; if none fits, the
error says the smallest number of devices on which one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphc.errors import UsageError, counted
from graphc.mesh import Mesh
from graphc.pipe.clock import play
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
    """

    mesh: Mesh
    zero: int
    micro_batches: int
    samples: int
    recompute: bool = False

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
            found["schedule"] = "1f1b"
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
    for pipe in (1, *costs.pipes):
        data, rest = divmod(devices, pipe)
        if rest or batch % data:
            continue
        share = batch // data
        counts = [m for m in range(1, min(share, MOST_MICRO_BATCHES * pipe) + 1) if share % m == 0 and m >= (pipe > 1) * pipe]
        flat = Mesh(data=data, pipe=pipe)
        nodes = _with_nodes(flat, node)
        for count in counts:
            if pipe > 1:
                yield Division(nodes or flat, 0, count, share // count)
                continue
            divided = [(nodes or flat, 0), *((mesh, zero) for mesh in (flat, nodes) if mesh is not None for zero in (1, 2, 3))]
            for mesh, zero in divided if data > 1 else divided[:1]:
                for recompute in (False, True) if costs.recomputed is not None else (False,):
                    yield Division(mesh, zero, count, share // count, recompute)


def _with_nodes(mesh: Mesh, node: int) -> Mesh | None:
    """The mesh with nodes of ``node`` devices; None: the replicas lie in one node, or do not fill nodes evenly."""
    if mesh.size <= node or node % mesh.pipe or mesh.size % node or node == mesh.pipe:
        return None
    return mesh.split(node)


def _stages(costs: ModelCosts, choice: Division) -> tuple[StageCosts, ...]:
    if choice.mesh.pipe > 1:
        return costs.pipes[choice.mesh.pipe]
    return (costs.recomputed,) if choice.recompute and costs.recomputed is not None else (costs.alone,)


def memory_of_choice(costs: ModelCosts, choice: Division) -> float:
    """Bytes of the rank that needs most; of ZeRO's third stage, two gathered buckets besides."""
    found = 0.0
    for stage in _stages(costs, choice):
        terms = ((stage.parameters, 3), (stage.gradients, 2), (stage.optimizer, 1))
        state = sum(nbytes / (choice.mesh.data if choice.zero >= least else 1) for nbytes, least in terms)
        gathered = 2 * max(BUCKET, costs.largest) if choice.zero == 3 else 0.0
        found = max(found, state + min(gathered, stage.parameters) + stage.rest.at(choice.samples))
    return found


def _too_small(costs: ModelCosts, node: int, choices: list[Division], devices: int, memory: float, batch: int) -> str:
    least = min(memory_of_choice(costs, choice) for choice in choices)
    start = (
        f"the model does not fit {counted(devices, 'device')} of {memory / 1e9:g} GB: the least is {least / 1e9:.3g} GB on each"
    )
    for more in range(devices + 1, batch * max(costs.pipes, default=1) + 1):
        if any(memory_of_choice(costs, choice) <= memory for choice in _choices(costs, node, more, batch)):
            return f"{start}; the smallest number of devices that can train it is {more}"
    return f"{start}, and with --batch-size {batch} no number of devices is enough; take a larger batch size or more memory"


def predict(costs: ModelCosts, network: Network, choice: Division) -> Predicted:
    """Play one step of ``choice``."""
    stages = _stages(costs, choice)
    ranks, data = choice.mesh.pipe, choice.mesh.data
    micro = costs.micro.at(choice.samples)
    forward, backward = micro * (1 - BACKWARD), micro * BACKWARD
    if choice.recompute:
        backward += forward
    gather = [network.one_way(stage.parameters, data, ranks) if choice.zero == 3 else 0.0 for stage in stages]

    def cost(action: Action) -> float:
        share = stages[action.stage].share
        return {"F": forward, "B": backward, "W": 0.0, "U": 0.0}[action.kind] * share

    played = play(PipeSchedule("1f1b").table(ranks, choice.micro_batches), cost)
    lanes, ends, exposed = [], [], 0.0
    for rank, stage in enumerate(stages):
        computing, communicating = list[Span](), list[Span]()
        late = 0.0
        for action in (a for a in played.table[rank] if a.kind in "FB"):
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
            after = done + network.one_way(stage.parameters, data, ranks)
            communicating.append(Span("collective", "AllGather parameters", done, after, stage.parameters))
            computing.append(Span("wait", "AllGather parameters", done, after))
            done = after
        exposed = max(exposed, sum(s.stop - s.start for s in computing if s.kind == "wait"))
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
        each = network.one_way(nbytes, mesh.data, mesh.pipe) + network.across(nbytes / mesh.data, mesh.node)
    else:
        each = network.allreduce(nbytes, mesh.replicas, mesh.pipe)
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
