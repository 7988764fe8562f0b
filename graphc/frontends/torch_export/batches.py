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
from collections.abc import Mapping, Sequence
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
        least: the size from which on it holds for all axes but the batch; 0: for any.
    """

    program: ExportedProgram
    assumed: str
    hooked: bool
    padded: bool
    checks: Sequence[str]
    least: int = 0


Axes = Sequence[Mapping[int, str]]
"""For each input its axes of any size, with a symbol each: ``batch`` for the batch. Axes with one symbol are of one size."""

BATCH = "batch"

_MULTIPLES = range(1, 9)
"""Of the example's batch: what is so for all of them is said of a batch in general, such as that it is even."""


_LEAST = (8, 32, 128, 512)
"""Sizes of other axes from which on a module may be captured where it cannot for all: strides of 2 leave 1 of short ones."""


def only_batches(axes: Axes) -> bool:
    """Whether batches alone are of any size."""
    return {symbol for symbols in axes for symbol in symbols.values()} == {BATCH}


def enlarged(tensors: Sequence[torch.Tensor], batched: Sequence[int]) -> list[torch.Tensor]:
    """``tensors`` with batches of eight times their size, whose halves and quarters have more than one sample."""
    return [t.repeat(8, *[1] * (t.dim() - 1)) if k in batched else t for k, t in enumerate(tensors)]


def capture(module: torch.nn.Module, tensors: Sequence[torch.Tensor], axes: Axes, *, strict: bool) -> Capture:
    """Capture ``module`` called with ``tensors``.

    Args:
        axes: those of any size.
        strict: follow the module's bytecode, which is slow, and knows what ``len(x)`` is.

    Raises:
        FixedBatchError: it can be captured for batches of the size of ``tensors`` only.
        LostGradientError: a strict capture would lose the gradient of a Function of the module's own.
    """
    if strict:
        own_gradients.refuse_if_called(module, tensors)
    places: dict[str, list[tuple[int, int]]] = {}
    for k, symbols in enumerate(axes):
        for axis, symbol in symbols.items():
            places.setdefault(symbol, []).append((k, axis))
    batched = [k for k, axis in places.get(BATCH, ()) if axis == 0]

    def share_their_sizes(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        for (first, its), *others in places.values():
            for k, axis in others:
                torch._check(inputs[k].shape[axis] == inputs[first].shape[its])  # type: ignore[no-untyped-call]

    def captured(tensors: Sequence[torch.Tensor], size: Any = None, least: int = 0) -> ExportedProgram:
        shapes = shapes_of(module, axes, size, least)
        return torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=strict)

    handle = module.register_forward_pre_hook(share_their_sizes)
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # they read values, and a capture has none
    try:
        with OtherForms() as forms, forms.checks.of_numbers(), own_gradients.captured(), packed.of_any_batch():
            try:
                return Capture(captured(tensors), "", forms.hooked, forms.padded, forms.checks)
            except UserError as error:
                if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION or "data-dependent" in str(error):
                    raise
                reason = error
            if not only_batches(axes):
                shortest = min(tensors[k].shape[axis] for name, (*_, (k, axis)) in places.items() if name != BATCH)
                for least in _LEAST if "specified range" in str(reason) else ():
                    if least <= shortest:
                        with contextlib.suppress(UserError):
                            return Capture(captured(tensors, least=least), "", forms.hooked, forms.padded, forms.checks, least)
                raise reason
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


def shapes_of(module: torch.nn.Module, axes: Axes, size: Any = None, least: int = 0) -> Any:
    """The ``dynamic_shapes`` of a call, by the parameters of ``forward``.

    Args:
        size: in place of symbols.
        least: the smallest size of axes but the batch; 0: any.
    """
    if not any(axes):
        return None

    def dim(symbol: str) -> Any:
        if size is not None:
            return size
        return Dim(symbol, min=least) if least and symbol != BATCH else Dim(symbol)

    dims = {symbol: dim(symbol) for symbols in axes for symbol in symbols.values()}
    shapes: tuple[Any, ...] = tuple({axis: dims[symbol] for axis, symbol in symbols.items()} or None for symbols in axes)
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    first = kinds.index(inspect.Parameter.VAR_POSITIONAL) if inspect.Parameter.VAR_POSITIONAL in kinds else len(shapes)
    if first < len(shapes):
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
