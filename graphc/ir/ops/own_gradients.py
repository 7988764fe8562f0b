"""Ops that tell ``autodiff`` a gradient which the model's author wrote: a ``torch.autograd.Function`` of PyTorch.

    y = f(x), computed without gradients          f's own backward pass is b(adjoint of y, what f saved)
    a = AdjointOf(y)
    t = AddAdjoint(a, x, b(a, saved))
    z = TakeAdjoint(y, a, t)

The forward graph holds the backward pass of f as well, fed by a stand-in. ``autodiff`` repeats it with the adjoint of z, and
takes the three nodes away, as ``inference_mode`` does.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import declare, same_as


@declare("AdjointOf", inputs="y", outputs="adjoint", attributes={"call": 0}, infer=same_as(0))
def adjoint_of(op: Builder, y: ir.Value, *, call: int) -> ir.Value:
    """The adjoint of y as the backward pass will know it; 0 outside of it. ``call`` keeps apart what is not one call."""
    return op.zeros_like(y)


@declare("AddAdjoint", inputs="through x dx", outputs="next", infer=same_as(0))
def add_adjoint(op: Builder, through: ir.Value, x: ir.Value, dx: ir.Value) -> ir.Value:
    """next = through; dx, which depends on an ``AdjointOf``, is a contribution to the adjoint of x."""
    return op.Identity(through)  # type: ignore[no-any-return]


@declare("TakeAdjoint", inputs="y adjoint through", outputs="z", infer=same_as(0))
def take_adjoint(op: Builder, y: ir.Value, adjoint: ir.Value, through: ir.Value) -> ir.Value:
    """z = y; the adjoint of z takes the place of ``adjoint`` in what the ``AddAdjoint`` nodes behind ``through`` pass on."""
    return op.Identity(y)  # type: ignore[no-any-return]


OWN_GRADIENTS = frozenset({"AdjointOf", "AddAdjoint", "TakeAdjoint"})
