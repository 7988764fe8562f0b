"""Mixtures of experts, whose products have a weight per group of rows, train after export as PyTorch trains them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import graphc
from graphc.errors import GraphcError, ModelError
from graphc.frontends.torch import export


class Experts(torch.nn.Module):
    """Each row goes to two of four experts; rows lie side by side by expert, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = torch.nn.Linear(16, 4), torch.nn.Linear(16, 5)
        self.up = torch.nn.Parameter(torch.randn(4, 16, 24) * 0.2)
        self.down = torch.nn.Parameter(torch.randn(4, 16, 24) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, expert = self.router(x).softmax(-1).topk(2)
        owner, order = torch.sort(expert.reshape(-1))
        counts = torch.histc(owner.float(), bins=4, min=0, max=3)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        h = self.product(x[order // 2], self.up, ends).relu()
        h = self.product(h, self.down.transpose(1, 2), ends) * share.reshape(-1)[order][:, None]
        return self.head(torch.zeros_like(x).index_add(0, order // 2, h))  # type: ignore[no-any-return]

    def product(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return functional.grouped_mm(x, w, offs=ends)


class Fallback(Experts):
    """The same by the operator of transformers for float32, which registers a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.operator = fallback()

    def product(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.operator(x, w, ends)  # type: ignore[no-any-return]


@functools.cache
def fallback() -> Any:
    """``transformers::grouped_mm_fallback``, as transformers defines it."""

    def spans(ends: torch.Tensor) -> list[tuple[int, int]]:
        return list(itertools.pairwise([0, *ends.tolist()]))

    def forward(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.cat([input[a:b] @ weight[e] for e, (a, b) in enumerate(spans(offs))])

    def shape(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return input.new_empty(input.shape[0], weight.shape[2])

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, w, ends = ctx.saved_tensors
        parts = list(enumerate(spans(ends)))
        return (
            torch.cat([dy[a:b] @ w[e].T for e, (a, b) in parts]),
            torch.stack([x[a:b].T @ dy[a:b] for _, (a, b) in parts]),
            None,
        )

    name, schema = "transformers::grouped_mm_fallback", "(Tensor input, Tensor weight, Tensor offs) -> Tensor"
    operator = torch.library.custom_op(name, forward, mutates_args=(), schema=schema)
    operator.register_fake(shape)
    operator.register_autograd(backward, setup_context=save)
    return operator


class Chosen(torch.nn.Module):
    """Each row is multiplied by a copy of the matrices of its expert: as rows, as columns, and by an Einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = torch.nn.Linear(16, 4), torch.nn.Linear(16, 5)
        self.up = torch.nn.Parameter(torch.randn(4, 16, 24) * 0.2)
        self.mix = torch.nn.Parameter(torch.randn(4, 20, 24) * 0.2)
        self.down = torch.nn.Parameter(torch.randn(4, 20, 16) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.router(x).argmax(-1) - 4  # negative indices count from the end
        h = torch.bmm(x[:, None], self.up[expert])[:, 0].relu()
        h = torch.bmm(self.mix[expert], h[:, :, None])[:, :, 0].relu()
        return self.head(torch.einsum("sd,sdo->so", h, self.down[expert]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Experts, Fallback, Chosen])
@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_experts_train_as_in_pytorch(backend: str, kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    module, x, label = kind(), torch.randn(24, 16), torch.randint(0, 5, (24,))
    loss, rule = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.3)
    program = graphc.compile(module, example_inputs=(x[:20],), loss=loss, optimizer=rule, backend=backend)
    assert [n.op_type for n in program.model.graph].count("GroupedMatMulGradWeight") == (3 if kind is Chosen else 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(6):
            optimizer.zero_grad()
            wanted = functional.cross_entropy(module(x), label)
            wanted.backward()
            optimizer.step()
            found = trainer.step({"x": x.numpy(), "label": label.numpy()})["loss"]
            assert found == pytest.approx(wanted.item(), rel=1e-5)
        trained = trainer.trained_values()
    for name, value in module.named_parameters():
        np.testing.assert_allclose(trained[name], value.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_groups_of_columns_are_refused_by_name() -> None:
    class Columns(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return functional.grouped_mm(x, w, offs=torch.tensor([8, 16], dtype=torch.int32))

    operands = torch.randn(2, 8, 16, dtype=torch.bfloat16), torch.randn(16, 16, dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="grouped_mm of ranks 3 and 2 has no translation: group rows of a matrix"):
        export(Columns(), operands, dynamic_batch=False)


def test_pytorch_is_as_it_was_after_an_export() -> None:
    from torch._subclasses import fake_impls

    export(torch.nn.Linear(3, 3), (torch.zeros(2, 3),))
    assert torch.ops.aten._grouped_mm.default not in fake_impls.op_implementations_dict


def test_a_row_whose_matrix_does_not_exist_is_refused() -> None:
    class Picked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3, 8, 5))

        def forward(self, x: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x[:, None], self.w[owner])[:, 0]

    feeds = {"x": np.ones((6, 8), np.float32), "owner": np.array([0, 1, 2, 3, 0, 1]), "label": np.zeros(6, np.int64)}
    example = torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)
    loss = graphc.losses.SoftmaxCrossEntropy()
    program = graphc.compile(Picked(), example_inputs=example, loss=loss, optimizer=graphc.optim.SGD(lr=0.1))
    with graphc.Trainer(program, threads=1) as trainer, pytest.raises(GraphcError, match=r"3 at owner\[3\] is outside -3"):
        trainer.step(feeds)
