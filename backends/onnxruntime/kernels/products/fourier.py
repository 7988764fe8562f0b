"""Fourier transforms of many lines at once, one line in each lane of a vector.

A length is a product of small numbers r. Each factor is one pass over the lines, from one buffer to another: transforms of r
numbers, multiplied by roots of one (Stockham's order, which leaves the result in its natural one). An inverse transform is a
transform in reverse order. Two real lines a and b are one complex line a + i·b, whose transform is the sum of one that is its
own conjugate mirror image and one that is the negative of it; so are the halves of two spectra of real lines.

Source: C. Van Loan, Computational Frameworks for the Fast Fourier Transform, 1992, sections 1.7 and 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.vectors.functions import LANES, array_of, butterfly_function, floats_at, transpose_square
from graphc.device import Array, Run
from graphc.ir.facts import constant, static_dims

LONGEST = 1 << 16
"""Points of a transform whose lines stay in the cache, and at which float32 still counts places."""

POINTS = (4, 2, 3, 5, 7, 11, 13)
of_2, of_3, of_4, of_5, of_7, of_11, of_13 = (butterfly_function(points) for points in sorted(POINTS))

COMPLEX, REAL, HALVES = range(3)
"""What lines are read: complex ones, pairs of real ones, or halves of pairs of spectra."""

LENGTH, KIND, INVERSE, READ, WRITTEN, OUTER, INNER = range(7)
X_OUTER, X_INNER, X_STEP, Y_OUTER, Y_INNER, Y_STEP, GROUPS, PARTS, X_FLOATS, Y_FLOATS = range(7, 17)
"""Places in the numbers that the loops get: points, kind, whether it is inverse, elements read and written of a line, outer and
inner lines; for x and y the steps of :func:`_bind`; groups of lines, parts of threads, floats of an element of x and of y.
"""


def factors_of(length: int) -> list[int] | None:
    """The passes of a transform; None where a factor is too large for one."""
    found = []
    for points in POINTS:
        while length % points == 0:
            found.append(points)
            length //= points
    return found if length == 1 else None


@dataclass(frozen=True, slots=True)
class _Transform:
    """A transform as a node asks for it: its axis (that of the frames for STFT), points, and kinds."""

    axis: int
    points: int
    inverse: bool
    one_sided: bool


def _transform_of(node: ir.Node) -> _Transform | None:
    """None where a size is not known before a run."""
    inputs = (*node.inputs, None, None, None)
    x, result = (None if v is None else static_dims(v) for v in (inputs[0], node.outputs[0]))
    if x is None or result is None:
        return None
    inverse, one_sided = bool(node.attributes.get_int("inverse", 0)), bool(node.attributes.get_int("onesided", 0))
    if node.op_type == "STFT":
        one_sided = bool(node.attributes.get_int("onesided", 1))
        window = None if inputs[2] is None else static_dims(inputs[2])
        length = _integer(inputs[3])
        points = length if length is not None else None if window is None else window[0]
        step = _integer(inputs[1])
        if points is None or step is None or step < 1 or (window is not None and window != (points,)):
            return None
        inside = (result[1] - 1) * step + points <= x[1]
        return _Transform(1, points, False, one_sided) if inside else None
    axis = -2 if inputs[2] is None else _integer(inputs[2])
    if axis is None:
        return None
    axis %= len(x)
    if not one_sided or inverse:
        points = result[axis]
    else:
        points = x[axis] if inputs[1] is None else _integer(inputs[1])
    return None if points is None else _Transform(axis, points, inverse, one_sided)


def _integer(value: ir.Value | None) -> int | None:
    found = constant(value)
    return None if found is None else int(found.reshape(-1)[0])


def _has_small_factors(node: ir.Node) -> bool:
    found = _transform_of(node)
    if found is None or not 1 < found.points <= LONGEST or factors_of(found.points) is None:
        return False
    return all(0 not in (static_dims(v) or (0,)) for v in (node.inputs[0], node.outputs[0]) if v is not None)


def _factors(points: int) -> tuple[Array, Array]:
    """The passes, int64, and the roots of one of all transforms of each pass, float32 pairs."""
    passes, roots, left = factors_of(points) or [], [], points
    for radix in passes:
        p, j = np.arange(left // radix)[:, None], np.arange(1, radix)[None, :]
        roots.append(np.exp(-2j * np.pi * (p * j % left) / left).reshape(-1))
        left //= radix
    every = np.concatenate([np.zeros(0, np.complex128), *roots])
    return np.array(passes, dtype=np.int64), np.stack([every.real, every.imag], -1).astype(np.float32).reshape(-1)


@kernel("onnxruntime", "DFT", when=_has_small_factors)
def fourier_transform(k: Binding) -> Run:
    """y = F·x along one axis, cut or padded with zeros to the points of the transform."""
    (x, *_), (y,), found = given(k.inputs, 1), given(k.outputs, 1), _transform_of(k.node)
    assert found is not None
    outer, inner = int(np.prod(x.shape[: found.axis])), int(np.prod(x.shape[found.axis + 1 : -1]))
    parts = x.shape[-1], y.shape[-1]
    read, written = x.shape[found.axis], y.shape[found.axis]
    places = [
        [read * inner * parts[0], parts[0], inner * parts[0]],
        [written * inner * parts[1], parts[1], inner * parts[1]],
    ]
    return _bind(k, x, y, None, found, (outer, inner), (read, written), places)


@kernel("onnxruntime", "STFT", when=_has_small_factors)
def short_time_transform(k: Binding) -> Run:
    """y = F·(window · frames of x)"""
    (x, *_), (y,), window, found = given(k.inputs, 1), given(k.outputs, 1), optional(k.inputs, 2), _transform_of(k.node)
    step = _integer(k.node.inputs[1])
    assert found is not None
    assert step is not None
    parts = 1 if x.ndim == 2 else x.shape[2]
    places = [[x.shape[1] * parts, step * parts, parts], [y.shape[1] * y.shape[2] * 2, y.shape[2] * 2, 2]]
    return _bind(k, x.reshape(*x.shape[:2], parts), y, window, found, y.shape[:2], (found.points, y.shape[2]), places)


def _bind(
    k: Binding,
    x: Array,
    y: Array,
    window: Array | None,
    found: _Transform,
    lines: tuple[int, ...],
    sizes: tuple[int, int],
    places: list[list[int]],
) -> Run:
    """Bind the transform of all lines.

    Args:
        lines: how many there are, outer and inner.
        sizes: elements of a line that lie in x, and those to write.
        places: for x and y the steps, in floats, from one outer line, inner line and element to the next.
    """
    points = found.points
    kind = HALVES if found.inverse and found.one_sided else REAL if x.shape[-1] == 1 else COMPLEX
    read = min(sizes[0], points // 2 + 1 if kind == HALVES else points)
    together = LANES if kind == COMPLEX else 2 * LANES
    groups = -(-lines[0] * lines[1] // together)
    parts, scratch = max(1, min(k.pool.threads, groups, x.size // 4096)), scratchpad_of(k.pool)
    each = 2 * points * 2 * LANES
    scratch.reserve(4 * parts * each)
    floats = x.shape[-1], y.shape[-1]
    kinds = points, kind, int(found.inverse), read, sizes[1]
    numbers = np.array([*kinds, *lines, *places[0], *places[1], groups, parts, *floats], dtype=np.int64)
    weights = np.ones(0, dtype=np.float32) if window is None else window.reshape(-1)
    scale = np.float32(1 / points if found.inverse else 1)
    arguments: tuple[Any, ...] = (x.reshape(-1), weights, y.reshape(-1), numbers, *_factors(points), scale, scratch.cell)
    return k.pool.bind(_transform_lines, arguments, parts)


@jit
def _start(line, inner, outer_step, inner_step):
    """Where a line begins."""
    return line // inner * outer_step + line % inner * inner_step


@jit
def _spacing(first, last, lines, inner, outer_step, inner_step):
    """Floats from each line of a group to the next; 0 where they differ or a line is missing."""
    if last >= lines:
        return 0
    if inner == 1:
        return outer_step
    return inner_step if first // inner == last // inner else 0


@jit
def _turn_lines(count, lines, line_step, rows, row_step):
    """rows[f, lane] = lines[lane, f] for LANES lines of ``count`` floats; steps in floats, between addresses of each."""
    whole = count - count % LANES
    for f in range(0, whole, LANES):
        transpose_square(lines + 4 * f, 4 * line_step, rows + 4 * f * row_step, 4 * row_step)
    return whole


@jit
def _turn_rows(count, rows, row_step, lines, line_step):
    """lines[lane, f] = rows[f, lane], as above."""
    whole = count - count % LANES
    for f in range(0, whole, LANES):
        transpose_square(rows + 4 * f * row_step, 4 * row_step, lines + 4 * f, 4 * line_step)
    return whole


@jit
def _read(x, numbers, group, buffer):
    """Fill buffer[element, part, lane] with the lines of one group."""
    points, kind, read = numbers[LENGTH], numbers[KIND], numbers[READ]
    inner, step, given = numbers[INNER], numbers[X_STEP], numbers[X_FLOATS]
    lines = numbers[OUTER] * inner
    together = 1 if kind == COMPLEX else 2
    if read < points:
        buffer[:] = 0.0
    first = group * LANES * together
    space = _spacing(first, first + LANES * together - 1, lines, inner, numbers[X_OUTER], numbers[X_INNER])
    at = _start(first, inner, numbers[X_OUTER], numbers[X_INNER])
    if kind != HALVES and space == given and step != given:  # lines lie side by side
        for n in range(read):
            source, real, imaginary = x[at + n * step :], buffer[n, 0], buffer[n, 1]
            for lane in range(LANES):
                real[lane] = source[2 * lane]
                imaginary[lane] = source[2 * lane + 1]
        return
    done = 0
    if kind != HALVES and space > 0 and step == given:  # each line is contiguous
        data, rows = x.ctypes.data + 4 * at, buffer.ctypes.data
        if kind == COMPLEX:
            done = _turn_lines(2 * read, data, space, rows, LANES) // 2
        else:
            done = _turn_lines(read, data, 2 * space, rows, 2 * LANES)
            _turn_lines(read, data + 4 * space, 2 * space, rows + 4 * LANES, 2 * LANES)
    for lane in range(LANES):
        line = min(first + together * lane, lines - 1)  # a missing line repeats the last one
        at = _start(line, inner, numbers[X_OUTER], numbers[X_INNER])
        if kind == COMPLEX:
            for n in range(done, read):
                buffer[n, 0, lane] = x[at + n * step]
                buffer[n, 1, lane] = x[at + n * step + 1]
            continue
        other = _start(min(line + 1, lines - 1), inner, numbers[X_OUTER], numbers[X_INNER])
        if kind == REAL:
            for n in range(done, read):
                buffer[n, 0, lane] = x[at + n * step]
                buffer[n, 1, lane] = x[other + n * step]
            continue
        for n in range(read):
            a, b = at + n * step, other + n * step
            alone = n == 0 or 2 * n == points
            turned, also = np.float32(0.0) if alone else x[a + 1], np.float32(0.0) if alone else x[b + 1]
            buffer[n, 0, lane] = x[a] - also
            buffer[n, 1, lane] = x[b] + turned
            if not alone:
                buffer[points - n, 0, lane] = x[a] + also
                buffer[points - n, 1, lane] = x[b] - turned


@jit
def _reverse(buffer, scale):
    """Bring the result of a transform into the order of the inverse one, and divide it by its length."""
    points = buffer.shape[0]
    for n in range(points // 2 + 1):
        mirror = points - n if n > 0 else 0
        for part in range(2):
            here, there = buffer[n, part], buffer[mirror, part]
            for lane in range(LANES):
                low, high = here[lane] * scale, there[lane] * scale
                here[lane] = high
                there[lane] = low


@jit
def _separate(buffer, second, result, written):
    """The spectra of the first or second lines of all pairs, as result[element, part, lane]."""
    points = buffer.shape[0]
    half = np.float32(0.5)
    for n in range(written):
        mirror = points - n if n > 0 else 0
        for lane in range(LANES):
            a, b, c, d = buffer[n, 0, lane], buffer[n, 1, lane], buffer[mirror, 0, lane], buffer[mirror, 1, lane]
            result[n, 0, lane] = (b + d) * half if second else (a + c) * half
            result[n, 1, lane] = (c - a) * half if second else (b - d) * half


@jit
def _write(buffer, y, numbers, first, together, part):
    """Write complex lines, or one part of them, from buffer[element, part, lane].

    Lane 0 holds line ``first`` and the next lane the line ``together`` further on. ``part``: 2 for both parts of a number.
    """
    written, inner, step, made = numbers[WRITTEN], numbers[INNER], numbers[Y_STEP], numbers[Y_FLOATS]
    lines = numbers[OUTER] * inner
    space = _spacing(first, first + (LANES - 1) * together, lines, inner, numbers[Y_OUTER], numbers[Y_INNER]) * together
    at, done = _start(first, inner, numbers[Y_OUTER], numbers[Y_INNER]), 0
    if space > 0 and step == made:
        data, rows = y.ctypes.data + 4 * at, buffer.ctypes.data
        if part == 2:
            done = _turn_rows(2 * written, rows, LANES, data, space) // 2
        else:
            done = _turn_rows(written, rows + 4 * part * LANES, 2 * LANES, data, space)
    elif space > 0:
        for n in range(written):
            target = y[at + n * step :]
            real, imaginary = buffer[n, 0 if part == 2 else part], buffer[n, 1]
            for lane in range(LANES):
                target[lane * space] = real[lane]
                if part == 2:
                    target[lane * space + 1] = imaginary[lane]
        return
    for lane in range(LANES):
        line = first + lane * together
        if line >= lines:
            return
        at = _start(line, inner, numbers[Y_OUTER], numbers[Y_INNER])
        for n in range(done, written):
            y[at + n * step] = buffer[n, 0 if part == 2 else part, lane]
            if part == 2:
                y[at + n * step + 1] = buffer[n, 1, lane]


@jit
def _transform_lines(x, window, y, numbers, passes, roots, scale, cell, start, stop):
    points, kind, groups, parts = numbers[LENGTH], numbers[KIND], numbers[GROUPS], numbers[PARTS]
    element = 8 * LANES  # bytes
    for part in range(start, stop):
        here = cell[0] + part * 2 * points * element
        there = here + points * element
        for group in range(groups * part // parts, groups * (part + 1) // parts):
            a, b = here, there
            lines = array_of(floats_at(a), (points, 2, LANES))
            _read(x, numbers, group, lines)
            for n in range(window.size):
                for lane in range(LANES):
                    lines[n, 0, lane] *= window[n]
                    lines[n, 1, lane] *= window[n]
            left, done, factors = points, 1, roots.ctypes.data
            for radix in passes:
                left //= radix
                across, along = left * done * element, done * element
                for p in range(left):
                    source, target = a + p * along, b + radix * p * along
                    if radix == 4:
                        of_4(source, across, target, along, done, factors)
                    elif radix == 2:
                        of_2(source, across, target, along, done, factors)
                    elif radix == 3:
                        of_3(source, across, target, along, done, factors)
                    elif radix == 5:
                        of_5(source, across, target, along, done, factors)
                    elif radix == 7:
                        of_7(source, across, target, along, done, factors)
                    elif radix == 11:
                        of_11(source, across, target, along, done, factors)
                    else:
                        of_13(source, across, target, along, done, factors)
                    factors += (radix - 1) * 8
                done *= radix
                a, b = b, a
            found, room = array_of(floats_at(a), (points, 2, LANES)), array_of(floats_at(b), (points, 2, LANES))
            if numbers[INVERSE]:
                _reverse(found, scale)
            if kind == COMPLEX:
                _write(found, y, numbers, group * LANES, 1, 2)
                continue
            for second in range(2):
                first = 2 * group * LANES + second
                if kind == HALVES:
                    _write(found, y, numbers, first, 2, second)
                else:
                    _separate(found, second, room, numbers[WRITTEN])
                    _write(room, y, numbers, first, 2, 2)
