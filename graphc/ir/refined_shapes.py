"""Refines the shape of an output from the elements of a shape operand, sizes that are known by name among them.

ONNX's inference of a single node leaves an axis without a size as soon as the operand, or another axis, is not a number: the
batch behind a ``Pad`` of an image's columns, say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphc.ir.facts import Dim, constant, dims
from graphc.ir.symbolic_dims import LIMIT, dims_of, held, product, quotient

_HUGE = 2**31 - 1
"""Exporters write this value or a larger one for the end of an open slice."""


def refine(node: ir.Node) -> None:
    """Refine the output shape of ``node`` from the elements of its shape operand."""
    rule = _SHAPES.get(node.op_type)
    if rule is None or node.domain != "":
        return
    found = rule(node)
    out = node.outputs[0]
    if found is None:
        return
    have = dims(out)
    if have is not None and len(have) == len(found):
        found = [h if isinstance(h, int) or f is None else f for h, f in zip(have, found, strict=True)]
    out.shape = ir.Shape(found)


def _reshape(node: ir.Node) -> Sequence[Dim] | None:
    target, source = held(node.inputs[1]), dims_of(node.inputs[0])
    if target is None:
        return None
    copied = "allowzero" not in node.attributes or not node.attributes["allowzero"].as_int()
    if copied and 0 in target:
        known = [*(source or ()), *[None] * len(target)]
        target = tuple(known[k] if d == 0 else d for k, d in enumerate(target))
    if -1 not in target:
        return target
    rest = quotient(product(source), product([d for d in target if d != -1])) if source is not None else None
    return [rest if d == -1 else d for d in target]


def _expand(node: ir.Node) -> Sequence[Dim] | None:
    target, source = held(node.inputs[1]), dims_of(node.inputs[0])
    if target is None or source is None:
        return None
    rank = max(len(target), len(source))
    pairs = zip([1] * (rank - len(source)) + [*source], [1] * (rank - len(target)) + [*target], strict=True)
    return [_broadcast(a, b) for a, b in pairs]


def _broadcast(a: Dim, b: Dim) -> Dim:
    if a == 1 or a == b:
        return b
    if b == 1:
        return a
    return next((d for d in (a, b) if isinstance(d, int)), None)


def _slice_shape(node: ir.Node) -> Sequence[Dim] | None:
    """Axes that are not sliced, or sliced from the first element to the last, keep their size."""
    source, starts, ends = dims_of(node.inputs[0]), held(node.inputs[1]), held(node.inputs[2])
    if source is None:
        return None
    if starts is None or ends is None:  # the sliced axes are unknown, the others keep their size
        count = _most(node.inputs[1])
        starts = ends = (None,) * count if isinstance(count, int) and count <= LIMIT else None
    if starts is None or ends is None:
        return None
    axes = held(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else tuple(range(len(starts)))
    steps = held(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else (1,) * len(starts)
    if axes is None or steps is None:
        return None
    result = list(source)
    if len({len(axes), len(starts), len(ends), len(steps)}) > 1:
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if not isinstance(axis, int) or not -len(result) <= axis < len(result):
            return None
        size = result[axis]
        whole = start == 0 and step == 1 and size is not None and (end == size or (isinstance(end, int) and end >= _HUGE))
        result[axis] = size if whole else None
    return result


def _most(starts: ir.Value | None) -> Dim:
    """The largest possible number of sliced axes. Exporters cut an index out of a tensor by ``offsets[k : k + 1]``."""
    count = (dims_of(starts) or (None,))[0]
    producer = starts.producer() if starts is not None else None
    if isinstance(count, int) or producer is None or producer.op_type != "Slice" or len(producer.inputs) != 3:
        return count
    after = producer.inputs[2].producer() if producer.inputs[2] is not None else None
    if after is None or after.op_type != "Add" or after.inputs[0] is not producer.inputs[1]:
        return None
    step = after.inputs[1]
    while step is not None and (cast := step.producer()) is not None and cast.op_type == "CastLike":
        step = cast.inputs[0]
    known = constant(step)
    return 1 if known is not None and known.size == 1 and int(known.reshape(-1)[0]) == 1 else None


def _range(node: ir.Node) -> Sequence[Dim] | None:
    """Counting from 0 to a size in steps that divide it."""
    start, limit, delta = (held(value) for value in node.inputs)
    return [quotient(limit[0], delta[0])] if start == (0,) and limit is not None and delta is not None else None


def _resize(node: ir.Node) -> Sequence[Dim] | None:
    """Axes that are not resized keep their size; a whole factor multiplies it."""
    source = dims_of(node.inputs[0])
    if source is None or _text_of(node, "coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    axes = [a % len(source) for a in node.attributes["axes"].as_ints()] if "axes" in node.attributes else range(len(source))
    scales, sizes = (node.inputs[k] if len(node.inputs) > k else None for k in (2, 3))
    targets: Sequence[Dim] = [None] * len(axes)
    if sizes is not None:
        if _text_of(node, "keep_aspect_ratio_policy") in (None, "stretch"):
            targets = held(sizes) or targets
    elif (factors := constant(scales)) is not None:
        pairs = zip(factors.reshape(-1).tolist(), axes, strict=False)
        targets = [product([int(f), source[a]]) if f >= 1 and float(f).is_integer() else None for f, a in pairs]
    if len(targets) != len(axes):
        return None
    result = list(source)
    for axis, target in zip(axes, targets, strict=True):
        result[axis] = target
    return result


def _text_of(node: ir.Node, name: str) -> str | None:
    return node.attributes[name].as_string() if name in node.attributes else None


def _pad(node: ir.Node) -> Sequence[Dim] | None:
    """Axes without padding keep their size."""
    source, pads = dims_of(node.inputs[0]), held(node.inputs[1])
    given = node.inputs[3] if len(node.inputs) > 3 else None
    if source is None:
        return None
    axes = held(given) if given is not None else tuple(range(len(source)))
    if pads is None or axes is None or len(pads) != 2 * len(axes):
        return None
    result = list(source)
    for before, after, axis in zip(pads[: len(axes)], pads[len(axes) :], axes, strict=True):
        if not isinstance(axis, int) or not -len(result) <= axis < len(result):
            return None
        if (before, after) != (0, 0):
            result[axis] = None
    return result


def _tile(node: ir.Node) -> Sequence[Dim] | None:
    source, repeats = dims_of(node.inputs[0]), held(node.inputs[1])
    if source is None or repeats is None or len(source) != len(repeats):
        return None
    return [product(pair) for pair in zip(source, repeats, strict=True)]


def _flatten(node: ir.Node) -> Sequence[Dim] | None:
    source = dims_of(node.inputs[0])
    if source is None:
        return None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    axis += len(source) if axis < 0 else 0
    return [product(source[:axis]), product(source[axis:])]


def _first_axis(node: ir.Node) -> Sequence[Dim] | None:
    """The batch of an op whose other sizes ONNX infers."""
    source, found = dims_of(node.inputs[0]), dims(node.outputs[0])
    return [source[0], *found[1:]] if source and found else None


_SHAPES: dict[str, Callable[[ir.Node], Sequence[Dim] | None]] = {
    "Col2Im": _first_axis,
    "ConstantOfShape": lambda node: held(node.inputs[0]),
    "Expand": _expand,
    "Flatten": _flatten,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "STFT": _first_axis,
    "Slice": _slice_shape,
    "Tile": _tile,
}
