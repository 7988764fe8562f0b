"""Local rewrite rules of ``simplify``; each rule looks at one node and its producers.

    Mul(x, 1) → x      Reshape(Reshape(x, a), b) → Reshape(x, b)      MatMul(Transpose(a), b) → Gemm(a, b, transA=1)

A rule takes the builder and the node, and returns the value that replaces the node's first output, or None. It applies only
if shapes are provably equal, statically or by the names of their symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of, same_dims, static_dims

Rewrite: TypeAlias = "Callable[[Builder, ir.Node], ir.Value | None]"

RULES: dict[tuple[str, str], Rewrite] = {}
"""(domain, op type) → rule."""

_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_SCAN_LIMIT = 4096


def rule(*ops: str, domain: str = "") -> Callable[[Rewrite], Rewrite]:
    def register(function: Rewrite) -> Rewrite:
        for op_type in ops:
            RULES[domain, op_type] = function
        return function

    return register


def filled(value: ir.Value | None) -> float | None:
    """The number that all elements of ``value`` equal, if known, else None."""
    if value is None:
        return None
    known = constant(value)
    if known is not None:
        if not 0 < known.size <= _SCAN_LIMIT or known.dtype.kind not in "fiub" or not (known == known.flat[0]).all():
            return None
        return float(known.flat[0])
    producer = value.producer()
    if producer is None or producer.domain != "":
        return None
    if producer.op_type == "Expand":
        return filled(producer.inputs[0])
    if producer.op_type == "Cast":
        number = filled(producer.inputs[0])
        return number if number in (0.0, 1.0) else None  # rounding may change other values
    if producer.op_type == "ConstantOfShape":
        return float(producer.attributes["value"].as_tensor().numpy().flat[0]) if "value" in producer.attributes else 0.0
    return None


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values provably have the same shape."""
    return same_dims(dims(a), dims(b))


def _broadcasts_into(small: ir.Value, x: ir.Value, out: ir.Value) -> bool:
    """Whether broadcasting ``x`` with ``small`` leaves the shape of ``x``."""
    if same_shape(x, out):
        return True
    size = static_dims(small)
    if size is None or any(d != 1 for d in size):
        return False
    return not size or (x.shape is not None and len(size) <= len(x.shape))


def _producer(value: ir.Value | None, *ops: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.domain == "" and node.op_type in ops else None


_NEUTRAL = {
    "Add": ((0, 1), 0),
    "Mul": ((0, 1), 1),
    "Sub": ((1,), 0),
    "Div": ((1,), 1),
    "Pow": ((1,), 1),
    "And": ((0, 1), 1),
    "Or": ((0, 1), 0),
}


@rule(*_NEUTRAL)
def neutral_operand(op: Builder, node: ir.Node) -> ir.Value | None:
    """x + 0, x · 1, x − 0, x / 1, x¹ → x;   x ∘ Expand(s) → x ∘ s"""
    places, neutral = _NEUTRAL[node.op_type]
    out = node.outputs[0]
    for k in places:
        x, other = node.inputs[1 - k], node.inputs[k]
        if x is not None and other is not None and filled(other) == neutral and _broadcasts_into(other, x, out):
            return x
    if node.op_type in ("Add", "Mul", "Sub", "Div"):
        for k in (0, 1):
            x, expanded = node.inputs[1 - k], _producer(node.inputs[k], "Expand")
            if x is not None and expanded is not None and same_shape(x, out):
                source = expanded.inputs[0]
                operands = (source, x) if k == 0 else (x, source)
                return op.emit(node.op_type, operands)[0]
    if node.op_type != "Add":
        return None
    joined = joined_pads(op, node)
    return joined if joined is not None else linear_layer(op, node)


@rule("Conv", "ConvTranspose")
def zero_bias(op: Builder, node: ir.Node) -> ir.Value | None:
    """Conv(x, w, 0) → Conv(x, w): exporters write zeros where a layer has no bias"""
    if len(node.inputs) < 3 or filled(node.inputs[2]) != 0:
        return None
    return op.repeat(node, node.inputs[:2], node.attributes)[0]


def linear_layer(op: Builder, node: ir.Node) -> ir.Value | None:
    """x·W + b of a stack of rows → Reshape(Gemm(Reshape(x), W, b)), for a matrix W and a vector b

    A runtime that fuses the two by itself copies the result to its shape; in a plan the reshape shares memory.
    """
    for product, bias in (node.inputs, reversed(node.inputs)):
        multiply = _producer(product, "MatMul")
        if multiply is None or bias is None or product is None or len(list(product.uses())) != 1:
            continue
        x, weight = multiply.inputs
        size, out, own = (static_dims(v) if v is not None else None for v in (x, product, bias))
        if size is None or out is None or own is None or x is None or weight is None or 0 in size:
            continue
        if len(size) < 3 or weight.shape is None or len(weight.shape) != 2 or own != out[-1:]:
            continue
        flat = _transposed(weight)
        rows = op.Reshape(x, [-1, size[-1]])
        return op.Reshape(op.Gemm(rows, flat or weight, bias, transB=int(flat is not None)), list(out))  # type: ignore[no-any-return]
    return None


def _gets_a_bias(product: ir.Value) -> bool:
    """Whether :func:`linear_layer` finds the addition of a bias to this product."""
    users = list(product.uses())
    if len(users) != 1 or users[0][0].op_type != "Add":
        return False
    (add, index), out = users[0], static_dims(product)
    bias = add.inputs[1 - index]
    return out is not None and bias is not None and static_dims(bias) == out[-1:]


def joined_pads(op: Builder, node: ir.Node) -> ir.Value | None:
    """Pad(a, behind) + Pad(b, in front) + c → Concat(a, b) + c, when parts do not overlap; zeros fill what is between them

    Autodiff leaves such sums where Gather, Slice or Split took a tensor apart, and an element asks every summand for its part.
    """
    if any(user.op_type == "Add" for user in node.outputs[0].consumers()):
        return None  # a longer sum of parts may end further down
    groups: dict[int, list[tuple[int, int, ir.Value]]] = {}
    others = []
    for leaf in _summands(node):
        part = _padded_part(leaf)
        extent = (dims(part[2]) or ())[part[0]] if part is not None else None
        if part is not None and isinstance(extent, int) and same_shape(leaf, node.outputs[0]):
            groups.setdefault(part[0], []).append((part[1], extent, part[2]))
        else:
            others.append(leaf)
    axis = max(groups, key=lambda k: len(groups[k]), default=-1)
    parts = sorted(groups.pop(axis, []), key=lambda part: part[0])
    size = (dims(node.outputs[0]) or ())[axis] if parts else None
    if len(parts) < 2 or groups or (others and len(parts) < 3) or not isinstance(size, int):
        return None
    ends = [0, *(start + extent for start, extent, _ in parts)]
    gaps = [start - end for (start, _, _), end in zip([*parts, (size, 0, parts[0][2])], ends, strict=True)]
    if min(gaps) < 0:
        return None
    rank = len(dims(node.outputs[0]) or ())
    filled_up = []
    for k, (_, _, source) in enumerate(parts):
        around = [0] * (2 * rank)
        around[axis], around[rank + axis] = (gaps[0] if k == 0 else 0), gaps[k + 1]
        filled_up.append(op.Pad(source, around) if any(around) else source)
    joined = op.Concat(*filled_up, axis=axis)
    for other in others:
        joined = op.Add(joined, other)
    return joined  # type: ignore[no-any-return]


def _summands(node: ir.Node) -> list[ir.Value]:
    """The summands of a tree of additions; an inner sum with other uses is one summand."""
    leaves: list[ir.Value] = []
    for value in node.inputs:
        inner = _producer(value, "Add")
        if inner is not None and len(list(inner.outputs[0].uses())) == 1 and not inner.outputs[0].is_graph_output():
            leaves.extend(_summands(inner))
        elif value is not None:
            leaves.append(value)
    return leaves


def _padded_part(value: ir.Value) -> tuple[int, int, ir.Value] | None:
    """(axis, start, part) of a value that is ``part`` with zeros around it along one axis."""
    pad = _producer(value, "Pad")
    if pad is None or pad.attributes.get_string("mode", "constant") != "constant":
        return None
    given = [*pad.inputs, None, None][:4]
    source, amounts = given[0], constant(given[1])
    if source is None or amounts is None or source.shape is None or (given[2] is not None and filled(given[2]) != 0):
        return None
    axes = constant(given[3]) if given[3] is not None else np.arange(len(source.shape))
    if axes is None or (amounts < 0).any():
        return None
    before, after = np.split(amounts.reshape(-1), 2)
    padded = [k for k in range(len(axes)) if before[k] or after[k]]
    if len(padded) != 1:
        return None
    return int(axes.reshape(-1)[padded[0]]) % len(source.shape), int(before[padded[0]]), source


@rule("Identity", "Sum", "Mean", "Max", "Min", "Concat")
def only_operand(op: Builder, node: ir.Node) -> ir.Value | None:
    """Sum(x), Concat(x), Identity(x) … → x"""
    return node.inputs[0] if len(node.inputs) == 1 else None


@rule("Neg", "Not")
def involution(op: Builder, node: ir.Node) -> ir.Value | None:
    """−(−x) → x"""
    inner = _producer(node.inputs[0], node.op_type)
    return inner.inputs[0] if inner is not None else None


@rule("Dropout")
def inactive_dropout(op: Builder, node: ir.Node) -> ir.Value | None:
    """Dropout that drops nothing → x, when its mask is not used"""
    if any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
        return None
    training = node.inputs[2] if len(node.inputs) > 2 else None
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    off = training is None or filled(training) == 0 or filled(ratio) == 0
    return node.inputs[0] if off else None


@rule("CastLike")
def cast_to_known_type(op: Builder, node: ir.Node) -> ir.Value | None:
    """CastLike(x, like) → Cast(x), which a constant x can be folded with"""
    x, like = node.inputs
    if x is None or like is None or like.dtype is None or x.dtype == like.dtype:
        return x if x is not None and like is not None and x.dtype == like.dtype else None
    options = {name: node.attributes[name] for name in ("saturate", "round_mode") if name in node.attributes}
    return op.Cast(x, to=int(like.dtype), **options)  # type: ignore[no-any-return]


@rule("Cast")
def cast_to_own_type(op: Builder, node: ir.Node) -> ir.Value | None:
    """Cast to the type it has → x"""
    x = node.inputs[0]
    return x if x is not None and x.dtype is not None and x.dtype == node.attributes["to"].as_int() else None


@rule("Expand")
def expand_to_own_shape(op: Builder, node: ir.Node) -> ir.Value | None:
    """Expand to the shape it has → x;   Expand(Expand(x, a), b) → Expand(x, b)"""
    x, out = input_of(node), node.outputs[0]
    if same_shape(x, out):
        return x
    inner, target = _producer(x, "Expand"), static_dims(out)
    if inner is None or target is None:
        return None
    return op.Expand(inner.inputs[0], np.array(target, dtype=np.int64))  # type: ignore[no-any-return]


@rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
def reduction_of_nothing(op: Builder, node: ir.Node) -> ir.Value | None:
    """A reduction over axes of size 1 that keeps them → x"""
    x = node.inputs[0]
    return x if x is not None and same_shape(x, node.outputs[0]) else None


@rule("ReduceSumTo", domain="graphc")
def sum_to_own_shape(op: Builder, node: ir.Node) -> ir.Value | None:
    """ReduceSumTo the shape it has → x"""
    return reduction_of_nothing(op, node)


@rule(*_RESHAPES)
def reshape(op: Builder, node: ir.Node) -> ir.Value | None:
    """A chain of reshapes that ends in a shape it had → that value;   Reshape(Reshape(x, a), b) → Reshape(x, b)"""
    out = node.outputs[0]
    source = node.inputs[0]
    while source is not None:
        if same_shape(source, out):
            return source
        inner = _producer(source, *_RESHAPES)
        source = inner.inputs[0] if inner is not None else None
    inner = _producer(node.inputs[0], *_RESHAPES)
    if node.op_type != "Reshape" or inner is None:
        return None
    target = static_dims(out)
    if target is not None and 0 not in target:
        return op.Reshape(inner.inputs[0], np.array(target, dtype=np.int64))  # type: ignore[no-any-return]
    known = constant(node.inputs[1])
    if (known is not None and 0 not in known) or _producer(node.inputs[1], "Shape") is not None:
        return op.Reshape(inner.inputs[0], node.inputs[1])  # type: ignore[no-any-return]
    return None


def permutation(node: ir.Node) -> list[int] | None:
    """The order of axes of a Transpose; None when the number of axes is not known."""
    perm = node.attributes.get("perm")
    if perm is not None:
        return list(perm.as_ints())
    x = node.inputs[0]
    return list(range(len(x.shape)))[::-1] if x is not None and x.shape is not None else None


@rule("Transpose")
def transpose(op: Builder, node: ir.Node) -> ir.Value | None:
    """Transpose that moves nothing → x; only axes of size 1 → Reshape(x);   Transpose(Transpose(x, a), b) → Transpose(x, a∘b);
    (a·b)ᵀ → bᵀ·aᵀ
    """
    perm = permutation(node)
    if perm is None:
        return None
    if perm == sorted(perm):
        return node.inputs[0]
    moved = _moved_alone(op, node, perm)
    if moved is not None:
        return moved
    inner = _producer(node.inputs[0], "Transpose")
    first = permutation(inner) if inner is not None else None
    if inner is None or first is None:
        return _transposed_product(op, node)
    combined = [first[k] for k in perm]
    if combined == sorted(combined):
        return inner.inputs[0]
    return op.Transpose(inner.inputs[0], perm=combined)  # type: ignore[no-any-return]


def _moved_alone(op: Builder, node: ir.Node, perm: list[int]) -> ir.Value | None:
    """The Reshape that a Transpose is when it leaves the order of all axes but those of size 1; None when it is none."""
    sizes = dims(input_of(node))
    if sizes is None or 0 in sizes or [axis for axis in perm if sizes[axis] != 1] != [k for k, n in enumerate(sizes) if n != 1]:
        return None
    target = [size if isinstance(size, int) else -1 for size in (sizes[axis] for axis in perm)]
    return op.Reshape(node.inputs[0], target) if target.count(-1) <= 1 else None


def _transposed_product(op: Builder, node: ir.Node) -> ir.Value | None:
    """(a·b)ᵀ → bᵀ·aᵀ, when the product is used nowhere else: Gemm transposes its operands in passing.

    So with a sum of products, as the gradient of a weight that several layers share. Every product stays where it is in the
    order of nodes, so that its operands need not wait for the last one.
    """
    if permutation(node) != [1, 0]:
        return None
    nodes: list[ir.Node] = []
    waiting = [node.inputs[0]]
    while waiting:
        value = waiting.pop()
        made = _producer(value, "Gemm", "Add")
        if value is None or made is None or len(list(value.uses())) != 1 or value.is_graph_output():
            return None
        if made.op_type == "Gemm" and len(made.inputs) > 2:
            return None
        if made.op_type == "Add":
            if op.marks or not all(x is not None and same_shape(x, value) for x in made.inputs):
                return None  # the summands may be of other stages of a pipeline
            waiting += made.inputs
        nodes.append(made)
    before, turned = op.before, dict[ir.Value, ir.Value]()
    for made in reversed(nodes):
        op.before = made
        if made.op_type == "Add":
            turned[made.outputs[0]] = op.Add(*(turned[x] for x in made.inputs if x is not None))
            continue
        attributes = {name: attr.value for name, attr in made.attributes.items()}
        swapped = {"transA": 1 - attributes.get("transB", 0), "transB": 1 - attributes.get("transA", 0)}
        kept = {name: value for name, value in {**attributes, **swapped}.items() if value}
        turned[made.outputs[0]] = op.emit("Gemm", made.inputs[::-1], kept)[0]
    op.before = before
    return turned[node.inputs[0]]  # type: ignore[index]


@rule("Slice")
def slice_of_everything(op: Builder, node: ir.Node) -> ir.Value | None:
    """Slice of all elements in order → x"""
    x = node.inputs[0]
    forward = len(node.inputs) < 5 or filled(node.inputs[4]) == 1
    return x if x is not None and forward and same_shape(x, node.outputs[0]) else None


@rule("Pad")
def pad_with_nothing(op: Builder, node: ir.Node) -> ir.Value | None:
    """Pad by zero elements → x"""
    return node.inputs[0] if filled(node.inputs[1]) == 0 else None


@rule("Where")
def decided_choice(op: Builder, node: ir.Node) -> ir.Value | None:
    """Where(true, a, b) → a;   Where(false, a, b) → b"""
    condition = filled(node.inputs[0])
    if condition is None:
        return None
    chosen = node.inputs[1] if condition else node.inputs[2]
    return chosen if chosen is not None and same_shape(chosen, node.outputs[0]) else None


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """The matrix whose transpose ``value`` is, or None."""
    producer = _producer(value, "Transpose")
    return producer.inputs[0] if producer is not None and permutation(producer) == [1, 0] else None


@rule("MatMul", "Gemm")
def transposed_operand(op: Builder, node: ir.Node) -> ir.Value | None:
    """aᵀ·b → Gemm(a, b, transA=1), for matrices;   a·bᵀ → Reshape(Gemm(Reshape(a), b, transB=1)) for a stack of rows"""
    a, b, *rest = node.inputs
    if a is None or b is None or a.shape is None or b.shape is None or len(b.shape) != 2:
        return None
    if len(a.shape) > 2:
        size, out, weight = static_dims(a), static_dims(node.outputs[0]), _transposed(b)
        if weight is None or size is None or out is None or 0 in size or _gets_a_bias(node.outputs[0]):
            return None
        return op.Reshape(op.Gemm(op.Reshape(a, [-1, size[-1]]), weight, transB=1), list(out))  # type: ignore[no-any-return]
    if len(a.shape) != 2:
        return None
    flat_a, flat_b = _transposed(a), _transposed(b)
    if flat_a is None and flat_b is None:
        return None
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    attributes["transA"] = int(attributes.get("transA", 0)) ^ (flat_a is not None)
    attributes["transB"] = int(attributes.get("transB", 0)) ^ (flat_b is not None)
    return op.emit("Gemm", [flat_a or a, flat_b or b, *rest], {k: v for k, v in attributes.items() if v})[0]
