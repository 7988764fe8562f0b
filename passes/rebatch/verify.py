"""Compares a model with its rewrite for any batch, sample by sample (:mod:`graphc.passes.rebatch.rebatch`).

    file, batch 1:   y(a), y(b)                rewrite, batch 2:   y(a, b)              must be the same rows

Done where the graph alone does not prove a repair: an index that may count samples, a Loop that the batch passes through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.decomposition import decompose_graph
from graphc.ir.evaluate import NOT_DETERMINED
from graphc.ir.facts import describe_value, dims, is_float

_LIMIT = 20_000_000
"""Values with more elements in total are not compared: the reference evaluator takes too long."""


NOT_COMPARED = "not compared"
"""What :func:`difference` returns where the two models cannot be run here."""


def difference(old: ir.Model, new: ir.Model, batched: set[str], batch: int, symbol: str) -> str | None:
    """Describe the output of ``new`` whose rows are not those of ``old``, or that is a total of some samples; else None, or
    :data:`NOT_COMPARED`.

    Args:
        batched: names of the inputs with the batch.
        batch: the batch of ``old``; ``new`` takes twice as many samples.
    """
    sizes = (math.prod(d for d in dims(v) or () if isinstance(d, int)) for node in old.graph for v in node.outputs)
    if sum(sizes) > _LIMIT or any(node.op_type in NOT_DETERMINED or _trains(node) for node in old.graph.all_nodes()):
        return NOT_COMPARED
    for low in (1, 0):  # ids and lengths of 1 and 2 are right nearly everywhere, else 0 and 1
        feeds = _feeds(old.graph, batched, batch, low)
        parts = [{k: v[p * batch : (p + 1) * batch] if k in batched else v for k, v in (feeds or {}).items()} for p in (0, 1)]
        outputs = [value for value in new.graph.outputs if (dims(value) or (None,))[0] == symbol]
        names = [value.name or "" for value in outputs]
        first, second = (_run(old, part, names) for part in parts)
        if feeds is not None and first is not None and second is not None:
            break
    else:
        return NOT_COMPARED
    turned = {k: np.roll(v, batch, axis=0) if k in batched else v for k, v in feeds.items()}
    for given, order in ((feeds, (first, second)), (turned, (second, first))):
        whole = _run(new, given, names)
        if whole is None:
            return f"the model does not run at a batch of {2 * batch}"
        for value, have, *want in zip(outputs, whole, *order, strict=True):
            if not _close(have, np.concatenate(want)):
                where = describe_value(value)
                return f"the samples of {where} come out otherwise in a batch of {2 * batch} than in one of {batch}"
    totals = [value for value in new.graph.outputs if value not in outputs and is_float(value)]
    short = _total_of_the_first(new, feeds, batched, batch, totals) if totals else None
    if short is not None:
        return f"{describe_value(short)} takes the first {counted(batch, 'sample')} of a batch of {2 * batch}, and no other"
    return None


def _total_of_the_first(
    model: ir.Model, feeds: Mapping[str, np.ndarray], batched: set[str], batch: int, totals: list[ir.Value]
) -> ir.Value | None:
    """The output that the first ``batch`` samples change, and no later one does, as where a loop was unrolled for them."""
    later = {k: np.concatenate([v[:batch], v[:batch]]) if k in batched else v for k, v in feeds.items()}
    first = {k: np.concatenate([v[batch:], v[batch:]]) if k in batched else v for k, v in feeds.items()}
    names = [value.name or "" for value in totals]
    have, with_other_later, with_other_first = (_run(model, given, names) or [] for given in (feeds, later, first))
    for value, same, kept, changed in zip(totals, have, with_other_later, with_other_first, strict=False):
        if np.array_equal(same, kept) and not np.array_equal(same, changed):
            return value
    return None


def _feeds(graph: ir.Graph, batched: set[str], batch: int, low: int) -> dict[str, np.ndarray] | None:
    """Random feeds of two batches that differ in every element; None for inputs of unknown size."""
    random = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for value in graph.inputs:
        shape = dims(value)
        if shape is None or value.dtype is None or not all(isinstance(d, int) for d in shape):
            return None
        rows = [int(d) for d in shape if isinstance(d, int)]
        if value.name in batched:
            rows[0] *= 2
        if is_float(value):
            made: np.ndarray = random.standard_normal(rows)
        else:
            low = 0 if value.dtype == ir.DataType.BOOL else low
            made = random.integers(low, low + 2, rows)
            if value.name in batched:
                made[batch:] = 2 * low + 1 - made[:batch]
        feeds[value.name or ""] = np.asarray(made).astype(value.dtype.numpy())
    return feeds


def _close(have: np.ndarray, want: np.ndarray) -> bool:
    scale = max(1.0, float(np.abs(want).max(initial=0))) if want.dtype.kind == "f" else 1.0
    return have.shape == want.shape and np.allclose(have, want, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)


def _trains(node: ir.Node) -> bool:
    """Whether the node computes with statistics of the batch."""
    return node.op_type == "BatchNormalization" and bool(node.attributes.get_int("training_mode", 0))


def _run(model: ir.Model, feeds: Mapping[str, np.ndarray], names: list[str]) -> list[np.ndarray] | None:
    from onnx.reference import ReferenceEvaluator

    copy = model.clone()
    decompose_graph(copy.graph, lambda node: False)
    try:
        found = ReferenceEvaluator(ir.to_proto(copy)).run(names, dict(feeds))
        return [np.asarray(array) for array in found]
    except Exception:
        return None  # the evaluator lacks an op, or the random indices fit no table
