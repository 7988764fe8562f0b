"""Binds state updates on a device one by one, and joins them when a step is recorded.

    Increment, RunningAverage × 106, AdamW(bucket 0), Narrow(bucket 0), AdamW(bucket 1), Narrow(bucket 1)
        become three launches: Increment | RunningAverage × 106 | (AdamW with Narrow) × 2

Two updates over arrays of one length become one kernel if the second reads what the first writes. Equal kernels become one
launch over a table of arrays. Updates that depend on each other keep their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from graphc.backends.cupy.device.cuda_memory import address
from graphc.backends.cupy.device.protocol import Device
from graphc.backends.cupy.updates.kernel import (
    WIDTH,
    NotElementwiseError,
    UpdateCall,
    UpdateProgram,
    skip_index,
    slots_read,
    written,
)
from graphc.backends.cupy.updates.multi_tensor import TableRow, bind_table
from graphc.device import Array, Run
from graphc.ir.declare import PLACEMENT, declaration_of, declared, is_update, required_declaration
from graphc.ir.facts import required

SLOTS = 40
"""Most arrays per kernel."""


@dataclass(slots=True, eq=False)
class Update:
    """Updates that form one kernel, over arrays of one length.

    Attributes:
        arrays: the array of each slot of the program.
        count: elements of each flat array.
    """

    device: Device
    program: UpdateProgram
    arrays: tuple[Array, ...]
    count: int
    _run: Run | None = field(default=None, repr=False)

    def __call__(self) -> None:
        if self._run is None:
            (self._run,) = bind_launches([[self]])
        self._run()

    @property
    def reads(self) -> list[tuple[int, int]]:
        """Byte ranges (begin, end) of all arrays."""
        return [(address(a), address(a) + a.nbytes) for a in self.arrays]

    @property
    def writes(self) -> list[tuple[int, int]]:
        """Byte ranges (begin, end) of the arrays that change."""
        places = self.reads
        return [places[k] for k in self.program.written]

    @property
    def traffic(self) -> int:
        """Bytes of the flat arrays that the kernel reads and writes."""
        touched = [*slots_read(self.program), *self.program.written]
        return sum(self.count * int(self.program.slots[k][0].itemsize) for k in touched if self.program.slots[k][1])


def is_elementwise(node: ir.Node) -> bool:
    """Whether an update kernel computes the node's next states."""
    declaration = declaration_of(node)
    if not is_update(node) or declaration is None or declaration.decompose is None:
        return False
    types = tuple(None if v is None or v.dtype is None else (v.dtype, k in declaration.flat) for k, v in enumerate(node.inputs))
    return _can_be_written(node.domain, node.op_type, tuple(sorted(_attributes(node).items())), types, len(node.outputs))


@functools.lru_cache(maxsize=256)
def _can_be_written(
    domain: str,
    op: str,
    attributes: tuple[tuple[str, Any], ...],
    types: tuple[tuple[ir.DataType, bool] | None, ...],
    outputs: int,
) -> bool:
    slots = tuple(t for t in types if t is not None)
    places = iter(range(len(slots)))
    inputs = tuple(None if t is None else next(places) for t in types)
    program = _program(domain, op, attributes, inputs, slots, outputs, True)
    try:
        written(program, device=False)
    except NotElementwiseError:
        return False
    return True


def _attributes(node: ir.Node) -> dict[str, Any]:
    """The attributes as hashable values, without placement, so that equal updates share a kernel."""
    found = {name: attr.value for name, attr in node.attributes.items() if name not in PLACEMENT}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def _program(
    domain: str,
    op: str,
    attributes: tuple[tuple[str, Any], ...],
    inputs: tuple[int | None, ...],
    slots: tuple[tuple[ir.DataType, bool], ...],
    outputs: int,
    vector: bool,
) -> UpdateProgram:
    declaration = required(declared(domain, op))
    at, given = skip_index(domain, op), list(inputs)
    skip = None
    if at is not None and at < len(given) and given[at] is not None:
        skip, given[at] = given[at], None
    while given and given[-1] is None:
        given.pop()
    following = declaration.next_value
    targets = tuple(inputs[following[k]] if following[k] < len(inputs) else None for k in range(outputs))
    return UpdateProgram(slots, (UpdateCall(domain, op, attributes, tuple(given), targets),), skip, vector)


def bind_update(device: Device, node: ir.Node, inputs: Sequence[Array | None]) -> Update:
    """Bind one in-place update of flat arrays."""
    flat = required_declaration(node).flat
    count = next(a.size for k, a in enumerate(inputs) if k in flat and a is not None)
    arrays: list[Array] = []
    known: dict[tuple[int, int, str], int] = {}
    places: list[int | None] = []
    slots: list[tuple[ir.DataType, bool]] = []
    for k, array in enumerate(inputs):
        if array is None:
            places.append(None)
            continue
        key = (address(array), array.size, str(array.dtype))
        if key not in known:
            known[key] = len(arrays)
            arrays.append(array.reshape(-1))
            slots.append((ir.DataType.from_numpy(array.dtype), k in flat))
        places.append(known[key])
    vector = all(address(a) % (WIDTH * a.dtype.itemsize) == 0 for a, (_, is_flat) in zip(arrays, slots, strict=True) if is_flat)
    attributes = tuple(sorted(_attributes(node).items()))
    program = _program(node.domain, node.op_type, attributes, tuple(places), tuple(slots), len(node.outputs), vector)
    return Update(device, program, tuple(arrays), count)


# Joining ---------------------------------------------------------------------------------------------------------------


def join_updates(runs: Iterable[Run]) -> list[Run]:
    """Join consecutive updates in ``runs`` into as few launches as their order allows."""
    found: list[Run] = []
    row: list[Update] = []
    for run in runs:
        if isinstance(run, Update):
            row.append(run)
            continue
        found += bind_launches(launches_of(row))
        row = []
        found.append(run)
    return [*found, *bind_launches(launches_of(row))]


def launches_of(updates: Sequence[Update]) -> list[list[Update]]:
    """The updates of each launch, in order; fused updates count as one."""
    kernels: list[Update] = []
    for update in updates:
        k = _latest(kernels, update, lambda earlier, new: _fused(earlier, new) is not None)
        fused = None if k is None else _fused(kernels[k], update)
        if k is None or fused is None:
            kernels.append(update)
        else:
            kernels[k] = fused
    rows: list[list[Update]] = []
    for kernel in kernels:
        k = _latest([row[0] for row in rows], kernel, lambda earlier, new: earlier.program == new.program, rows)
        if k is None:
            rows.append([kernel])
        else:
            rows[k].append(kernel)
    return rows


def _latest(
    candidates: Sequence[Update],
    new: Update,
    joins: Callable[[Update, Update], bool],
    rows: Sequence[Sequence[Update]] | None = None,
) -> int | None:
    """The last of ``candidates`` that ``new`` may join without running before something it depends on."""
    for k in reversed(range(len(candidates))):
        members = [candidates[k]] if rows is None else rows[k]
        apart = not any(_overlap(member.writes, new.reads) or _overlap(new.writes, member.reads) for member in members)
        if joins(candidates[k], new) and (apart or rows is None):
            return k
        if not apart:
            return None
    return None


def _overlap(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)


def _fused(a: Update, b: Update) -> Update | None:
    """Fuse both into one kernel if ``b`` reads results of ``a`` at the same index only; None otherwise."""
    if a.count != b.count or a.program.vector != b.program.vector:
        return None
    slots, arrays = list(a.program.slots), list(a.arrays)
    known = {(address(x), x.nbytes): k for k, x in enumerate(arrays)}
    moved: dict[int, int] = {}
    for k, array in enumerate(b.arrays):
        key = (address(array), array.nbytes)
        if key not in known:
            known[key] = len(arrays)
            arrays.append(array)
            slots.append(b.program.slots[k])
        moved[k] = known[key]
        if slots[moved[k]] != b.program.slots[k]:
            return None
    shared = [k for k in moved.values() if k < len(a.arrays) and slots[k][1]]
    exact = {known[address(x), x.nbytes] for x in a.arrays}
    if len(arrays) > SLOTS or not any(k in a.program.written for k in shared):
        return None
    outside = [x for x in b.arrays if known[address(x), x.nbytes] not in exact]
    if _overlap(a.writes, [(address(x), address(x) + x.nbytes) for x in outside]):
        return None
    changed = [b.arrays[k] for k in b.program.written if moved[k] not in exact]
    if _overlap([(address(x), address(x) + x.nbytes) for x in changed], a.reads):
        return None
    if any(k in a.program.written and not slots[k][1] for k in moved.values()):
        return None  # each block reads scalars once, before the first update changes them
    skips = (a.program.skip, None if b.program.skip is None else moved[b.program.skip])
    if skips[0] != skips[1]:
        return None
    calls = tuple(_renumbered(call, moved) for call in b.program.calls)
    program = replace(a.program, slots=tuple(slots), calls=(*a.program.calls, *calls))
    return Update(a.device, program, tuple(arrays), a.count)


def _renumbered(call: UpdateCall, moved: Mapping[int, int]) -> UpdateCall:
    def slots(places: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return tuple(None if k is None else moved[k] for k in places)

    return replace(call, inputs=slots(call.inputs), targets=slots(call.targets))


def bind_launches(rows: Sequence[Sequence[Update]]) -> list[Run]:
    """Bind one launch per row of updates with equal programs."""
    if not rows:
        return []
    device = rows[0][0].device
    texts = [_written(row[0].program, device.writes_cuda) for row in rows]
    kernels = device.compile(dict(texts))
    tables = [[TableRow(update.arrays, update.count) for update in row] for row in rows]
    return [
        replace(bind_table(device, kernels[name], table), name=name_of(row[0]), traffic=sum(update.traffic for update in row))
        for (name, _), table, row in zip(texts, tables, rows, strict=True)
    ]


def name_of(update: Update) -> str:
    """The ops of an update's kernel, joined by "+"."""
    return "+".join(call.op for call in update.program.calls)


@functools.lru_cache(maxsize=256)
def _written(program: UpdateProgram, device: bool) -> tuple[str, str]:
    return written(program, device=device)
