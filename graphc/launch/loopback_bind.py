"""Keeps the runtime of MPI on the loopback: PRRTE, which ``mpiexec`` is, listens on all interfaces and has no option for it.

``mpiexec`` starts with a small library in ``LD_PRELOAD`` whose ``bind`` puts the loopback in the place of "any address"; the
workers start without it. The library is put together here, as there may be no compiler where graphc runs. In C::

    int bind(int fd, const struct sockaddr *address, socklen_t length) {
        if (length >= 16 && address is of AF_INET and 0.0.0.0)      address = a copy with 127.0.0.1;
        else if (length >= 28 && address is of AF_INET6 and ::)     address = a copy with ::1;
        return syscall(SYS_bind, fd, address, length);              // with errno, through __errno_location
    }
"""

from __future__ import annotations

import os
import platform
import struct
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PRELOAD = "LD_PRELOAD"
FILE = "loopback-bind.so"


@dataclass(frozen=True, slots=True)
class _Machine:
    """The code of ``bind`` for one kind of processor.

    Attributes:
        number: of the processor in ELF files.
        relocation: the kind that fills a place with the address of a symbol.
        call: offset of the instruction that reads the address of ``__errno_location``.
    """

    number: int
    relocation: int
    code: bytes
    call: int


_MACHINES = {
    "x86_64": _Machine(
        62,
        6,  # R_X86_64_GLOB_DAT
        bytes.fromhex(
            "4883ec28"  # sub rsp, 40
            "83fa10 7258 0fb706 83f802 751f"  # length < 16: call; family != AF_INET: next
            "837e0400 754a"  # address != 0: call
            "0f1006 0f110424 c74424047f000001"  # copy 16 bytes, put 127.0.0.1 in
            "4889e6 ba10000000 eb31"  # rsi = copy, edx = 16: call
            "83f80a 752c 83fa1c 7227"  # family != AF_INET6 or length < 28: call
            "488b4608 480b4610 751d"  # address != 0: call
            "0f1006 0f110424 0f10460c 0f1144240c c644241701"  # copy 28 bytes, put ::1 in
            "4889e6 ba1c000000"  # rsi = copy, edx = 28
            "b831000000 0f05 85c0 7915"  # call: bind; done unless negative
            "f7d8 890424 ff1500000000 8b0c24 8908 b8ffffffff"  # *__errno_location() = -eax; eax = -1
            "4883c428 c3"  # done: add rsp, 40; ret
        ),
        call=0x71,
    ),
    "aarch64": _Machine(
        183,
        1025,  # R_AARCH64_GLOB_DAT
        bytes.fromhex(
            "ffc300d1 fd7b02a9"  # sub sp, sp, 48; stp x29, x30, [sp, 32]
            "5f400071 a3030054 23004079 7f080071 61010054"  # length < 16: call; family != AF_INET: next
            "240440b9 04030035"  # address != 0: call
            "2000c03d e003803d e40f8052 0420a072 e40700b9"  # copy 16 bytes, put 127.0.0.1 in
            "e1030091 02028052 10000014"  # x1 = copy, w2 = 16: call
            "7f280071 c1010054 5f700071 83010054"  # family != AF_INET6 or length < 28: call
            "249440a9 840005aa 240100b5"  # address != 0: call
            "2000c03d e003803d 20c0c03c e0c3803c 24008052 e45f0039"  # copy 28 bytes, put ::1 in
            "e1030091 82038052"  # x1 = copy, w2 = 28
            "081980d2 010000d4 0001f836"  # call: bind; done unless negative
            "e003004b e00300b9 09000058 20013fd6 e10340b9 010000b9 00008012"  # *__errno_location() = -w0; w0 = -1
            "fd7b42a9 ffc30091 c0035fd6"  # done: ldp x29, x30, [sp, 32]; add sp, sp, 48; ret
        ),
        call=0x94,
    ),
}


def confine(command: Sequence[str], environment: MutableMapping[str, str], directory: Path) -> list[str]:
    """Let the ``mpiexec`` that gets ``environment`` listen on the loopback only; returns the command of its workers.

    Args:
        command: of a worker; it runs with the ``LD_PRELOAD`` that ``environment`` has now.
        directory: of the run, for the library.
    """
    machine, problem = _MACHINES.get(platform.machine()), ""
    if machine is None:
        problem = f"graphc cannot confine it on {platform.machine()}"
    elif any(character in " :;" for character in str(directory)):
        problem = f"no library can be preloaded from {directory.parent}; name a folder without spaces and colons in TMPDIR"
    elif os.statvfs(directory).f_flag & os.ST_NOEXEC:
        problem = f"{directory.parent} is mounted noexec; name another folder in TMPDIR"
    if machine is None or problem:
        print(
            f"graphc: the runtime of MPI listens on all interfaces while the workers run: {problem}, or use --transport tcp",
            file=sys.stderr,
        )
        return list(command)
    path = directory / FILE
    path.write_bytes(library(machine))
    before = environment.get(PRELOAD)
    environment[PRELOAD] = ":".join(filter(None, (str(path), before)))
    return ["env", *(["-u", PRELOAD] if before is None else [f"{PRELOAD}={before}"]), *command]


def library(machine: _Machine) -> bytes:
    """An ELF file of 64 bits with the function ``bind``."""
    names = b"\0bind\0__errno_location\0"
    head, segments = 64, 4 * 56
    symbols = head + segments
    strings = symbols + 3 * 24
    table = _aligned(strings + len(names))
    relocations = table + 6 * 4
    text = relocations + 24
    dynamic = _aligned(text + len(machine.code))
    slot = dynamic + 9 * 16
    end = slot + 8
    moved = 0x10000  # the writable part lies one page, of the largest size that there is, behind the rest

    code = _with_address(machine, moved + slot - (text + machine.call))
    entries = [(4, table), (5, strings), (6, symbols), (10, len(names)), (11, 24), (7, relocations), (8, 24), (9, 24), (0, 0)]
    parts = {
        0: struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, machine.number, 1, 0, head, 0, 0, 64, 56, 4, 0, 0, 0),
        head: _segment(1, 5, 0, 0, dynamic)  # code, readable and executable
        + _segment(1, 6, dynamic, moved + dynamic, end - dynamic)  # data, readable and writable
        + _segment(2, 6, dynamic, moved + dynamic, 9 * 16)  # what the loader reads
        + _segment(0x6474E551, 6, 0, 0, 0),  # no executable stack
        symbols: bytes(24)
        + struct.pack("<IBBHQQ", 1, 0x12, 0, 1, text, len(code))  # bind, a global function
        + struct.pack("<IBBHQQ", 6, 0x12, 0, 0, 0, 0),  # __errno_location, of the C library
        strings: names,
        table: struct.pack("<6I", 1, 3, 1, 0, 2, 0),  # one chain: both symbols
        relocations: struct.pack("<QQq", moved + slot, 2 << 32 | machine.relocation, 0),
        text: code,
        dynamic: b"".join(struct.pack("<qQ", tag, value) for tag, value in entries),
    }
    file = bytearray(end)
    for place, part in parts.items():
        file[place : place + len(part)] = part
    return bytes(file)


def _with_address(machine: _Machine, distance: int) -> bytes:
    """The code with the distance from its instruction ``call`` to the place that holds the address of a function."""
    code = bytearray(machine.code)
    if machine is _MACHINES["aarch64"]:
        (word,) = struct.unpack_from("<I", code, machine.call)
        struct.pack_into("<I", code, machine.call, word | distance // 4 << 5)
    else:
        struct.pack_into("<i", code, machine.call + 2, distance - 6)  # counted from the end of the instruction
    return bytes(code)


def _segment(kind: int, flags: int, offset: int, address: int, size: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, size, size, 0x10000 if kind == 1 else 8)


def _aligned(place: int) -> int:
    return (place + 7) // 8 * 8
