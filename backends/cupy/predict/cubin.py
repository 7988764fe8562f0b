"""Reads from a compiled kernel what it takes of a multiprocessor, and how many loads it keeps in flight.

A cubin is an ELF file. Its ``.nv.info`` section has registers and stack of each kernel, ``.nv.shared.<kernel>`` the shared
memory, and ``.text.<kernel>`` the instructions of 16 bytes each. An instruction names the scoreboard that it sets when its
result has arrived, and the scoreboards that it waits for; that is how loads in flight are counted without a disassembler.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphc.errors import GraphcError

REGISTERS, STACK = 0x2F, 0x11
"""Attributes of ``.nv.info``: EIATTR_REGCOUNT and EIATTR_FRAME_SIZE."""

LOAD_GLOBAL = 0x981
"""The low twelve bits of LDG, since compute capability 7.0."""

LOAD_BYTES = (1, 1, 2, 2, 4, 8, 16)
"""Bytes of a load by its size field."""

SHARED_CACHE = 7
"""Four bits of a load that goes past a multiprocessor's own cache (``ld.global.cg``), as those of a last block do."""

BRANCH = 0x947
"""The low twelve bits of BRA."""

NO_SCOREBOARD = 7


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread in local memory: spilled registers and arrays with a computed index.
        shared: bytes of a block.
        in_flight: most bytes of loads that a thread has requested before it waits for one of them.
        instructions: their number.
    """

    registers: int
    stack: int
    shared: int
    in_flight: int
    instructions: int


def read_cubin(cubin: bytes, name: str) -> Resources:
    """The resources of kernel ``name``.

    Raises:
        GraphcError: the file holds no such kernel.
    """
    if cubin[:4] != b"\x7fELF":
        raise GraphcError(f"the compiled kernel {name} is no ELF file; compile for an architecture sm_…, not for PTX")
    sections = {found: (kind, body, size) for found, kind, body, size in _sections(cubin)}
    if f".text.{name}" not in sections:
        raise GraphcError(f"the compiled file holds no kernel {name}")
    facts = dict(_info(sections[".nv.info"][1]))
    text = sections[f".text.{name}"][1]
    shared = sections.get(f".nv.shared.{name}", (0, b"", 0))[2]
    return Resources(facts.get(REGISTERS, 0), facts.get(STACK, 0), shared, _in_flight(text), len(text) // 16)


def _sections(cubin: bytes) -> Iterator[tuple[str, int, bytes, int]]:
    """(name, type, content, size) of each section; sections without content have a size only."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + k * entry) for k in range(count)]
    strings = headers[names][4]
    for head in headers:
        at = strings + head[0]
        content = b"" if head[1] == 8 else cubin[head[4] : head[4] + head[5]]
        yield cubin[at : cubin.index(b"\0", at)].decode(), head[1], content, head[5]


def _info(section: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of the attributes that have a value for each kernel."""
    at = 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:  # the other forms hold their value in place of the size
            if size == 8:
                yield attribute, struct.unpack_from("<II", section, at)[1]
            at += size


def _in_flight(text: bytes) -> int:
    """Most bytes that a thread has requested at once, in the loop that loads most, or else in the whole kernel."""
    words = list(struct.iter_unpack("<QQ", text))
    bodies = [words[first : last + 1] * 2 for first, last in _loops(words)]  # twice: a loop may load for its next round
    return _most_waiting(max(bodies, key=_loaded, default=())) or _most_waiting(words)


def _loops(words: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(first, last) instruction of the innermost loops: what lies between a branch backwards and its target."""
    found = []
    for k, (low, high) in enumerate(words):
        if low & 0xFFF == BRANCH:
            offset = (low >> 34 | (high & 0x3FFFF) << 30) << 8 | (low >> 16 & 0xFF)  # 48 and 8 bits, in units of 4 bytes
            offset -= (offset >> 55) << 56
            target = k + 1 + offset * 4 // 16
            if target < k:
                found.append((target, k))
    for first, last in found:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in found):
            yield first, last


def _loaded(words: Sequence[tuple[int, int]]) -> int:
    return sum(_load_bytes(low, high) for low, high in words)


def _load_bytes(low: int, high: int) -> int:
    """Bytes of a load; those of the totals that a last block adds up, a small part of the kernel's time, do not count."""
    return LOAD_BYTES[high >> 9 & 7] if low & 0xFFF == LOAD_GLOBAL and high >> 13 & 0xF != SHARED_CACHE else 0


def _most_waiting(words: Sequence[tuple[int, int]]) -> int:
    waiting: dict[int, int] = {}
    most = 0
    for low, high in words:
        awaited = high >> 52 & 0x3F
        for scoreboard in [s for s in waiting if awaited >> s & 1]:
            del waiting[scoreboard]
        nbytes, scoreboard = _load_bytes(low, high), high >> 46 & 7
        if nbytes and scoreboard != NO_SCOREBOARD:
            waiting[scoreboard] = waiting.get(scoreboard, 0) + nbytes
            most = max(most, sum(waiting.values()))
    return most
