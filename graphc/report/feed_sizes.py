"""Chooses sizes for the unknown dimensions of a model's inputs, with which a plan can be tried without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from graphc.ir.facts import dims, is_float

SIDES = (64, 224, 32, 48, 96, 320, 640)
"""Sides of images that are tried, in this order."""

LENGTHS = (16, 32, 128, 64, 512, 4000, 16000)
"""Lengths of sequences that are tried beside them."""

CHANNELS = 3
"""Size of an image's unknown axis of channels."""


def likely_shapes(inputs: Sequence[ir.Value], batch: int) -> Iterator[dict[str, list[int]]]:
    """Yield shapes for the inputs of a model; more than one if sizes have to be guessed.

    Args:
        batch: size of the batch dimension, if the model leaves it open.

    Yields:
        Input → shape. Inputs of unknown rank are left out.
    """
    symbol = next((found[0] for found in map(dims, inputs) if found), None)
    known = {symbol: batch} if isinstance(symbol, str) else {}
    seen = []
    for side, length in zip(SIDES, LENGTHS, strict=True):
        sizes = dict(known)
        shapes = {v.name or "": _shape(v, sizes, batch, side, length) for v in inputs if dims(v) is not None}
        if shapes not in seen:
            seen.append(shapes)
            yield shapes


def _shape(value: ir.Value, sizes: dict[str, int], batch: int, side: int, length: int) -> list[int]:
    declared = dims(value) or ()
    image = is_float(value) and len(declared) in (4, 5)
    channels = 1 if image and not isinstance(declared[1], int) and not isinstance(declared[-1], int) else None
    shape = []
    for axis, size in enumerate(declared):
        if isinstance(size, int):
            shape.append(size)
            continue
        guess = batch if axis == 0 else CHANNELS if axis == channels else side if image else length
        shape.append(guess if size is None else sizes.setdefault(size, _of_sum(size, sizes, length) or guess))
    return shape


def _of_sum(symbol: str, sizes: dict[str, int], length: int) -> int | None:
    """The size of a dimension that exporters name by a sum, ``past_length + length``; None: it is no sum."""
    terms = [term.strip() for term in symbol.split("+")]
    if len(terms) < 2 or not all(terms):
        return None
    return sum(int(term) if term.isdigit() else sizes.setdefault(term, length) for term in terms)
