"""Summarises a training graph as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.cli.terminal import output
from graphc.gradient import key_of
from graphc.ir.facts import describe_value, known_nbytes, state_updates, static_dims
from graphc.ir.ops.collectives import collective_of
from graphc.ir.updates import state_of, trains


def elements(value: ir.Value) -> int:
    """Number of elements of a value; 0 if its shape is not static."""
    shape = static_dims(value)
    return int(np.prod(shape, dtype=np.int64)) if shape is not None else 0


def op_counts(graph: ir.Graph) -> dict[str, int]:
    """Count nodes by op, without constants, the most frequent first."""
    counts = Counter(key_of(node.domain, node.op_type) for node in graph if node.op_type != "Constant")
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def collectives(graph: ir.Graph) -> list[dict[str, Any]]:
    """List the collectives of a graph in order: tag, group, reduction, tensors, bytes, and steps between two runs."""
    rows = []
    for node in graph:
        if collective_of(node) is None or node.op_type.endswith("Wait"):
            continue
        text = {
            name: node.attributes[name].as_string() for name in ("tag", "group", "reduce", "owner") if name in node.attributes
        }
        values = [v for v in node.inputs if v is not None]
        every = {"every": every} if (every := node.attributes.get_int("every", 1)) > 1 else {}
        rows.append({"op": node.op_type, **text, **every, "tensors": len(values), "bytes": sum(map(known_nbytes, values))})
    return rows


def per_step(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Collectives per step and their bytes, from the rows of :func:`collectives`; one every n steps counts 1/n."""
    shares = [Fraction(1, row.get("every", 1)) for row in rows]
    number, size = sum(shares), sum(share * row["bytes"] for share, row in zip(shares, rows, strict=True))
    return _rounded(number), _rounded(size)


def _rounded(number: Fraction | int) -> float:
    return int(number) if number == int(number) else round(float(number), 3)


def training_graph(model: ir.Model) -> dict[str, Any]:
    """Count nodes, collectives and parameters of a training graph."""
    from graphc.compiler import nodes_by_kind

    trained = {state.name: state for node, state, _ in state_updates(model.graph) if is_trained(node, state)}
    number, size = per_step(collectives(model.graph))
    return {
        "nodes": len(model.graph),
        **nodes_by_kind(model),
        "trained_parameters": len(trained),
        "trained_elements": sum(map(elements, trained.values())),
        "allreduces": number,
        "allreduce_bytes": size,
        "inputs": [describe_value(v) for v in model.graph.inputs],
        "outputs": [describe_value(v) for v in model.graph.outputs],
    }


def is_trained(node: ir.Node, state: ir.Value) -> bool:
    """Whether ``state`` is the parameter that ``node`` updates."""
    return trains(node) and state_of(node) is state


def print_training_graph(found: dict[str, Any], *, to_stderr: bool = False) -> None:
    """Print the counts as a few lines."""
    lines = {
        "nodes": f"{found['nodes']:,}: {found['compute']:,} compute, {found['collectives']:,} collectives, "
        f"{found['updates']:,} updates",
        "trained": f"{output.counted(found['trained_parameters'], 'parameter')}, {found['trained_elements']:,} elements",
        "AllReduces": f"{found['allreduces']} per step, {output.size(found['allreduce_bytes'])}",
        "inputs": ", ".join(found["inputs"]),
        "outputs": ", ".join(found["outputs"]),
    }
    if to_stderr:
        for name, text in lines.items():
            output.note(f"{name}: {text}")
    else:
        output.pairs(lines)
