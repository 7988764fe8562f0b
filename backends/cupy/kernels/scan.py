"""Running sums and products along an axis.

One thread takes a line if there are many lines; otherwise one block does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.kernels.text import computed, load, store
from graphc.backends.cupy.libraries.registry import STORED, Launch, node_kernel
from graphc.backends.fusion.views import integers
from graphc.ir.facts import input_of, shape_of, size_of

LINES = 4096
"""Lines from which one thread a line keeps a device busy."""

WIDEST = 512
"""Most threads of a block (see :func:`graphc.backends.cupy.codegen.launch_shape.blocks`)."""


@node_kernel("CumSum", "CumProd", dtypes=STORED, when=lambda node: integers(node, 1) is not None)
def running(node: ir.Node) -> Sequence[Launch]:
    """y[k] = x[0] ∘ … ∘ x[k]; ``exclusive`` omits x[k], ``reverse`` starts at the end."""
    x, y = input_of(node), node.outputs[0]
    shape = shape_of(x)
    axis = (integers(node, 1) or [0])[0] % len(shape)
    n, inner = shape[axis], int(np.prod(shape[axis + 1 :], dtype=np.int64))
    lines = size_of(x) // n
    combine, start = ("Sum", "0") if node.op_type == "CumSum" else ("Prod", "1")
    reverse, exclusive = (bool(node.attributes.get_int(name, 0)) for name in ("reverse", "exclusive"))
    kind = computed(x)
    place = f"{n - 1} - k" if reverse else "k"
    at = f"(INDEX)((row / {inner} * {n} + {place}) * {inner} + row % {inner})"
    if lines >= LINES or inner > 1 or n <= 64:
        later, sooner = ("", store(y, "y", "at", "total")) if exclusive else (store(y, "y", "at", "total"), "")
        body = f"""{kind} total = {start};
for (INDEX k = 0; k < {n}; ++k) {{
const INDEX at = {at};
{sooner}
total = {combine}::of(total, {load(x, "x", "at")});
{later}
}}"""
        return [Launch(body, {"x": x}, {"y": y}, lines)]
    result = f"{combine}::of(carry, THREAD > 0 ? held[from][THREAD - 1] : ({kind}){start})" if exclusive else "upto"
    body = f"""SHARED {kind} held[2][{WIDEST}];
{kind} carry = {start};
for (INDEX base = 0; base < {n}; base += THREADS) {{
const INDEX k = base + THREAD;
const INDEX at = {at};
int from = 0;
held[0][THREAD] = k < {n} ? {load(x, "x", "at")} : ({kind}){start};
SYNC;
for (int step = 1; step < THREADS; step *= 2) {{
held[1 - from][THREAD] = THREAD >= step ? {combine}::of(held[from][THREAD - step], held[from][THREAD]) : held[from][THREAD];
from = 1 - from;
SYNC;
}}
const {kind} upto = {combine}::of(carry, held[from][THREAD]);
if (k < {n}) {{ {store(y, "y", "at", result)} }}
const {kind} all = {combine}::of(carry, held[from][THREADS - 1]);
SYNC;
carry = all;
}}"""
    return [Launch(body, {"x": x}, {"y": y}, lines, columns=n, block=True)]
