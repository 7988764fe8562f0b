"""Keeps the gradients that a module's own ``torch.autograd.Function`` classes define.

    class Sign(Function):                      y = Sign(x);  a = graphc.AdjointOf(y)
        def forward(ctx, x): …                 t = graphc.AddAdjoint(a, x, backward of a)
        def backward(ctx, dy): return dy       z = graphc.TakeAdjoint(y, a, t)

A capture sees what ``forward`` computes, and would be differentiated through that: a straight-through estimator would have no
gradient, a gradient reversal none that is reversed. Here ``backward`` is captured as well, of a stand-in for the adjoint, and
three nodes tell ``autodiff`` whose adjoint that is and where the results go. Elsewhere they compute what ``forward`` does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from graphc.errors import ModelError
from graphc.frontends.torch_export.marks import OPERATOR, arguments
from graphc.ir import DOMAIN

TRAINING = "ai.onnx.preview.training"
"""Domain of ONNX's ``Gradient``."""


class _Context(FunctionCtx):
    """What ``forward`` leaves for ``backward``."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save

    saved_variables = saved_tensors  # the name that older code has for them


@contextmanager
def captured() -> Iterator[None]:
    """While the block runs, calls of a module's own Functions by this thread record their gradients. One captures at a time."""
    calls, thread = itertools.count(), threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == thread
        if here and cls is CheckpointFunction:  # computes without gradients, which its backward pass makes up for
            return args[0](*args[2:])
        if not here or not torch.is_grad_enabled() or _is_of_pytorch(cls):
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        return _recorded(cls, args, kwargs, calls)

    derivative = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by torch.func, which computes with this too
        other = transformed or threading.get_ident() != thread
        return derivative(*args, **kwargs) if other else _derivatives(*args, **kwargs)

    torch.autograd.grad = grad  # type: ignore[assignment]
    try:
        with _applied_by(apply):
            yield
    finally:
        torch.autograd.grad = derivative


@contextmanager
def _applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Let ``apply`` run Functions, also through an ``f = Sign.apply`` of long ago: that calls the base class's in the end."""
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _is_of_pytorch(function: type) -> bool:
    return function.__module__.partition(".")[0] == "torch"


def _derivatives(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor, ...]:
    """What ``torch.autograd.grad`` returns, as nodes that name what is differentiated; values that are unused give zeros."""
    del retain_graph, only_inputs, allow_unused, materialize_grads
    if is_grads_batched:
        raise TypeError("torch.autograd.grad with is_grads_batched=True cannot be captured: call it once for each gradient")
    parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    weights = [grad_outputs] if grad_outputs is None or isinstance(grad_outputs, torch.Tensor) else list(grad_outputs)
    weights += [None] * (len(parts) - len(weights))
    total = sum((y if w is None else y * w).sum() for y, w in zip(parts, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    found = [_node("Derivative", [x, total]) for x in wanted]
    return tuple(found if create_graph else (value.detach() for value in found))


@contextmanager
def refused() -> Iterator[None]:
    """While the block runs, calls of a module's own Functions by this thread fail: a trace drops their gradients."""

    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == thread
        if here and cls is CheckpointFunction:
            return args[0](*args[2:])
        if here and not _is_of_pytorch(cls):
            raise TypeError(f"it would lose the gradient that the torch.autograd.Function {cls.__name__} defines")
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    with _applied_by(apply):
        yield


def _recorded(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], calls: Iterator[int]) -> Any:
    """The outputs of a call of ``function``, with its gradient."""
    floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in args]
    inputs = [x.clone() if is_float else x for x, is_float in zip(args, floats, strict=True)]  # it may assign to them
    context = _Context(tuple(is_float and x.requires_grad for x, is_float in zip(args, floats, strict=True)))
    with torch.no_grad():
        if function.setup_context is _SingleLevelFunction.setup_context:
            result = function.forward(context, *inputs, **kwargs)
        else:
            result = function.forward(*inputs, **kwargs)
            function.setup_context(context, tuple(inputs), result)
    if not any(context.needs_input_grad):
        return result
    outputs = result if isinstance(result, tuple) else (result,)
    fixed = {id(y) for y in context.non_differentiable}
    taken = [k for k, y in enumerate(outputs) if isinstance(y, torch.Tensor) and y.is_floating_point() and id(y) not in fixed]
    if not taken:
        return result
    call = next(calls)
    adjoints = {k: _node("AdjointOf", [outputs[k]], call=call) for k in taken}
    with torch.no_grad():
        given = [adjoints.get(k, _no_adjoint(context, y)) for k, y in enumerate(outputs)]
        backward = function.backward if function.backward is not _SingleLevelFunction.backward else function.vjp
        try:
            found = backward(context, *given)
        except Exception as error:
            raise TypeError(f"the backward pass of {function.__name__} cannot be captured: {error}") from None
    through = adjoints[taken[0]]
    for x, needed, dx in zip(args, context.needs_input_grad, found if isinstance(found, tuple) else (found,), strict=False):
        if needed and dx is not None:
            fits = dx if dx.shape == x.shape else dx.sum_to_size(x.shape)
            through = _node("AddAdjoint", [through, x, fits.to(x.dtype)])
    marked = [_node("TakeAdjoint", [y, adjoints[k], through]) if k in adjoints else y for k, y in enumerate(outputs)]
    return tuple(marked) if isinstance(result, tuple) else marked[0]


def _no_adjoint(context: _Context, y: Any) -> torch.Tensor | None:
    """What ``backward`` gets for an output without an adjoint."""
    return torch.zeros_like(y) if context.materialize_grads and isinstance(y, torch.Tensor) else None


def _node(kind: str, inputs: list[torch.Tensor], **attributes: int) -> torch.Tensor:
    by_place, by_name = arguments(kind, inputs, inputs[0], attributes)
    result: torch.Tensor = OPERATOR(*by_place, **by_name)
    return result


def name_derivatives(model: ir.Model) -> None:
    """Write a capture's ``Derivative`` nodes as ONNX's ``Gradient``, which names values: they keep their names from here on.

    Raises:
        ModelError: a gradient goes through a Function of the module's own, whose gradient has none here.
    """
    for node in [node for node in model.graph if node.op_type == "Derivative" and node.domain == DOMAIN]:
        model.opset_imports[TRAINING] = 1
        x, total = node.inputs
        assert x is not None
        assert total is not None
        if _passes_own_gradient(x, total):
            raise ModelError(
                "torch.autograd.grad in forward goes through a torch.autograd.Function, whose backward pass cannot be"
                " differentiated again here: write the Function with PyTorch's operators"
            )
        node.op_type, node.domain = "Gradient", TRAINING
        node.attributes["xs"], node.attributes["y"] = ir.AttrStrings("xs", [x.name or ""]), ir.AttrString("y", total.name or "")
        node.resize_inputs(1)


def _passes_own_gradient(x: ir.Value, total: ir.Value) -> bool:
    """Whether ``total`` depends on ``x`` through a node that takes an adjoint of its own."""
    seen, stack = {x}, [x]
    while stack:
        for user in stack.pop().consumers():
            stack += [value for value in user.outputs if value not in seen]
            seen.update(user.outputs)
    before, stack = {total}, [total]
    while stack:
        node = stack.pop().producer()
        stack += [v for v in (node.inputs if node is not None else ()) if v is not None and v not in before]
        before.update(v for v in (node.inputs if node is not None else ()) if v is not None)
    producers = (value.producer() for value in seen & before)
    return any(node is not None and node.op_type == "TakeAdjoint" and node.domain == DOMAIN for node in producers)
