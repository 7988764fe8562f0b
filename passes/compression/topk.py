"""Top-k: each rank sends its gradient elements of largest magnitude and keeps the others for later.

    corrected = dW + residual
    kept, rest = KeepLargest(corrected)               k elements of each tensor, zero elsewhere; the others
    the update takes AllReduce(kept, nonzero=k);      residual' = rest

Sources: Y. Lin et al., "Deep Gradient Compression", ICLR 2018; S. U. Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
As in both papers, each tensor has its own largest elements: over a whole bucket, layers with large gradients would starve the
others. The reduced value is dense in the graph, so its meaning does not depend on the number of ranks; ``nonzero`` lets the
runtime send indices and values instead (:mod:`graphc.runtime.sparse_allreduce`) when that is less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import static_dims
from graphc.ir.state import add_initializer
from graphc.passes.compression.powersgd import RESIDUAL


def keep_largest(graph: ir.Graph, reductions: Sequence[ir.Node], names: Sequence[str], ratio: float) -> int:
    """Send a ``ratio`` of the elements of gradients of rank 2 and more; returns the number of such gradients.

    Args:
        reductions: AllReduces of single gradients.
        names: names of their parameters.
    """
    op = Builder(graph)
    following = dict(itertools.pairwise(list(graph)))
    chosen = 0
    for node, name in zip(reductions, names, strict=True):
        gradient, shape = node.inputs[0], static_dims(node.outputs[0])
        if gradient is None or shape is None or len(shape) < 2:
            continue
        count = max(1, math.ceil(ratio * int(np.prod(shape, dtype=np.int64))))
        producer = gradient.producer()
        op.scope, op.before = f"compress/{name}", node if producer is None else following[producer]
        residual = add_initializer(graph, f"{name}::{RESIDUAL}", np.zeros(shape, np.float32))
        corrected = op.Add(gradient, residual)
        kept, unsent = op.graphc.KeepLargest(corrected, count=count)
        op.before = following[node]
        outputs = [f"{name}::{RESIDUAL}::next"]
        op.emit("Residual", [residual, unsent], domain="graphc", outputs=outputs, name=f"update/{name}::{RESIDUAL}")
        node.replace_input_with(0, kept)
        node.attributes["nonzero"] = ir.AttrInt64("nonzero", count)
        chosen += 1
    return chosen
