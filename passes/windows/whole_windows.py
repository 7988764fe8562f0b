"""whole_windows: a convolution with one window, over the whole image, becomes a product of matrices.

    before   y = Conv(x, w, b)                                                  # x: N × C × 7 × 7, w: M × C × 7 × 7
    after    y = Reshape(Gemm(Reshape(x, N × 49·C), Reshape(w, M × 49·C), b, transB=1), N × M × 1 × 1)

So do the 1 × 1 convolutions behind a global pool, in squeeze-and-excitation and in heads, the dense layers of a VGG that became
convolutions, and windows that overhang an image of a single one: of them, only the taps over the image are used. A
ConvTranspose of images of one pixel is the same the other way round. Products and their gradients take the weight as it lies,
where convolutions copy it to a layout of their own: the weight gradient of 4096 × 512 windows of 7 × 7 over 8 images takes
4.4 s in oneDNN 3.2, and 10 ms as a product (Zen 5, two threads).
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import input_of, static_dims
from graphc.ir.ops.convolution import CONV, Window
from graphc.passes.optimize.simplify import replace_each
from graphc.pipeline import Context, graph_pass

_TRANSPOSED = ("dilations", "kernel_shape", "strides", "pads", "output_padding", "output_shape")


@graph_pass("whole_windows", requires=("legalize",), changes="form")
def whole_windows(model: ir.Model, ctx: Context) -> bool:
    """Replace every Conv with one window, and every ConvTranspose of one pixel, by a product."""
    count = replace_each(model.graph, ("Conv",), _gathered) + replace_each(model.graph, ("ConvTranspose",), _spread)
    if count:
        ctx.note(f"whole_windows: {counted(count, 'convolution')} with one window as products")
    return count > 0


def _sizes(node: ir.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Channels and spatial sizes of the image, and the shape of the weight; None if they are not known, or with groups."""
    image, weight = input_of(node).shape, static_dims(input_of(node, 1))
    if image is None or weight is None or len(image) < 3 or node.attributes.get_int("group", 1) != 1:
        return None
    found = tuple(d for d in image.dims[1:] if isinstance(d, int))
    return (found, weight) if len(found) == len(image) - 1 and 0 not in (*found, *weight) else None


def _attributes(node: ir.Node, names: Any) -> dict[str, Any]:
    return {name: node.attributes[name].value for name in names if name in node.attributes}


def _gathered(op: Builder, node: ir.Node) -> ir.Value | None:
    sizes = _sizes(node)
    if sizes is None:
        return None
    (channels, *image), (features, _, *taps) = sizes
    window = Window.of(_attributes(node, CONV), tuple(image), tuple(taps))
    begin, end = window.padding
    axes = range(len(image))
    if any(image[k] + begin[k] + end[k] - window.span[k] >= window.strides[k] for k in axes):  # a second window
        return None
    first = [min(begin[k], taps[k]) for k in axes]  # tap over the first pixel
    count = [min(taps[k] - first[k], image[k]) for k in axes]
    if any(count[k] < 1 or (window.dilations[k] > 1 and taps[k] > 1) for k in axes):
        return None
    x, w = input_of(node), input_of(node, 1)
    places = [k + 2 for k in axes]
    if count != image:
        x = op.Slice(x, [0] * len(image), count, places)
    if count != taps:
        w = op.Slice(w, first, [f + c for f, c in zip(first, count, strict=True)], places)
    terms = channels * math.prod(count)
    y = op.Gemm(op.Reshape(x, [0, terms]), op.Reshape(w, [features, terms]), *node.inputs[2:3], transB=1)
    return op.Reshape(y, [0, features, *[1] * len(image)])  # type: ignore[no-any-return]


def _spread(op: Builder, node: ir.Node) -> ir.Value | None:
    sizes = _sizes(node)
    if sizes is None:
        return None
    (channels, *image), (_, features, *taps) = sizes
    found = _attributes(node, _TRANSPOSED)
    plain = not any(found.get("pads", ())) and not any(found.get("output_padding", ())) and "output_shape" not in found
    dilated = any(d > 1 and k > 1 for d, k in zip(found.get("dilations", [1] * len(taps)), taps, strict=True))
    if not plain or dilated or set(image) != {1} or node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    y = op.Gemm(op.Reshape(input_of(node), [0, channels]), op.Reshape(input_of(node, 1), [channels, -1]))
    y = op.Reshape(y, [0, features, *taps])
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return y if bias is None else op.Add(y, op.Reshape(bias, [features, *[1] * len(taps)]))  # type: ignore[no-any-return]
