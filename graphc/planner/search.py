"""Proposes how to divide a training job over devices.

Every way to divide it that graphc runs is played on a clock by one cost model. What does not fit the memory is left out; if
nothing fits, the error says the smallest number of devices on which something does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphc.errors import UsageError, counted
from graphc.pipe.clock import Played, in_flight, play
from graphc.pipe.tables import Action, PipeSchedule
from graphc.planner.costs import ModelCosts, StageCosts
from graphc.planner.division import Division, divisions
from graphc.planner.network import Network
from graphc.planner.scaling import BUCKET
from graphc.report.trace import Span


@dataclass(slots=True)
class Lane:
    """What one rank of a pipeline does in a step; its replicas do the same.

    Attributes:
        record: whether spans are kept; without them there are only the sums.
        end: seconds from the beginning of the step to the end of what is there so far.
        waited: seconds of it in which collectives are waited for.
        computing, communicating: spans in seconds from the beginning of the step.
    """

    record: bool
    end: float = 0.0
    waited: float = 0.0
    computing: list[Span] = field(default_factory=list)
    communicating: list[Span] = field(default_factory=list)

    def compute(self, kind: str, name: str, seconds: float) -> None:
        """Add work behind what is there."""
        if self.record:
            self.computing.append(Span(kind, name, self.end, self.end + seconds))
        self.end += seconds

    def wait(self, name: str, until: float) -> None:
        """Wait until a time, if it is not over."""
        if until > self.end:
            self.waited += until - self.end
            self.compute("wait", name, until - self.end)

    def communicate(self, kind: str, name: str, start: float, seconds: float, nbytes: float) -> float:
        """Add a transfer beside the work; return its end."""
        if self.record:
            self.communicating.append(Span(kind, name, start, start + seconds, round(nbytes)))
        return start + seconds


@dataclass(frozen=True, slots=True)
class Predicted:
    """A choice with its prediction.

    Attributes:
        seconds: time of a step.
        bubble: share of the time in which ranks of a pipeline wait for each other.
        exposed: seconds of communication that no computation hides, on the rank that has most.
        memory: bytes of the rank that needs most.
    """

    choice: Division
    seconds: float
    bubble: float
    exposed: float
    memory: float


def best(costs: ModelCosts, network: Network, devices: int, memory: float, batch: int) -> list[Predicted]:
    """All choices that fit, the fastest first; of equally fast ones, those that need less memory.

    Args:
        memory: bytes of a device.
        batch: samples of a step on all workers.

    Raises:
        UsageError: nothing fits, or ``batch`` cannot be divided among the devices.
    """
    network.check(devices)
    choices = list(divisions(costs, network.node, devices, batch))
    if not choices:
        raise UsageError(
            f"--batch-size {batch} cannot be shared by {devices} devices evenly; take a multiple of {devices}, or fewer devices"
        )
    fitting = [choice for choice in choices if memory_of_choice(costs, choice) <= memory]
    if not fitting:
        raise UsageError(_too_small(costs, network.node, choices, devices, memory, batch))
    clock = StepClock(costs, network)
    found = [predict(costs, network, choice, clock) for choice in fitting]
    return sorted(found, key=lambda p: (round(p.seconds, 9), p.memory))


def stages_of(costs: ModelCosts, choice: Division) -> tuple[StageCosts, ...]:
    """The costs of each stage, or of the only rank; those of the tensor axis are scaled as the whole model is."""
    found = costs.pipes[choice.stages] if choice.mesh.pipe > 1 else (costs.alone,)
    if choice.mesh.tensor > 1:
        divided = costs.tensors[choice.mesh.tensor].stage
        found = tuple(stage.scaled(divided, costs.alone) for stage in found)
    if choice.recompute and costs.recomputed is not None:
        found = tuple(_recomputed(stage, costs.recomputed, costs.alone) for stage in found)
    return found


def _recomputed(stage: StageCosts, again: StageCosts, whole: StageCosts) -> StageCosts:
    """``stage`` if its activations are computed again, as those of the whole model are."""
    if stage == whole:
        return again
    kept = min(1.0, again.rest.each / whole.rest.each) if whole.rest.each else 1.0
    slower = again.backward.at(1) / whole.backward.at(1) if whole.backward.at(1) else 1.0
    rest = replace(stage.rest, each=stage.rest.each * kept) if stage.stash.at(1) == 0 else stage.rest
    return replace(stage, backward=stage.backward.times(slower), stash=stage.stash.times(kept), rest=rest)


@functools.cache
def _in_flight(schedule: str, ranks: int, micro_batches: int) -> tuple[dict[int, int], ...]:
    """Of each rank: stage → micro-batches whose activations it holds at once."""
    found = PipeSchedule.parse(schedule)
    table, stages = found.table(ranks, micro_batches), found.stages_on(ranks)
    return tuple({stage: in_flight(row, stage) for stage in range(rank, stages, ranks)} for rank, row in enumerate(table))


def memory_of_choice(costs: ModelCosts, choice: Division) -> float:
    """Bytes of the rank that needs most.

    Under ZeRO the sums over several micro-batches stay whole.
    """
    pipe, samples = choice.mesh.pipe, choice.samples
    flights = _in_flight(choice.schedule, pipe, choice.micro_batches) if pipe > 1 else ({0: 0},)
    whole_sums = choice.micro_batches > 1 or pipe > 1
    divided = [choice.zero >= 3, choice.zero >= 2 and not whole_sums, choice.zero >= 1]
    stages, found = stages_of(costs, choice), 0.0
    for flight in flights:
        own = [stages[stage] for stage in flight]
        state = 0.0
        for stage in own:
            parts = (stage.parameters, stage.gradients, stage.optimizer)
            state += sum(n / (choice.mesh.data if by else 1) for n, by in zip(parts, divided, strict=True))
        state += _on_the_way(choice, costs.largest, own)
        rest = max(stage.rest.at(samples) for stage in own)
        rest += sum(count * stages[stage].stash.at(samples) for stage, count in flight.items())
        found = max(found, state + rest)
    return found


def _on_the_way(choice: Division, largest: float, own: Sequence[StageCosts]) -> float:
    """Bytes that are gathered, reduced or added up at a time, beside the state, where the largest parameter has ``largest``.

    In ZeRO's third stage these are buckets of parameters in use, the next ones, and those that the backward pass begins with;
    in a pipeline a task gathers those of its own stage. A gradient is added to the sum of several micro-batches by itself.
    """
    bucket = max(BUCKET, largest)
    parameters = max(stage.parameters for stage in own)
    gradients = sum(stage.gradients for stage in own)
    several, found = choice.micro_batches > 1, 0.0
    if choice.zero == 3:
        found += min(3 * bucket, parameters if choice.mesh.pipe > 1 and several else 2 * parameters)
    if choice.zero >= 2 and not several and choice.mesh.pipe == 1:
        found += min(2 * bucket, gradients)
    if several and choice.mesh.pipe == 1:  # the plans of stages have it already
        found += min(largest, gradients)
    return found


def _too_small(costs: ModelCosts, node: int, choices: list[Division], devices: int, memory: float, batch: int) -> str:
    least = min(memory_of_choice(costs, choice) for choice in choices)
    start = (
        f"the model does not fit {counted(devices, 'device')} of {memory / 1e9:g} GB: the least is {least / 1e9:.3g} GB on each"
    )
    for more in range(devices + 1, batch * max(costs.pipes, default=1) * max(costs.tensors, default=1) + 1):
        if any(memory_of_choice(costs, choice) <= memory for choice in divisions(costs, node, more, batch)):
            return f"{start}; the smallest number of devices that can train it is {more}"
    return f"{start}, and with --batch-size {batch} no number of devices is enough; take a larger batch size or more memory"


class StepClock:
    """Plays the forward and backward passes of a step; choices that differ in the strategy only share a play."""

    def __init__(self, costs: ModelCosts, network: Network) -> None:
        self._costs, self._network = costs, network
        self._played: dict[tuple[object, ...], tuple[Played, float]] = {}

    def play(self, choice: Division) -> tuple[Played, float]:
        """The played table, and seconds that a micro-batch exchanges over the tensor axis in all stages."""
        mesh = choice.mesh
        key = mesh.pipe, mesh.tensor, choice.schedule, choice.micro_batches, choice.samples, choice.recompute
        if key not in self._played:
            self._played[key] = self._play(choice)
        return self._played[key]

    def _play(self, choice: Division) -> tuple[Played, float]:
        stages, samples, mesh = stages_of(self._costs, choice), choice.samples, choice.mesh
        exchanged = self._exchanged(choice)
        forwards = [stage.forward.at(samples) for stage in stages]
        backwards = [stage.backward.at(samples) for stage in stages]
        work = sum(forwards) + sum(backwards) or 1.0
        slower = 1 + exchanged / work  # over the tensor axis, by turns with the work
        schedule = PipeSchedule.parse(choice.schedule)
        later = 0.5 if schedule.splits_weights else 0.0  # the part of the backward pass that gives weight gradients
        several = choice.micro_batches > 1
        sent = {
            "F": [self._sent(stage.results.at(samples), mesh.tensor) for stage in stages],
            "B": [self._sent(stage.adjoints.at(samples), mesh.tensor) for stage in stages],
        }

        def cost(action: Action) -> float:
            if action.kind == "F":
                return forwards[action.stage] * slower
            if action.kind == "U":
                return 0.0
            summed = stages[action.stage].sums if several else 0.0
            backward = backwards[action.stage] * slower + summed
            return backward * ({"B": 1 - later, "W": later}[action.kind])

        def message(action: Action) -> float:
            return sent[action.kind][action.stage] if action.kind in sent else 0.0

        return play(schedule.table(mesh.pipe, choice.micro_batches), cost, message), exchanged

    def _sent(self, nbytes: float, distance: int) -> float:
        return self._network.send(nbytes, distance) if nbytes else 0.0

    def _exchanged(self, choice: Division) -> float:
        ranks = choice.mesh.tensor
        if ranks == 1:
            return 0.0
        divided = self._costs.tensors[ranks]
        each = divided.exchanged.at(choice.samples) / max(1, divided.messages)
        return divided.messages * self._network.allreduce(each, ranks)


def predict(costs: ModelCosts, network: Network, choice: Division, clock: StepClock | None = None) -> Predicted:
    """Play one step of ``choice``."""
    played, lanes, waits = _played(costs, network, choice, clock or StepClock(costs, network), record=False)
    return Predicted(choice, max(lane.end for lane in lanes), played.idle(), max(waits), memory_of_choice(costs, choice))


def timeline(costs: ModelCosts, network: Network, choice: Division) -> list[Lane]:
    """What each rank of the pipe axis does in a step, or the only one."""
    return _played(costs, network, choice, StepClock(costs, network), record=True)[1]


def _played(
    costs: ModelCosts, network: Network, choice: Division, clock: StepClock, *, record: bool
) -> tuple[Played, list[Lane], list[float]]:
    """The played passes, what each rank does in the step, and its seconds of communication that nothing hides."""
    stages, mesh, samples = stages_of(costs, choice), choice.mesh, choice.samples
    played, exchanged = clock.play(choice)
    work = sum(stage.forward.at(samples) + stage.backward.at(samples) for stage in stages) or 1.0
    lanes, waits = [], []
    for rank in range(mesh.pipe):
        own = stages[rank :: mesh.pipe]
        lane = Lane(record)
        begun = _passes(network, choice, stages, played, rank, lane)
        reduced = _reduced(network, choice, sum(stage.gradients for stage in own), begun, lane)
        shared = sum(stage.shared for stage in own)
        if shared:
            reduced = lane.communicate("send", "shared parameters", reduced, network.send(shared, mesh.tensor), shared)
        lane.wait("gradients", reduced)
        lane.compute("update", "updates", sum(stage.update for stage in own) / (mesh.data if choice.zero else 1))
        if choice.zero in (1, 2):
            parameters = sum(stage.parameters for stage in own)
            gather = network.one_way(parameters, mesh.data, mesh.pipe * mesh.tensor)
            lane.wait(
                "AllGather parameters", lane.communicate("collective", "AllGather parameters", lane.end, gather, parameters)
            )
        share = sum(stage.forward.at(samples) + stage.backward.at(samples) for stage in own) / work
        waits.append(lane.waited + choice.micro_batches * exchanged * share)
        lanes.append(lane)
    return played, lanes, waits


def _passes(network: Network, choice: Division, stages: Sequence[StageCosts], played: Played, rank: int, lane: Lane) -> float:
    """The forward and backward passes of a rank; returns when the last one begins."""
    mesh, begun = choice.mesh, 0.0
    for action in (a for a in played.table[rank] if a.kind in "FBW"):
        begun = max(lane.end, played.start[action] + lane.waited)
        lane.end = begun
        lane.compute("segment", str(action) if lane.record else "", played.end[action] - played.start[action])
        if choice.zero == 3:  # parameters of the next bucket come while this one computes; the first one is waited for
            nbytes = stages[action.stage].parameters
            gather = network.one_way(nbytes, mesh.data, mesh.pipe * mesh.tensor)
            first = gather / max(1, round(nbytes / BUCKET))
            lane.communicate("collective", f"AllGather {action}", begun, gather, nbytes)
            lane.wait(f"AllGather {action}", begun + first + max(lane.end - begun, gather - first))
    return begun


def _reduced(network: Network, choice: Division, gradients: int, begun: float, lane: Lane) -> float:
    """Reduce the gradients in buckets, beside the last backward pass; return when the last one has arrived."""
    mesh, last = choice.mesh, lane.end
    if mesh.replicas == 1:
        return last
    count = max(1, round(gradients / BUCKET))
    nbytes, free = gradients / count, begun
    if choice.zero:
        each = network.one_way(nbytes, mesh.data, mesh.pipe * mesh.tensor) + network.across(nbytes / mesh.data, mesh.node)
    else:
        each = network.allreduce(nbytes, mesh.replicas, mesh.pipe * mesh.tensor)
    name = "ReduceScatter" if choice.zero else "AllReduce"
    for k in range(count):
        start = max(free, begun + (last - begun) * (k + 1) / count)
        free = lane.communicate("collective", f"{name} b{k}", start, each, gradients // count)
    return max(last, free)


def steps(predicted: Predicted, played: Sequence[Lane], count: int) -> Iterator[tuple[int, Lane]]:
    """The rank and lane of every worker, for ``count`` steps one behind the other.

    Args:
        played: of :func:`timeline`.
    """
    mesh = predicted.choice.mesh
    lanes = []
    for lane in played:
        found = Lane(record=True)
        for number in range(count):
            shift = number * predicted.seconds
            found.computing.append(Span("step", f"step {number}", shift, shift + predicted.seconds))
            found.computing += [s._replace(start=s.start + shift, stop=s.stop + shift) for s in lane.computing]
            found.communicating += [s._replace(start=s.start + shift, stop=s.stop + shift) for s in lane.communicating]
        lanes.append(found)
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
