"""Col2Im: images as sums of the columns of their windows, as ``torch.nn.functional.fold`` makes them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.device import Run
from graphc.ir.facts import constant, static_dims

GRAIN = 1 << 14
"""Elements of columns worth handing to another thread."""


def _has_two_axes(node: ir.Node) -> bool:
    columns, image, block = node.inputs
    shape = static_dims(columns) if columns is not None else None
    sizes = [constant(v) for v in (image, block)]
    return shape is not None and 0 not in shape and all(size is not None and size.size == 2 for size in sizes)


@kernel("onnxruntime", "Col2Im", when=_has_two_axes)
def col2im(k: Binding) -> Run:
    """The rows of each tap are added to rows of the image, one channel of a sample after the other."""
    (columns,), (y,) = given(k.inputs, 1), given(k.outputs, 1)
    taps = constant(k.node.inputs[2])
    assert taps is not None
    planes, (height, width) = y.shape[0] * y.shape[1], y.shape[2:]
    strides, dilations, pads = (
        [int(n) for n in k.attributes.get(name) or [default] * count]
        for name, default, count in (("strides", 1, 2), ("dilations", 1, 2), ("pads", 0, 4))
    )
    spans = [dilations[n] * (int(taps[n]) - 1) + 1 for n in range(2)]
    counts = [(y.shape[2 + n] + pads[n] + pads[n + 2] - spans[n]) // strides[n] + 1 for n in range(2)]
    places = np.array(
        [[i * dilations[0] - pads[0], j * dilations[1] - pads[1]] for i in range(taps[0]) for j in range(taps[1])]
    )
    first = np.clip(-(places // strides), 0, counts)
    last = np.clip((np.array([height - 1, width - 1]) - places) // strides + 1, first, counts)
    windows = columns.reshape(planes, len(places), *counts)
    arguments = (
        windows,
        places.astype(np.int64),
        first.astype(np.int64),
        last.astype(np.int64),
        tuple(strides),
        y.reshape(planes, height, width),
    )
    return k.pool.bind(_added, arguments, planes, max(1, GRAIN * planes // columns.size))


@jit
def _added(windows, places, first, last, strides, y, start, stop):
    for plane in range(start, stop):
        image = y[plane]
        image[:] = 0.0
        for tap in range(len(places)):
            begin, count = first[tap, 1], last[tap, 1] - first[tap, 1]
            for r in range(first[tap, 0], last[tap, 0]):
                row, source = image[r * strides[0] + places[tap, 0]], windows[plane, tap, r, begin : begin + count]
                target = row[begin * strides[1] + places[tap, 1] :]
                if strides[1] == 1:
                    for q in range(count):
                        target[q] += source[q]
                else:
                    for q in range(count):
                        target[q * strides[1]] += source[q]
