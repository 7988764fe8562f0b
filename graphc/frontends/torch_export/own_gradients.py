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
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from graphc.errors import ModelError
from graphc.frontends.torch_export.marks import OPERATOR, arguments
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder

TRAINING = "ai.onnx.preview.training"
"""Domain of ONNX's ``Gradient``."""


class LostGradientError(TypeError):
    """What an exporter would write of a module trains otherwise than the module does."""


class _Context(FunctionCtx):
    """What ``forward`` leaves for ``backward``.

    Args:
        copies: operands as ``forward`` gets them, with the operands themselves.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True
        self._copies = [(copy, copy._version, x) for copy, x in copies]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """Operands are the operands themselves, unless ``forward`` assigned to them: ``backward`` may differentiate by them."""
        kept = {id(copy): x for copy, version, x in self._copies if copy._version == version}
        return tuple(kept.get(id(value), value) for value in self.to_save)

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
    """While the block runs, calls of a module's own Functions by this thread fail: a trace drops their gradients.

    Raises:
        LostGradientError: there was a call.
    """

    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == thread
        if here and cls is CheckpointFunction:
            return args[0](*args[2:])
        needed = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        if here and needed and not _is_of_pytorch(cls):
            raise LostGradientError(f"it would lose the gradient that the torch.autograd.Function {cls.__name__} defines")
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    with _applied_by(apply):
        yield


def refuse_if_called(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Call ``module`` to see that it needs no Functions of its own, which a capture of bytecode takes apart unseen.

    Raises:
        LostGradientError: it calls one.
    """
    with torch.random.fork_rng(devices=()), refused():
        try:
            module(*tensors)
        except LostGradientError:
            raise
        except Exception:  # the capture tells
            return


def _recorded(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], calls: Iterator[int]) -> Any:
    """The outputs of a call of ``function``, with its gradient."""
    floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in args]
    inputs = [x.clone() if is_float else x for x, is_float in zip(args, floats, strict=True)]  # it may assign to them
    context = _Context(
        tuple(is_float and x.requires_grad for x, is_float in zip(args, floats, strict=True)),
        [(copy, x) for copy, x, is_float in zip(inputs, args, floats, strict=True) if is_float],
    )
    with _WithoutGradients():
        if function.setup_context is _SingleLevelFunction.setup_context:
            result = function.forward(context, *inputs, **kwargs)
        else:
            result = function.forward(*inputs, **kwargs)
            function.setup_context(context, tuple(inputs), result)
    outputs = result if isinstance(result, tuple) else (result,)
    fixed = {id(y) for y in context.non_differentiable}
    taken = [k for k, y in enumerate(outputs) if isinstance(y, torch.Tensor) and y.is_floating_point() and id(y) not in fixed]
    if not any(context.needs_input_grad) or not taken:
        return tuple(map(_detached, outputs)) if isinstance(result, tuple) else _detached(result)
    call = next(calls)
    adjoints = {k: _node("AdjointOf", [outputs[k]], call=call) for k in taken}
    with _WithoutGradients():
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
    marked = [_node("TakeAdjoint", [y, adjoints[k], through]) if k in adjoints else _detached(y) for k, y in enumerate(outputs)]
    return tuple(marked) if isinstance(result, tuple) else marked[0]


class _WithoutGradients(TorchFunctionMode):
    """``torch.no_grad()`` that a capture does not note, as the blocks inside are not: PyTorch's passes take time in the square
    of the number of such blocks, and a model may have a Function for each activation.

    What the block returns goes through ``TakeAdjoint`` or ``detach``, so that nothing is differentiated through it.
    """

    def __enter__(self) -> _WithoutGradients:
        self._before = torch.is_grad_enabled()
        _set_gradients(False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        _set_gradients(self._before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _set_gradients(*args) if func is torch._C._set_grad_enabled else func(*args, **(kwargs or {}))


def _set_gradients(enabled: bool) -> None:
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


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
        between = _after(x) & _before(total)
        if any(n is not None and n.op_type == "TakeAdjoint" and n.domain == DOMAIN for n in (v.producer() for v in between)):
            raise ModelError(
                "torch.autograd.grad in forward goes through a torch.autograd.Function, whose backward pass cannot be"
                " differentiated again here: write the Function with PyTorch's operators"
            )
        if not between:
            op = Builder(model.graph, before=node)
            node.outputs[0].replace_all_uses_with(op.zeros_like(x))
            model.graph.remove(node, safe=True)
            continue
        node.op_type, node.domain = "Gradient", TRAINING
        node.attributes["xs"], node.attributes["y"] = ir.AttrStrings("xs", [x.name or ""]), ir.AttrString("y", total.name or "")
        node.resize_inputs(1)


def _after(value: ir.Value) -> set[ir.Value]:
    """``value`` and all that depends on it."""
    seen, stack = {value}, [value]
    while stack:
        for user in stack.pop().consumers():
            stack += [found for found in user.outputs if found not in seen]
            seen.update(user.outputs)
    return seen


def _before(value: ir.Value) -> set[ir.Value]:
    """``value`` and all that it depends on."""
    seen, stack = {value}, [value]
    while stack:
        node = stack.pop().producer()
        found = [v for v in (node.inputs if node is not None else ()) if v is not None and v not in seen]
        stack += found
        seen.update(found)
    return seen
