"""Checks feeds against a graph's inputs: names, shapes, types and labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphc.data import Batch
from graphc.device import Array, Memory
from graphc.errors import FeedError, nearest
from graphc.ir.dim_expressions import symbols
from graphc.ir.facts import Dim, batch_dim, dims
from graphc.ir.index_operands import IndexRange
from graphc.ir.ops.losses import label_range
from graphc.ir.symbolic_dims import substituted


def feed_shape(feed: Any) -> tuple[int, ...]:
    """Return the shape of a feed, in host or device memory.

    Raises:
        FeedError: rows of unequal length.
    """
    found = getattr(feed, "shape", None)
    try:
        return tuple(np.shape(feed) if found is None else found)
    except ValueError as error:
        raise FeedError(f"a feed is not an array: {error}") from None


_MAPPING = "a mapping from the names of the graph's inputs to arrays"
_SHARD = "graphc.data.shard(data, names=(…), global_batch=N) makes such batches of arrays, a dataset or a DataLoader"


def batches_of(items: Any) -> Iterator[Any]:
    """Iterate over batches: each a :class:`~graphc.data.Batch` or a mapping input → array.

    Raises:
        FeedError: ``batches`` is not iterable, or a batch is of another type.
    """
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        what = "one batch" if isinstance(items, Mapping) else f"a {type(items).__name__}"
        raise FeedError(f"this is {what}; give a list of batches, each {_MAPPING}; {_SHARD}")
    for item in items:
        if not isinstance(item, Batch | Mapping):
            raise FeedError(f"a batch is {_MAPPING}, not a {type(item).__name__}; {_SHARD}")
        yield item


def averages(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute an evaluation's values from the sums of all batches: ``loss`` = ``loss::total`` ÷ ``loss::weight``.

    Raises:
        FeedError: no sample was counted.
    """
    total = "::total"
    weights = {name: sums.get(name.removesuffix(total) + "::weight", 1.0) for name in sums if name.endswith(total)}
    if 0.0 in weights.values():
        raise FeedError("evaluate got no samples that count; an iterator can be walked only once: give a list or shards")
    return {name.removesuffix(total): sums[name] / weight for name, weight in weights.items()}


def key_of_shapes(feeds: Mapping[str, Array]) -> tuple[Any, ...]:
    """Key of a plan: the shapes of its feeds."""
    return tuple((name, feed_shape(array)) for name, array in sorted(feeds.items()))


def check_feed_names(feeds: Mapping[str, Array], graph: ir.Graph) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``feeds`` by the names of the graph's inputs.

    Raises:
        FeedError: not a mapping, an unknown or a missing name, or a number instead of an array.
    """
    if not isinstance(feeds, Mapping):
        raise FeedError(f"feeds are {_MAPPING}, not a {type(feeds).__name__}")
    wanted = {v.name or "": v for v in graph.inputs}
    for name in feeds:
        if name not in wanted:
            raise FeedError(f"there is no input {name!r}{nearest(str(name), wanted)}; the inputs are {', '.join(wanted)}")
    for name, value in wanted.items():
        if name not in feeds:
            raise FeedError(f"the feed {name!r} is missing; the inputs are {', '.join(wanted)}")
        if dims(value) and not feed_shape(feeds[name]):
            raise FeedError(f"feed {name!r} is a single number, the model wants an array of {len(dims(value) or ())} axes")
    return {name: feed_shape(feeds[name]) for name in wanted}


def check_arrays(
    feeds: Mapping[str, Array],
    inputs: Mapping[str, Array],
    labels: Mapping[str, tuple[int, int, int | None]],
    memory: Memory,
    indices: Mapping[str, Sequence[IndexRange]] = {},
) -> dict[str, Array]:
    """Convert feeds to the dtypes of ``inputs``, as :func:`converted` does.

    Arrays that are in ``memory`` stay there; all others go to host memory.

    Args:
        labels: name → range of the labels, and the ignored label. Labels on a device are not checked.
        indices: name → the ranges of its elements where nodes read them as indices. Arrays on a device are not checked.

    Raises:
        FeedError: a wrong type, a label or an index out of range, or a device array that cannot be used in place.
    """
    arrays: dict[str, Array] = {}
    for name, buffer in inputs.items():
        array = _array(name, feeds[name], memory)
        arrays[name] = converted(array, np.dtype(buffer.dtype), f"feed {name!r}")
    for name, (low, high, ignore) in labels.items():
        found = arrays.get(name)
        if found is None or found.size == 0 or not isinstance(found, np.ndarray):
            continue
        if found.min() < low or found.max() >= high:
            wrong = (found < low) | (found >= high)
            if ignore is not None:
                wrong &= found != ignore
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise FeedError(f"label {int(found[where])} at {name}{list(where)} is outside {label_range(low, high)}")
    for name, ranges in indices.items():
        _check_indices(name, arrays[name], ranges)
    return arrays


def _check_indices(name: str, array: Array, ranges: Sequence[IndexRange]) -> None:
    """Raise FeedError for the first element outside one of the ranges."""
    if not isinstance(array, np.ndarray) or array.size == 0 or array.dtype.kind not in "iu":
        return
    limits = {part: _limits(array, part) for part in {range_.part for range_ in ranges}}
    for range_ in ranges:
        least, most = limits[range_.part]
        if least < range_.low or most >= range_.high:
            outside = (array < range_.low) | (array >= range_.high)
            if range_.part is not None:
                axis, place = range_.part
                kept = np.zeros(array.shape, bool)
                np.moveaxis(kept, axis, 0)[place] = True
                outside &= kept
            where = tuple(int(i) for i in np.argwhere(outside)[0])
            raise FeedError(
                f"{int(array[where])} at {name}{list(where)} is outside {range_.low} … {range_.high - 1}, the range of the"
                f" indices or lengths that {range_.reader} takes"
            )


def _limits(array: Array, part: tuple[int, int] | None) -> tuple[int, int]:
    """The least and the largest element of an array, or of one place of an axis of it."""
    if part is not None:
        array = np.moveaxis(array, part[0], 0)
        array = array[part[1]] if -len(array) <= part[1] < len(array) else array[:0]
    return (int(array.min()), int(array.max())) if array.size else (0, -1)


def converted(array: Array, dtype: np.dtype[Any], what: str) -> Array:
    """Convert an array to ``dtype`` if that keeps every integer, and of floats all but their last digits.

    Args:
        what: the array, for messages.

    Raises:
        FeedError: any other conversion, values out of range of a narrower type, or an array on a device.
    """
    if array.dtype == dtype:
        return array
    same_kind = array.dtype.kind == dtype.kind or (array.dtype.kind in "iu" and dtype.kind in "iu")
    to_float = dtype.kind == "f" or dtype == np.dtype(ml_dtypes.bfloat16)
    narrowed = array.dtype.kind == "f" and to_float and dtype.itemsize < array.dtype.itemsize
    on_host = isinstance(array, np.ndarray)
    if not on_host or not (narrowed or (same_kind and np.can_cast(array.dtype, dtype, "safe"))):
        scaled = array.dtype.kind in "iu" and to_float
        hint = ", scaled as the model was trained; of images, the option scale does it (--scale x=1/255)"
        hint = hint if scaled else " if its values allow"
        raise FeedError(f"{what} is {array.dtype}, the model wants {dtype}; convert it with .astype({str(dtype)!r}){hint}")
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if narrowed and bool(np.isinf(result).any()) and not bool(np.isinf(array).any()):
        raise FeedError(f"{what} has values too large for {dtype}")
    return result


def check_sample_labels(arrays: Mapping[str, Array], graph: ir.Graph, classes: Mapping[str, tuple[str, int | None]]) -> None:
    """Check labels whose number of classes is a symbol: mostly the samples of the batch, as in contrastive losses.

    Args:
        classes: name → the number of classes as a product of symbols, and the ignored label.

    Raises:
        FeedError: a label outside the classes, or that is no sample of this worker's share.
    """
    pairs = ((dims(value) or (), feed_shape(arrays[value.name or ""])) for value in graph.inputs if value.name in arrays)
    sizes = {dim: size for shape, fed in pairs for dim, size in zip(shape, fed, strict=False) if isinstance(dim, str)}
    for name, (count, ignore) in classes.items():
        limit: Dim = count
        for symbol, size in sizes.items():
            limit = substituted(limit, symbol, size)
        found = arrays.get(name)
        if not isinstance(limit, int) or not isinstance(found, np.ndarray):
            continue
        wrong = (found < 0) | (found >= limit)
        if ignore is not None:
            wrong &= found != ignore
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            because = (
                f": the classes are the samples of the batch, of which this worker computes {limit} at a time; compare a whole"
                " batch on one worker (-n 1, no --accumulate), or number the samples of each share from 0"
            )
            batch = batch_dim(graph)
            of_batch = isinstance(batch, str) and batch in symbols(count)
            text = f"label {int(found[where])} at {name}{list(where)} is outside 0 … {limit - 1}"
            raise FeedError(text + (because if of_batch else ""))


def _array(name: str, feed: Any, memory: Memory) -> Array:
    """Return a feed as an array in ``memory`` if it is there already, else as a host array."""
    try:
        found = memory.adopt(feed)
    except (ValueError, RuntimeError, BufferError) as error:
        raise FeedError(f"feed {name!r} on a device cannot be taken: {error}") from error
    if found is None:
        try:
            return np.asarray(feed)
        except (ValueError, RuntimeError) as error:  # ragged rows, or a tensor that requires grad
            raise FeedError(f"feed {name!r} is not an array: {error}") from None
        except TypeError as error:
            where = "the host" if memory.on_host else "this worker's device or the host"
            raise FeedError(f"feed {name!r} is not in the memory of {where} ({error}); copy it there first") from error
    if not found.flags.c_contiguous:
        raise FeedError(f"feed {name!r} is not contiguous on the device; make it contiguous first")
    return found
