"""Predicts the time of collectives from measured AllReduce curves.

A curve is interpolated in log-log: below some hundred KiB an AllReduce takes the same time whatever it carries, then its
bandwidth rises over three orders of magnitude, so no line of latency and bandwidth describes both ends.
"""

from __future__ import annotations

import csv
import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphc.atomic_files import read_regular
from graphc.errors import UsageError

COLUMNS = ("payload_KiB", "busbw_GBps", "time_us")
"""Columns of a curve's file, as nccl-tests measures them."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured AllReduces of one group of ranks.

    Attributes:
        ranks: size of the group.
        nbytes: payloads, ascending.
        seconds: time of each.
    """

    ranks: int
    nbytes: Sequence[float]
    seconds: Sequence[float]

    def time(self, nbytes: float) -> float:
        """Seconds of one AllReduce of ``nbytes``: log-log between two measurements, and beyond them.

        Smaller payloads take the time of the smallest one; larger ones run at the bandwidth of the largest one.
        """
        if nbytes <= self.nbytes[0]:
            return self.seconds[0]
        if nbytes >= self.nbytes[-1]:
            return self.seconds[-1] * nbytes / self.nbytes[-1]
        k = bisect_right(self.nbytes, nbytes)
        (x0, x1), (y0, y1) = self.nbytes[k - 1 : k + 1], self.seconds[k - 1 : k + 1]
        return y0 * math.exp(math.log(y1 / y0) * math.log(nbytes / x0) / math.log(x1 / x0))

    @property
    def bandwidth(self) -> float:
        """Bytes a second over each rank's link (bus bandwidth) at the largest payload."""
        return moved(self.ranks) * self.nbytes[-1] / self.seconds[-1]

    @classmethod
    def line(cls, bandwidth: float, latency: float, ranks: int = 2) -> Curve:
        """A curve of a link of which only bandwidth (bytes/s) and latency (s) are known."""
        sizes = [2.0**k for k in range(10, 36)]
        return cls(ranks, sizes, [latency + moved(ranks) * size / bandwidth for size in sizes])

    @classmethod
    def read(cls, path: Path) -> Curve:
        """Read a CSV file with the columns payload_KiB, busbw_GBps and time_us.

        The number of ranks n follows from both columns, since bus bandwidth is 2(n − 1)/n · payload / time.

        Raises:
            UsageError: a file that is none, or not of this form.
        """
        try:
            rows = list(csv.DictReader(read_regular(path).splitlines()))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"network {path}: the curve cannot be read ({error})") from None
        try:
            found = sorted((float(r["payload_KiB"]) * 1024, float(r["time_us"]) * 1e-6) for r in rows)
            busy = float(rows[-1]["busbw_GBps"]) * 1e9
            share = busy * float(rows[-1]["time_us"]) * 1e-6 / (float(rows[-1]["payload_KiB"]) * 1024)
            ranks = round(2 / (2 - share))
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
            raise UsageError(
                f"network {path}: a curve has the columns {', '.join(COLUMNS)}, with a number in each row"
            ) from None
        sizes, times = [size for size, _ in found], [seconds for _, seconds in found]
        if len(set(sizes)) < max(2, len(sizes)) or sizes[0] <= 0 or min(times) <= 0 or ranks < 2:
            raise UsageError(f"network {path}: a curve needs two or more different payloads, and times above 0")
        return cls(ranks, sizes, times)


def moved(ranks: int) -> float:
    """Bytes over each rank's link for each byte of an AllReduce: 2(n − 1)/n."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of connection between ranks.

    Attributes:
        curve: its AllReduce, or that of a similar link.
        speed: bandwidth relative to the curve's; latencies stay.
    """

    curve: Curve
    speed: float = 1.0

    def allreduce(self, nbytes: float, ranks: int) -> float:
        """Seconds of an AllReduce of ``nbytes`` among ``ranks``; latency grows with the depth of a tree."""
        if ranks < 2 or nbytes <= 0:
            return 0.0
        equal = nbytes * moved(ranks) / moved(self.curve.ranks) / self.speed
        deeper = max(0.0, math.log2(ranks / self.curve.ranks)) * self.curve.seconds[0] / math.log2(max(2, self.curve.ranks))
        return self.curve.time(equal) + deeper

    def one_way(self, nbytes: float, ranks: int) -> float:
        """Seconds of a ReduceScatter or an AllGather: half an AllReduce."""
        return self.allreduce(nbytes, ranks) / 2

    def send(self, nbytes: float) -> float:
        """Seconds of a message from one rank to another."""
        return self.curve.seconds[0] / 2 + nbytes / (self.curve.bandwidth * self.speed)


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes of equal size, with one link inside and one between them.

    Attributes:
        node: devices of a node.
        inside: the link between them.
        between: that of each device to other nodes; None: there is one node.
    """

    node: int
    inside: Link
    between: Link | None = None

    def check(self, devices: int) -> None:
        """Raise UsageError if ``devices`` are more than a node, and nothing connects nodes."""
        if devices > self.node and self.between is None:
            raise UsageError(
                f"--network describes one node of {self.node} devices, and {devices} need several; add the link between"
                " nodes, in a TOML file: [between] gigabytes_per_second = 50"
            )

    def allreduce(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an AllReduce among ``ranks`` that lie ``stride`` devices apart.

        Where the group spans nodes: ReduceScatter inside the node, AllReduce of each shard between nodes, AllGather inside.
        """
        own = max(1, min(ranks, self.node // stride))
        nodes = -(-ranks // own)
        return self.inside.allreduce(nbytes, own) + self.across(nbytes / own, nodes)

    def across(self, nbytes: float, nodes: int) -> float:
        """Seconds of an AllReduce between one device of each of ``nodes``."""
        return self.between.allreduce(nbytes, nodes) if nodes > 1 and self.between is not None else 0.0

    def one_way(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of a ReduceScatter or an AllGather: half an AllReduce."""
        return self.allreduce(nbytes, ranks, stride) / 2

    def send(self, nbytes: float, distance: int) -> float:
        """Seconds of a message to the device ``distance`` further on."""
        link = self.between if distance >= self.node and self.between is not None else self.inside
        return link.send(nbytes)

    @classmethod
    def read(cls, path: str | Path) -> Network:
        """Read a network: a curve (CSV) of one node, or a description (TOML).

            node = 8                         # devices of a node
            [inside]
            curve = "allreduce.csv"          # beside this file; and speed = 0.5 for a link half as fast
            [between]
            gigabytes_per_second = 50        # of each device; or a curve
            latency_us = 20

        Raises:
            UsageError: a file that cannot be read, or with other contents.
        """
        path = Path(path)
        if path.suffix == ".csv":
            curve = Curve.read(path)
            return cls(curve.ranks, Link(curve))
        try:
            found = tomllib.loads(read_regular(path))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"network {path}: it cannot be read ({error}); it is a CSV or TOML file") from None
        unknown = sorted(set(found) - {"node", "inside", "between"})
        if unknown or "inside" not in found:
            wrong = f"{unknown[0]!r} is not known" if unknown else "[inside] is missing"
            raise UsageError(f"network {path}: {wrong}; a network has node, [inside] and [between]")
        inside = _link(path, "inside", found["inside"])
        node = found.get("node", inside.curve.ranks)
        if isinstance(node, bool) or not isinstance(node, int) or node < 1:
            raise UsageError(f"network {path}: node = {node!r}; it is the number of devices of a node")
        return cls(node, inside, _link(path, "between", found["between"]) if "between" in found else None)


def _link(path: Path, name: str, fields: Mapping[str, Any]) -> Link:
    known = ("curve", "speed", "gigabytes_per_second", "latency_us")
    if not isinstance(fields, dict) or set(fields) - set(known) or ("curve" in fields) == (known[2] in fields):
        raise UsageError(f"network {path}: [{name}] has a curve (and speed), or gigabytes_per_second (and latency_us)")
    for key, value in fields.items():
        if key != "curve" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise UsageError(f"network {path}: [{name}] {key} = {value!r}; it is a number above 0")
    if "curve" in fields:
        return Link(Curve.read(path.parent / str(fields["curve"])), float(fields.get("speed", 1.0)))
    return Link(Curve.line(float(fields[known[2]]) * 1e9, float(fields.get("latency_us", 20.0)) * 1e-6))
