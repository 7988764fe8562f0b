"""Compares a step's measured calls with the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphc.report.step_time import Timed

Row = dict[str, Any]


def rows(calls: Sequence[Timed]) -> list[Row]:
    """Make one row for all calls with equal kind, bytes and operations; sorted by microseconds beyond the prediction.

    A row has ``centre``, ``name`` (of its first call), ``calls``, and their sums ``measured_us``, ``predicted_us``,
    ``excess_us``, ``bytes`` and ``flops``; ``ratio`` is measured ÷ predicted, None without a prediction.
    """
    found: dict[tuple[Any, ...], list[Timed]] = {}
    for timed in calls:
        cost = timed.cost
        found.setdefault((cost.centre, cost.name.partition(" ")[0], cost.nbytes, cost.flops, cost.seconds), []).append(timed)
    return sorted((_row(same) for same in found.values()), key=lambda row: -row["excess_us"])


def centres(table: Sequence[Row]) -> list[Row]:
    """Sum the :func:`rows` by cost centre, the most expensive first."""
    found: dict[str, list[Row]] = {}
    for row in table:
        found.setdefault(row["centre"], []).append(row)
    sums = [_sum(centre, "", members) for centre, members in found.items()]
    return sorted(sums, key=lambda row: -row["measured_us"])


def markdown(table: Sequence[Row], most: int) -> str:
    """Format the sums and the ``most`` rows with the largest excess."""
    head = "| µs | predicted | ratio | calls | TB/s | TFLOP/s | centre | call |\n|---:|---:|---:|---:|---:|---:|---|---|"
    sums = centres(table)
    lines = [_line(row) for row in (_sum("all", "", sums), *sums, *table[:most])] if sums else []
    return "\n".join([head, *lines])


def worst(table: Sequence[Row], most: int = 10) -> list[str]:
    """Name the calls that lose most against their prediction, each with its microseconds."""
    late = [row for row in table if row["excess_us"] > 0][:most]
    return [f"{row['excess_us']:.1f} µs over {row['predicted_us']:.1f}, {row['calls']} × {row['name']}" for row in late]


def _row(same: Sequence[Timed]) -> Row:
    each: list[Row] = [
        {
            "calls": 1,
            "measured_us": timed.seconds * 1e6,
            "predicted_us": timed.cost.seconds * 1e6,
            "bytes": timed.cost.nbytes,
            "flops": timed.cost.flops,
        }
        for timed in same
    ]
    cost = same[0].cost
    return _sum(cost.centre, cost.name + (f" ({cost.note})" if cost.note else ""), each)


def _sum(centre: str, name: str, members: Sequence[Mapping[str, Any]]) -> Row:
    total = {key: sum(m[key] for m in members) for key in ("calls", "measured_us", "predicted_us", "bytes", "flops")}
    measured, predicted = total["measured_us"], total["predicted_us"]
    ratio = measured / predicted if predicted else None
    return {"centre": centre, "name": name, **total, "excess_us": measured - predicted, "ratio": ratio}


def _line(row: Row) -> str:
    us = row["measured_us"]
    ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else ""
    memory = f"{row['bytes'] / us / 1e6:.2f}" if us and row["bytes"] else ""
    rate = f"{row['flops'] / us / 1e6:.0f}" if us and row["flops"] else ""
    cells = (f"{us:.1f}", f"{row['predicted_us']:.1f}", ratio, row["calls"], memory, rate, row["centre"], row["name"])
    return f"| {' | '.join(map(str, cells))} |"
