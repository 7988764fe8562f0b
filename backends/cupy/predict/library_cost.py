"""Predicts the time of library calls: products, convolutions, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.libraries.cudnn_convolution import INPUT, convolution_of
from graphc.backends.cupy.libraries.gemm import HALVES, Product
from graphc.backends.cupy.predict.hardware import (
    ATTENTION,
    ATTENTION_GRADIENT,
    CONVOLUTION,
    CONVOLUTION_MEMORY,
    EPILOGUE,
    MIN_LAUNCH,
    NARROW_CONVOLUTION,
    SHORT,
    SHORT_ATTENTION,
    STEM_CONVOLUTION,
    STEPS_OF_TILE,
    TF32,
    TRANSPOSED_TF32,
    TURNED_TF32,
    Machine,
)
from graphc.backends.cupy.predict.traffic import nbytes
from graphc.ir.facts import shape_of

Estimate = tuple[Callable[[Machine], float], int, int]
"""Seconds on a machine, bytes moved, operations."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.65), (64, 32, 0.4))
"""Tiles of a product that one multiprocessor computes, and the share of the largest tile's rate. Assumed."""

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Parts of the summed dimension that different multiprocessors may sum."""


def product(p: Product, moved: int) -> Estimate:
    """A product of cuBLASLt: its tiles go over the multiprocessors in waves, by the best tile and split."""

    def seconds(machine: Machine) -> float:
        rate = machine.gpu.peak[p.dtype] * machine.of(machine.gpu.product)
        if p.dtype == ir.DataType.FLOAT:
            rate *= machine.of(TF32)
            apart = (p.a.column_step != 1) + (p.b.row_step != 1)
            rate *= (1.0, machine.of(TRANSPOSED_TF32), machine.of(TURNED_TF32))[apart]
        if p.dtype == ir.DataType.DOUBLE:
            rate /= machine.of(machine.gpu.product) / 0.75
        work = min(_tiled(p, rate, machine, tile, splits) for tile in TILES for splits in SPLITS)
        if p.epilogue and p.dtype in HALVES:
            work *= 1 + (machine.of(EPILOGUE) - 1) * min(1.0, 768 / p.k)
        return machine.launched(max(work, moved / machine.kernel_memory))

    return seconds, moved, p.flops


def _tiled(p: Product, rate: float, machine: Machine, tile: tuple[int, int, float], splits: int) -> float:
    rows, columns, share = tile
    if splits > 1 and p.k < 512 * splits:
        return math.inf
    tiles = -(-p.m // rows) * -(-p.n // columns) * p.batch * p.rounds * splits
    waves = math.ceil(tiles / machine.gpu.multiprocessors)
    depth = p.k / splits + machine.of(STEPS_OF_TILE)
    partial = 0.0 if splits == 1 else 2 * 4 * splits * p.m * p.n * p.batch * p.rounds / machine.kernel_memory
    return waves * 2 * rows * columns * depth * machine.gpu.multiprocessors / (rate * share) + partial


def convolution(node: ir.Node, values: Sequence[ir.Value]) -> Estimate:
    """A convolution of cuDNN or one of its gradients; its operations or its bytes count, whichever takes longer."""
    found = convolution_of(node)
    moved = sum(nbytes(v) for v in values)
    if found.kind != INPUT and found.skips:  # a strided window of one pixel skips the pixels between
        x = values[0]
        moved -= nbytes(x) - nbytes(x) * int(np.prod(found.y.dims[2:])) // int(np.prod(found.x.dims[2:]))
    channels = found.w.dims[1]
    flops = 2 * found.y.dims[0] * int(np.prod(found.y.dims[2:])) * int(np.prod(found.w.dims))
    share = STEM_CONVOLUTION if channels <= 4 else NARROW_CONVOLUTION if channels < 64 else CONVOLUTION

    def seconds(machine: Machine) -> float:
        return machine.launched(max(flops / machine.peak(share), moved / (machine.memory * machine.of(CONVOLUTION_MEMORY))))

    return seconds, moved, flops


def attention(node: ir.Node, values: Sequence[ir.Value]) -> Estimate:
    """Attention of cuDNN or its gradient; a causal one counts half."""
    gradient = node.op_type.endswith("Grad")
    axes = node.attributes["layout"].as_string().split(",")
    q, k = (node.inputs[1], node.inputs[2]) if gradient else (node.inputs[0], node.inputs[1])
    sizes = dict(zip(axes[0], shape_of(q), strict=True))
    keys = dict(zip(axes[1], shape_of(k), strict=True)).get("t", 1)
    flops = 4 * sizes.get("b", 1) * sizes.get("h", 1) * sizes.get("t", 1) * keys * sizes.get("d", 1)
    flops = (5 * flops // 2 if gradient else flops) // (2 if node.attributes.get_int("causal", 0) else 1)
    moved = sum(nbytes(v) for v in dict.fromkeys(values))

    def seconds(machine: Machine) -> float:
        rate = machine.peak(ATTENTION_GRADIENT if gradient else ATTENTION)
        rate *= machine.of(SHORT_ATTENTION) if keys < SHORT else 1.0
        return machine.launched(max(flops / rate, moved / machine.kernel_memory))

    return seconds, moved, flops


def other(values: Sequence[ir.Value]) -> Estimate:
    """Any other call: its bytes."""
    return copied(sum(nbytes(v) for v in values))


def copied(moved: int) -> Estimate:
    """A kernel that only moves ``moved`` bytes, with enough of them in flight."""
    return (lambda machine: machine.launched(moved / machine.kernel_memory, MIN_LAUNCH)), moved, 0
