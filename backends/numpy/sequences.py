"""Ops on sequences by the ONNX standard, where ``onnx.reference`` does less.

Its SequenceInsert cannot insert at the end by number, its SequenceMap sees no values around the body and at most one further
sequence, and its Optional wraps what it should hand on.
"""

from __future__ import annotations

from typing import Any

from onnx.reference.op_run import OpRun


class SequenceInsert(OpRun):
    """At any position from -n to n; at the end without one."""

    op_domain = ""

    def _run(self, sequence: Any, tensor: Any, position: Any = None) -> tuple[Any]:
        result = list(sequence)
        result.insert(len(result) if position is None else int(position.reshape(-1)[0]), tensor)
        return (result,)


class SequenceMap(OpRun):
    """Any number of further sequences and tensors, and a body that reads values around it."""

    op_domain = ""

    def need_context(self) -> bool:
        return True

    def _run(self, sequence: Any, *others: Any, context: Any = None, **options: Any) -> tuple[Any, ...]:
        body = self.body
        results: tuple[list[Any], ...] = tuple([] for _ in body.output_names)
        for k, element in enumerate(sequence):
            operands = [element, *(v[k] if isinstance(v, list) else v for v in others)]
            feeds = {**(context or {}), **dict(zip(body.input_names, operands, strict=True))}
            for part, value in zip(results, body.run(None, feeds), strict=True):
                part.append(value)
        return results


class Optional(OpRun):
    """The content itself; ``[None]``, as the other ops of ``onnx.reference`` expect it, when there is none."""

    op_domain = ""

    def _run(self, content: Any = None, **options: Any) -> tuple[Any]:
        return (content if content is not None else [None],)


OPS: list[type[OpRun]] = [SequenceInsert, SequenceMap, Optional]
