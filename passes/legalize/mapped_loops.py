"""Computes all iterations of a Loop at once if each reads its own slice of a tensor and nothing of another iteration.

    before  Loop k < 4: { rows = Slice(x: [28, 8], 7·k, 7·k + 7);  y = ReduceMean(rows, axis 0) }      y: [4, 8]
    after   Reshape(x, [4, 7, 8]);  y = ReduceMean(·, axis 1)

PyTorch's exporters write ``EmbeddingBag`` like this. The result is compared with the iterations, on random numbers, before it
replaces the Loop.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.evaluate import computed
from graphc.ir.facts import constant, dims, dtype_of, inputs_of, is_float, static_dims
from graphc.ir.subgraphs import inline, remove_with_bodies
from graphc.passes.legalize.sequences import dissolve
from graphc.passes.legalize.structure import remove_dead

_MOST = 64
"""Loops of more iterations stay as they are."""

_SAME = frozenset({"Abs", "Cast", "Exp", "Identity", "Neg", "Relu", "Sigmoid", "Sqrt", "Tanh"})
_REDUCE = frozenset({"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"})
_SCALED = frozenset({"Add", "Div", "Mul", "Sub"})


def compute_mapped_loops_at_once(graph: ir.Graph) -> None:
    """Replace the Loops of ``graph`` whose iterations are independent and read consecutive slices."""
    for node in [n for n in graph if n.op_type == "Loop" and n.domain == ""]:
        body = node.attributes["body"].as_graph()
        if not any(n.op_type == "Slice" for n in body.all_nodes()) or any(is_float(v) for v in body.inputs[2:]):
            continue
        carried = len(body.inputs) - 2
        if carried + 1 == len(node.outputs) and not any(v.uses() or v.is_graph_output() for v in node.outputs[:carried]):
            _replace(graph, node)
    remove_dead(graph)


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    op = Builder(graph, before=node, scope=node.name or "Loop")
    results = _iterations(op, graph, node)
    made = _all_at_once(op, results[0], len(results)) if results else None
    if made is None or not _equal(results, made):
        return
    old = node.outputs[-1]
    name, old.name = old.name, op.unique(f"{old.name}.replaced", value=True)
    if old.is_graph_output():
        made = op.Identity(made)
        made.name = name
    old.replace_all_uses_with(made, replace_graph_outputs=True)
    remove_with_bodies(graph, node)


def _iterations(op: Builder, graph: ir.Graph, node: ir.Node) -> list[ir.Value]:
    """Unroll the Loop; returns the value that each iteration adds to its last output, or none."""
    most, going = constant(node.inputs[0]), node.inputs[1] is None or _holds(node.inputs[1])
    body, found = node.attributes["body"].as_graph(), list[ir.Value]()
    states = [v for v in node.inputs[2:] if v is not None]
    limit = _MOST + 1 if most is None else int(most.reshape(-1)[0])
    while going and len(found) < limit:
        if len(found) == _MOST:
            return []
        operands = [op.const(np.int64(len(found))), op.const(True), *states]
        more, *made = inline(op, body, dict(zip(body.inputs, operands, strict=True)))
        states, going = made[: len(states)], _holds(more)
        found.append(op.Identity(made[-1]))
        if constant(more) is None:
            return []
    for value in found:  # held as outputs, so that the decided branches may be simplified
        graph.outputs.append(value)
    dissolve(graph)
    return [graph.outputs.pop() for _ in found][::-1]


def _holds(value: ir.Value | None) -> bool:
    known = constant(value)
    return known is not None and bool(np.all(known))


def _all_at_once(op: Builder, value: ir.Value, count: int) -> ir.Value | None:
    """Rebuild what the first iteration computes with all iterations along a new first axis; None if an op is unknown."""
    made: dict[ir.Value, ir.Value] = {}
    for node in _ancestors(value):
        result = _slices(op, node, count) or _mapped(op, node, made)
        if result is not None:
            made[node.outputs[0]] = result
        elif any(v in made for v in inputs_of(node)):
            return None
    return made.get(value)


def _ancestors(value: ir.Value) -> list[ir.Node]:
    """The nodes that ``value`` depends on, in the order of the graph, without constants."""
    found, pending = set[ir.Node](), [value]
    while pending:
        last = pending.pop()
        node = last.producer()
        if node is not None and node not in found and constant(last) is None:
            found.add(node)
            pending.extend(inputs_of(node))
    graph = value.producer().graph if found else None  # type: ignore[union-attr]
    return [node for node in graph if node in found] if graph is not None else []


def _width(node: ir.Node, count: int) -> int | None:
    """The length of the slices, if ``node`` takes the first of ``count`` along axis 0."""
    if node.op_type != "Slice" or node.domain != "":
        return None
    shape = static_dims(node.inputs[0]) if node.inputs[0] is not None else None
    bounds = [constant(v) for v in node.inputs[1:]]
    if shape is None or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    numbers = [int(bound.reshape(-1)[0]) for bound in bounds if bound is not None]
    start, end, axis, step = [*numbers, *(0, 1)[len(numbers) - 2 :]]
    whole = start == 0 and axis in (0, -len(shape)) and step == 1
    return shape[0] // count if whole and shape[0] % count == 0 and min(end, shape[0]) == shape[0] // count else None


def _slices(op: Builder, node: ir.Node, count: int) -> ir.Value | None:
    width, source = _width(node, count), node.inputs[0]
    if width is None or source is None:
        return None
    return op.Reshape(source, op.const([count, width, *(static_dims(source) or ())[1:]]))  # type: ignore[no-any-return]


def _mapped(op: Builder, node: ir.Node, made: dict[ir.Value, ir.Value]) -> ir.Value | None:
    """``node`` with the iterations along the first axis of its operands in ``made``."""
    values = [made.get(v, v) if v is not None else None for v in node.inputs]
    moved = [v is not None and v in made for v in node.inputs]
    if node.domain != "" or not any(moved):
        return None
    kind = node.op_type
    ranks = {m: [len(dims(v) or ()) for v, n in zip(inputs_of(node), moved, strict=False) if n is m] for m in (True, False)}
    aligned = len(set(ranks[True])) == 1 and max(ranks[False], default=0) <= ranks[True][0]
    if kind in _SAME or (kind in _SCALED and aligned):
        return op.repeat(node, values, dict(node.attributes))[0]
    if kind == "Gather" and moved == [False, True] and node.attributes.get_int("axis", 0) == 0:
        return op.repeat(node, values, dict(node.attributes))[0]
    if kind in (*_REDUCE, "Squeeze", "Unsqueeze") and moved[0]:
        axes = constant(values[1]) if len(values) > 1 else None
        if axes is None:
            return None
        return op.repeat(node, [values[0], op.const([int(a) + 1 if a >= 0 else int(a) for a in axes])], dict(node.attributes))[
            0
        ]
    return None


def _equal(results: list[ir.Value], made: ir.Value) -> bool:
    """Whether ``made`` stacks ``results``, by random numbers for every value that no constant tells."""
    random = np.random.default_rng(0)
    known: dict[ir.Value, np.ndarray | None] = {}
    values = _sources([*results, made])
    for value in values:
        shape = static_dims(value)
        if shape is None:
            return False
        dtype = dtype_of(value).numpy()
        numbers = random.standard_normal(shape) if is_float(value) else random.integers(0, 2, shape)
        known[value] = np.asarray(numbers).astype(dtype)
    each, whole = [computed(v, known) for v in results], computed(made, known)
    if whole is None or any(e is None for e in each):
        return False
    want = np.stack([e for e in each if e is not None])
    return want.shape == whole.shape and np.allclose(want, whole, rtol=1e-4, atol=1e-5)


def _sources(values: list[ir.Value]) -> list[ir.Value]:
    """The graph inputs and weights that ``values`` depend on."""
    found, seen, pending = list[ir.Value](), set[ir.Value](), list(values)
    while pending:
        value = pending.pop()
        if value in seen or constant(value) is not None:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is None:
            found.append(value)
        else:
            pending.extend(inputs_of(producer))
    return found
