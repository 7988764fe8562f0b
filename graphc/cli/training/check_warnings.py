"""Warnings of ``graphc check``: files that train, but hardly as their makers meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.cli.terminal import output
from graphc.ir.state import repeats_one_value
from graphc.pipeline import warnings_in


def warnings_of(model: ir.Model, parameters: Sequence[Mapping[str, Any]], log: Sequence[str]) -> list[str]:
    """Collect warnings about the model before training.

    Args:
        parameters: what the ``check`` pass said of each.
        log: what the passes said of the file.
    """
    warnings, constant = warnings_in(log), []
    trains = {parameter["name"] for parameter in parameters if parameter["trains"]}
    for name in sorted(trains):
        tensor = model.graph.initializers[name].const_value
        if tensor is None or (len(tensor.shape) >= 2 and tensor.size > 1 and repeats_one_value(tensor)):
            constant.append(name)
    if constant:
        warnings.append(
            f"{output.counted(len(constant), 'weight')} (first: {constant[0]!r}) hold one repeated value, so the file was saved"
            " without trained weights; train with --initialize he"
        )
    doubtful = [p for p in parameters if p["doubtful"] and not p["trains"]]
    if doubtful:
        shown = ", ".join(f"{p['name']!r} ({p['reason']})" for p in doubtful[:3])
        more = f" and {len(doubtful) - 3} more" if len(doubtful) > 3 else ""
        warnings.append(
            f"{output.counted(len(doubtful), 'constant')} may be meant to train, but do not: {shown}{more};"
            f" --train {shlex.quote(doubtful[0]['name'])} trains the first"
        )
    warnings.extend(_rewritten_weights(model.graph, trains))
    return warnings


_MADE_NAMES = re.compile(r"val_\d+|onnx::\w+_\d+")
"""Names that PyTorch's exporters give to results of constant folding."""

_UNFOLDED = "export with optimize=False (dynamo) or do_constant_folding=False, or give the module itself to graphc.compile"


def _rewritten_weights(graph: ir.Graph, trains: set[str]) -> list[str]:
    """Warn about weights that an exporter folded or merged, which changes training but not inference."""
    warnings = []
    made = sorted(name for name in trains if _MADE_NAMES.fullmatch(name))
    if made:
        warnings.append(
            f"{output.counted(len(made), 'weight')} (first: {made[0]!r}) came out of the exporter's constant folding: names are"
            f" lost, and a weight that was shared may be several now; {_UNFOLDED}"
        )
    merged = []
    for name in sorted(trains):
        value = graph.initializers[name]
        if value.const_value is not None and len(value.uses()) > 1 and repeats_one_value(value.const_value):
            merged.append(name)
    if merged:
        warnings.append(
            f"{output.counted(len(merged), 'weight')} of one repeated value (first: {merged[0]!r}) serve several nodes: if the"
            f" exporter has merged equal weights, they train as one here; {_UNFOLDED}"
        )
    return warnings
