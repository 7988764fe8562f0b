"""rebatch: change the batch size of an exported model, or make it dynamic.

    before  x: [1, 3, 224, 224] ─► … ─► Reshape(·, [1, 1024]) ─► Gemm
    after   x: [batch, 3, 224, 224] ─► … ─► Reshape(·, [0, 1024]) ─► Gemm

Sizes that the exporter baked in are repaired where the batch provably passes: targets of ``Reshape`` and ``Expand``, ends of
``Slice``, sizes of ``Resize``, and masks, tables, initial states and indices that were made for one batch.
The result is checked: every output whose first axis was the batch has the new batch there, and where indices reach into the
batch, samples come out as before.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphc.errors import ModelError, UsageError, listed, nearest
from graphc.ir.builder import Builder
from graphc.ir.facts import Dim, describe, describe_value, dims
from graphc.ir.infer import apply, fold, propagate
from graphc.ir.subgraphs import captured
from graphc.passes.legalize.structure import remove_dead
from graphc.passes.rebatch.change import Change
from graphc.passes.rebatch.repair import REPAIRS, is_doubtful
from graphc.passes.rebatch.verify import NOT_COMPARED, difference
from graphc.pipeline import Context, graph_pass

_NAME = re.compile(r"[A-Za-z_]\w*")

_HELP = (
    "export the model with a dynamic batch dimension, or, if other inputs carry the batch, name them:"
    " graphc opt MODEL -p 'legalize,rebatch{inputs=NAME|NAME}' -o NEW.onnx"
)


@graph_pass("rebatch", requires=("legalize",), changes="form")
def rebatch(model: ir.Model, ctx: Context, *, batch: int | str = "batch", inputs: Sequence[str] | None = None) -> bool:
    """Change the batch size of a model to ``batch``.

    Args:
        batch: the new size, or the name of a symbol for a batch of any size.
        inputs: glob patterns of the graph inputs whose first dimension is the batch. Default: the first input, and every
            other whose first dimension is the same.

    Raises:
        UsageError: a pattern that matches no input, or no size and no name.
        ModelError: the batch dimension gets lost; the first node at which it does is named.
    """
    graph = model.graph
    if (isinstance(batch, int) and batch < 1) or (isinstance(batch, str) and not _NAME.fullmatch(batch)):
        raise UsageError(f"batch={batch!r} is neither a positive size nor a name")
    chosen = _batch_inputs(graph, inputs)
    declared = (dims(chosen[0]) or (None,))[0]
    if declared == batch:
        return False
    original = model.clone()
    before = {v: dims(v) for v in _values(graph)}
    symbol = batch if isinstance(batch, str) else "batch"
    for value in chosen:
        value.shape = ir.Shape([symbol, *(before[value] or ())[1:]])
    if isinstance(declared, int):
        change = Change(Builder(graph), symbol, declared, before, chosen[0])
        _walk(graph, change)
    else:
        _rename(graph, declared, symbol)
        propagate(graph)
    _check_outputs(graph, before, declared, symbol)
    remove_dead(graph)
    if isinstance(declared, int) and change.doubts:
        wrong = difference(original, model, {v.name or "" for v in chosen}, declared, symbol)
        if wrong == NOT_COMPARED:
            place = describe(change.doubts[0])
            ctx.note(f"rebatch: warning: whether samples stay apart at {place} could not be compared with the file; check it")
        elif wrong is not None:
            raise ModelError(f"the batch size cannot change at {describe(change.doubts[0])}: {wrong}\n{_HELP}")
    if isinstance(batch, int):
        _rename(graph, symbol, batch)
        propagate(graph)
    ctx.note(f"rebatch: {', '.join(v.name or '' for v in chosen)}: {declared} → {batch}")
    return True


def _batch_inputs(graph: ir.Graph, patterns: Sequence[str] | None) -> list[ir.Value]:
    names = [v.name or "" for v in graph.inputs]
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"no graph input matches {pattern!r}{nearest(pattern, names)}; {listed('input', names, most=8)}")
    if patterns:
        chosen = [v for v in graph.inputs if any(fnmatch.fnmatchcase(v.name or "", p) for p in patterns)]
    else:
        ranked = [v for v in graph.inputs if dims(v)]
        first = (dims(ranked[0]) or (None,))[0] if ranked else None
        chosen = [v for v in ranked if (dims(v) or (None,))[0] == first]
    if not chosen or any(not dims(v) for v in chosen):
        raise ModelError("no graph input has a first dimension that could be the batch")
    sizes = {(dims(v) or (None,))[0] for v in chosen}
    if len(sizes) > 1:
        raise UsageError(f"the inputs {', '.join(v.name or '' for v in chosen)} have different first dimensions: {sizes}")
    return chosen


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]


def _rename(graph: ir.Graph, old: Dim, new: Dim) -> None:
    """Replace the symbol ``old`` by ``new`` in the shapes of the graph inputs."""
    for value in graph.inputs:
        found = dims(value)
        if found is not None and old is not None and old in found:
            value.shape = ir.Shape([new if d == old else d for d in found])


def _walk(graph: ir.Graph, change: Change) -> None:
    """Repair and re-infer node by node; repairs need the position of the batch."""
    op = change.op
    for node in [n for n in graph if n.op_type != "Constant"]:
        op.before, op.scope = node, f"rebatch/{node.name or node.op_type}"
        if any(change.axes(v) for v in (*node.inputs, *captured(node))) and is_doubtful(change, node):
            change.doubts.append(node)
        if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
            continue  # keeps its types; if the batch passes through it, the check of the outputs reports it
        for value in node.outputs:
            value.const_value = None  # folded for the old batch size
        try:
            repair = REPAIRS.get(node.op_type) if node.domain in ("", "graphc") else None
            if repair is not None:
                repair(change, node)
            apply(node)
            change.sharpen(node)
        except ModelError as error:
            raise ModelError(f"the batch size cannot change at {describe(node)}: {error}\n{_HELP}") from None
        fold(node)
        change.inherit(node)


def _check_outputs(graph: ir.Graph, before: Mapping[ir.Value, tuple[Dim, ...] | None], declared: Dim, symbol: str) -> None:
    reached = _descendants(graph, symbol)
    for value in graph.outputs:
        old, new = before.get(value), dims(value)
        if value not in reached or old == () or (old and isinstance(old[0], int) and old[0] != declared):
            continue
        if new and (new[0] == symbol or (old and old[0] != declared and carries(value, symbol))):
            continue
        node = _first_loss(graph, value, symbol) or value.producer()
        where = describe(node) if node is not None else describe_value(value)
        raise ModelError(
            f"the batch dimension is lost at {where}\n"
            f"so that the output {describe_value(value)} does not start with the batch; {_HELP}"
        )


def _descendants(graph: ir.Graph, symbol: str) -> set[ir.Value]:
    """Values that depend on an input with the batch."""
    found = {v for v in graph.inputs if carries(v, symbol)}
    for node in graph:
        if any(v in found for v in node.inputs if v is not None):
            found.update(node.outputs)
    return found


def carries(value: ir.Value | None, symbol: str) -> bool:
    """Whether some dimension of ``value`` is a multiple of ``symbol``."""
    found = dims(value) if value is not None else None
    return any(isinstance(d, str) and symbol in d.split("*") for d in found or ())


def _first_loss(graph: ir.Graph, output: ir.Value, symbol: str) -> ir.Node | None:
    """Find the node that loses the batch: an input has it, no output has it, and no other path to ``output`` keeps it."""
    without = {output} if not carries(output, symbol) else set()
    found = None
    for node in reversed(list(graph)):
        if not any(v in without for v in node.outputs):
            continue
        if any(carries(v, symbol) for v in node.inputs):
            found = node
        without.update(v for v in node.inputs if v is not None and not carries(v, symbol))
    return found
