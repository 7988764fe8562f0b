"""Reads chains of Transpose, Reshape and Gather as an order of axes.

    packed: [B, T, 768] ─► Reshape [B, T, 3, 8, 32] ─► Transpose ─► Gather 1 ─► k: [B, 8, T, 32]

is the tensor ``packed``, seen with the axes b, t, ``1`` (the part), h, d. Axes are letters; several letters on one axis are
nested, outermost first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import Dim, constant, dims
from graphc.ir.symbolic_dims import product, quotient
from graphc.passes.optimize.identities import filled, permutation

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class View:
    """A value with named axes.

    Attributes:
        axes: the letters on each axis of ``value``; a digit is the part that is read.
        sizes: the length of each letter.
        scale: the factor on the value when it is read.
        alone: the same operand as a tensor of its own; this view itself unless a part is read.
    """

    value: ir.Value
    axes: list[str]
    sizes: dict[str, Dim]
    scale: float = 1.0
    _alone: View | None = field(default=None, compare=False)

    @property
    def alone(self) -> View:
        return self._alone or self

    @property
    def part(self) -> str | None:
        return next((c for axis in self.axes for c in axis if c.isdigit()), None)

    @property
    def pattern(self) -> str:
        """The axes, with the part left open."""
        return "|".join("".join("#" if c.isdigit() else c for c in axis) for axis in self.axes)

    @staticmethod
    def extent(axis: str, sizes: dict[str, Dim]) -> Dim:
        """The length of an axis that holds these letters."""
        return product([sizes[c] for c in axis])

    def of(self, value: ir.Value) -> View:
        """Another value with the same axes."""
        return replace(self, value=value)

    def renamed(self) -> View:
        """The name of the length of keys in a layout."""
        other = self._alone.renamed() if self._alone is not None else None
        axes = [axis.replace("s", "t") for axis in self.axes]
        return replace(self, axes=axes, sizes={c.replace("s", "t"): n for c, n in self.sizes.items()}, _alone=other)

    def through(self, node: ir.Node) -> View | None:
        """Follow a node that moves axes of this value: its result as a view, or None."""
        out = node.outputs[0]
        if node.domain or node.inputs[0] is not self.value:
            return None
        if node.op_type == "Transpose":
            return replace(self, value=out, axes=[self.axes[k] for k in permutation(node) or ()])
        axes = _regrouped("".join(self.axes), self.sizes, dims(out)) if node.op_type in RESHAPES else None
        return replace(self, value=out, axes=axes) if axes is not None else None

    def back(self, node: ir.Node) -> View | None:
        """Follow the node that computes this value back to its operand, or None when it does more than move axes."""
        source = node.inputs[0] if node.inputs else None
        if node.domain or source is None:
            return None
        if node.op_type == "Transpose":
            axes = [""] * len(self.axes)
            for axis, k in zip(self.axes, permutation(node) or (), strict=True):
                axes[k] = axis
            return replace(self, value=source, axes=axes)
        if node.op_type in RESHAPES:
            regrouped = _regrouped("".join(self.axes), self.sizes, dims(source))
            return replace(self, value=source, axes=regrouped) if regrouped is not None else _one_of_group(self, source)
        return None

    def emit(self, op: Builder) -> ir.Value:
        """The value with one axis a letter."""
        if all(len(axis) == 1 for axis in self.axes):
            return self.value
        return op.Reshape(self.value, op.lengths(*_target(self)))  # type: ignore[no-any-return]

    def reshaped(self, op: Builder, whole: ir.Value) -> ir.Value:
        """Reshape ``whole``, which has one axis a letter, to the shape of this value."""
        if all(len(axis) == 1 for axis in self.axes):
            return whole
        letters = "".join(self.axes)
        target: list[int | tuple[ir.Value, int]] = []
        for axis in self.axes:
            size = self.extent(axis, self.sizes)
            if isinstance(size, int):
                target.append(size)
            else:
                target.append((whole, letters.index(axis)) if len(axis) == 1 else -1)
        return op.Reshape(whole, op.lengths(*target))  # type: ignore[no-any-return]

    def expressible(self) -> bool:
        """Whether :meth:`emit` can write the shape: at most one length inside an axis is unknown."""
        return sum(part == -1 for part in _target(self)) <= 1


def _target(view: View) -> list[int | tuple[ir.Value, int]]:
    found: list[int | tuple[ir.Value, int]] = []
    for place, axis in enumerate(view.axes):
        for letter in axis:
            size = view.sizes[letter]
            found.append(size if isinstance(size, int) else (view.value, place) if len(axis) == 1 else -1)
    return found


def source_of(view: View, *, scaled: bool = False) -> View:
    """Follow an operand back to the value that first wrote its memory, through moved axes, parts and (``scaled``) factors."""
    whole = _walk(view, scaled, parts=True)
    return replace(whole, _alone=_walk(view, scaled, parts=False)) if whole.part is not None else whole


def _walk(view: View, scaled: bool, *, parts: bool) -> View:
    best, current = view, view
    while (node := current.value.producer()) is not None:
        factor = scaling(node) if scaled else None
        if factor is not None:
            following: View | None = replace(current, value=factor[0], scale=current.scale * factor[1])
        else:
            following = current.back(node)
            if following is None and parts and current.part is None:
                following = _part(current, node)
        if following is None:
            break
        current = following
        if current.expressible():
            best = current
    return best


def follow_result(view: View) -> View:
    """The result ``view`` after the last Transpose that only moves its axes."""
    best, current = view, view
    while (user := only_user(current.value)) is not None:
        following = current.through(user)
        if following is None:
            break
        current = following
        if user.op_type == "Transpose" and _is_sayable(current):
            best = current
    return best


def _is_sayable(view: View) -> bool:
    unknown = [axis for axis in view.axes if not isinstance(View.extent(axis, view.sizes), int)]
    return sum(len(axis) > 1 for axis in unknown) <= 1


def only_user(value: ir.Value) -> ir.Node | None:
    """The only node that uses a value, once; None when there are other uses, or the value is a graph output."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.graph is not _graph(value):
        return None
    return uses[0].node


def _graph(value: ir.Value) -> ir.Graph | ir.Function | None:
    producer = value.producer()
    return producer.graph if producer is not None else None


def scaling(node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, c) of a product or quotient c·x with a constant number."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return None
    for index in (1, 0) if node.op_type == "Mul" else (1,):
        x, number = node.inputs[1 - index], filled(node.inputs[index])
        if x is not None and number and dims(x) == dims(node.outputs[0]):
            return x, number if node.op_type == "Mul" else 1 / number
    return None


def _regrouped(letters: str, sizes: dict[str, Dim], target: Sequence[Dim] | None) -> list[str] | None:
    """Distribute the letters, in order, over axes of these lengths; None when an axis would cut a letter."""
    if target is None or any(d is None for d in target):
        return None
    rest, axes = letters, []
    for dim in target:
        taken = ""
        if dim == 1:
            taken = rest[:1] if rest and sizes[rest[0]] == 1 else ""
        else:
            while product([sizes[c] for c in taken]) != product([dim]):
                if not rest[len(taken) :]:
                    return None
                taken = rest[: len(taken) + 1]
        rest = rest[len(taken) :]
        axes.append(taken)
    if any(sizes[c] != 1 for c in rest):
        return None
    if rest and not axes:
        return None
    if rest:
        axes[-1] += rest
    return axes


def _part(view: View, node: ir.Node) -> View | None:
    """View a value that is one of several equal parts of ``node``'s operand along an axis."""
    source = node.inputs[0] if node.inputs else None
    found = dims(source) if source is not None else None
    if node.domain or source is None or found is None:
        return None
    if node.op_type == "Gather":
        index = constant(node.inputs[1])
        axis = node.attributes.get_int("axis", 0) % len(found)
        count = found[axis]
        if index is None or index.ndim != 0 or not isinstance(count, int) or count > 10:
            return None
        digit = str(int(index) % count)
        return _with_part(view, source, [*view.axes[:axis], digit, *view.axes[axis:]], digit, count)
    taken = _equal_part(node, view.value, found)
    if taken is None:
        return None
    axis, digit, count = taken
    axes = [digit + letters if k == axis else letters for k, letters in enumerate(view.axes)]
    return _with_part(view, source, axes, digit, count)


def _with_part(view: View, source: ir.Value, axes: list[str], digit: str, count: int) -> View:
    return replace(view, value=source, axes=axes, sizes={**view.sizes, digit: count})


def _equal_part(node: ir.Node, value: ir.Value, whole: Sequence[Dim]) -> tuple[int, str, int] | None:
    """(axis, index of the part, number of parts) of an output of Split or a Slice with equal parts."""
    own = dims(value)
    if node.op_type not in ("Split", "Slice") or own is None or len(own) != len(whole):
        return None
    different = [k for k, (a, b) in enumerate(zip(own, whole, strict=True)) if a != b]
    if len(different) != 1:
        return None
    axis = different[0]
    part, total = own[axis], whole[axis]
    if not isinstance(part, int) or not isinstance(total, int) or part == 0 or total % part or total // part > 10:
        return None
    if node.op_type == "Split":
        if any((dims(out) or ())[axis] != part for out in node.outputs):
            return None
        return axis, str(list(node.outputs).index(value)), total // part
    starts, axes = constant(node.inputs[1]), constant(node.inputs[3]) if len(node.inputs) > 3 else None
    step = constant(node.inputs[4]) if len(node.inputs) > 4 else np.array([1])
    if starts is None or starts.size != 1 or step is None or (step != 1).any():
        return None
    if (axes is None and axis != 0) or (axes is not None and int(axes.reshape(-1)[0]) % len(whole) != axis):
        return None
    start = int(starts.reshape(-1)[0])
    start = start + total if start < 0 else start
    return (axis, str(start // part), total // part) if start % part == 0 else None


def _one_of_group(view: View, wide: ir.Value) -> View | None:
    """Follow heads that are repeated for groups of queries, Reshape(Expand(Unsqueeze(k))), back to k."""
    expand = wide.producer()
    narrow = expand.inputs[0] if expand is not None and not expand.domain and expand.op_type == "Expand" else None
    unsqueeze = narrow.producer() if narrow is not None else None
    if narrow is None or unsqueeze is None or unsqueeze.op_type not in RESHAPES or "h" not in view.sizes:
        return None
    single, spread, source = dims(narrow), dims(wide), unsqueeze.inputs[0]
    if single is None or spread is None or source is None or len(single) != len(spread):
        return None
    repeated = [k for k, (a, b) in enumerate(zip(single, spread, strict=True)) if a != b]
    if len(repeated) != 1 or single[repeated[0]] != 1:
        return None
    place = repeated[0]
    sizes = {**view.sizes, "h": quotient(view.sizes["h"], spread[place]), "r": spread[place]}
    axes = _regrouped("".join(view.axes).replace("h", "hr"), sizes, spread) if sizes["h"] is not None else None
    if axes is None or axes[place] != "r" or list(dims(source) or ()) != [*single[:place], *single[place + 1 :]]:
        return None
    del sizes["r"]
    return replace(view, value=source, axes=[*axes[:place], *axes[place + 1 :]], sizes=sizes)
