"""A PyTorch module goes straight into compile."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import graphc
from graphc import frontends
from graphc.bench.models import build
from graphc.bench.specs import SPECS


@pytest.mark.full
def test_a_module_trains_as_in_pytorch_and_what_it_holds_still_stays() -> None:
    module = build("lenet").train()
    module.features[0].weight.requires_grad_(False)
    x, y = SPECS["lenet"].batch(8)
    program = graphc.compile(
        module,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.05),
        example_inputs=(torch.from_numpy(x[:2]),),
    )
    (name,) = (v.name for v in program.model.graph.inputs if v.name != "label")
    reference = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
            reference.zero_grad()
            loss.backward()
            reference.step()
            assert trainer.step({name: x, "label": y})["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for key, value in module.named_parameters():
            np.testing.assert_allclose(trainer.state.arrays[key], value.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_a_module_without_example_inputs_is_told_what_is_missing() -> None:
    with pytest.raises(graphc.GraphcError, match="example_inputs"):
        graphc.compile(build("mlp"), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))


@pytest.mark.full
@pytest.mark.parametrize("how", ["parameters that do not train", "evaluation mode"])
def test_a_batch_normalisation_behaves_as_the_module_says(how: str) -> None:
    """Without gradients it still normalises with its batch; in evaluation mode it does not, and its parameters train."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    if how == "evaluation mode":
        module[1].eval()
    else:
        module[1].weight.requires_grad_(False)
        module[1].bias.requires_grad_(False)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    program = graphc.compile(
        module, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), example_inputs=(x,)
    )
    (name,) = (v.name for v in program.model.graph.inputs if v.name != "label")
    reference = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    with graphc.Trainer(program, threads=1) as trainer:
        follows(trainer, name, module, reference, (x, y), steps=3, rel=1e-5)
        found = trainer.trained_values()
    for key, value in [*module.named_parameters(), ("1.running_mean", module[1].running_mean)]:
        np.testing.assert_allclose(found[key], value.detach().numpy(), rtol=1e-4, atol=1e-6)


def follows(
    trainer: graphc.Trainer,
    name: str,
    module: torch.nn.Module,
    reference: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    *,
    steps: int,
    rel: float,
) -> None:
    """Train both on one batch; every loss is PyTorch's."""
    x, y = batch
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(module(x), y)
        reference.zero_grad()
        loss.backward()
        reference.step()
        assert trainer.step({name: x.numpy(), "label": y.numpy()})["loss"] == pytest.approx(loss.item(), rel=rel)


class Quantized(torch.nn.Module):
    """Rows are replaced by the nearest of a table, and gradients go straight through; a gate only weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
        self.table = torch.nn.Embedding(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        nearest = self.table((z.unsqueeze(1) - self.table.weight).square().sum(-1).argmin(1))
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(x))
        return self.last((z + (nearest - z).detach()) * gate)


@pytest.mark.full
def test_what_a_module_detaches_gets_no_gradient() -> None:
    torch.manual_seed(0)
    module, x, y = Quantized(), torch.randn(8, 4), torch.randint(0, 3, (8,))
    program = graphc.compile(
        module, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5), example_inputs=(x,)
    )
    reference = torch.optim.SGD(module.parameters(), lr=0.5)
    with graphc.Trainer(program, threads=1) as trainer:
        follows(trainer, "x", module, reference, (x, y), steps=5, rel=1e-5)


class Words(torch.nn.Module):
    """Words whose padding has a row that does not train; the table is tied to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(6, 3, padding_idx=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.words(x)).mean(1) @ self.words.weight.T


def test_the_row_for_padding_trains_as_in_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Words(), torch.tensor([[1, 2, 0], [2, 2, 5], [3, 4, 2]])
    with warnings.catch_warnings(action="error", category=UserWarning):
        frontends.save(frontends.export(module, x), str(tmp_path / "words.onnx"))
    program = graphc.compile(
        tmp_path / "words.onnx", loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5)
    )
    label = torch.tensor([1, 0, 4])
    reference = torch.optim.SGD(module.parameters(), lr=0.5)
    with graphc.Trainer(program, threads=1) as trainer:
        follows(trainer, "x", module, reference, (x, label), steps=4, rel=1e-6)
        np.testing.assert_allclose(
            trainer.trained_values()["words.weight"], module.words.weight.detach().numpy(), rtol=1e-6, atol=1e-7
        )


@pytest.mark.full
def test_what_would_train_otherwise_than_in_pytorch_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"row 2 of 'words.weight' trains"):
        frontends.export(Words(), torch.tensor([[1, 2]]), exporter="torchscript")


class Tables(torch.nn.Module):
    """Reads its parameters from a list and a dictionary, as cells with many weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.table = {name: torch.nn.Parameter(torch.rand(4) + 0.5) for name in ("scale", "shift")}
        self.listed = [torch.nn.Parameter(torch.rand(4, 4) - 0.5)]
        for name, value in [*self.table.items(), ("turn", self.listed[0])]:
            self.register_parameter(name, value)
        self.unknown = [torch.nn.Parameter(torch.ones(4))]  # which no optimizer is given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x)) * self.table["scale"] + self.unknown[0]
        return y @ self.listed[0] + self.table["scale"] * self.table["shift"]


def test_parameters_that_forward_finds_in_a_list_or_dictionary_train() -> None:
    torch.manual_seed(0)
    module, x, y = Tables().train(), torch.randn(8, 4), torch.randn(8, 4)
    loss, optimizer = graphc.losses.MSE(), graphc.optim.SGD(lr=0.1)
    program = graphc.compile(module, loss=loss, optimizer=optimizer, example_inputs=(x,))
    reference = torch.optim.SGD(module.parameters(), lr=0.1)
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(3):
            wanted = torch.nn.functional.mse_loss(module(x), y)
            reference.zero_grad()
            wanted.backward()
            reference.step()
            assert trainer.step({"x": x.numpy(), "label": y.numpy()})["loss"] == pytest.approx(wanted.item(), rel=1e-5)
        trained = trainer.trained_values()
    for name, value in module.named_parameters():
        np.testing.assert_allclose(trained[name], value.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
