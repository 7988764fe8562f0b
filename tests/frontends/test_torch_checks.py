"""Modules that check their data export: the graph computes what follows if the checks hold, and the export says so."""

from __future__ import annotations

import dis
from collections.abc import Callable

import pytest
import torch

from graphc.frontends.torch import export
from graphc.frontends.torch_export.checks import passing
from tests.frontends.torch_steps import batch

CHECKS = {
    "assertion": "assert torch.isfinite(x).all()",
    "denial": "assert not torch.isnan(x).any(), 'the input holds a NaN'",
    "exception": "if torch.isnan(x).any(): raise ValueError(f'the input of shape {x.shape} holds a NaN')",
    "number": "assert x.max().item() < 1e9",
    "both": "assert (x < 1e9).all() and (x > -1e9).all()",
    "either": "if x.abs().max() > 1e9 or x.min() < -1e9: raise ValueError('the input is too large')",
    "truth": "if not bool((x < 1e9).all()): raise ValueError('the input is too large')",
    "selection": "assert x[x > 0].reshape(-1, 1).expand(-1, 3).contiguous().view(-1).all()",
    "call": "torch._assert((x < 1e9).all(), 'the input is too large')",
}

CHOICES = {
    "two results": "if x.sum() > 0:\n  return 1\n return 2",
    "two errors": "if x.sum() > 0:\n  raise ValueError('positive')\n raise ValueError('negative')",
    "a value": "return bool(x.sum() > 0)",
}


def function_of(body: str) -> Callable[[torch.Tensor], object]:
    """The function: pytest would rewrite its assertions in this file."""
    found: dict[str, Callable[[torch.Tensor], object]] = {}
    exec(compile(f"def check(x):\n {body}", "/model.py", "exec"), {"torch": torch}, found)
    return found["check"]


class Checked(torch.nn.Module):
    def __init__(self, check: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.first, self.second, self.check = torch.nn.Linear(6, 5), torch.nn.Linear(5, 4), check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check(x)
        hidden = self.first(x).relu()
        self.check(hidden)
        return self.second(hidden)


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_data_is_passed_and_named(name: str) -> None:
    with pytest.warns(UserWarning, match=r"checks of data at model\.py:2 are taken to hold"):
        model = export(Checked(function_of(CHECKS[name])), (batch(0)[0],), exporter="dynamo")
    kinds = [node.op_type for node in model.graph]
    assert [kind for kind in kinds if kind in ("Gemm", "Relu")] == ["Gemm", "Relu", "Gemm"]
    assert not {"IsNaN", "IsInf", "ReduceMax", "If"} & set(kinds)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_by_data_is_no_check(name: str) -> None:
    code = function_of(CHOICES[name]).__code__
    assert {passing(code, instruction.offset) for instruction in dis.get_instructions(code)} == {None}
