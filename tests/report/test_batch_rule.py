"""batch_rule: what a file says about its batch, in the words of the options that train it."""

from __future__ import annotations

import pytest
from onnx import helper

from graphc.frontends import load
from graphc.report.batch_rule import batch_rule
from tests.passes.legalize.legalize_cases import build, normal


def rule(nodes: list[helper.NodeProto], shape: list[int | str], **weights: object) -> str:
    return str(batch_rule(load(build(nodes, {"x": shape}, ["y"], weights, opset=13))))


@pytest.mark.parametrize(("batch", "says"), [("n", "dynamic: any batch"), (4, "fixed at 4: other batches rewrite the model")])
def test_files_that_take_any_batch(batch: int | str, says: str) -> None:
    assert rule([helper.make_node("MatMul", ["x", "w"], ["y"])], [batch, 3], w=normal(3, 2)).startswith(says)


def test_a_table_of_one_row_for_each_sample_fixes_the_batch() -> None:
    says = rule([helper.make_node("Add", ["x", "table"], ["y"], name="sum")], [4, 3], table=normal(4, 3))
    assert "fixed at 4 and cannot be changed, so it trains at --per-worker-batch 4, or at 4 × K with --accumulate K" in says
    assert "sum" in says
