"""Gradients that a module defines itself (``torch.autograd.Function``) are those that train it, as in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphc
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import ModelError
from graphc.frontends.torch import export
from tests.frontends.torch_steps import batch, compare, feeds, in_torch
from tests.tiers import params

SGD, MSE = graphc.optim.SGD(lr=0.1), graphc.losses.MSE()
T = torch.Tensor


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, dy: T) -> T:  # type: ignore[override]
        return dy


class Rounded(torch.autograd.Function):
    """A quantiser whose gradient ends at its limits, and whose step learns, in the newer form of Functions."""

    @staticmethod
    def forward(x: T, step: T, limit: float) -> T:  # type: ignore[override]
        return torch.clamp(torch.round(x / step), -limit, limit) * step

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[T, T, float], output: T) -> None:
        x, step, ctx.limit = inputs
        ctx.save_for_backward(x, step)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: T) -> tuple[T | None, ...]:  # type: ignore[override]
        x, step = ctx.saved_tensors
        inside = (x / step).abs() <= ctx.limit
        dstep = dy * torch.where(inside, torch.round(x / step) - x / step, torch.sign(x) * ctx.limit)
        return dy * inside, dstep, None  # the engine sums dstep to the shape of step


class Reversed(torch.autograd.Function):
    """Returns its operand, and turns its gradient around."""

    @staticmethod
    def forward(ctx: Any, x: T, factor: float) -> T:  # type: ignore[override]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: T) -> tuple[T, None]:  # type: ignore[override]
        return -ctx.factor * dy, None


class Parts(torch.autograd.Function):
    """Several outputs, one of them of integers, with gradients of its own of both operands."""

    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> tuple[T, T, T]:  # type: ignore[override]
        y = x @ w
        place = y.argmax(1)
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(x, w, y)
        return y.relu(), place, y.square()

    @staticmethod
    def backward(ctx: Any, drelu: T, dplace: T | None, dsquare: T) -> tuple[T, T]:  # type: ignore[override]
        x, w, y = ctx.saved_variables
        assert dplace is not None  # zeros
        dy = drelu * (y > -0.1) + dsquare * y.clamp(-1, 1)
        return 0.5 * dy @ w.t(), 2.0 * x.t() @ dy


class Doubled(torch.autograd.Function):
    """Assigns to its operand."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:  # type: ignore[override]
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, dy: T) -> T:  # type: ignore[override]
        return dy * 3.0


class Recomputed(torch.autograd.Function):
    """Calls a function again to differentiate it, by parameters and by a value that the function finds outside."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[T], T], x: T, *rest: T) -> T:  # type: ignore[override]
        ctx.function = function
        ctx.save_for_backward(x, *rest)
        return function(x)

    @staticmethod
    def backward(ctx: Any, dy: T) -> tuple[T | None, ...]:  # type: ignore[override]
        x, *rest = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = ctx.function(again)
        return None, *torch.autograd.grad(y, (again, *rest), dy, allow_unused=True)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)
        self.step = torch.nn.Parameter(torch.tensor([0.25]))


sign = Sign.apply
"""As modules often call them."""


class Straight(Model):
    """Binary activations and weights: the Function twice, once of a parameter."""

    def forward(self, x: T) -> T:
        h = sign(self.inner(x))  # type: ignore[no-untyped-call]
        return functional.linear(h, Sign.apply(self.outer.weight), self.outer.bias) * self.step  # type: ignore[no-untyped-call]


class Quantised(Model):
    def forward(self, x: T) -> T:
        return self.outer(Rounded.apply(self.inner(x).tanh(), self.step, 3.0))  # type: ignore[no-any-return,no-untyped-call]


class Adversarial(Model):
    """Two heads of one encoder, one behind a reversal."""

    def forward(self, x: T) -> T:
        h = self.inner(x).tanh()
        other = functional.linear(Reversed.apply(h, 0.3), self.outer.weight.flip(1))  # type: ignore[no-untyped-call]
        return self.outer(h) + other * self.step  # type: ignore[no-any-return]


class Several(Model):
    def forward(self, x: T) -> T:
        relu, place, square = Parts.apply(self.inner(x).tanh(), self.outer.weight.t())  # type: ignore[no-untyped-call]
        return (relu + square * self.step) * (1 + functional.one_hot(place, 4))  # type: ignore[no-any-return]


class OneOfSeveral(Model):
    """The first output is not read: its adjoint is zero."""

    def forward(self, x: T) -> T:
        return Parts.apply(self.inner(x).tanh(), self.outer.weight.t())[2] * self.step  # type: ignore[no-any-return,no-untyped-call]


class Assigning(Model):
    def forward(self, x: T) -> T:
        return self.outer(Doubled.apply(self.inner(x).tanh() + 0.0)) * self.step  # type: ignore[no-any-return,no-untyped-call]


class Checkpointed(Model):
    """Of both kinds: the older one computes without gradients, and again in the backward pass."""

    def forward(self, x: T) -> T:
        h = checkpoint(lambda v: self.inner(v).tanh(), x + 0 * self.step, use_reentrant=True)
        return checkpoint(lambda v: self.outer(v) * self.step, h, use_reentrant=False)  # type: ignore[no-any-return]


class Recomputing(Model):
    """One of the operands of the Function is not used."""

    def forward(self, x: T) -> T:
        h = self.inner(x).tanh()
        gate = h.sigmoid()
        unused = self.step * 2
        y = Recomputed.apply(lambda v: self.outer(v * gate).square(), h, gate, unused, *self.outer.parameters())  # type: ignore[no-untyped-call]
        return y * self.step  # type: ignore[no-any-return]


class Counted(Model):
    """Its code takes the size of the batch for a number, which a capture of bytecode does not."""

    def forward(self, x: T) -> T:
        return self.outer(Sign.apply(self.inner(x))) * self.step / len(x)  # type: ignore[no-untyped-call]


class Detached(Model):
    """Parameters and results without gradients, in all ways to write it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def gate(self, x: T) -> T:
        return torch.sigmoid(self.inner(x))

    def forward(self, x: T) -> T:
        h = self.inner(x).tanh() * self.scale
        y = functional.linear(h, self.outer.weight.data) + functional.linear(h * self.scale.detach(), self.outer.weight)
        twice, kept = h * 2, h * 1
        kept.detach_()
        with torch.no_grad():
            plain = self.outer(h)
            with torch.enable_grad():
                y = y + self.outer(twice * kept * self.gate(x) * h.clone().detach_())
        return y * self.step + plain


class Traced(Model):
    """The forms that the older exporter takes."""

    def forward(self, x: T) -> T:
        h = self.inner(x).tanh()
        y = functional.linear(h, self.outer.weight.detach()) + self.outer(h * h.data)
        with torch.no_grad():
            plain = self.outer(h)
        return checkpoint(lambda v: v * self.step, y, use_reentrant=True) + plain  # type: ignore[no-any-return]


def test_the_older_exporter_keeps_what_is_detached() -> None:
    torch.manual_seed(0)
    module = Traced()
    model = export(module, batch(0)[0], exporter="torchscript")
    with graphc.Trainer(graphc.compile(model, loss=MSE, optimizer=SGD), threads=1) as trainer:
        np.testing.assert_allclose(
            [trainer.step(feeds(seed))["loss"] for seed in range(3)], in_torch(module, range(3), lr=0.1), rtol=1e-5
        )
        compare(trainer.trained_values(), module)


class Clamped(Model):
    """Assigns to a parameter, and computes with what it assigned."""

    def forward(self, x: T) -> T:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.outer(self.inner(x).tanh()) * self.step  # type: ignore[no-any-return]


class InPlace(Model):
    def forward(self, x: T) -> T:
        h = self.inner(x).tanh() * 1
        h.detach_()
        return self.outer(h) * self.step  # type: ignore[no-any-return]


class Frequencies(Model):
    """An embedding whose rows learn the mean of their gradients, not the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(6, 8, scale_grad_by_freq=True)

    def forward(self, x: T) -> T:
        return self.outer(self.table(x.abs().argmax(1)).tanh()) * self.step  # type: ignore[no-any-return]


KINDS = [Detached, Frequencies, Straight, Quantised, Adversarial, Several, OneOfSeveral, Assigning, Checkpointed, Recomputing]


@pytest.mark.parametrize(
    ("kind", "source"),
    params(
        product(KINDS, ("module", "file")),
        full=[*((kind, "module") for kind in KINDS if kind is not Straight), (Several, "file")],
        large=[(kind, "file") for kind in KINDS if kind is not Several],
    ),
)
def test_they_train_as_in_pytorch_and_evaluate_as_forward_does(kind: type[Model], source: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module: Any = kind()
    path, given = tmp_path / "model.onnx", {"example_inputs": (batch(0)[0],)}
    if source == "file":
        graphc.frontends.save(export(module, batch(0)[0]), path)
        given = {}
    program = graphc.compile(path if source == "file" else module, loss=MSE, optimizer=SGD, **given)
    with graphc.Trainer(program, threads=1) as trainer:
        losses = [trainer.step(feeds(seed))["loss"] for seed in range(3)]
        np.testing.assert_allclose(losses, in_torch(module, range(3), lr=0.1), rtol=1e-5)
        compare(trainer.trained_values(), module)
        x, label = batch(9)
        with torch.no_grad():
            y = module(x)
        loss = trainer.evaluate([feeds(9)])["loss"]
        np.testing.assert_allclose(loss, functional.mse_loss(y, label).item(), rtol=1e-5)
        trainer.export(path)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, y.numpy(), rtol=1e-5, atol=1e-6)


def test_nothing_of_a_backward_pass_is_computed_twice_or_in_evaluation() -> None:
    program = graphc.compile(Quantised(), loss=MSE, optimizer=SGD, example_inputs=(batch(0)[0],))
    for model in (program.model, program.inference):
        assert not {"AdjointOf", "AddAdjoint", "TakeAdjoint"} & {node.op_type for node in model.graph}
    assert sum(node.op_type == "LessOrEqual" for node in program.model.graph) == 1
    assert not any(node.op_type in ("LessOrEqual", "Sign") for node in program.inference.graph)


OPTIONS: dict[str, dict[str, Any]] = {
    "zero 3": {"strategy": "zero:stage=3"},
    "stages": {"mesh": graphc.Mesh(pipe=2)},
    "micro-batches": {"accumulate": 2},
    "recomputed": {"recompute": "all"},
    "numpy": {"backend": "numpy"},
}


@pytest.mark.parametrize("name", params(OPTIONS, full=OPTIONS))
def test_every_strategy_follows_them(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path = Adversarial(), tmp_path / "model.onnx"
    graphc.frontends.save(export(module, batch(0)[0]), path)
    whole = name in ("stages", "numpy", "recomputed")

    def train(comm: Any) -> tuple[list[float], dict[str, Any]]:
        program = graphc.compile(path, loss=MSE, optimizer=SGD, **OPTIONS[name])
        rows = slice(None) if whole else share(8, comm.rank, comm.size)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            return [trainer.step(feeds(seed, rows))["loss"] for seed in range(3)], trainer.trained_values()

    results, expected = run_threads(1 if name in ("numpy", "recomputed") else 2, train), in_torch(module, range(3), lr=0.1)
    for losses, values in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        compare(values, module)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Straight, r"lose the gradient that the torch\.autograd\.Function Sign defines"),
        (Clamped, r"lose the gradient of what forward assigns to 'inner\.weight'"),
        (InPlace, r"lose a detach_\(\); write x = x\.detach\(\)"),
    ],
)
def test_what_the_older_exporter_would_lose_is_refused(kind: type[Model], what: str) -> None:
    module = kind()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(ModelError, match=f"torchscript: .*{what}"):
        export(module, batch(0)[0], exporter="torchscript")
    assert all(map(torch.equal, before, module.parameters()))


class Hooked(Model):
    def forward(self, x: T) -> T:
        h = self.inner(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda dy: dy * 0.1)
        return self.outer(h) * self.step  # type: ignore[no-any-return]


def _hooked_parameter() -> Model:
    module = Checkpointed()
    module.inner.weight.register_hook(lambda dy: dy * 0.1)
    return module


def _hooked_module() -> Model:
    module = Checkpointed()
    module.outer.register_full_backward_hook(lambda *_: None)
    return module


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Hooked, "a tensor that forward computes"),
        (_hooked_parameter, r"the parameter 'inner\.weight'"),
        (_hooked_module, "the module 'outer'"),
    ],
)
def test_hooks_on_gradients_are_warned_of(make: Callable[[], Model], what: str) -> None:
    with pytest.warns(UserWarning, match=f"the hook on the gradient of {what} does not run"):
        export(make(), batch(0)[0])


@pytest.mark.full
def test_a_parameter_that_is_assigned_to_has_the_gradient_of_what_is_assigned() -> None:
    torch.manual_seed(0)
    module = Clamped()
    before = module.inner.weight.detach().clone()
    with pytest.warns(UserWarning, match="forward assigns to 'inner.weight'.*goes on from what was there before"):
        program = graphc.compile(module, example_inputs=(batch(0)[0],), loss=MSE, optimizer=SGD)
    assert torch.equal(module.inner.weight, before)
    with graphc.Trainer(program, threads=1) as trainer:
        loss, values = trainer.step(feeds(0))["loss"], trainer.trained_values()
    np.testing.assert_allclose([loss], in_torch(module, range(1), lr=0.1), rtol=1e-5)
    assert module.inner.weight.grad is not None
    np.testing.assert_allclose(values["inner.weight"], (before - 0.1 * module.inner.weight.grad).numpy(), rtol=1e-5, atol=1e-6)
    del values["inner.weight"]
    np.testing.assert_allclose(values["outer.weight"], module.outer.weight.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_capture_of_bytecode_does_not_lose_them() -> None:
    torch.manual_seed(0)
    module = Counted()
    with pytest.warns(UserWarning, match="trains with batches of 8 only"):
        program = graphc.compile(module, example_inputs=(batch(0)[0],), loss=MSE, optimizer=SGD)
    with graphc.Trainer(program, threads=1) as trainer:
        losses = [trainer.step(feeds(seed))["loss"] for seed in range(3)]
        np.testing.assert_allclose(losses, in_torch(module, range(3), lr=0.1), rtol=1e-5)
        compare(trainer.trained_values(), module)


def test_other_modules_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = export(torch.nn.Linear(6, 4), batch(0)[0])
    assert not model.functions


def test_an_operator_with_a_gradient_of_its_own_is_refused_by_name() -> None:
    @torch.library.custom_op("graphc_tests::spike", mutates_args=())
    def spike(x: T) -> T:
        return (x > 0).to(x.dtype)

    spike.register_fake(torch.empty_like)
    spike.register_autograd(lambda _, slope: slope)

    class Spiking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(6, 4)

        def forward(self, x: T) -> T:
            return spike(self.inner(x))

    with pytest.raises(ModelError, match=r"graphc_tests::spike defines its gradient .*call a torch.autograd.Function"):
        export(Spiking(), batch(0)[0])
