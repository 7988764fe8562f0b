"""Times of the steps of plans, measured on one machine or modelled from what was measured; a JSON file holds them.

    step of a plan     Gemm 512×768 · 768×3072        measured: its own time
                       Gemm 512×768 · 768×50257       not measured: work / rates, scaled as the Gemm nearest in size is

Steps with equal ops, attributes, types and shapes are one entry, wherever they stand: the blocks of a transformer are measured
once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from graphc.atomic_files import read_regular, whole_file
from graphc.errors import UsageError
from graphc.ir.facts import constant, dims, known_nbytes
from graphc.ir.subgraphs import bodies, captured
from graphc.plan.node_costs import operations
from graphc.plan.partition import Plan
from graphc.plan.steps import PlanStep, UpdateGroup
from graphc.report.step_time import Cost, Prediction

FORM = "graphc profile 1"
"""First entry of a file: what it is."""

COMPUTES = ("segment", "kernel")
"""Kinds of plan steps that a backend computes; the others move bytes."""

SELECTS = frozenset({"Gather", "GatherElements", "GatherND"})
"""Ops that read only as many elements of their first operand as they return."""


class StepTimes(Protocol):
    """A cost model of one device: the time of each step of a plan.

    Attributes:
        machine: the device, in words.
        bytes_per_second: to and from its memory.
    """

    @property
    def machine(self) -> str: ...

    @property
    def bytes_per_second(self) -> float: ...

    def seconds(self, step: PlanStep) -> float:
        """Time of a step that computes, updates, sums or checks; transfers between workers take none here."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does.

    Attributes:
        key: equal for steps that take the same time: a digest of ops, attributes, types and shapes.
        kind: its ops by name.
        text: its ops and the shapes that they read.
        nbytes: bytes that it reads and writes.
        operations: of matrix products, convolutions and attention.
    """

    key: str
    kind: str
    text: str
    nbytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured step."""

    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Measured steps of one machine.

    Attributes:
        about: the machine and the versions of what ran: name → text; ``name`` is the processor or device.
        backend: which ran them.
        threads: of each worker.
        bytes_per_second, operations_per_second: of a large sum of arrays, and of a large matrix product.
        steps: key → measured step.
    """

    about: Mapping[str, str]
    backend: str
    threads: int
    bytes_per_second: float
    operations_per_second: float
    steps: dict[str, Measured] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        return self.about.get("name", "another machine")

    def seconds(self, step: PlanStep) -> float:
        return self.time_of(work_of(step)) if step.kind in COMPUTES else moved_by(step) / self.bytes_per_second

    def time_of(self, work: Work) -> float:
        """Measured, or else modelled."""
        found = self.steps.get(work.key)
        if found is not None:
            return found.seconds
        base = self.base(work)
        alike = [m for m in self.steps.values() if m.work.kind == work.kind] or list(self.steps.values())
        ratios = [(abs(math.log(self.base(m.work) / base)), m.seconds / self.base(m.work)) for m in alike]
        return base * min(ratios, default=(0.0, 1.0))[1]

    def base(self, work: Work) -> float:
        """Seconds by the rates alone; never 0."""
        return work.operations / self.operations_per_second + max(1, work.nbytes) / self.bytes_per_second

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        found = asdict(self) | {"form": FORM, "steps": [asdict(m.work) | {"seconds": m.seconds} for m in self.steps.values()]}
        order = ("form", "about", "backend", "threads", "bytes_per_second", "operations_per_second", "steps")
        with whole_file(path) as file:
            file.write((json.dumps({name: found[name] for name in order}, indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: str | Path) -> StepProfile:
        """Read what :meth:`write` wrote.

        Raises:
            UsageError: a file that is none, or something else.
        """
        try:
            found = json.loads(read_regular(path))
            if found["form"] != FORM:
                raise ValueError(f"its form is {found['form']!r}, not {FORM!r}")
            works = [
                Work(str(one["key"]), str(one["kind"]), str(one["text"]), count(one["nbytes"]), count(one["operations"]))
                for one in found["steps"]
            ]
            seconds = [positive(one["seconds"]) for one in found["steps"]]
            steps = {work.key: Measured(work, taken) for work, taken in zip(works, seconds, strict=True)}
            about = {str(name): str(text) for name, text in found["about"].items()}
            rates = positive(found["bytes_per_second"]), positive(found["operations_per_second"])
            return cls(about, str(found["backend"]), int(found["threads"]), *rates, steps)
        except (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(
                f"profile {path}: it cannot be read ({reason}); 'graphc plan --profile' writes one where there is no file"
            ) from None


def positive(value: Any) -> float:
    """``value`` as a number; ValueError unless it is finite and above 0."""
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{value!r} is no time or rate")
    return number


def count(value: Any) -> int:
    """``value`` as a whole number; ValueError if it is negative."""
    number = int(value)
    if number < 0:
        raise ValueError(f"{value!r} is no number of bytes or operations")
    return number


def work_of(step: PlanStep) -> Work:
    """What a ``segment`` or ``kernel`` step does."""
    lines = list(_canonical(step.nodes))
    read, written = outside(step)
    nbytes = sum(_bytes_read(step.nodes, v) for v in read) + sum(known_nbytes(v) for v in written)
    kind = "+".join(sorted({node.op_type for node in step.nodes}))
    shapes = (v.shape for v in read if v.shape is not None and len(v.shape))
    text = f"{kind} {' '.join('x'.join(map(str, shape)) for shape in shapes)}"
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
    return Work(key, kind, text, nbytes, sum(operations(node, 1) for node in step.nodes))


def outside(step: PlanStep) -> tuple[list[ir.Value], list[ir.Value]]:
    """The values that a step reads from and writes to memory, without constants."""
    made = {v for node in step.nodes for v in node.outputs}
    read = [v for node in step.nodes for v in (*node.inputs, *captured(node)) if v is not None and v not in made]
    return [v for v in dict.fromkeys(read) if constant(v) is None], list(step.outputs)


def _bytes_read(nodes: Sequence[ir.Node], value: ir.Value) -> int:
    users = [node for node in nodes if value in node.inputs]
    if users and all(node.op_type in SELECTS and node.inputs[0] is value for node in users):
        return min(known_nbytes(value), sum(known_nbytes(node.outputs[0]) for node in users))
    return known_nbytes(value)


def _canonical(nodes: Sequence[ir.Node]) -> Iterator[str]:
    """The nodes as text in which values have numbers in the place of names."""
    numbers: dict[ir.Value, int] = {}

    def shown(value: ir.Value | None) -> str:
        if value is None:
            return "-"
        known = constant(value)
        dtype = value.dtype.name if value.dtype is not None else "?"
        if known is not None and known.size <= FEW:
            return f"{dtype}{known.tolist()}"
        name = "c" if known is not None else numbers.setdefault(value, len(numbers))
        return f"{name}:{dtype}{list(dims(value) or ())}"

    for node in nodes:
        attributes = (f"{name}={_value(held)}" for name, held in sorted(node.attributes.items()) if name not in NAMES)
        inner = (line for body in bodies(node) for line in _canonical(list(body)))
        operands, results = (" ".join(map(shown, values)) for values in ((*node.inputs, *captured(node)), node.outputs))
        yield f"{node.domain}::{node.op_type}({operands}; {' '.join(attributes)}){list(inner)} -> {results}"


FEW = 64
"""Elements of a constant up to which its values are part of a step's key, such as axes and shapes."""

NAMES = ("tag",)
"""Attributes that only tell nodes apart."""


def _value(attribute: ir.Attr) -> str:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return ""
    if attribute.type is ir.AttributeType.TENSOR:
        return hashlib.sha256(attribute.as_tensor().tobytes()).hexdigest()
    return str(attribute.value)


def moved_by(step: PlanStep) -> int:
    """Bytes that an update, a sum over micro-batches or a check reads and writes; 0 for transfers between workers."""
    if step.group is not None:
        return _moved_by_update(step.group)
    if step.kind == "accumulate":
        return 3 * sum(known_nbytes(v) for v in step.outputs)
    return 0


def _moved_by_update(group: UpdateGroup) -> int:
    start, stop = group.owned
    written = set(group.states())
    return sum((stop - start) * group.dtype(k).itemsize * (1 + (k in written)) for k in group.flat)


def checked_by(plan: Plan) -> int:
    """Bytes of gradients that the check for NaN reads."""
    states = {group.buffer(k) for group in plan.groups for k in group.states()}
    groups = [(group, k) for group in plan.groups if (k := group.source) is not None and group.buffer(k) not in states]
    return sum((group.owned[1] - group.owned[0]) * group.dtype(k).itemsize for group, k in groups)


def prediction_of(plan: Plan, times: StepProfile) -> Prediction:
    """The time of one step of training on one worker, by what is measured."""
    costs = []
    for step in plan.steps:
        nbytes, flops, centre = moved_by(step), 0, step.kind
        if step.kind in COMPUTES:
            work = work_of(step)
            nbytes, flops, centre = work.nbytes, work.operations, work.kind
        if step.kind == "check":
            nbytes = checked_by(plan)
        seconds = times.seconds(step) if step.kind in COMPUTES else nbytes / times.bytes_per_second
        costs.append(Cost(centre, step.name, seconds, nbytes, flops))
    return Prediction(times.machine, costs, 0)
