"""Adds a skip flag to updates, for devices where a queued kernel cannot be cancelled.

    before   check(dW)            Adam(W, dW, …)              the check raises, and no update runs
    after    stop = check(dW)     Adam(W, dW, …, skip=stop)   the updates run and change nothing; the host reads ``stop`` later

So a step with a NaN changes nothing, and the host waits for the device only once, for the results. The flag stays set until
the host clears it: steps that were queued before the host knew of the NaN change nothing either.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from graphc.ir.declare import operand, place_of, put

STOP = "graphc.stop"
"""Name of the flag, a rank-0 bool that the check step writes, and of its memory, which all plans of a trainer share."""


def guard(updates: Iterable[ir.Node]) -> ir.Value | None:
    """Give the updates of a plan's graph the flag, and return it.

    None where they have one already (``skip_nonfinite``, ``loss_scaling``) or cannot take one (a custom op).
    """
    nodes = list(updates)
    if not nodes or any(place_of(node, "skip") is None or operand(node, "skip") is not None for node in nodes):
        return None
    flag = ir.Value(name=STOP, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    for node in nodes:
        put(node, "skip", flag)
    return flag
