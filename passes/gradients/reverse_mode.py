"""Engine of reverse-mode differentiation, shared by the rules and the ``autodiff`` pass.

    before   x ─► MatMul(W) ─► y
    after    x ─► MatMul(W) ─► y        dy ─► MatMul(xᵀ, ·) ─► dW

Rules (:mod:`graphc.gradient`) are formulas. This engine decides which values need a gradient, seeds, accumulates contributions,
and sums broadcast gradients back to the shape of their input. It differentiates a ``graphc`` op without a rule through its
decomposition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import ModelError, UnknownRankError, UnsupportedOpError
from graphc.gradient import GRADIENTS, key_of, refuse_gradient
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of, decompose_node
from graphc.ir.facts import describe, describe_value, dims, is_float, required, same_dims, static_dims
from graphc.ir.functions import emit_body, has_body
from graphc.ir.names import PHASE, STAGE, marks_of
from graphc.ir.subgraphs import bodies, captured, finish_body, inline, new_body, reads, remove_with_bodies

refuse_gradient(
    "graphc::LateGradient", reason="its rule waits for shapes; fix those of the inputs with --shape (shapes=)", origin=__name__
)


def differentiate(graph: ir.Graph, targets: Sequence[ir.Value], sources: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Append the backward subgraph; returns source → gradient for every source that ``targets`` depend on.

    Raises:
        UnsupportedOpError: ops on a path from a source to a target have no gradient rule; the message names all of them.
    """
    op = Builder(graph, scope="grad/seed")
    nodes = list(graph)
    return backpropagate(op, nodes, [(target, _filled(op, target, 1)) for target in targets], sources)


def backpropagate(
    op: Builder, nodes: Sequence[ir.Node], seeds: Sequence[tuple[ir.Value, ir.Value]], sources: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Propagate ``seeds``, pairs of a value and its adjoint, back through ``nodes``, which are in topological order."""
    needs = descendants(nodes, sources)
    needed_by_target = ancestors(nodes, [value for value, _ in seeds])
    order = [n for n in nodes if any(o in needs for o in n.outputs) and any(o in needed_by_target for o in n.outputs)]
    _refuse_missing_rules(order, needs, set(sources))

    contributions: dict[ir.Value, list[ir.Value]] = {}
    for target, adjoint in seeds:
        contributions.setdefault(target, []).append(adjoint)
    adjoints: dict[ir.Value, ir.Value] = {}
    scope, marks = op.scope.removesuffix("/seed"), op.marks
    for node in reversed(order):
        op.scope, op.marks = f"{scope}/{node.name or node.op_type}", _backward_marks(node) or marks
        dys = [_take(op, adjoints, contributions, out) for out in node.outputs]
        if all(dy is None for dy in dys):
            continue
        for value, made in _gradients_of(op, node, dys, needs):
            contributions.setdefault(value, []).append(sum_to_shape(op, made, value))
    op.scope, op.marks = scope, marks
    found = {source: _take(op, adjoints, contributions, source) for source in sources}
    return {source: value for source, value in found.items() if value is not None}


def _backward_marks(node: ir.Node) -> dict[str, str]:
    """Marks of the backward pass of a node: it runs on the node's stage."""
    return {STAGE: node.metadata_props[STAGE], PHASE: "backward"} if STAGE in node.metadata_props else {}


def _gradients_of(
    op: Builder, node: ir.Node, dys: Sequence[ir.Value | None], needs: set[ir.Value]
) -> list[tuple[ir.Value, ir.Value]]:
    """The node's contributions to the adjoints of its operands."""
    found = []
    try:
        for value, result in zip((*node.inputs, *captured(node)), _apply_rule(op, node, dys, needs), strict=False):
            if value is None or value not in needs or result is None:
                continue
            made = result() if callable(result) else result
            if made is not None:
                found.append((value, made))
    except Exception as error:
        # a rule that knows its operands by their axes cannot say in advance which rank it misses
        late = isinstance(error, UnknownRankError) or any(
            v is not None and v.shape is None and isinstance(v.type, ir.TensorType) for v in (*node.inputs, *node.outputs)
        )
        if not late or bodies(node):
            raise
        return _late(op, node, dys, needs)
    return found


def _late(op: Builder, node: ir.Node, dys: Sequence[ir.Value | None], needs: set[ir.Value]) -> list[tuple[ir.Value, ir.Value]]:
    """Leave the rule of a node to the plan, which knows the shapes of the feeds."""
    inputs = list(dict.fromkeys(v for v in node.inputs if v is not None))
    body, inner, formal = new_body(op, [(v.name or "input", v.type, v.shape) for v in inputs], name=f"{op.scope}/forward")
    inside = dict(zip(inputs, formal, strict=True))
    outputs = inner.repeat(node, [inside[v] if v is not None else None for v in node.inputs], node.attributes)
    body.outputs.extend(outputs)
    wanted = [k for k, v in enumerate(inputs) if v in needs and is_float(v)]
    given = [k for k, dy in enumerate(dys) if dy is not None]
    made = op.emit(
        "LateGradient",
        [*inputs, *(dys[k] for k in given)],
        {"forward": body, "wanted": wanted, "given": given},
        domain=DOMAIN,
        outputs=len(wanted),
    )
    return [(inputs[k], value) for k, value in zip(wanted, made, strict=True)]


def resolve_late(op: Builder, node: ir.Node) -> None:
    """Replace a ``LateGradient``, all of whose operands have shapes by now, by what the rule makes."""
    graph, body = op.graph, node.attributes["forward"].as_graph()
    before = set(graph)
    inputs, rest = list(node.inputs[: len(body.inputs)]), node.inputs[len(body.inputs) :]
    op.before, op.scope, op.marks = None, node.name or node.op_type, marks_of(node)
    known = {formal: value for formal, value in zip(body.inputs, inputs, strict=True) if value is not None}
    outputs = inline(op, body, known)
    made = [n for n in graph if n not in before]
    seeds = [(outputs[k], dy) for k, dy in zip(node.attributes["given"].as_ints(), rest, strict=True) if dy is not None]
    wanted = [required(inputs[k]) for k in node.attributes["wanted"].as_ints()]
    found = backpropagate(op, made, seeds, wanted)
    results = [found[v] if v in found else zeros(op, v) for v in wanted]
    made = [n for n in graph if n not in before and n.op_type != "Constant"]
    graph.remove(made)
    graph.insert_before(node, made)
    op.before, op.marks = node, {}
    for old, new in zip(node.outputs, results, strict=True):
        if old.is_graph_output() or new.producer() is None or new in results[: results.index(new)]:
            (new,) = op.emit("Identity", [new])
        name, old.name = old.name, op.unique(f"{old.name}.late", value=True)
        new.metadata_props.update(old.metadata_props)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name
    graph.remove(node, safe=True)


def _apply_rule(op: Builder, node: ir.Node, dys: Sequence[ir.Value | None], needs: set[ir.Value]) -> Sequence[Any]:
    """Call the node's rule; returns one entry per input."""
    rule = GRADIENTS.get(key_of(node.domain, node.op_type))
    if rule is None:
        return _through_decomposition(op, node, dys, needs)
    if rule.function is None:
        return ()
    results = rule.function(op, node, *dys, needs=needs) if rule.selective else rule.function(op, node, *dys)
    return results if isinstance(results, tuple) else (results,)


def _through_decomposition(
    op: Builder, node: ir.Node, dys: Sequence[ir.Value | None], needs: set[ir.Value]
) -> Sequence[ir.Value | None]:
    """Differentiate an op without a rule through its decomposition or ONNX function body; serves most second derivatives."""

    def same() -> Sequence[ir.Value | None]:
        found = decompose_node(op, node) if declaration_of(node) is not None else emit_body(op, node)
        if found is None:
            raise UnsupportedOpError(f"no gradient for {node.op_type}, nor a body to differentiate: {describe(node)}")
        return found

    return through(op, node, dys, needs, same)


def through(
    op: Builder,
    node: ir.Node,
    dys: Sequence[ir.Value | None],
    needs: set[ir.Value],
    same: Callable[[], Sequence[ir.Value | None]],
) -> Sequence[ir.Value | None]:
    """The gradients of ``node`` through ``same``, which emits other nodes that compute the same outputs.

    The node itself stays, so that a backend can use its kernel; of the other nodes only those read by the backward pass stay.
    """
    graph = op.graph
    last = graph[-1] if len(graph) else None
    outputs = same()
    emitted = list(itertools.takewhile(lambda n: n is not last, reversed(graph)))[::-1]
    seeds = [(out, dy) for out, dy in zip(outputs, dys, strict=False) if out is not None and dy is not None]
    inputs = list(dict.fromkeys(v for v in node.inputs if v is not None and v in needs))
    found = backpropagate(op, emitted, seeds, inputs)
    kept = set(found.values())
    for made in reversed(emitted):
        if not any(out.uses() or out in kept for out in made.outputs):
            remove_with_bodies(graph, made)
    first = {value: node.inputs.index(value) for value in inputs}
    return [found.get(v) if v is not None and first.get(v) == k else None for k, v in enumerate(node.inputs)]


def _take(
    op: Builder, adjoints: dict[ir.Value, ir.Value], contributions: dict[ir.Value, list[ir.Value]], value: ir.Value
) -> ir.Value | None:
    """The finished adjoint of ``value``: its contributions summed in order of creation."""
    if value in adjoints:
        return adjoints[value]
    parts = contributions.get(value)
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = add(op, total, part)
        if total.shape is None and value.shape is not None:  # the sum of two symbolic shapes
            total.shape = ir.Shape(value.shape.dims)
    adjoints[value] = total
    return total


def add(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """a + b, element by element for sequences of tensors."""
    if not isinstance(a.type, ir.SequenceType):
        return op.Add(a, b)  # type: ignore[no-any-return]
    body, inner, (x, y) = new_body(op, [("a", a.type.elem_type, None), ("b", a.type.elem_type, None)])
    finish_body(inner, [inner.Add(x, y)])
    return op.SequenceMap(a, b, body=body)  # type: ignore[no-any-return]


def zeros(op: Builder, value: ir.Value) -> ir.Value:
    """Zeros like a tensor, or like each tensor of a sequence."""
    return _filled(op, value, 0)


def _filled(op: Builder, value: ir.Value, number: float) -> ir.Value:
    if not isinstance(value.type, ir.SequenceType):
        return op.expand_like(op.scalar(number, value), value)
    body, inner, (x,) = new_body(op, [("x", value.type.elem_type, None)])
    finish_body(inner, [inner.Expand(inner.scalar(number, x), inner.Shape(x))])
    return op.SequenceMap(value, body=body)  # type: ignore[no-any-return]


def sum_to_shape(op: Builder, gradient: ir.Value, like: ir.Value) -> ir.Value:
    """Sum ``gradient`` over the axes along which ``like`` was broadcast; emits nothing when shapes agree."""
    if not isinstance(like.type, ir.TensorType):
        return gradient  # sequences do not broadcast
    have, want = dims(gradient), dims(like)
    if same_dims(have, want):
        return gradient
    if static_dims(gradient) is None or static_dims(like) is None:
        certain = have is not None and want is not None and len(have) >= len(want)
        if not certain or not _axes_are_certain(have or (), want or ()):
            return op.graphc.ReduceSumTo(gradient, op.shape(like))  # type: ignore[no-any-return]
    assert have is not None
    assert want is not None
    lead = len(have) - len(want)
    if lead < 0 or any(w not in (1, h) for h, w in zip(have[lead:], want, strict=True)):
        raise ModelError(f"{describe_value(like)} has not the shape that its op takes: the gradient is {list(have)}")
    axes = list(range(lead)) + [lead + k for k, (h, w) in enumerate(zip(have[lead:], want, strict=True)) if w == 1 and h != 1]
    if not axes:
        return gradient
    if len(axes) == lead:
        return op.ReduceSum(gradient, axes, keepdims=0)  # type: ignore[no-any-return]
    summed = op.ReduceSum(gradient, axes, keepdims=1)
    return op.reshape_like(summed, like) if lead else summed


def _axes_are_certain(have: Sequence[int | str | None], want: Sequence[int | str | None]) -> bool:
    lead = len(have) - len(want)
    return all(w is not None and (w == h or w == 1) and h is not None for h, w in zip(have[lead:], want, strict=True))


def descendants(nodes: Sequence[ir.Node], sources: Sequence[ir.Value]) -> set[ir.Value]:
    """Float values that depend on ``sources``, except through ops with zero gradient."""
    needs = set(sources)
    for node in nodes:
        declaration = declaration_of(node)
        if declaration is not None and declaration.next_value:
            continue
        rule = GRADIENTS.get(key_of(node.domain, node.op_type))
        if rule is not None and rule.function is None and node.op_type not in INTEGER_PRODUCTS:
            continue
        if any(v in needs for v in reads(node)):
            needs.update(out for out in node.outputs if out.dtype is None or is_float(out) or _is_quantised(node, out, needs))
    return needs


_QUANTISES = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
INTEGER_PRODUCTS = frozenset({"MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"})
"""Products of integers that stand for real numbers: a gradient that stops here is wrong, so it is refused."""

_MOVES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Expand", "Concat"})


def _is_quantised(node: ir.Node, out: ir.Value, needs: set[ir.Value]) -> bool:
    """Whether a non-float tensor stands for a float one: quantised, then at most moved. Its adjoint is a float."""
    if node.domain or out.dtype in (ir.DataType.INT64, ir.DataType.BOOL):
        return False
    if node.op_type in _QUANTISES:
        return out is node.outputs[0]
    if node.op_type in INTEGER_PRODUCTS:
        return any(v in needs for v in node.inputs)
    return node.op_type in _MOVES and any(v in needs and v.dtype == out.dtype for v in node.inputs if v is not None)


def ancestors(nodes: Iterable[ir.Node], targets: Sequence[ir.Value]) -> set[ir.Value]:
    """Values that contribute to ``targets``, the targets included."""
    wanted = set(targets)
    for node in reversed(list(nodes)):
        if any(out in wanted for out in node.outputs):
            wanted.update(reads(node))
    return wanted


def has_no_gradient(node: ir.Node) -> bool:
    """Whether the node has no rule, decomposition or function body to differentiate."""
    if node.op_type in INTEGER_PRODUCTS and not node.domain:
        return True
    if key_of(node.domain, node.op_type) in GRADIENTS:
        return False
    declaration = declaration_of(node)
    if declaration is None:
        return not has_body(node.op_type, node.domain)
    return declaration.effect or declaration.decompose is None


def _refuse_missing_rules(order: Sequence[ir.Node], needs: set[ir.Value], sources: set[ir.Value]) -> None:
    missing = [node for node in order if has_no_gradient(node)]
    if not missing:
        return
    lines = []
    for node in missing[:8]:
        path = path_from_source(node, needs, sources)
        lines.append(f"  {key_of(node.domain, node.op_type)} at {describe(node)}\n    reached from {' → '.join(path)}")
    more = f"\n  … and {len(missing) - 8} more" if len(missing) > 8 else ""
    names = sorted({key_of(n.domain, n.op_type) for n in missing})
    instead = (
        "\nThe pass 'dequantize' in front of autodiff makes float products of integer ones (--dequantize auto)"
        if INTEGER_PRODUCTS & set(names)
        else ""
    )
    raise UnsupportedOpError(
        f"no gradient for {', '.join(names)} on the path from a trained parameter to the loss:\n"
        + "\n".join(lines)
        + more
        + "\nFreeze the parameters in front of it (--freeze GLOB), or register a rule with @graphc.gradient.gradient"
        + f"({names[0]!r})"
        + instead
    )


def path_from_source(node: ir.Node, needs: set[ir.Value], sources: set[ir.Value]) -> list[str]:
    """Names of one chain of nodes from a source to ``node``; a long chain is abbreviated in the middle."""
    path = [node.name or node.op_type]
    current: ir.Node | None = node
    while current is not None:
        value = next(v for v in reads(current) if v in needs)
        current = None if value in sources else value.producer()
        path.append((current.name or current.op_type if current else value.name) or "?")
    path.reverse()
    return path if len(path) <= 12 else [*path[:5], "…", *path[-6:]]
