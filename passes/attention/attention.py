"""attention: fuse softmax(scale·Q·Kᵀ + mask)·V, and the copies around it, into one op.

    before   s = Add(Mul(MatMul(q, Transpose(k)), scale), mask);  y = Transpose(MatMul(Softmax(s), v), perm=[0, 2, 1, 3])
    after    y, saved = graphc.ScaledDotProductAttention(q, k, v, mask; scale, layout="bhtd,bhtd,bhtd->bthd")

The pass starts at a Softmax, follows the scores back to the first product (through the scale and additive or selecting
masks) and the probabilities forward to the second. Heads may be repeated for groups of queries. It reads transposes, reshapes
and the parts of a packed projection as an order of axes (:mod:`graphc.passes.optimize.axis_order`). Other factors of the
scores, such as a temperature that each head learns, multiply the queries, or the keys where they differ between keys. A
dropout mask of the probabilities from ``train_mode`` becomes an operand. ``ai.onnx::Attention`` is replaced if it has no
cache, cap or window. Nothing changes if the probabilities have another use (another product, an output).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError, UsageError, nearest
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, describe, describe_value, dims, input_of, is_float, rank
from graphc.passes.attention.dropout import drawn_again, dropout_mask, dropping
from graphc.passes.attention.masks import (
    HIDES,
    adds_causal,
    aligned_mask,
    hides_causal,
    is_choice,
    known_mask,
    shows_causal,
    window_mask,
)
from graphc.passes.optimize.axis_order import View, follow_result, only_user, scaling, source_of
from graphc.passes.optimize.identities import filled
from graphc.passes.optimize.simplify import dead_code_elimination, replace, simplify_graph
from graphc.pipeline import Context, graph_pass

SAVES = ("auto", "probabilities", "logsumexp")

_LONG = 1
"""Keys per element of a head above which the probabilities take more than a quarter of the memory of q, k, v and y.

To recompute them took the CPU's kernels 7 to 17 % of an attention's time at 1.5 to 4 keys per element, and none with a causal
mask, where not writing them gains as much (one AVX2 core)."""


@graph_pass("attention", requires=("legalize",), changes="form")
def attention(model: ir.Model, ctx: Context, *, saves: str = "auto") -> bool:
    """Fuse each attention into ``graphc.ScaledDotProductAttention``.

    Args:
        saves: value saved for the backward pass: ``probabilities`` (nothing is recomputed), ``logsumexp`` (memory grows
            with the length, not with its square), or ``auto``: probabilities up to one key per element of a head.

    Raises:
        UsageError: an unknown ``saves``.
    """
    if saves not in SAVES:
        raise UsageError(f"saves={saves!r}{nearest(saves, SAVES)}; it is one of {', '.join(SAVES)}")
    graph = model.graph
    if not any(True for _ in _starts(graph)):
        return False
    simplify_graph(graph)
    op = Builder(graph)
    count = 0
    causal: dict[tuple[ir.Value, str], bool] = {}
    for node in list(_starts(graph)):
        found = _standard(node) if node.op_type == "Attention" else _Search(node, causal).run()
        if found is None:
            ctx.note(f"attention: not the pattern at {describe(node)}")
            continue
        found.emit(graph, op, saves)
        count += 1
    dead_code_elimination(graph)
    ctx.note(f"attention: {count} fused")
    return count > 0


def _starts(graph: ir.Graph) -> Iterator[ir.Node]:
    """Nodes that may be the Softmax or the op at the centre of an attention."""
    for node in graph:
        if node.domain == "" and node.op_type == "Attention":
            yield node
        elif node.domain == "" and node.op_type == "Softmax" and any(True for _ in node.outputs[0].uses()):
            scores = node.inputs[0]
            if scores is not None and scores.shape is not None and 3 <= len(scores.shape) <= 4 and is_float(scores):
                yield node


@dataclass(frozen=True)
class ScoreFactor:
    """What the scores are multiplied with, or divided by, that no number is: a value which broadcasts to them.

    Attributes:
        axes: the letter of each of its axes longer than one, in order; a key's is t, as in a layout.
        place: those axes.
        of_keys: whether it multiplies the keys; else the queries.
    """

    value: ir.Value
    axes: str
    place: tuple[int, ...]
    of_keys: bool
    divides: bool

    def applied(self, op: Builder, view: View) -> View:
        """The queries or keys times this."""
        whole, letters = view.emit(op), "".join(view.axes)
        single = [k for k in range(rank(self.value)) if k not in self.place]
        value = op.Squeeze(self.value, single) if single else self.value
        value = _permuted(op, value, [self.axes.index(c) for c in letters if c in self.axes])
        missing = [k for k, c in enumerate(letters) if c not in self.axes]
        if self.axes:
            value = op.Unsqueeze(value, missing)
        value = op.Div(whole, value) if self.divides else op.Mul(whole, value)
        return View(value, list(letters), view.sizes, view.scale)


@dataclass
class Found:
    """The operands and results of one attention."""

    q: View
    k: View
    v: View
    y: View
    before: ir.Node
    scale: float
    causal: bool = False
    seen: list[tuple[ir.Value, bool]] = field(default_factory=list)
    added: list[ir.Value] = field(default_factory=list)
    keep: View | None = None
    factors: list[ScoreFactor] = field(default_factory=list)

    def emit(self, graph: ir.Graph, op: Builder, saves: str) -> None:
        op.before, op.scope = self.before, self.before.name or self.before.op_type
        views = self._unpacked_or_packed()
        if self.factors:
            views = [view.alone for view in views]
        for factor in self.factors:
            views[factor.of_keys] = factor.applied(op, views[factor.of_keys])
        whole: dict[tuple[ir.Value, str], ir.Value] = {}
        operands = []
        for view in views:
            key, order = (view.value, view.pattern), _rows("".join(view.axes))
            if key not in whole:
                whole[key] = _permuted(op, view.emit(op), order)
            operands.append((whole[key], "".join("".join(view.axes)[k] for k in order)))
        if saves == "auto":
            size, length = views[0].sizes.get("d", 1), views[1].sizes.get("t", 1)
            short = isinstance(size, int) and isinstance(length, int) and length <= _LONG * size
            saves = "probabilities" if short else "logsumexp"
        y_axes = "".join(self.y.axes)
        order = _rows(y_axes)
        layout = ",".join(axes for _, axes in operands) + "->" + "".join(y_axes[k] for k in order)
        y, _ = op.graphc.ScaledDotProductAttention(
            *(value for value, _ in operands),
            self._mask(op),
            *(() if self.keep is None else (drawn_again(op, self.keep, *operands[:2]),)),
            scale=self.scale * views[0].scale * views[1].scale,
            causal=int(self.causal),
            layout=layout,
            saves=saves,
        )
        replace(graph, op, self.y.value, self.y.reshaped(op, _permuted(op, y, [order.index(k) for k in range(len(order))])))

    def _unpacked_or_packed(self) -> list[View]:
        """The operands, as one packed tensor if they are all of its parts."""
        views = [self.q, self.k, self.v]
        parts = [view for view in views if view.part is not None]
        if parts:
            whole = {(view.value, view.pattern) for view in parts}
            count = parts[0].sizes[parts[0].part or ""]
            if len(whole) > 1 or sorted(view.part or "" for view in parts) != [str(k) for k in range(len(parts))]:
                return [view.alone for view in views]
            if count != len(parts):
                return [view.alone for view in views]
        return views

    def _mask(self, op: Builder) -> ir.Value | None:
        """Combine all masks into one, which stays boolean unless a mask is additive."""
        seen = [op.Not(value) if inverted else value for value, inverted in self.seen]
        if not self.added:
            mask = seen[0] if seen else None
            for other in seen[1:]:
                mask = op.And(mask, other)
            return mask
        total = self.added[0]
        for other in self.added[1:]:
            total = op.Add(total, other)
        for value in seen:
            total = op.Where(value, total, op.scalar(-math.inf, total))
        return total


def _rows(axes: str) -> list[int]:
    """The axes with d last: kernels read and write the elements of a head as a row."""
    return sorted(range(len(axes)), key=lambda k: axes[k] == "d")


def _permuted(op: Builder, value: ir.Value, order: list[int]) -> ir.Value:
    return value if order == sorted(order) else op.Transpose(value, perm=order)


class _Search:
    """One search, from a Softmax to both products.

    Args:
        causal: (mask, kind of masking) → whether it is the causal mask; shared by all searches of a graph.
    """

    def __init__(self, softmax: ir.Node, causal: dict[tuple[ir.Value, str], bool]) -> None:
        self.softmax = softmax
        self._is_causal = causal
        self.scale = 1.0
        self.factors: list[ScoreFactor] = []
        self.causal = False
        self.seen: list[tuple[ir.Value, bool]] = []
        self.hidden: list[tuple[ir.Value, bool, float]] = []
        self.added: list[tuple[ir.Value, float]] = []
        self.keep: View | None = None

    def run(self) -> Found | None:
        scores = input_of(self.softmax, 0)
        width = rank(scores)
        axis = self.softmax.attributes.get_int("axis", -1) % width
        if axis < width - 2 or any(d is None for d in dims(scores) or (None,)):
            return None
        letters = list("bhts"[4 - width :])
        if axis == width - 2:
            letters[-2:] = letters[-1], letters[-2]
        start = View(scores, letters, dict(zip(letters, dims(scores) or (), strict=True)))
        weights = self._weights(start.of(self.softmax.outputs[0]))
        product = self._product(start)
        if weights is None or product is None:
            return None
        q, k = product
        v, y, node = weights
        of_k, of_v = source_of(k, scaled=True), source_of(v)
        of_q = source_of(q, scaled=True)
        if any(of_k.sizes.get(c, 1) != of_v.sizes.get(c, 1) for c in "bhs"):
            return None
        if not all(self._fits(factor, of_k.renamed() if factor.of_keys else of_q) for factor in self.factors):
            return None
        rest = self.scale, self.causal, self.seen, self._additive(node), self.keep, self.factors
        return Found(of_q, of_k.renamed(), of_v.renamed(), follow_result(y), node, *rest)

    def _additive(self, before: ir.Node) -> list[ir.Value]:
        """All numbers that are added to scores; a mask that selects a large negative number becomes such."""
        op = Builder(before.graph, before=before, scope=f"{before.name}/mask")  # type: ignore[arg-type]
        found = [mask if scale == 1 else op.Mul(mask, op.scalar(scale, mask)) for mask, scale in self.added]
        for value, inverted, number in self.hidden:
            zero, low = op.scalar(0.0, self.softmax.outputs[0]), op.scalar(number, self.softmax.outputs[0])
            found.append(op.Where(value, low, zero) if inverted else op.Where(value, zero, low))
        return found

    # From the probabilities to y -----------------------------------------------------------------------------------------

    def _weights(self, view: View) -> tuple[View, View, ir.Node] | None:
        """v, y and their product."""
        while True:
            guarded = _without_nan(view.value)
            if guarded is not None:
                view = view.of(guarded)
                continue
            user = only_user(view.value) or dropping(view.value)
            if user is None:
                return None
            if user.op_type == "MatMul":
                return _split_product(user, view)
            mask = dropout_mask(user, view) if self.keep is None else None
            self.keep = self.keep or mask
            moved = view.of(user.outputs[0]) if mask is not None else view.through(user)
            if moved is None:
                return None
            view = moved

    # From the scores to q and k ------------------------------------------------------------------------------------------

    def _product(self, view: View) -> tuple[View, View] | None:
        """q and k."""
        while True:
            node = view.value.producer()
            if node is None or node.domain or only_user(view.value) is None:
                return None
            if node.op_type == "MatMul":
                return _operands(node, view)
            step = self._scaling(node, view) or self._masking(node, view)
            if step is not None:
                view = view.of(step)
                continue
            back = view.back(node)
            if back is None:
                return None
            view = back

    def _scaling(self, node: ir.Node, view: View) -> ir.Value | None:
        """The scores before they are multiplied, with a number or with what is the same for all keys or for all queries."""
        found = scaling(node)
        if found is not None:
            self.scale *= found[1]
            return found[0]
        if node.op_type not in ("Mul", "Div") or sorted(view.axes[-2:]) != ["s", "t"]:
            return None
        for x, factor in (node.inputs, reversed(node.inputs))[: 2 if node.op_type == "Mul" else 1]:
            shape = dims(factor) if factor is not None else None
            if x is None or factor is None or shape is None or dims(x) != dims(view.value) or not _leads_to_product(x):
                continue
            axes = {k: view.axes[k - len(shape)] for k, size in enumerate(shape) if size != 1}
            letters = "".join(axes.values())
            if len(letters) == len(axes) and not {"s", "t"} <= set(letters):
                place = tuple(axes)
                self.factors.append(
                    ScoreFactor(factor, letters.replace("s", "t"), place, "s" in letters, node.op_type == "Div")
                )
                return x
        return None

    def _fits(self, factor: ScoreFactor, view: View) -> bool:
        """Whether the queries or keys have the axes of a factor as it has them: heads that are shared have not."""
        shape = dims(factor.value) or ()
        return all(view.sizes.get(c, 1) == shape[k] for c, k in zip(factor.axes, factor.place, strict=True))

    def _masking(self, node: ir.Node, view: View) -> ir.Value | None:
        """The scores before a mask, which is recorded; None for another op or a mask that no layout expresses."""
        if self.factors or self.scale <= 0:
            return None  # what a mask adds before is multiplied too, which turns or fills it
        if node.op_type == "Add":
            for x, mask in (node.inputs, reversed(node.inputs)):
                if x is not None and mask is not None and _leads_to_product(x) and dims(x) == dims(node.outputs[0]):
                    aligned = aligned_mask(mask, view)
                    if aligned is None:
                        return None
                    self._remember_addition(aligned)
                    return x
        if node.op_type == "Where":
            condition, yes, no = node.inputs
            for x, other, inverted in ((yes, no, False), (no, yes, True)):
                number = filled(other)
                if x is None or condition is None or number is None or number > HIDES or dims(x) != dims(node.outputs[0]):
                    continue
                aligned = aligned_mask(condition, view)
                if aligned is None:
                    return None
                how, test = ("shown", shows_causal) if not inverted else ("hidden", hides_causal)
                if self._asked(aligned, how, test):
                    self.causal = True  # every row sees its first key, so the value that masks the others does not matter
                elif number != -math.inf:
                    self.hidden.append((aligned, inverted, number * self.scale))
                else:
                    self.seen.append((aligned, inverted))
                return x
        found = window_mask(node, view)
        if found is not None:
            self._remember_addition(found[1])
        return found[0] if found is not None else None

    def _asked(self, mask: ir.Value, how: str, test: Callable[[np.ndarray | None], bool]) -> bool:
        """Whether a mask is causal; computed once for all layers that share it."""
        if (mask, how) not in self._is_causal:
            self._is_causal[mask, how] = test(known_mask(mask))
        return self._is_causal[mask, how]

    def _remember_addition(self, mask: ir.Value) -> None:
        choice = mask.producer()
        if self._asked(mask, "added", adds_causal):
            self.causal = True
        elif choice is not None and choice.op_type == "Where" and is_choice(*choice.inputs[1:]):
            self.seen.append((input_of(choice), False))
        else:
            self.added.append((mask, self.scale))


def _leads_to_product(value: ir.Value) -> bool:
    """Whether the value is a matrix product, scaled, masked or reshaped."""
    node: ir.Node | None = value.producer()
    for _ in range(12):
        if node is None or node.domain:
            return False
        if node.op_type == "MatMul":
            return True
        if node.op_type not in ("Add", "Where", "Mul", "Div", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"):
            return False
        operands = [v for v in node.inputs if v is not None and v.producer() is not None and dims(v) == dims(node.outputs[0])]
        following = operands or [v for v in node.inputs[:1] if v is not None]
        node = next((v.producer() for v in following if v.producer() and constant(v) is None), None)
    return False


def _without_nan(value: ir.Value) -> ir.Value | None:
    """Match Where(IsNaN(p), 0, p), which exporters write after a Softmax whose rows may be entirely masked."""
    users = list(value.consumers())
    test = next((n for n in users if n.op_type == "IsNaN"), None)
    if test is None or value.is_graph_output():
        return None
    choice = only_user(test.outputs[0])
    if choice is None or choice.op_type != "Where" or choice.inputs[2] is not value or filled(choice.inputs[1]) != 0:
        return None
    return choice.outputs[0] if {id(n) for n in users} == {id(test), id(choice)} else None


def _split_product(node: ir.Node, p: View) -> tuple[View, View, ir.Node] | None:
    """v and y of the product of probabilities and v, in either order."""
    left = node.inputs[0] is p.value
    other, out = node.inputs[1 if left else 0], node.outputs[0]
    if node.inputs[0] is node.inputs[1] or other is None:
        return None
    lead, last = p.axes[:-2], p.axes[-2:]
    if last != (["t", "s"] if left else ["s", "t"]):
        return None
    v = _operand(other, [*lead, *(("s", "d") if left else ("d", "s"))], p)
    y = _operand(out, [*lead, *(("t", "d") if left else ("d", "t"))], p)
    return (v, y, node) if v is not None and y is not None else None


def _operands(node: ir.Node, scores: View) -> tuple[View, View] | None:
    """q and k of the product that gives the scores, in either order."""
    a, b = node.inputs
    lead, last = scores.axes[:-2], scores.axes[-2:]
    if a is None or b is None or sorted(last) != ["s", "t"]:
        return None
    first, second = _operand(a, [*lead, last[0], "d"], scores), _operand(b, [*lead, "d", last[1]], scores)
    if first is None or second is None:
        return None
    return (first, second) if last == ["t", "s"] else (second, first)


def _operand(value: ir.Value, axes: list[str], scores: View) -> View | None:
    """A view of one operand of a product; only heads may be broadcast."""
    found = dims(value)
    if found is None or len(found) != len(axes) or any(d is None for d in found):
        return None
    sizes = {**scores.sizes, "d": found[axes.index("d")]}
    for axis, dim in zip(axes, found, strict=True):
        if axis == "h" and dim == 1:
            sizes["h"] = 1
        elif View.extent(axis, sizes) != dim:
            return None
    return View(value, axes, {c: n for c, n in sizes.items() if c in "".join(axes)})


def _standard(node: ir.Node) -> Found | None:
    """The operands of ai.onnx::Attention, unless it computes more than the fused op."""
    attributes = node.attributes
    q, k, v, mask, *rest = (*node.inputs, None)[: max(4, len(node.inputs))]
    used = [out for out in node.outputs[1:] if out.uses() or out.is_graph_output()]
    if any(rest) or used or attributes.get_float("softcap", 0.0) != 0 or q is None or k is None or v is None:
        return None
    views = []
    for value, heads, own in ((q, "q", "t"), (k, "kv", "s"), (v, "kv", "s"), (node.outputs[0], "q", "t")):
        found = dims(value)
        if found is None or any(d is None for d in found):
            return None
        if len(found) == 4:
            views.append(View(value, ["b", "h", own, "d"], dict(zip(("b", "h", own, "d"), found, strict=True))))
            continue
        count, width = attributes.get_int(f"{heads}_num_heads", 0), found[2]
        if not isinstance(width, int) or not count:
            return None
        if width % count or not width:
            raise ModelError(f"{count} heads do not divide the last axis of {describe_value(value)}: {describe(node)}")
        views.append(View(value, ["b", own, "hd"], {"b": found[0], own: found[1], "h": count, "d": width // count}))
    size, length = views[0].sizes["d"], views[1].sizes["s"]
    scale = attributes.get_float("scale", 0.0) or (1 / math.sqrt(size or 1) if isinstance(size, int) else 0.0)
    if not scale or (mask is not None and (dims(mask) or (None,))[-1] != length):
        return None
    causal = bool(attributes.get_int("is_causal", 0))
    boolean = mask is not None and mask.dtype == ir.DataType.BOOL
    seen = [(mask, False)] if mask is not None and boolean else []
    added = [mask] if mask is not None and not boolean else []
    of_q, of_k, of_v = (source_of(view).renamed() for view in views[:3])
    return Found(of_q, of_k, of_v, follow_result(views[3]), node, scale, causal, seen, added)
