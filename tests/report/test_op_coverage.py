"""Every operator is accounted for, the generated page is up to date, and second order is not only a claim."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx.defs
import pytest

from graphc.gradient import GRADIENTS
from graphc.ir.builder import Builder
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.report import op_coverage
from tests.gradient_check import check_gradient, new_model, positive

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_every_operator_is_accounted_for() -> None:
    missing = [row.name for row in op_coverage.standard() if row.gradient == "missing"]
    assert not missing, f"give {', '.join(missing)} a rule, mark them zero, or say in NO_GRADIENT why they have none"


def test_all_differentiable_operators_are_covered() -> None:
    counts = op_coverage.summary(op_coverage.standard())
    assert counts["covered"] == counts["differentiable"]
    assert counts["operators"] == counts["covered"] + counts["zero"] + counts["none"]
    assert counts["operators"] == sum(
        not onnx.defs.get_schema(name).deprecated for name in {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
    )


def test_no_operator_without_gradient_has_a_rule_or_floats_on_both_sides() -> None:
    for key in op_coverage.NO_GRADIENT:
        assert key not in GRADIENTS
        domain, _, name = key.rpartition("::")
        schema = onnx.defs.get_schema(name, domain)
        if domain:
            continue
        floats = [any("float" in t for t in formal.types) for formal in (*schema.inputs[:1], *schema.outputs[:1])]
        assert not all(floats), f"{name} takes floats and gives floats"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == op_coverage.page(), "run python -m graphc.report.op_coverage docs/ops.md"


def test_the_summary_counts_the_operators_of_the_standard() -> None:
    some = next(iter(op_coverage.standard()))

    def row(gradient: str, domain: str = "ai.onnx") -> op_coverage.Coverage:
        return dataclasses.replace(some, domain=domain, gradient=gradient)

    table = [row("direct"), row("direct"), row("through body"), row("zero"), row("none"), row("missing")]
    assert op_coverage.summary([*table, row("direct", domain="ai.onnx.preview")]) == {
        "operators": 6,
        "differentiable": 4,
        "covered": 3,
        "direct": 2,
        "through_body": 1,
        "zero": 1,
        "none": 1,
        "second_order": 3,
    }


def test_an_operator_that_nobody_knows_is_missing() -> None:
    with GRADIENTS.restored():
        GRADIENTS.remove("CumProd")
        rows = {row.name: row for row in op_coverage.standard()}
    assert rows["CumProd"].gradient == "missing"
    counts = op_coverage.summary(rows.values())
    assert counts["covered"] == counts["differentiable"] - 1


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes"),
    [
        ("Det", [(3, 3)], {}),
        ("CumProd", [(2, 4)], {}),
        ("DFT", [(2, 5, 1)], {"onesided": 1}),
        ("Einsum", [(3, 3, 2)], {"equation": "iij->ij"}),
        ("ScatterND", [(4, 2), (3, 2)], {"reduction": "mul"}),
        ("Attention", [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)], {"is_causal": 1, "softcap": 2.0}),
        ("MeanVarianceNormalization", [(2, 2, 3)], {"axes": [0, 2]}),
    ],
)
def test_second_order(op_type: str, shapes: list[tuple[int, ...]], attributes: dict[str, object]) -> None:
    """∂/∂x of ∂(Σ y³)/∂x, which the table promises; in float32 for the op that onnx.reference has in no other type."""
    single = op_type == "MeanVarianceNormalization"
    dtype = np.float32 if single else np.float64
    feeds = {f"x{k}": positive(*shape, seed=k).value.astype(dtype) for k, shape in enumerate(shapes)}
    model, values = new_model(feeds)
    op = Builder(model.graph)
    extra = {"CumProd": [op.const(np.int64(1))]}.get(op_type, [])
    operands = [*values, *extra] if op_type != "ScatterND" else [values[0], op.const(np.array([[1], [1], [3]])), values[1]]
    y = op.emit(op_type, operands, attributes)[0]
    first = differentiate(model.graph, [op.Mul(y, op.Mul(y, y))], values)
    model.graph.outputs.extend(first[value] for value in values)
    check_gradient(model, feeds, tolerance=2e-2 if single else 1e-5, step=1e-2 if single else 1e-5)
