"""Captures modules that join and divide batches, as siamese networks do, for batches of any size.

    u, v = torch.chunk(encoder(torch.cat([a, b])), 2)       # 2 · batch rows: each part has ``batch`` of them

``torch.export`` has a symbol for each input's batch until it is done, and counts the parts of ``chunk`` and ``split`` with a
division that rounds up; it can simplify neither, and takes the batch of the example for the only one. Here the batches are one
from the start, and :mod:`graphc.frontends.torch_export.functions` counts equal parts without rounding.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.exc import UserError, UserErrorType
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram

from graphc.frontends.torch_export import own_gradients, packed
from graphc.frontends.torch_export.functions import OtherForms


class FixedBatchError(Exception):
    """The code of a module takes the size of the batch for a number: what was captured is right for that size only."""


class Capture(NamedTuple):
    """What ``torch.export`` captured.

    Attributes:
        assumed: what the module's code found out about the batch's size; "" if other batches do not differ in it.
        hooked: whether ``forward`` puts a hook on the gradient of a tensor.
        padded: whether ``forward`` pads a packed sequence to its longest sample.
        checks: the places of the checks of data that were passed.
    """

    program: ExportedProgram
    assumed: str
    hooked: bool
    padded: bool
    checks: Sequence[str]


_MULTIPLES = range(1, 9)
"""Of the example's batch: what is so for all of them is said of a batch in general, such as that it is even."""


def enlarged(tensors: Sequence[torch.Tensor], batched: Sequence[int]) -> list[torch.Tensor]:
    """``tensors`` with batches of eight times their size, whose halves and quarters have more than one sample."""
    return [t.repeat(8, *[1] * (t.dim() - 1)) if k in batched else t for k, t in enumerate(tensors)]


def capture(module: torch.nn.Module, tensors: Sequence[torch.Tensor], batched: Sequence[int], *, strict: bool) -> Capture:
    """Capture ``module`` called with ``tensors``.

    Args:
        batched: the places of the inputs whose first dimension is a batch of any size.
        strict: follow the module's bytecode, which is slow, and knows what ``len(x)`` is.

    Raises:
        FixedBatchError: it can be captured for batches of the size of ``tensors`` only.
    """

    def share_their_batch(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        for k in batched[1:]:
            torch._check(inputs[k].shape[0] == inputs[batched[0]].shape[0])  # type: ignore[no-untyped-call]

    def captured(tensors: Sequence[torch.Tensor], size: Any) -> ExportedProgram:
        shapes = shapes_of(module, len(tensors), batched, size)
        return torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=strict)

    handle = module.register_forward_pre_hook(share_their_batch)
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # they read values, and a capture has none
    try:
        with OtherForms() as forms, forms.checks.of_numbers(), own_gradients.captured(), packed.of_any_batch():
            try:
                return Capture(captured(tensors, Dim("batch")), "", forms.hooked, forms.padded, forms.checks)
            except UserError as error:
                if not batched or error.error_type is not UserErrorType.CONSTRAINT_VIOLATION or "data-dependent" in str(error):
                    raise
                reason = error
            for example in (tensors, enlarged(tensors, batched)):  # half of two samples is one, which is a constant
                with contextlib.suppress(Exception):
                    program = captured(example, Dim.AUTO)
                    assumed = _assumed(program, example[batched[0]].shape[0])
                    if assumed is not None:
                        return Capture(program, assumed, forms.hooked, forms.padded, forms.checks)
            raise FixedBatchError(_guard_of(reason)) from None
    finally:
        Distribution.set_default_validate_args(checks)
        handle.remove()


def shapes_of(module: torch.nn.Module, count: int, batched: Sequence[int], size: Any) -> Any:
    """The ``dynamic_shapes`` of a call with ``count`` tensors, by the parameters of ``forward``: ``size`` for each batch."""
    if not batched:
        return None
    shapes: tuple[Any, ...] = tuple({0: size} if k in batched else None for k in range(count))
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        shapes = (*shapes[:first], shapes[first:])
    return shapes


def _assumed(program: ExportedProgram, size: int) -> str | None:
    """The comparisons by which a program chose its way, and whose outcome batches of other sizes do not share.

    None where the batch has become a number: no input has one of any size, or it equals what does not grow with it.
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    firsts: list[Any] = [v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim()]
    batches = [size for size in firsts if isinstance(size, torch.SymInt)]
    if not batches:
        return None
    assumed = []
    for guard in batches[0].node.shape_env.guards:
        outcomes = [guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, k * size)) for k in _MULTIPLES]
        if all(outcome == sympy.true for outcome in outcomes):
            continue
        if isinstance(guard.expr, sympy.Eq):
            return None
        assumed.append(str(guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, sympy.Symbol("batch")))))
    return " and ".join(assumed)


def _guard_of(error: UserError) -> str:
    """The condition that a message of ``torch.export`` tells, in brackets; "" where it tells none."""
    found = re.search(r"generated guard (.*)\.", str(error))
    return "" if found is None else " (" + re.sub(r"L\['(\w+)'\]\.size\(\)\[0\]", r"\1.shape[0]", found[1]) + ")"
