"""RecurrentTraining and its gradient: packs the weights, runs the loop over time, and multiplies what all steps left.

oneDNN's training primitives are not used: in version 3.2 an LSTM of 64 × 32 × 256 takes as long in them as in PyTorch 2.13, its
workspace is four times as large, threads wait for each other after every step, and its gradient always includes that of x.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.host.processor import has_matrix_tiles
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.products.linear import product_of
from graphc.backends.onnxruntime.recurrent import loops
from graphc.backends.onnxruntime.recurrent.products import (
    FEWEST_TILED,
    TILED_COLUMNS,
    TILED_ROWS,
    pack,
    pack_transposed,
    padded,
    split,
    steps_of,
)
from graphc.backends.onnxruntime.vectors.functions import WIDE_PANEL
from graphc.backends.onnxruntime.vectors.tiles import SIDE, STEP_BYTES
from graphc.device import Array, Run, in_order
from graphc.ir.facts import static_dims
from graphc.ir.ops import recurrent_training as op
from graphc.ir.ops.gate_order import PYTORCH

_CELLS = {
    op.LSTM: loops.LSTM,
    op.GRU: loops.GRU,
    op.GRU_RESET_AFTER: loops.GRU_RESET_AFTER,
    op.TANH: loops.TANH,
    op.RELU: loops.RELU,
}
_FEWEST = 4
"""Rows of the batch that a thread of its own is worth."""
_LOWEST, _MOST_GROUPS = 2, 64
"""Rows of a group, which one thread runs, and groups of a batch; there is a sum of bias gradients for each."""


def _is_native(node: ir.Node) -> bool:
    """Whether every operand has a known shape without an empty dimension."""
    return all((shape := static_dims(v)) is not None and 0 not in shape for v in node.inputs if v is not None)


class _Layer:
    """What both kernels share: sizes, shares of the threads, and packed weights and products in the scratchpad."""

    def __init__(self, k: Binding, r: Array, batch: int, *, transposed: bool) -> None:
        self.pool, self.cell = k.pool, _CELLS[k.attributes["cell"]]
        self.pytorch = int(k.attributes["order"] == PYTORCH)
        self.count, self.wide, self.hidden = r.shape
        direction = k.attributes["direction"]
        self.backward = np.array([direction == "reverse", True][: self.count])
        self.height = max(_LOWEST, -(-batch // _MOST_GROUPS))
        self.groups = -(-batch // self.height)
        self.parts = max(1, min(-(-k.pool.threads // self.count), batch // _FEWEST, self.groups))
        self.rows = min(batch, -(-self.groups // self.parts) * self.height)
        # a GRU that resets before the product has two products a step, of its first two gates and of the third
        cut = 2 * self.hidden if self.cell == loops.GRU else self.wide
        self.weights = [r[:, :cut], r[:, cut:]] if self.cell == loops.GRU else [r]
        self.transposed = transposed
        matrices = [w.transpose(0, 2, 1) if transposed else w for w in self.weights]
        self.depths = [m.shape[1] for m in matrices]
        self.tiled = has_matrix_tiles() and batch // self.parts >= FEWEST_TILED and min(r.shape[1:]) >= SIDE
        rows = -(-self.rows // TILED_ROWS) * TILED_ROWS if self.tiled else self.rows
        shapes = [self._panels(depth, columns) for _, depth, columns in (m.shape for m in matrices)]
        work = self.count * self.parts, rows + 1, max(columns for _, columns, _ in shapes)
        room = steps_of(max(self.depths)) * STEP_BYTES // 8 if self.tiled else 0
        *self.packed, self.work, self.split = scratchpad_of(k.pool).floats(*shapes, work, (self.count * self.parts, room))

    def _panels(self, depth: int, columns: int) -> tuple[int, int, int]:
        """The shape of a packed matrix of each direction."""
        if self.tiled:
            wide = -(-columns // TILED_COLUMNS) * TILED_COLUMNS
            return self.count, wide, steps_of(depth) * STEP_BYTES // (4 * SIDE)
        return self.count, padded(columns), depth

    @property
    def panels(self) -> tuple[Array, Array]:
        return self.packed[0], self.packed[-1]

    def packing(self) -> Run:
        """Copies the weights, which change with every step, to their panels."""
        pairs = list(zip(self.weights, self.packed, strict=True))
        if self.tiled:
            turned = int(self.transposed)
            return in_order([self.pool.bind(split, (*pair, turned), self.count * pair[1].shape[1] // SIDE) for pair in pairs])
        function = pack_transposed if self.transposed else pack
        return in_order([self.pool.bind(function, pair, self.count * -(-pair[1].shape[1] // WIDE_PANEL), 4) for pair in pairs])


def _state(array: Array | None, like: Array) -> Array:
    return np.zeros_like(like) if array is None else array


_NOTHING = np.zeros((1, 0, 1, 1), dtype=np.float32)
_NO_LENGTHS = np.zeros(0, dtype=np.int32)


@kernel("onnxruntime", "graphc::RecurrentTraining", when=_is_native, inplace={2: 0})
def recurrent_training(k: Binding) -> Run:
    """(hₜ, cₜ) = cell(projectedₜ + hₜ₋₁·Rᵀ, cₜ₋₁)"""
    (projected, r), (y,) = given(k.inputs, 2), given(k.outputs, 1)
    bias, hidden_bias, lengths, h, c = (optional(k.inputs, i) for i in range(2, 7))
    count, wide, hidden = r.shape
    time, batch, _ = projected.shape
    layer = _Layer(k, r, batch, transposed=True)
    states = np.zeros((count, batch, hidden), dtype=np.float32)

    def made(index: int, shape: tuple[int, ...], steps: int = 1) -> Array:
        """An output with this shape, of ``steps`` steps where something reads it, and else of one."""
        found = optional(k.outputs, index)
        if found is None:
            return np.empty(shape, dtype=np.float32)
        return found.reshape(steps * shape[0], *shape[1:])

    last_h, gates = made(1, states.shape), made(2, (1, batch, count, wide), time)
    last_c = made(4, states.shape) if layer.cell == loops.LSTM else states
    kept = _NOTHING if layer.cell in (loops.TANH, loops.RELU) else made(3, (1, batch, count, hidden), time)
    arguments = (
        layer.cell,
        layer.pytorch,
        layer.backward,
        layer.parts,
        layer.height,
        int(h is None),
        projected.reshape(time, batch, count, wide),
        _NO_LENGTHS if lengths is None else lengths,
        *layer.panels,
        np.zeros((count, wide), dtype=np.float32) if bias is None else bias,
        np.zeros((count, hidden), dtype=np.float32) if hidden_bias is None else hidden_bias,
        layer.work,
        layer.split,
        gates,
        kept,
        last_h,
        last_c,
        y,
    )
    begin = [(last_h, h), (last_c, c)] if layer.cell == loops.LSTM else [(last_h, h)]
    return _running(layer, loops.forward, arguments, begin)


def _running(layer: _Layer, loop: Any, arguments: tuple[Any, ...], begin: list[tuple[Array, Array | None]]) -> Run:
    """Packs the weights, sets states to where they begin, runs the loop."""
    packing, sweep = layer.packing(), layer.pool.bind(loop, arguments, layer.count * layer.parts)

    def run() -> None:
        packing()
        for state, source in begin:
            state[...] = 0.0 if source is None else source
        sweep()

    return run


@kernel("onnxruntime", "graphc::RecurrentTrainingGrad", when=_is_native, inplace={0: 1})
def recurrent_training_grad(k: Binding) -> Run:
    """∂aₜ from ∂hₜ, ∂hₜ₋₁ = ∂aₜ·R;  then ∂R = Σ ∂aₜᵀ·hₜ₋₁, ∂b = Σ ∂aₜ"""
    (y, gates, r), (dprojected, dr) = given(k.inputs, 3), given(k.outputs, 2)
    kept, lengths, h, c, dy, dy_h, dy_c = (optional(k.inputs, i) for i in range(3, 10))
    time, count, batch, hidden = y.shape
    wide = r.shape[1]
    layer, shape = _Layer(k, r, batch, transposed=False), (time, batch, count, wide)
    in_place = count == 1 and h is None and time > 1  # a step starts from the result of the one before, the first from zeros
    earlier = np.empty((count, 0 if in_place else time, batch, hidden), dtype=np.float32)
    dh, of_bias, extra = (optional(k.outputs, i) for i in range(2, 5))
    ends = dh is not None
    dh = np.empty((count, batch, hidden), dtype=np.float32) if dh is None else dh
    resets_product = layer.cell == loops.GRU_RESET_AFTER
    sums = np.empty((count, layer.groups, wide + hidden if resets_product else wide), dtype=np.float32)
    dc = dh if layer.cell != loops.LSTM else np.empty_like(dh) if extra is None else extra
    da = dprojected.reshape(shape)
    dproduct = np.empty(shape, dtype=np.float32) if layer.cell == loops.GRU_RESET_AFTER else da
    arguments = (
        layer.cell,
        layer.pytorch,
        layer.backward,
        layer.parts,
        layer.height,
        int(ends),
        y,
        gates.reshape(shape),
        _NOTHING if kept is None else kept.reshape(time, batch, count, hidden),
        _NO_LENGTHS if lengths is None else lengths,
        _state(h, dh),
        _state(c, dh),
        _NOTHING if dy is None else dy,
        *layer.panels,
        layer.depths[0],
        layer.depths[-1],
        layer.work,
        layer.split,
        da,
        dproduct,
        earlier,
        sums,
        dh,
        dc,
    )
    begin = [(dh, dy_h), (dc, dy_c)] if layer.cell == loops.LSTM else [(dh, dy_h)]
    loop = _running(layer, loops.backpropagate, arguments, begin)
    slopes, after, before = dproduct.reshape(-1, count, wide), slice(None), slice(None)
    if in_place:
        after, before = (slice(1, None), slice(-1)) if k.attributes["direction"] == "forward" else (slice(-1), slice(1, None))
    products = []
    for d in range(count):
        states = (y[before] if in_place else earlier[d]).reshape(-1, hidden)
        pieces = [(dproduct[after].reshape(-1, count, wide), slice(None), states)]
        if layer.cell == loops.GRU and kept is not None:
            pieces[0] = (pieces[0][0], slice(2 * hidden), states)
            pieces.append((slopes, slice(2 * hidden, None), kept.reshape(-1, count, hidden)[:, d]))
        products += [product_of(k.pool, steps[:, d, rows].T, b, dr[d, rows]) for steps, rows, b in pieces]
    biases = [] if of_bias is None else [(of_bias, sums[:, :, :wide])]
    biases += [(extra, sums[:, :, wide:])] if resets_product and extra is not None else []

    def run() -> None:
        loop()
        for multiply in products:
            multiply()
        for result, parts in biases:
            np.add.reduce(parts, axis=1, out=result)

    return run
