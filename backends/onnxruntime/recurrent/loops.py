"""Loops over time: each thread runs rows of the batch in one direction from the first step to the last, alone.

Rows do not depend on each other, so that threads never wait for one another, and a row has the same bits with any number of
them. ``start`` and ``stop`` count shares: direction · parts + part of the batch. Parts consist of whole groups of ``height``
rows, which add gradients of biases to a sum of their own, so that these have the same bits, too.
"""

from __future__ import annotations

from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.recurrent import cells as row
from graphc.backends.onnxruntime.recurrent.products import product, product_on_tiles
from graphc.backends.onnxruntime.vectors.functions import array_of, floats_at
from graphc.backends.onnxruntime.vectors.tiles import configure_tiles, release_tiles

LSTM, GRU, GRU_RESET_AFTER, TANH, RELU = range(5)
"""The cells as compiled code knows them."""


@jit
def _multiply(tiles, a, lda, b, columns, depth, c, ldc, rows):
    """c = a·b in panels, or on tiles with scratch at ``tiles``."""
    if tiles != 0:
        product_on_tiles(a, lda, b, columns, depth, c, ldc, rows, tiles)
    else:
        product(a, lda, b, columns, depth, c, ldc, rows)


@jit
def _first_row(part, parts, height, batch):
    """The first row of a part of the batch."""
    groups = (batch + height - 1) // height
    return min(batch, groups * part // parts * height)


@jit
def forward(
    cell,
    pytorch,
    backward,
    parts,
    height,
    from_zero,
    projected,
    lengths,
    packed,
    packed_new,
    bias,
    hidden_bias,
    work,
    split,
    gates,
    kept,
    h,
    c,
    y,
    start,
    stop,
):
    """Run the steps of some shares.

    ``pytorch``: whether the gates lie in PyTorch's order. ``from_zero``: whether h is zero at first, as its product is.
    projected, gates: time × batch × directions × gates·hidden. kept: time × batch × directions × hidden (an RNN: empty).
    The time of gates and kept may be one, where no gradient reads them: a step then writes over those of the step before.
    lengths: batch, or empty. packed: the panels of rᵀ (see :mod:`.products`), for a GRU those of its first two gates;
    packed_new: of the third.
    bias: directions × gates·hidden. hidden_bias: directions × hidden.
    work: shares × rows × padded gates. split: scratch of each share for products on tiles, or empty.
    h, c: directions × batch × hidden, from the initial states to the final ones (c of an LSTM).
    y: time × directions × batch × hidden.
    """
    time, batch, count, wide = projected.shape
    n = h.shape[2]
    line, to_kept, ld = 4 * wide, 4 * n, 4 * work.shape[2]
    of_x, of_gates, of_kept, of_y = projected.ctypes.data, gates.ctypes.data, kept.ctypes.data, y.ctypes.data
    of_h, of_c, of_bias, of_hidden_bias = h.ctypes.data, c.ctypes.data, bias.ctypes.data, hidden_bias.ctypes.data
    columns, new_columns = packed.shape[1], packed_new.shape[1]
    of_r, of_new = packed.ctypes.data, packed_new.ctypes.data
    keeps_gates, keeps_cells = gates.shape[0] == time, kept.size > 0 and kept.shape[0] == time
    if split.size > 0:
        configure_tiles()
    for share in range(start, stop):
        d = share // parts
        part = share % parts
        first, last = _first_row(part, parts, height, batch), _first_row(part + 1, parts, height, batch)
        of_work = work.ctypes.data + share * work.shape[1] * ld
        tiles = split[share].ctypes.data if split.size > 0 else 0
        state = of_h + (d * batch + first) * to_kept
        for step in range(time):
            t = time - 1 - step if backward[d] else step
            of_step, of_cells = (t if keeps_gates else 0) * batch, (t if keeps_cells else 0) * batch
            if step == 0 and from_zero:
                array_of(floats_at(of_work), (work.shape[1] * work.shape[2],))[:] = 0.0
            else:
                _multiply(tiles, state, to_kept, of_r + d * packed.strides[0], columns, n, of_work, ld, last - first)
            w = of_bias + d * line
            for b in range(first, last):
                x = of_x + ((t * batch + b) * count + d) * line
                g, k = of_gates + ((of_step + b) * count + d) * line, of_kept + ((of_cells + b) * count + d) * to_kept
                p, out = of_work + (b - first) * ld, of_y + ((t * count + d) * batch + b) * to_kept
                before = of_h + (d * batch + b) * to_kept
                if lengths.size > 0 and t >= lengths[b]:
                    for j in range(n):
                        y[t, d, b, j] = 0.0
                    for j in range(wide if keeps_gates else 0):
                        gates[t, b, d, j] = 0.0
                    for j in range(n if keeps_cells else 0):
                        kept[t, b, d, j] = 0.0
                elif cell == LSTM and pytorch:
                    row.pytorch_lstm(n, (x, x + count * line, w, p, g, of_c + (d * batch + b) * to_kept, k, before, out))
                elif cell == LSTM:
                    row.lstm(n, (x, x + count * line, w, p, g, of_c + (d * batch + b) * to_kept, k, before, out))
                elif cell == GRU:
                    row.gru_gates(n, (x, w, p, g, before, k))
                elif cell == GRU_RESET_AFTER and pytorch:
                    row.pytorch_gru(n, (x, x + count * line, w, p, g, before, out, k, of_hidden_bias + d * to_kept))
                elif cell == GRU_RESET_AFTER:
                    row.gru_reset_after(n, (x, x + count * line, w, p, g, before, out, k, of_hidden_bias + d * to_kept))
                elif cell == TANH:
                    row.tanh(n, (x, w, p, g, before, out))
                else:
                    row.relu(n, (x, w, p, g, before, out))
            if cell == GRU:
                place = of_kept + ((of_cells + first) * count + d) * to_kept
                new = of_new + d * packed_new.strides[0]
                if step > 0 or not from_zero:
                    _multiply(tiles, place, count * to_kept, new, new_columns, n, of_work, ld, last - first)
                for b in range(first, last):
                    if lengths.size == 0 or t < lengths[b]:
                        x = of_x + ((t * batch + b) * count + d) * line
                        g, p = of_gates + ((of_step + b) * count + d) * line, of_work + (b - first) * ld
                        out = of_y + ((t * count + d) * batch + b) * to_kept
                        row.gru(n, (x, w, p, g, of_h + (d * batch + b) * to_kept, out))
    if split.size > 0:
        release_tiles()


@jit
def _is_first(source, time, backward, lengths, b):
    """Whether a step starts from the initial state: no step ``source`` of sequence b came before it."""
    return source < 0 or source >= time or (backward and lengths.size > 0 and source >= lengths[b])


@jit
def backpropagate(
    cell,
    pytorch,
    backward,
    parts,
    height,
    ends,
    y,
    gates,
    kept,
    lengths,
    h,
    c,
    dy,
    packed,
    packed_new,
    depth,
    new_depth,
    work,
    split,
    da,
    dproduct,
    earlier,
    sums,
    dh,
    dc,
    start,
    stop,
):
    """Run the steps of some shares in reverse.

    Shapes as in :func:`forward`, and: h, c: the initial states. dy: as y, or empty. packed: the panels of r, for a GRU those of
    its first two gates; depth, new_depth: their rows. da: the gradient of projected, as gates; dproduct: of h·Rᵀ, as gates,
    where a GRU resets it. earlier: directions × time × batch × hidden, the state that each step started from, or empty.
    sums: directions × groups × gates·hidden, and of a GRU that resets the product hidden more: gradients of the biases.
    ``ends``: whether dh is wanted behind the last step.
    dh, dc: directions × batch × hidden, from the gradients of the final states to those of the initial ones.
    """
    time, batch, count, wide = gates.shape
    n = h.shape[2]
    line, to_kept, ld = 4 * wide, 4 * n, 4 * work.shape[2]
    of_gates, of_kept, of_dy, of_da = gates.ctypes.data, kept.ctypes.data, dy.ctypes.data, da.ctypes.data
    of_dh, of_dc, of_y = dh.ctypes.data, dc.ctypes.data, y.ctypes.data
    of_dproduct, of_sums = dproduct.ctypes.data, sums.ctypes.data
    columns, new_columns = packed.shape[1], packed_new.shape[1]
    of_r, of_new = packed.ctypes.data, packed_new.ctypes.data
    slopes = of_dproduct if cell == GRU_RESET_AFTER else of_da
    if split.size > 0:
        configure_tiles()
    for share in range(start, stop):
        d = share // parts
        part = share % parts
        first, last = _first_row(part, parts, height, batch), _first_row(part + 1, parts, height, batch)
        of_work = work.ctypes.data + share * work.shape[1] * ld
        tiles = split[share].ctypes.data if split.size > 0 else 0
        for group in range(first // height, (last + height - 1) // height):
            sums[d, group] = 0.0
        zeros = of_work + work.shape[1] * ld - ld  # the last row
        for j in range(n):
            work[share, work.shape[1] - 1, j] = 0.0
        for step in range(time):
            t = step if backward[d] else time - 1 - step
            source = t + 1 if backward[d] else t - 1
            for b in range(first, last):
                at = (t * batch + b) * count + d
                g, a, k = of_gates + at * line, of_da + at * line, of_kept + at * to_kept
                slope = of_dy + ((t * count + d) * batch + b) * to_kept if dy.size > 0 else zeros
                dhb, dcb = of_dh + (d * batch + b) * to_kept, of_dc + (d * batch + b) * to_kept
                total = of_sums + d * sums.strides[0] + b // height * sums.strides[1]
                if lengths.size > 0 and t >= lengths[b]:
                    for j in range(wide):
                        da[t, b, d, j] = 0.0
                    if cell == GRU_RESET_AFTER:
                        for j in range(wide):
                            dproduct[t, b, d, j] = 0.0
                    for j in range(n if earlier.size > 0 else 0):
                        earlier[d, t, b, j] = 0.0
                    continue
                begins = _is_first(source, time, backward[d], lengths, b)
                e = of_y + ((source * count + d) * batch + b) * to_kept
                if begins:
                    e = h.ctypes.data + (d * batch + b) * to_kept
                if earlier.size > 0:
                    state = array_of(floats_at(e), (n,))
                    for j in range(n):
                        earlier[d, t, b, j] = state[j]
                if cell == LSTM:
                    held = of_kept + ((source * batch + b) * count + d) * to_kept
                    if begins:
                        held = c.ctypes.data + (d * batch + b) * to_kept
                    if pytorch:
                        row.pytorch_lstm_back(n, (g, g + count * line, k, held, slope, dhb, dcb, a, total))
                    else:
                        row.lstm_back(n, (g, g + count * line, k, held, slope, dhb, dcb, a, total))
                elif cell == GRU:
                    row.gru_new_back(n, (g, e, slope, dhb, a, total))
                elif cell == GRU_RESET_AFTER and pytorch:
                    row.pytorch_gru_back(n, (g, g + count * line, k, e, slope, dhb, a, of_dproduct + at * line, total))
                elif cell == GRU_RESET_AFTER:
                    row.gru_reset_after_back(n, (g, g + count * line, k, e, slope, dhb, a, of_dproduct + at * line, total))
                elif cell == TANH:
                    row.tanh_back(n, (g, slope, dhb, a, total))
                else:
                    row.relu_back(n, (g, slope, dhb, a, total))
            place = ((t * batch + first) * count + d) * line
            if cell == GRU:
                matrix, new = of_new + d * packed_new.strides[0], of_da + place + 2 * to_kept
                _multiply(tiles, new, count * line, matrix, new_columns, new_depth, of_work, ld, last - first)
                for b in range(first, last):
                    if lengths.size == 0 or t < lengths[b]:
                        at = ((t * batch + b) * count + d) * line
                        e = of_y + ((source * count + d) * batch + b) * to_kept
                        if _is_first(source, time, backward[d], lengths, b):
                            e = h.ctypes.data + (d * batch + b) * to_kept
                        p, dhb = of_work + (b - first) * ld, of_dh + (d * batch + b) * to_kept
                        total = of_sums + d * sums.strides[0] + b // height * sums.strides[1]
                        row.gru_reset_back(n, (of_gates + at, e, p, dhb, of_da + at, total))
            if step == time - 1 and not ends:
                continue
            matrix = of_r + d * packed.strides[0]
            _multiply(tiles, slopes + place, count * line, matrix, columns, depth, of_work, ld, last - first)
            for b in range(first, last):
                if lengths.size == 0 or t < lengths[b]:
                    row.add(n, (of_dh + (d * batch + b) * to_kept, of_work + (b - first) * ld))
    if split.size > 0:
        release_tiles()
