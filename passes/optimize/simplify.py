"""simplify: fold constants, merge equal nodes, remove identities and dead nodes; effects stay where they are.

    before   h = Mul(x, 1);  a = Relu(h);  b = Relu(x);  y = Add(a, b);  unused = Exp(x)
    after    a = Relu(x);  y = Add(a, a)

A sweep in node order sees inputs that are already simple, so chains collapse in one sweep; sweeps repeat until nothing
changes (usually two). Collectives and updates are neither merged nor deleted, random ops are never folded, and a float
initializer is a parameter, never a constant. In a graph with pipeline stages no node takes the place of nodes on two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np
import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import has_effect
from graphc.ir.evaluate import NOT_DETERMINED, evaluate
from graphc.ir.infer import fold, infer_node, version_of
from graphc.ir.names import GRADIENT_OF, LOSS_TOTAL, STAGE, marks_of
from graphc.ir.ops.random import RANDOM_OPS
from graphc.ir.subgraphs import remove_with_bodies, sources
from graphc.ir.text import graph_metadata
from graphc.ir.updates import trains
from graphc.passes.legalize.subgraphs import decided_branch
from graphc.passes.optimize.identities import RULES
from graphc.pipeline import Context, graph_pass

FOLD_LIMIT = 16384
"""Largest constant, in elements, that folding reads or creates."""

_REPEATING = frozenset({"Expand", "ConstantOfShape", "Tile"})
"""Ops that only repeat elements: not folded, so that a float result stays one scalar, visible to other rules."""

_MAX_SWEEPS = 10

_COMMUTATIVE = frozenset({"Add", "Mul", "And", "Or", "Equal"})


@graph_pass("simplify", changes="form")
def simplify(model: ir.Model, ctx: Context) -> bool:
    """Fold constants, merge common subexpressions, remove identities and dead nodes, until nothing changes."""
    before = len(model.graph)
    changed = simplify_graph(model.graph)
    ctx.note(f"simplify: {before} nodes to {len(model.graph)}")
    return changed


def simplify_graph(graph: ir.Graph) -> bool:
    """Run all simplifications on one graph; returns whether anything changed."""
    any_change = False
    for _ in range(_MAX_SWEEPS):
        any_change |= dead_code_elimination(graph)
        changed = common_subexpressions(graph)
        changed |= fold_and_rewrite(graph)
        any_change |= changed
        if not changed:
            break  # both have seen the graph without its dead nodes
    any_change |= dead_code_elimination(graph)
    return any_change


def dead_code_elimination(graph: ir.Graph) -> bool:
    """Remove nodes that no graph output and no effect depends on, and initializers without use or update.

    Before the optimizer pass nothing reads the gradients and the loss total; they stay for it.
    """
    pending = not any(trains(node) for node in graph)
    changed = False
    for node in reversed(list(graph)):
        if any(out.uses() or out.is_graph_output() for out in node.outputs) or has_effect(node):
            continue
        if pending and any(GRADIENT_OF in out.metadata_props or LOSS_TOTAL in out.metadata_props for out in node.outputs):
            continue
        remove_with_bodies(graph, node)
        changed = True
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
            changed = True
    if changed and DOMAIN in graph.opset_imports and not any(n.domain == DOMAIN for n in graph.all_nodes()):
        del graph.opset_imports[DOMAIN]
    return changed


def common_subexpressions(graph: ir.Graph) -> bool:
    """Merge equal pure nodes into the first of them."""
    seen: dict[Hashable, ir.Node] = {}
    alone: dict[Hashable, ir.Node | None] = {}
    changed = False
    op: Builder | None = None
    for node in list(graph):
        if not _is_pure(node):
            continue
        operands = _operands(node)
        if operands not in alone:
            alone[operands] = node  # most nodes: needs no key
            continue
        other, alone[operands] = alone[operands], None
        if other is not None and (of_other := _expression(other)) is not None:
            seen[of_other] = other
        key = _expression(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node or not any(out.uses() or out.is_graph_output() or out.metadata_props for out in node.outputs):
            continue
        op = op or Builder(graph)
        for old, new in zip(node.outputs, first.outputs, strict=True):
            changed |= replace(graph, op, old, new)
    return changed


def _expression(node: ir.Node) -> Hashable | None:
    """Compute the merge key of a pure node; None for a node that must not be merged."""
    attributes: list[Hashable] = []
    for name in sorted(node.attributes):
        attr = node.attributes[name]
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) or attr.is_ref():
            return None
        if attr.type == ir.AttributeType.TENSOR:
            tensor = attr.value  # as_tensor() checks its type slowly
            if tensor.size > FOLD_LIMIT or tensor.dtype == ir.DataType.STRING:
                return None
            attributes.append((name, int(tensor.dtype), tuple(tensor.shape), tensor.tobytes()))
        else:
            value = attr.value
            attributes.append((name, int(attr.type), tuple(value) if isinstance(value, (list, tuple)) else value))
    outputs = tuple(bool(v.name) for v in node.outputs)
    return *_operands(node), node.overload, tuple(attributes), outputs


def _operands(node: ir.Node) -> tuple[Hashable, ...]:
    """The op and the operands of a node, without attributes, and its stage of a pipeline."""
    inputs: Sequence[ir.Value | None] = node.inputs
    if node.op_type in _COMMUTATIVE and node.domain == "":
        inputs = sorted(inputs, key=id)
    return node.domain, node.op_type, node.metadata_props.get(STAGE), *inputs


def _is_pure(node: ir.Node) -> bool:
    if node.domain == DOMAIN:
        return not has_effect(node) and node.op_type not in RANDOM_OPS
    if node.op_type == "Dropout":
        return len(node.inputs) < 3  # without training_mode it drops nothing
    return node.op_type not in NOT_DETERMINED


def fold_and_rewrite(graph: ir.Graph) -> bool:
    """One sweep in node order: re-infer, fold constants, apply the identities of
    :mod:`graphc.passes.optimize.identities`.
    """
    op = Builder(graph)
    changed = False
    for node in list(graph):
        if node.op_type == "Constant" and node.domain == "":
            continue
        op.before, op.scope, op.marks = node, node.name or node.op_type, marks_of(node)
        if any(v.uses() or v.is_graph_output() or v.metadata_props for v in node.outputs):
            _refine(node)
            changed |= _decide(graph, op, node) or _fold(graph, op, node) or _rewrite(graph, op, node)
    return changed


def _decide(graph: ir.Graph, op: Builder, node: ir.Node) -> bool:
    """Replace an If whose condition became known by its branch."""
    values = decided_branch(op, node) if node.op_type == "If" and node.domain == "" else None
    if values is None:
        return False
    for old, new in zip(node.outputs, values, strict=True):
        replace(graph, op, old, new)
    return True


def _refine(node: ir.Node) -> None:
    """Fill in dimensions that simplified inputs have made known."""
    if all(out.shape is not None and out.shape.is_static() for out in node.outputs):
        return
    for out, (_, shape) in zip(node.outputs, infer_node(node, version_of(node)), strict=False):
        out.shape = _sharper(out.shape, shape)


def _fold(graph: ir.Graph, op: Builder, node: ir.Node) -> bool:
    if node.domain != "" or len(node.outputs) != 1 or node.op_type == "Identity" or not _is_pure(node):
        return False
    out = node.outputs[0]
    fold(node)
    if out.const_value is not None:
        array = np.asarray(out.const_value.numpy())
    else:
        result = evaluate(node, limit=1 if node.op_type in _REPEATING else FOLD_LIMIT)
        if result is None or result.dtype.kind == "O" or out.dtype is None:
            return False
        array = result.astype(out.dtype.numpy(), copy=False)
    return array.size <= FOLD_LIMIT and replace(graph, op, out, op.const(array))


def _rewrite(graph: ir.Graph, op: Builder, node: ir.Node) -> bool:
    rule = RULES.get((node.domain, node.op_type))
    new = rule(op, node) if rule is not None and not (op.marks and _reads_another_stage(node)) else None
    if new is None:
        return False
    return replace(graph, op, node.outputs[0], new)


def _reads_another_stage(node: ir.Node) -> bool:
    """Whether an operand, or an operand of that, is made on another stage of a pipeline: one node cannot be on both."""
    for value in node.inputs:
        for source in (p, *sources(p)) if value is not None and (p := value.producer()) is not None else ():
            stage = source.metadata_props.get(STAGE)
            if stage is not None and stage != node.metadata_props.get(STAGE):
                return True
    return False


def replace(graph: ir.Graph, op: Builder, old: ir.Value, new: ir.Value) -> bool:
    """Replace ``old`` by ``new`` in every use; returns False when the facts recorded on both contradict.

    A graph output keeps its name. If ``new`` is an output too, or no node computes it, the output becomes a copy that
    nothing else reads. Metadata of the graph (``graphc.gradient_of`` …) moves along.
    """
    kept = new
    facts, others = graph_metadata(old.metadata_props), graph_metadata(new.metadata_props)
    if any(others.get(key, value) != value for key, value in facts.items()):
        return False
    if old.is_graph_output():
        if new.producer() is None or new.is_graph_output():
            producer = old.producer()
            if producer is not None and producer.op_type == "Identity" and producer.inputs[0] is new:
                return False  # an output that is an input, an initializer or another output needs its Identity
            (kept,) = op.emit("Identity", [new])
        name = old.name
        old.name = op.unique(f"{name}.replaced", value=True)
        kept.name = name
        for k, out in enumerate(graph.outputs):
            if out is old:
                graph.outputs[k] = kept
    for key, value in facts.items():
        new.metadata_props[key] = value
        del old.metadata_props[key]
    _keep_type(old, new)
    old.replace_all_uses_with(new)
    return True


def replace_each(graph: ir.Graph, op_types: Collection[str], make: Callable[[Builder, ir.Node], ir.Value | None]) -> int:
    """Replace the result of each of these nodes by what ``make`` emits in front of it, and remove what is dead then.

    Args:
        op_types: of the standard domain.
        make: None leaves the node as it is.

    Returns:
        How many were replaced.
    """
    op, count = Builder(graph), 0
    for node in [node for node in graph if node.domain == "" and node.op_type in op_types]:
        op.before, op.scope = node, node.name or node.op_type
        made = make(op, node)
        count += made is not None and replace(graph, op, node.outputs[0], made)
    if count:
        dead_code_elimination(graph)
    return count


def _keep_type(old: ir.Value, new: ir.Value) -> None:
    """Copy better-known facts about ``old`` (a size that ``new`` lacks) to ``new``."""
    if not new.is_initializer() and not new.is_graph_input():
        new.shape = _sharper(new.shape, old.shape)


def _sharper(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """Merge two descriptions of one shape: a size wins over a symbol, a symbol over nothing."""
    if a is None or b is None or len(a) != len(b):
        return a if a is not None else b
    return ir.Shape([y if isinstance(y, int) or _unknown(x) else x for x, y in zip(a.dims, b.dims, strict=True)])


def _unknown(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and dim.value is None
