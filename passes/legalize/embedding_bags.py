"""Computes the bags of an ``EmbeddingBag`` side by side.

    before  Loop over bags b { rows of b = Slice(rows, offsets[b], offsets[b + 1]);  y[b] = ReduceSum(rows of b, axis 0) }
    after   bag = CumSum(marks at offsets) - 1;  y = GatherGrad(rows, bag)        # adds each row to its bag
            y = ReduceSum(Reshape(rows, [bags, length, width]), axis 1)           # where all bags have one length

PyTorch's exporters write the Loop: the newer one with a sequence that grows by a bag in each iteration, and a record of what it
stands for (``aten.embedding_bag``); the older one with a bag as scan output. With ``padding_idx`` an inner Loop collects the
rows to read; here the others count as 0. An empty bag is 0, as in PyTorch; the older exporter's mean of one would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.exporter_records import stands_for
from graphc.ir.facts import constant, dims, dtype_of, input_of, inputs_of, is_float, producer_of
from graphc.ir.symbolic_dims import product


@dataclass(frozen=True, slots=True)
class _Bags:
    """What a Loop over bags reads: ``rows`` (N × width), ``offsets`` of bags and of the end (bags + 1), and ``mode``.

    Attributes:
        kept: bool (N × 1): which rows count; None: all.
    """

    rows: ir.Value
    offsets: ir.Value
    mode: str
    kept: ir.Value | None = None


def compute_bags_at_once(graph: ir.Graph) -> None:
    """Replace the Loops of ``graph`` that PyTorch's exporters wrote for EmbeddingBag."""
    for node in [n for n in graph if n.op_type == "Loop" and n.domain == ""]:
        op = Builder(graph, before=node, scope=node.name or "EmbeddingBag")
        if stands_for(node, "embedding_bag"):
            bags, old = _bags(node) or _padded(op, node), _joined(node)
        else:
            bags, old = _scanned(op, node), node.outputs[0]
        if bags is None or old is None:
            continue
        made = op.Identity(_computed(op, bags))
        name, old.name = old.name, op.unique(f"{old.name}.replaced", value=True)
        old.replace_all_uses_with(made, replace_graph_outputs=True)
        made.name = name


def _joined(loop: ir.Node) -> ir.Value | None:
    """The rows of the sequence that a Loop makes, which one node joins."""
    joins = [user for out in loop.outputs for user in out.consumers()]
    if len(joins) != 1 or joins[0].op_type != "ConcatFromSequence":
        return None
    return None if any(joins[0].attributes.get_int(name, 0) for name in ("axis", "new_axis")) else joins[0].outputs[0]


def _scanned(op: Builder, loop: ir.Node) -> _Bags | None:
    """Bags as the scan output of a Loop over ``Reduce(Gather(table, Slice(indices, starts[b], ends[b])))``; emits the rows."""
    body = loop.attributes["body"].as_graph()
    if len(loop.inputs) != 2 or len(body.outputs) != 2 or not _is_count_of(loop.inputs[0], body):
        return None
    if not (loop.inputs[1] is None or _holds(loop.inputs[1])) or not _holds(body.outputs[0]):
        return None  # it may end earlier
    reduce = _maker(body.outputs[1], "ReduceSum", "ReduceMean", "ReduceMax")
    gather = _maker(reduce.inputs[0], "Gather") if reduce is not None and _takes_away_rows(reduce) else None
    part = _maker(gather.inputs[1], "Slice") if gather is not None and not gather.attributes.get_int("axis", 0) else None
    if reduce is None or gather is None or part is None or len(part.inputs) != 4:
        return None
    axes, (starts, ends) = constant(part.inputs[3]), (_table_of(part.inputs[k], body) for k in (1, 2))
    table, indices = gather.inputs[0], part.inputs[0]
    rest = _maker(ends, "Slice")
    if axes is None or axes.tolist() != [0] or starts is None or rest is None or rest.inputs[0] is not starts:
        return None
    if not _is_all_but_the_first(rest) or not _is_outside(indices, body):
        return None
    if table is None or not _is_outside(table, body) or len(dims(table) or ()) != 2:
        return None
    return _Bags(op.Gather(table, indices, axis=0), starts, _MODES[reduce.op_type])


def _maker(value: ir.Value | None, *ops: str) -> ir.Node | None:
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type in ops and not producer.domain else None


def _holds(value: ir.Value) -> bool:
    """Whether a condition is always true."""
    cast = _maker(value, "Cast", "Identity")
    known = constant(value if cast is None else cast.inputs[0])
    return known is not None and bool(known.all())


def _is_all_but_the_first(part: ir.Node) -> bool:
    """Whether a Slice takes a vector from its second element to its end."""
    first, last, _, step = (None if v is None else constant(v) for v in (*part.inputs, None, None)[1:5])
    to_the_end = last is not None and int(last.reshape(-1)[0]) >= np.iinfo(np.int32).max
    one_by_one = len(part.inputs) < 5 or (step is not None and step.tolist() == [1])
    return first is not None and first.tolist() == [1] and to_the_end and one_by_one


def _is_outside(value: ir.Value | None, body: ir.Graph) -> bool:
    producer = value.producer() if value is not None else None
    return value is not None and (producer is None or producer.graph is not body) and value not in body.inputs


def _takes_away_rows(reduce: ir.Node) -> bool:
    axes = constant(reduce.inputs[1]) if len(reduce.inputs) > 1 else None
    return axes is not None and axes.tolist() == [0] and reduce.attributes.get_int("keepdims", 1) == 0


def _table_of(value: ir.Value | None, body: ir.Graph) -> ir.Value | None:
    """The vector of which each iteration takes its element."""
    found = _maker(value, "Unsqueeze", "Reshape")
    gather = _maker(found.inputs[0], "Gather") if found is not None else None
    return gather.inputs[0] if gather is not None and gather.inputs[1] is body.inputs[0] else None


def _is_count_of(count: ir.Value | None, body: ir.Graph) -> bool:
    """Whether a Loop has an iteration for every element of some vector that its body takes one of."""
    vectors = [input_of(n) for n in body if n.op_type == "Gather" and n.inputs[1] is body.inputs[0]]
    known = constant(count)
    if known is not None:
        return any(dims(v) == (int(known.reshape(-1)[0]),) for v in vectors)
    taken = _maker(count, "Gather", "Squeeze", "Reshape")
    shape = _maker(taken.inputs[0], "Shape") if taken is not None else None
    return shape is not None and shape.inputs[0] in vectors


def _bags(loop: ir.Node) -> _Bags | None:
    body = loop.attributes["body"].as_graph()
    empty = [n for n in body if n.op_type == "If"]
    tests = [producer_of(v) for n in empty if (v := n.inputs[0]) is not None and v.producer() is not None]
    if len(tests) != 1 or tests[0].op_type != "Equal":
        return None
    bounds = [v.producer() for v in inputs_of(tests[0])]
    if any(b is None or b.op_type != "Slice" for b in bounds):
        return None
    offsets = {b.inputs[0] for b in bounds if b is not None}
    inner = list(body.all_nodes())
    rows = {n.inputs[0] for n in inner if n.op_type == "Slice"} - offsets
    reduced = {n.op_type for n in inner if n.op_type.startswith("Reduce")}
    if len(offsets) != 1 or len(rows) != 1:
        return None
    (start,), (table,) = offsets, rows
    if start is None or table is None or not is_float(table) or len(dims(table) or ()) != 2:
        return None
    modes = {frozenset({"ReduceSum"}): "sum", frozenset({"ReduceSum", "ReduceMean"}): "mean", frozenset({"ReduceMax"}): "max"}
    mode = modes.get(frozenset(reduced))
    return None if mode is None else _Bags(table, start, mode)


def _padded(op: Builder, loop: ir.Node) -> _Bags | None:
    """Bags that leave out an index: an inner Loop over a bag collects the places of all others."""
    body = loop.attributes["body"].as_graph()
    inner = [node for node in body if node.op_type == "Loop"]
    if len(inner) != 1:
        return None
    collecting = list(inner[0].attributes["body"].as_graph().all_nodes())
    left_out = [known for n in collecting if n.op_type == "Equal" and (known := constant(n.inputs[1])) is not None]
    indices = {n.inputs[0] for n in collecting if n.op_type == "Gather"}
    offsets = {n.inputs[0] for n in body if n.op_type == "Gather"}
    tables = {n.inputs[0] for n in body.all_nodes() if n.op_type == "Gather"} - indices - offsets
    reduced = {n.op_type for n in body.all_nodes() if n.op_type.startswith("Reduce")}
    mode = _MODES.get(reduced.pop()) if len(reduced) == 1 else None
    if mode is None or not len(left_out) == len(indices) == len(offsets) == len(tables) == 1:
        return None
    (places,), (starts,), (rows,) = indices, offsets, tables
    table = _table_behind(rows)
    if places is None or starts is None or rows is None or table is None or not is_float(rows) or len(dims(rows) or ()) != 2:
        return None
    if not all(_is_outside(value, body) for value in (places, starts, rows)):
        return None
    count = op.CastLike(op.Shape(table, end=1), places)  # an index may count from the end
    left = op.const(left_out[0].reshape(-1).astype(dtype_of(places).numpy()))
    return _Bags(rows, starts, mode, op.Unsqueeze(op.Not(op.Equal(op.Mod(places, count), op.Mod(left, count))), [1]))


def _table_behind(rows: ir.Value | None) -> ir.Value | None:
    """The table of which rows were gathered, and perhaps weighted."""
    maker = _maker(rows, "Cast", "Mul", "Gather")
    while maker is not None and maker.op_type != "Gather":
        maker = _maker(maker.inputs[0], "Cast", "Mul", "Gather")
    return maker.inputs[0] if maker is not None else None


def _computed(op: Builder, bags: _Bags) -> Any:
    if bags.kept is None:
        return _of_one_length(op, bags) or _of_any_length(op, bags)
    rows, most = bags.rows, bags.mode == "max"
    nothing = op.scalar(float(np.finfo(dtype_of(rows).numpy()).min) if most else 0, rows)
    result = _computed(op, _Bags(op.Where(bags.kept, rows, nothing), bags.offsets, "max" if most else "sum"))
    if bags.mode == "sum":
        return result
    counts = _computed(op, _Bags(op.CastLike(bags.kept, rows), bags.offsets, "sum"))
    if most:
        return op.Where(op.Equal(counts, op.scalar(0, rows)), op.scalar(0, rows), result)
    return op.Div(result, op.Max(counts, op.scalar(1, rows)))


_MODES = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max"}


def _of_one_length(op: Builder, bags: _Bags) -> ir.Value | None:
    """The bags of ``arange(0, N, length)``, which PyTorch makes of a matrix of indices."""
    length = _common_length(bags)
    if length is None:
        return None
    apart = op.Reshape(bags.rows, op.Concat(op.const([-1, length]), op.Shape(bags.rows, start=1), axis=0))
    reduce = {"sum": op.ReduceSum, "mean": op.ReduceMean, "max": op.ReduceMax}[bags.mode]
    return reduce(apart, [1], keepdims=0)  # type: ignore[no-any-return]


def _common_length(bags: _Bags) -> int | None:
    total, known = (dims(bags.rows) or (None,))[0], constant(bags.offsets)
    if known is not None:
        lengths = set(np.diff(known).tolist())
        return min(lengths) if len(lengths) == 1 and min(lengths) > 0 and known[0] == 0 and known[-1] == total else None
    join = bags.offsets.producer()
    starts = join.inputs[0] if join is not None and join.op_type == "Concat" and len(join.inputs) == 2 else None
    made = _maker(starts, "Range")
    if starts is None or made is None:
        return None
    first, length, count = constant(made.inputs[0]), constant(made.inputs[2]), (dims(starts) or (None,))[0]
    if first is None or int(first) != 0 or length is None or int(length) < 1 or count is None:
        return None
    return int(length) if product((count, int(length))) == total else None


def _of_any_length(op: Builder, bags: _Bags) -> Any:
    """Bags of any lengths, empty ones included, whose result is 0."""
    rows = bags.rows
    starts, ends = op.Slice(bags.offsets, [0], [-1], [0]), op.Slice(bags.offsets, [1], [_END], [0])
    count, shape = op.Shape(rows, end=1), op.Concat(op.Shape(starts), op.Shape(rows, start=1), axis=0)
    none = op.Expand(op.const(np.int64(0)), op.Add(count, [1]))  # one more than rows: bags at the end may be empty
    marks = op.ScatterElements(none, starts, op.Expand(op.const(np.int64(1)), op.Shape(starts)), axis=0, reduction="add")
    bag = op.Sub(op.Slice(op.CumSum(marks, op.const(np.int64(0))), [0], [-1], [0]), np.int64(1))
    held = op.Unsqueeze(op.Sub(ends, starts), [1])
    if bags.mode == "max":
        lowest = op.Expand(op.scalar(float(np.finfo(dtype_of(rows).numpy()).min), rows), shape)
        most = op.ScatterND(lowest, op.Unsqueeze(bag, [-1]), rows, reduction="max")
        return op.Where(op.Equal(held, np.int64(0)), op.scalar(0, rows), most)
    total = op.graphc.GatherGrad(rows, bag, shape)
    return total if bags.mode == "sum" else op.Div(total, op.CastLike(op.Max(held, np.int64(1)), rows))


_END = np.iinfo(np.int64).max
