"""Replaces sequences of known length by tensors, and an If of known condition by its branch.

    before  s = SplitToSequence(x, 2, axis=1);  a = SequenceAt(s, 0);  y = ConcatFromSequence(s, axis=0)
    after   a, b = Split(x, [2, 2], axis=1);  y = Concat(a, b, axis=0)

    before  s = Loop { …; s = SequenceInsert(s, row) };  y = ConcatFromSequence(s, axis=0)
    after   rows = Loop { …; row is a scan output };      y = Reshape(rows)

    before  y = Loop (3, x) { y = Concat(y, row) }        after   y = Concat(Concat(Concat(x, row), row), row)

PyTorch's exporter writes ``split`` and ``unbind`` in the first form, EmbeddingBag in the second. Only tensors pass between the
steps of a plan. A sequence that depends on data stays, and works as long as no gradient has to leave its segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.control_flow import static_trip_count
from graphc.ir.facts import constant, dims, producer_of, required, static_dims
from graphc.ir.infer import apply, propagate
from graphc.ir.subgraphs import CONTROL, bodies, inline, prune, remove_with_bodies
from graphc.passes.legalize.subgraphs import decided_branch

Elements: TypeAlias = dict[ir.Value, list[ir.Value]]
"""Sequence → its elements, for sequences whose elements are known."""

_UNROLL = 256
"""Largest trip count up to which loops with growing carried sequences or tensors are unrolled."""


def dissolve(graph: ir.Graph) -> bool:
    """Rewrite ``graph`` and its subgraphs; dead-code elimination removes unused nodes later."""
    if not any(n.op_type in _RULES or n.op_type in CONTROL for n in graph if n.op_type != "Identity"):
        return False
    changed = False
    known: Elements = {}
    while _dissolve(Builder(graph), graph, known):
        changed = True
        propagate(graph)  # the size of an element may tell how long the next sequence is
    return changed


def _dissolve(op: Builder, graph: ir.Graph, known: Elements) -> bool:
    changed = False
    pending = list(graph)
    while pending:
        node = pending.pop(0)
        if node.graph is not graph:
            continue  # already replaced together with an earlier one
        op.before, op.scope = node, node.name or node.op_type
        for body in bodies(node):
            if _dissolve(op.inside(body), body, known):
                prune(body)
                changed = True
        if changed and node.op_type in CONTROL:
            apply(node)
        if node.domain != "":
            continue
        if node.op_type == "Loop" and _collect_by_scan(op, graph, node):
            changed = True
            continue
        before = set(graph) if node.op_type in ("If", "Loop") else set()
        values = decided_branch(op, node) if node.op_type == "If" else _unrolled(op, node)
        if values is not None:
            pending = [n for n in graph if n not in before and n.op_type != "Constant"] + pending
            _replace(op, graph, node, values)
            changed = True
            continue
        rule = _RULES.get(node.op_type)
        made = rule(op, node, known) if rule is not None else None
        if made is not None:
            _replace(op, graph, node, made)
            changed = True
    return changed


def _unrolled(op: Builder, node: ir.Node) -> list[ir.Value] | None:
    """Unroll a Loop that carries sequences or growing tensors; returns its outputs."""
    if node.op_type != "Loop":
        return None
    body, states = node.attributes["body"].as_graph(), [v for v in node.inputs[2:] if v is not None]
    count = static_trip_count(node)
    if count is None or not 0 < count <= _UNROLL:
        return None
    if all(_keeps_its_shape(state, formal) for state, formal in zip(states, body.inputs[2:], strict=True)):
        return None
    collected: list[list[ir.Value]] = []
    for t in range(count):
        operands = [op.const(np.int64(t)), op.const(True), *states]
        made = inline(op, body, dict(zip(body.inputs, operands, strict=True)))
        states = made[1 : 1 + len(states)]
        collected.append([op.Unsqueeze(v, [0]) for v in made[1 + len(states) :]])
    return [*states, *(op.Concat(*parts, axis=0) for parts in zip(*collected, strict=True))]


def _keeps_its_shape(initial: ir.Value, formal: ir.Value) -> bool:
    """Whether a carried value is a tensor whose shape stays the same, as far as the first shape is known."""
    if not isinstance(initial.type, ir.TensorType):
        return False
    first, always = static_dims(initial), dims(formal)
    return first is None or always == first


def _replace(op: Builder, graph: ir.Graph, node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Replace the outputs of ``node`` by ``values``, which inherit their names, and remove the node."""
    for old, new in zip(list(node.outputs), values, strict=True):
        producer = new.producer()
        if old.is_graph_output() and (producer is None or producer.graph is not graph or new.is_graph_output()):
            (new,) = op.emit("Identity", [new])
        name, old.name = old.name, op.unique(f"{old.name}.replaced", value=True)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if new.is_graph_output():
            new.name = name
    remove_with_bodies(graph, node)


def _position(value: ir.Value | None, length: int, default: int) -> int | None:
    """A constant position, counted from the front; None when unknown."""
    if value is None:
        return default
    known = constant(value)
    if known is None:
        return None
    place = int(known.reshape(-1)[0])
    return place + length if place < 0 else place


# Rules: return replacements for a node's outputs, or None. A rule that builds a sequence only records its elements. -------


def _construct(op: Builder, node: ir.Node, known: Elements) -> None:
    known[node.outputs[0]] = [v for v in node.inputs if v is not None]


def _empty(op: Builder, node: ir.Node, known: Elements) -> None:
    known[node.outputs[0]] = []


def _insert(op: Builder, node: ir.Node, known: Elements) -> None:
    sequence, element, position = (*node.inputs, None)[:3]
    if sequence in known and element is not None:
        parts = known[sequence]
        place = _position(position, len(parts), len(parts))
        if place is not None:
            known[node.outputs[0]] = [*parts[:place], element, *parts[place:]]


def _erase(op: Builder, node: ir.Node, known: Elements) -> None:
    sequence, position = (*node.inputs, None)[:2]
    if sequence in known:
        parts = known[sequence]
        place = _position(position, len(parts), len(parts) - 1)
        if place is not None:
            known[node.outputs[0]] = [*parts[:place], *parts[place + 1 :]]


def _split(op: Builder, node: ir.Node, known: Elements) -> None:
    x, lengths = (*node.inputs, None)[:2]
    if node.outputs[0] in known:
        return
    found = dims(x) if x is not None else None
    axis = node.attributes.get_int("axis", 0)
    size = found[axis] if found is not None else None
    given, listed = constant(lengths), dims(lengths) if lengths is not None else None
    if lengths is None and isinstance(size, int):
        count, sizes = size, op.const([1] * size)
    elif given is not None and given.ndim:
        count, sizes = len(given), op.const(given)
    elif given is not None and isinstance(size, int):
        each = int(given)
        found_sizes = [min(each, size - k) for k in range(0, size, each)]
        count, sizes = len(found_sizes), op.const(found_sizes)
    elif lengths is not None and listed and isinstance(listed[0], int):
        count, sizes = listed[0], lengths  # parts of a batch: how many is known, and how large when a plan is made
    else:
        return
    parts = list(op.emit("Split", [x, sizes], {"axis": axis}, outputs=count)) if count > 1 else [x]
    if lengths is None and not node.attributes.get_int("keepdims", 1):
        parts = [op.Squeeze(part, [axis]) for part in parts]
    known[node.outputs[0]] = [part for part in parts if part is not None]


def _copy(op: Builder, node: ir.Node, known: Elements) -> None:
    source = node.inputs[0]
    if source in known:
        known[node.outputs[0]] = known[source]


def _map(op: Builder, node: ir.Node, known: Elements) -> None:
    body, given = node.attributes["body"].as_graph(), [v for v in node.inputs if v is not None]
    sequences = [v for v in given if isinstance(v.type, ir.SequenceType)]
    if not all(v in known for v in sequences):
        return
    made = []
    for k in range(len(known[given[0]])):
        operands = [known[v][k] if v in known else v for v in given]
        made.append(inline(op, body, dict(zip(body.inputs, operands, strict=True))))
    for j, out in enumerate(node.outputs):
        known[out] = [values[j] for values in made]


def _at(op: Builder, node: ir.Node, known: Elements) -> list[ir.Value] | None:
    sequence, position = node.inputs
    if sequence not in known:
        return None
    place = _position(position, len(known[sequence]), 0)
    return [known[sequence][place]] if place is not None and 0 <= place < len(known[sequence]) else None


def _length(op: Builder, node: ir.Node, known: Elements) -> list[ir.Value] | None:
    sequence = node.inputs[0]
    return [op.const(np.int64(len(known[sequence])))] if sequence in known else None


def _concat(op: Builder, node: ir.Node, known: Elements) -> list[ir.Value] | None:
    sequence = node.inputs[0]
    if sequence not in known or not known[sequence]:
        return None
    axis, parts = node.attributes["axis"].as_int(), known[sequence]
    if node.attributes.get_int("new_axis", 0):
        parts = [op.Unsqueeze(part, [axis]) for part in parts]
    return [op.Concat(*parts, axis=axis)]


def _get_element(op: Builder, node: ir.Node, known: Elements) -> list[ir.Value] | None:
    source = node.inputs[0]
    producer = source.producer() if source is not None else None
    if producer is not None and producer.op_type == "Optional" and producer.inputs and producer.inputs[0] is not None:
        return [producer.inputs[0]]
    return [source] if source is not None and not isinstance(source.type, ir.OptionalType) else None


_RULES: dict[str, Callable[[Builder, ir.Node, Elements], list[ir.Value] | None]] = {
    "ConcatFromSequence": _concat,
    "Identity": _copy,
    "OptionalGetElement": _get_element,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SequenceMap": _map,
    "SplitToSequence": _split,
}


# Loops that append to a sequence --------------------------------------------------------------------------------------


def _collect_by_scan(op: Builder, graph: ir.Graph, node: ir.Node) -> bool:
    """Turn carried sequences that only grow at their end and are concatenated afterwards into scan outputs."""
    changed = False
    while True:
        found = next((k for k in range(len(node.inputs) - 2) if _grows_and_is_joined(node, k)), None)
        if found is None:
            return changed
        node, changed = _without_state(op, graph, node, found), True


def _grows_and_is_joined(node: ir.Node, k: int) -> bool:
    """Whether carried value ``k`` only grows, and its concatenated elements have one shape.

    The elements may differ only in the axis of the concatenation, whose size must be known.
    """
    appended, final = _appended(node, k), node.outputs[k]
    shape = dims(appended) if appended is not None else None
    if shape is None or final.is_graph_output():
        return False
    for user in final.consumers():
        if user.op_type != "ConcatFromSequence":
            return False
        if not user.attributes.get_int("new_axis", 0) and shape[user.attributes["axis"].as_int()] is None:
            return False
    return True


def _appended(node: ir.Node, k: int) -> ir.Value | None:
    """The value that each iteration appends to carried value ``k``, which starts as an empty sequence."""
    initial, body = node.inputs[2 + k], node.attributes["body"].as_graph()
    producer, formal, result = initial.producer() if initial is not None else None, body.inputs[2 + k], body.outputs[1 + k]
    insert = result.producer()
    if producer is None or producer.op_type != "SequenceEmpty" or insert is None or insert.op_type != "SequenceInsert":
        return None
    alone = len(list(formal.uses())) == 1 and insert.inputs[0] is formal and len(insert.inputs) == 2
    return insert.inputs[1] if alone and insert.graph is body else None


def _without_state(op: Builder, graph: ir.Graph, node: ir.Node, k: int) -> ir.Node:
    """Rebuild the Loop without carried value ``k``; its elements become the last scan output."""
    body, appended = node.attributes["body"].as_graph(), required(_appended(node, k))
    op.before = node
    insert = producer_of(body.outputs[1 + k])
    final, inputs = node.outputs[k], [v for j, v in enumerate(node.inputs) if j != 2 + k]
    kept = [v for v in node.outputs if v is not final]
    del body.outputs[1 + k]
    body.remove(insert, safe=True)
    del body.inputs[2 + k]
    inner = op.inside(body)
    collected = inner.Identity(appended)
    body.outputs.append(collected)
    node.attributes.pop("body")
    made = op.emit("Loop", inputs, {"body": body}, outputs=len(kept) + 1, name=node.name)
    for join in list(final.consumers()):
        op.before = join
        _replace(op, graph, join, [_joined(op, made[-1], join)])
    for old, new in zip(kept, made, strict=False):
        name, old.name = old.name, op.unique(f"{old.name}.replaced", value=True)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name
    graph.remove(node, safe=True)
    return producer_of(made[0])


def _joined(op: Builder, stacked: ir.Value, join: ir.Node) -> Any:
    """The result of ConcatFromSequence over elements that ``stacked`` holds along its first axis."""
    rank = len(stacked.shape or ())
    new, axis = bool(join.attributes.get_int("new_axis", 0)), join.attributes["axis"].as_int()
    axis %= rank if new else rank - 1
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    moved = op.Transpose(stacked, perm=order) if axis else stacked
    if new:
        return moved
    sizes: list[Any] = [op.const([-1]) if d == axis else op.Shape(moved, start=d, end=d + 1) for d in range(axis + 1)]
    rest = [op.Shape(moved, start=axis + 2)] if axis + 2 < rank else []
    return op.Reshape(moved, op.Concat(*sizes, *rest, axis=0) if len(sizes) + len(rest) > 1 else sizes[0])
