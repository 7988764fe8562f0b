"""Buffers that a module changes while it trains follow PyTorch's, step by step, and evaluation reads what is stored."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm

import graphc
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.frontends.torch import export
from tests.frontends.torch_steps import batch, feeds, in_torch
from tests.tiers import params

SGD, MSE = graphc.optim.SGD(lr=0.05, momentum=0.9), graphc.losses.MSE()


class Spectral(torch.nn.Module):
    """Both spectral norms of PyTorch; one iterates three times a step."""

    def __init__(self) -> None:
        super().__init__()
        self.one = spectral_norm(torch.nn.Linear(6, 8), n_power_iterations=3)
        self.two = parametrizations.spectral_norm(torch.nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh())  # type: ignore[no-any-return]


class Average(torch.nn.Module):
    """An average of what it computes, with its own counter, flag and float count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("total", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.steps.add_(1)
                self.begun.fill_(True)
                self.total += 1
        return (y - self.average) / self.steps.float()  # type: ignore[no-any-return]


class Codebook(torch.nn.Module):
    """The codes of a VQ-VAE, which are averages of the rows nearest to them; evaluation reads only the codes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(6, 4), torch.nn.Linear(4, 4)
        self.register_buffer("book", torch.randn(5, 4))
        self.register_buffer("size", torch.ones(5))
        self.register_buffer("sum", self.book.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.into(x)
        near = (z[:, None] - self.book[None]).square().sum(-1).argmin(1)
        chosen = functional.one_hot(near, 5).to(z.dtype)
        code = chosen @ self.book
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sum.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
                self.book.copy_(self.sum / (self.size[:, None] + 1e-5))
        return self.out(z + (code - z).detach())  # type: ignore[no-any-return]


class Part(torch.nn.Module):
    """Assigns to a part of a buffer, and reads the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.register_buffer("kept", torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.kept[:, :4] = x.mean(0)[:4] * 0.5 + self.kept[:, :4] * 0.5
        return self.linear(x) + functional.linear(x, self.kept)  # type: ignore[no-any-return]


class State(torch.nn.Module):
    """Hands a state from batch to batch, in evaluation too: its result comes from the new state there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) + self.state)
        self.state.copy_(y.detach().mean(0))
        return y + self.state  # type: ignore[no-any-return]


class Teacher(torch.nn.Module):
    """A frozen copy of a layer follows it, as in BYOL and MoCo: parameters that change without training."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.out = torch.nn.Linear(6, 8), torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.out(self.student(x).tanh() * self.teacher(x))  # type: ignore[no-any-return]


def in_graphc(trainer: graphc.Trainer, seeds: range) -> list[float]:
    return [trainer.step(feeds(seed))["loss"] for seed in seeds]


def compare_state(trainer: graphc.Trainer, module: torch.nn.Module) -> None:
    values, expected = trainer.trained_values(), module.state_dict()
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        assert values[name].dtype == tensor.numpy().dtype, name
        np.testing.assert_allclose(values[name], tensor.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "kind", params([Spectral, Average, Codebook, Part, State, Teacher], full=[Average, Codebook, Part, State])
)
def test_they_follow_pytorch_and_the_exported_file_evaluates_as_the_module_does(
    kind: type[torch.nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = kind()
    program = graphc.compile(module, example_inputs=(batch(0)[0],), loss=MSE, optimizer=SGD)
    with graphc.Trainer(program, threads=1) as trainer:
        np.testing.assert_allclose(in_graphc(trainer, range(5)), in_torch(module, range(5), lr=0.05, momentum=0.9), rtol=1e-5)
        compare_state(trainer, module)
        trainer.export(tmp_path / "trained.onnx")
        x, label = batch(9)
        with torch.no_grad():
            y = module.eval()(x)
        (found,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x.numpy()})
        np.testing.assert_allclose(found, y.numpy(), rtol=1e-5, atol=1e-6)
        loss = trainer.evaluate([{"x": x.numpy(), "label": label.numpy()}])["loss"]
        np.testing.assert_allclose(loss, functional.mse_loss(y, label).item(), rtol=1e-5)


@pytest.mark.parametrize("kind", params([Spectral, Codebook], full=[Spectral, Codebook]))
def test_a_file_goes_on_where_the_run_that_wrote_it_ended(kind: type[torch.nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = kind()
    path = tmp_path / "trained.onnx"
    plain = graphc.optim.SGD(lr=0.05)
    graphc.frontends.save(export(module, batch(0)[0]), path)
    for seeds in (range(3), range(3, 6)):
        with graphc.Trainer(graphc.compile(path, loss=MSE, optimizer=plain), threads=1) as trainer:
            found = in_graphc(trainer, seeds)
            trainer.export(path)
        np.testing.assert_allclose(found, in_torch(module, seeds, lr=0.05), rtol=1e-5)


STRATEGIES: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "uneven shares": {},
    "zero 3": {"strategy": "zero:stage=3"},
    "micro-batches": {"accumulate": 2},
    "stages": {"mesh": graphc.Mesh(pipe=2)},
}


@pytest.mark.parametrize("name", params(STRATEGIES, full=[name for name in STRATEGIES if name != "mirrored"]))
def test_workers_share_what_they_keep(name: str, tmp_path: Path) -> None:
    """Spectral norm does not mix samples: every strategy gives what PyTorch has with the whole batch."""
    torch.manual_seed(2)
    module = torch.nn.Sequential(parametrizations.spectral_norm(torch.nn.Linear(6, 8)), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    path = tmp_path / "model.onnx"
    graphc.frontends.save(export(module, {"input": batch(0)[0]}, input_names=["x"]), path)
    options = STRATEGIES[name]

    def train(comm: Any) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
        program, losses = graphc.compile(path, loss=MSE, optimizer=SGD, **options), []
        part = share(8, comm.rank, comm.size) if name != "uneven shares" else slice(*((0, 3), (3, 8))[comm.rank])
        rows = slice(0, 8) if name == "stages" else part
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            for seed in range(5):
                losses.append(trainer.step(feeds(seed, rows))["loss"])
            return losses, trainer.trained_values()

    results = run_threads(2, train)
    np.testing.assert_allclose(results[0][0], in_torch(module, range(5), lr=0.05, momentum=0.9), rtol=1e-5)
    for key, tensor in module.state_dict().items():
        np.testing.assert_allclose(results[0][1][key], tensor.numpy(), rtol=1e-5, atol=1e-6, err_msg=key)
        np.testing.assert_array_equal(results[0][1][key], results[1][1][key], err_msg=key)


@pytest.mark.gpu
def test_counters_and_flags_change_on_a_gpu_as_averages_do() -> None:
    torch.manual_seed(0)
    module = Average()
    program = graphc.compile(module, example_inputs=(batch(0)[0],), loss=MSE, optimizer=SGD, backend="cupy")
    with graphc.Trainer(program, threads=1) as trainer:
        np.testing.assert_allclose(in_graphc(trainer, range(5)), in_torch(module, range(5), lr=0.05, momentum=0.9), rtol=1e-5)
        compare_state(trainer, module)


def test_a_frozen_buffer_stays_and_is_read() -> None:
    torch.manual_seed(3)
    module = Average()
    with torch.no_grad():
        module.average.fill_(0.5)
    program = graphc.compile(module, example_inputs=(batch(0)[0],), loss=MSE, optimizer=SGD, freeze=["average", "steps"])
    x, label = batch(1)
    with graphc.Trainer(program, threads=1) as trainer:
        loss = in_graphc(trainer, range(1, 2))[0]
        values = trainer.trained_values()
    np.testing.assert_allclose(loss, functional.mse_loss((module.linear(x) - 0.5) / 3, label).item(), rtol=1e-5)
    np.testing.assert_array_equal(values["average"], np.full(4, 0.5, np.float32))
    assert values["total"] == 1


class Counting(torch.nn.Module):
    """Counts rows with a sign in an integer, which differs between workers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)
        self.register_buffer("positive", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.positive += (x[:, 0] > 0).sum()
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "exporter", "name"), [(Counting, "dynamo", "positive"), (Part, "torchscript", "kept")])
def test_what_stays_as_it_is_is_warned_of(kind: type[torch.nn.Module], exporter: str, name: str) -> None:
    module = kind()
    before = module.get_buffer(name).clone()
    with pytest.warns(UserWarning, match=f"PyTorch changes '{name}' with every step of training; here each stays as it is now"):
        export(module, batch(0)[0], exporter=exporter)
    assert torch.equal(module.get_buffer(name), before)


def test_counters_of_normalisations_are_not_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = export(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)), batch(0)[0])
    assert not any("num_batches_tracked" in name for name in model.graph.initializers)
    assert not model.functions
