"""What processes listen at, as the kernel tells it."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTENING = "0A"


def addresses(pids: Iterable[int]) -> set[str]:
    """The addresses of all TCP sockets that these processes listen with."""
    rows = dict(_listening())
    found = set()
    for pid in pids:
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target in rows:
                found.add(rows[target])
    return found


def family(pid: int) -> set[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = set(), [pid]
    while waiting:
        one = waiting.pop()
        found.add(one)
        waiting += children.get(one, [])
    return found


def _listening() -> Iterator[tuple[str, str]]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING:
                words = bytes.fromhex(fields[1].partition(":")[0])
                address = b"".join(words[k : k + 4][::-1] for k in range(0, len(words), 4))
                yield f"socket:[{fields[9]}]", str(ipaddress.ip_address(address))
