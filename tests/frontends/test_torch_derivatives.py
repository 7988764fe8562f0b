"""``torch.autograd.grad`` inside ``forward``: forces of a potential, gradient penalties and inner steps train as in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

import graphc
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import ModelError
from graphc.frontends.torch import export
from tests.frontends.torch_steps import batch, compare, feeds, in_torch
from tests.tiers import params

SGD, MSE = graphc.optim.SGD(lr=0.1), graphc.losses.MSE()
T = torch.Tensor


class Potential(torch.nn.Module):
    """An energy and its forces, with respect to an input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.SiLU(), torch.nn.Linear(16, 1))

    def forward(self, x: T) -> T:
        x = x.requires_grad_(True)
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, -slope[:, :3]], 1)


class Penalty(torch.nn.Module):
    """The size of a gradient with respect to a hidden value, and a gradient that is not differentiated itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

    def forward(self, x: T) -> T:
        h = self.inner(x).tanh()
        y = self.outer(h).sigmoid()
        (weighted,) = torch.autograd.grad([y], [h], grad_outputs=[torch.full_like(y, 0.5)], create_graph=True)
        (fixed,) = torch.autograd.grad(y.square().sum(), h, retain_graph=True)
        return y + weighted.norm(dim=1, keepdim=True) + fixed.mean(1, keepdim=True)  # type: ignore[no-any-return]


class InnerStep(torch.nn.Module):
    """A step of the output layer inside the forward pass, as in MAML: gradients with respect to parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

    def forward(self, x: T) -> T:
        h = self.inner(x).tanh()
        error = (self.outer(h) - x[:, :4]).square().mean()
        dw, db = torch.autograd.grad(error, [self.outer.weight, self.outer.bias], create_graph=True)
        return functional.linear(h, self.outer.weight - 0.5 * dw, self.outer.bias - 0.5 * db)


@pytest.mark.parametrize("source", params(["module", "file"], full=["file"]))
@pytest.mark.parametrize("kind", params([Potential, Penalty, InnerStep], full=[Penalty, InnerStep]))
def test_they_train_as_in_pytorch_and_run_in_plain_onnxruntime(
    kind: type[torch.nn.Module], source: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module: Any = kind()
    path, given = tmp_path / "model.onnx", {"example_inputs": (batch(0)[0],)}
    if source == "file":
        graphc.frontends.save(export(module, batch(0)[0]), path)
        given = {}
    program = graphc.compile(path if source == "file" else module, loss=MSE, optimizer=SGD, **given)
    with graphc.Trainer(program, threads=1) as trainer:
        np.testing.assert_allclose(
            [trainer.step(feeds(seed))["loss"] for seed in range(3)], in_torch(module, range(3), lr=0.1), rtol=1e-5
        )
        compare(trainer.trained_values(), module)
        x, label = batch(9)
        y = module(x.clone()).detach()
        loss = trainer.evaluate([feeds(9)])["loss"]
        np.testing.assert_allclose(loss, functional.mse_loss(y, label).item(), rtol=1e-5)
        trainer.export(path)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, y.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"strategy": "zero:stage=3"}, {"accumulate": 2}, {"mesh": graphc.Mesh(pipe=2)}])
def test_workers_follow_one(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path = Potential(), tmp_path / "model.onnx"
    graphc.frontends.save(export(module, batch(0)[0]), path)

    def train(comm: Any) -> tuple[list[float], dict[str, Any]]:
        rows = slice(None) if "mesh" in options else share(8, comm.rank, comm.size)
        program = graphc.compile(path, loss=MSE, optimizer=SGD, **options)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            return [trainer.step(feeds(seed, rows))["loss"] for seed in range(3)], trainer.trained_values()

    results, expected = run_threads(2, train), in_torch(module, range(3), lr=0.1)
    for losses, values in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        compare(values, module)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, dy: T) -> T:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        share = x.sigmoid()
        return dy * share * (1 + x * (1 - share))


@pytest.mark.full
def test_what_cannot_be_captured_is_refused() -> None:
    class Own(Potential):
        def __init__(self) -> None:
            super().__init__()
            self.energy[1] = torch.nn.Module()
            self.energy[1].forward = Swish.apply  # type: ignore[method-assign]

    class Batched(Penalty):
        def forward(self, x: T) -> T:
            h = self.inner(x)
            return torch.autograd.grad(h, x, torch.eye(8).expand(8, 8, 8), is_grads_batched=True)[0]

    class Transformed(Potential):
        def forward(self, x: T) -> T:
            y, back = torch.func.vjp(self.energy, x)
            return back(torch.ones_like(y))[0]  # type: ignore[no-any-return]

    with pytest.raises(ModelError, match=r"goes through a torch\.autograd\.Function, whose backward pass cannot"):
        export(Own(), batch(0)[0])
    with pytest.raises(ModelError, match=r"is_grads_batched=True cannot be captured: call it once for each gradient"):
        export(Batched(), batch(0)[0], exporter="dynamo")
    with pytest.raises(ModelError, match="Transformed cannot be exported"):
        export(Transformed(), batch(0)[0])
