"""Control flow, sequences and optionals for ``onnx.reference``, whose own implementations lack cases.

Loop: scalars as scan outputs, no condition, no trips. Scan: axes, reversed directions, no trips. SequenceMap: several
inputs, captured values. Optional: an element instead of a list of it; nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

from graphc.device import Array

Values = Mapping[str, Any]


class _Open(OpRun):
    """An op that may return None, the optional without a value, and whose body sees all outer values."""

    op_domain = ""

    def _check_and_fix_outputs(self, res: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(np.asarray(r) if np.isscalar(r) else r for r in res)


class _WithBody(_Open):
    def need_context(self) -> bool:
        return True


def _empty(body: Any, index: int, axis: int = 0) -> Array:
    """The scan output of a body that never ran: no elements, with the declared type and known sizes."""
    tensor = body.output_types_[index].tensor_type
    dims = [d.dim_value for d in tensor.shape.dim]
    dims.insert(axis % (len(dims) + 1), 0)
    return np.zeros(dims, dtype=onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type or onnx.TensorProto.FLOAT))


class If(_WithBody):
    """The outputs of one branch."""

    def _run(
        self,
        cond: Array,
        context: Values | None = None,
        else_branch: Any = None,
        then_branch: Any = None,
        attributes: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        branch = then_branch if bool(np.asarray(cond).reshape(())) else else_branch
        return tuple(branch.run(None, dict(context or {}), attributes=attributes))


class Loop(_WithBody):
    """Iterate until the count or the condition ends; states are carried, scan outputs are stacked along a new axis 0."""

    def _run(
        self,
        M: Array | None = None,
        cond: Array | None = None,
        *states: Any,
        context: Values | None = None,
        body: Any = None,
        attributes: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        current, trip = list(states), 0
        gathered: list[list[Any]] = [[] for _ in body.output_names[1 + len(states) :]]
        going = cond is None or bool(np.asarray(cond).reshape(()))
        limit = None if M is None else int(np.asarray(M).reshape(()))
        while going and (limit is None or trip < limit):
            feeds = dict(context or {})
            feeds.update(zip(body.input_names, [np.array(trip, dtype=np.int64), np.array(going), *current], strict=True))
            condition, *results = body.run(None, feeds, attributes=attributes)
            current, scanned = results[: len(states)], results[len(states) :]
            for part, value in zip(gathered, scanned, strict=True):
                part.append(value)
            going, trip = bool(np.asarray(condition).reshape(())), trip + 1
        first = 1 + len(states)
        return (*current, *(np.stack(part) if part else _empty(body, first + k) for k, part in enumerate(gathered)))


class Scan(_WithBody):
    """Iterate over slices of the scan inputs; states are carried, scan outputs are stacked along their axes."""

    def _run(
        self,
        *values: Any,
        context: Values | None = None,
        body: Any = None,
        num_scan_inputs: int = 1,
        attributes: Any = None,
        **scan: Any,
    ) -> tuple[Any, ...]:
        count = len(values) - num_scan_inputs
        current, scans = list(values[:count]), values[count:]
        axes = list(scan.get("scan_input_axes") or [0] * num_scan_inputs)
        backwards = list(scan.get("scan_input_directions") or [0] * num_scan_inputs)
        slices = [np.moveaxis(v, axis, 0)[:: -1 if b else 1] for v, axis, b in zip(scans, axes, backwards, strict=True)]
        gathered: list[list[Any]] = [[] for _ in body.output_names[count:]]
        for trip in range(len(slices[0])):
            feeds = dict(context or {})
            feeds.update(zip(body.input_names, [*current, *(s[trip] for s in slices)], strict=True))
            results = body.run(None, feeds, attributes=attributes)
            current = results[:count]
            for part, value in zip(gathered, results[count:], strict=True):
                part.append(value)
        axes = list(scan.get("scan_output_axes") or [0] * len(gathered))
        backwards = list(scan.get("scan_output_directions") or [0] * len(gathered))
        return (
            *current,
            *(
                np.stack(part[:: -1 if b else 1], axis=axis) if part else _empty(body, count + k, axis)
                for k, (part, axis, b) in enumerate(zip(gathered, axes, backwards, strict=True))
            ),
        )


class SequenceMap(_WithBody):
    """Run the body for every element of the first sequence; other sequences advance with it, tensors stay."""

    def _run(
        self,
        sequence: list[Any],
        *others: Any,
        context: Values | None = None,
        body: Any = None,
        attributes: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        results: list[list[Any]] = [[] for _ in body.output_names]
        for k, element in enumerate(sequence):
            feeds = dict(context or {})
            items = [other[k] if isinstance(other, list) else other for other in others]
            feeds.update(zip(body.input_names, [element, *items], strict=True))
            for part, value in zip(results, body.run(None, feeds, attributes=attributes), strict=True):
                part.append(value)
        return tuple(results)


class SequenceInsert(_Open):
    """The sequence with an element at a position from -n to n; at the end without one."""

    def _run(self, sequence: list[Any], element: Any, position: Any = None) -> tuple[Any, ...]:
        result = list(sequence)
        result.insert(len(result) if position is None else int(np.asarray(position).reshape(())), element)
        return (result,)


class Optional(_Open):
    """Its input, or nothing."""

    def _run(self, value: Any = None, **_: Any) -> tuple[Any, ...]:
        return (value,)


class OptionalGetElement(_Open):
    """Its input, which must be there."""

    def _run(self, value: Any = None) -> tuple[Any, ...]:
        if value is None:
            raise ValueError("OptionalGetElement of an optional without a value")
        return (value,)
