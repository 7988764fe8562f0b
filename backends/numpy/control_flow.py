"""Scan and Loop by the ONNX standard, where ``onnx.reference`` does less.

Its Scan knows no axes and directions but the first, its Loop takes a missing condition for false and joins scan outputs
along an axis that they have already instead of a new one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class Scan(OpRun):
    """Every axis and direction of scan inputs and outputs."""

    op_domain = ""

    def need_context(self) -> bool:
        return True

    def _run(self, *args: Any, context: Any = None, **options: Any) -> tuple[Any, ...]:
        body, width = self.body, self.num_scan_inputs
        count = len(args) - width
        names, outputs = body.input_names, body.output_names
        axes, ways = (_numbers(options, f"scan_input_{name}", width) for name in ("axes", "directions"))
        out_axes, out_ways = (_numbers(options, f"scan_output_{name}", len(outputs) - count) for name in ("axes", "directions"))
        scanned = [
            np.flip(np.moveaxis(x, axis, 0), 0) if way else np.moveaxis(x, axis, 0)
            for x, axis, way in zip(args[count:], axes, ways, strict=True)
        ]
        states = list(args[:count])
        collected: list[list[Any]] = [[] for _ in outputs[count:]]
        for t in range(len(scanned[0])):
            feeds = {**(context or {}), **dict(zip(names, [*states, *(x[t] for x in scanned)], strict=True))}
            results = body.run(None, feeds)
            states = results[:count]
            for part, value in zip(collected, results[count:], strict=True):
                part.append(value)
        for part, axis, way in zip(collected, out_axes, out_ways, strict=True):
            if not part:
                raise RuntimeError("a Scan over nothing has no scan output whose shape is known")
            stacked = np.stack(part[::-1] if way else part)
            states.append(np.moveaxis(stacked, 0, axis))
        return tuple(states)


def _numbers(options: dict[str, Any], name: str, count: int) -> list[int]:
    return list(options.get(name) or [0] * count)


class Loop(OpRun):
    """Any trip count and condition, either of them left out; scan outputs along a new first axis."""

    op_domain = ""

    def need_context(self) -> bool:
        return True

    def _run(self, limit: Any, going: Any, *initial: Any, context: Any = None, **options: Any) -> tuple[Any, ...]:
        body = self.body
        names, outputs = body.input_names, body.output_names
        states = list(initial)
        collected: list[list[Any]] = [[] for _ in outputs[1 + len(states) :]]
        t, going = 0, True if going is None else bool(np.all(going))
        while going and (limit is None or t < int(np.asarray(limit).reshape(-1)[0])):
            values = [np.array(t, dtype=np.int64), np.array(True), *states]
            results = body.run(None, {**(context or {}), **dict(zip(names, values, strict=True))})
            going, states = bool(np.all(results[0])), list(results[1 : 1 + len(states)])
            for part, value in zip(collected, results[1 + len(states) :], strict=True):
                part.append(value)
            t += 1
        stacked = [
            np.stack(part) if part else _nothing(body, name)
            for part, name in zip(collected, outputs[1 + len(states) :], strict=True)
        ]
        return (*states, *stacked)


def _nothing(body: Any, name: str) -> Any:
    """The scan output of a loop without iterations, by the type that the body declares."""
    from onnx.helper import tensor_dtype_to_np_dtype

    declared = next(v.type.tensor_type for v in body.proto_.output if v.name == name)
    sizes = [d.dim_value for d in declared.shape.dim]
    return np.zeros([0, *sizes], dtype=tensor_dtype_to_np_dtype(declared.elem_type))


OPS: list[type[OpRun]] = [Scan, Loop]
