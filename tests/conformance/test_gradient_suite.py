"""Every differentiable operator × its ONNX backend cases × each float input, against central differences in float64.

The table below says what a case needs beyond the rule of the suite; everything else is checked as it comes from ``onnx``.
At the end of the full tier the number of operators that pass in all of their cases is printed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.defs
import pytest
from onnx.backend.test.case.test_case import TestCase

from graphc.report import op_coverage
from tests.conformance import gradient_suite as suite
from tests.conformance.gradient_cases import (
    EXCEPTIONS,
    MOVED,
    ROUGH,
    SINGLE,
    UNMATCHED_SINGLE,
    check,
)
from tests.conformance.gradient_suite import Outcome

EXACT = 1e-6


NO_KERNEL: dict[str, str] = {
    "Mod": "onnxruntime refuses fmod=0 with floats",
}
"""Op → why onnxruntime does not run its backward graph."""

_SEQUENCES = "its cases hold integers, or there are none; tests/passes/gradients/test_sequence.py"
UNTESTED: dict[str, str] = {
    "ConcatFromSequence": _SEQUENCES,
    "GlobalLpPool": "it has no cases; LpPool has",
    "If": "its cases choose between constants; tests/passes/gradients/test_control_flow.py",
    "MaxRoiPool": "it has no cases; tests/passes/gradients/test_quantization.py",
    "Optional": _SEQUENCES,
    "QuantizeLinear": "straight-through is no derivative; tests/passes/gradients/test_quantization.py",
    "SequenceAt": _SEQUENCES,
    "SequenceConstruct": _SEQUENCES,
    "SequenceErase": _SEQUENCES,
    "SequenceInsert": _SEQUENCES,
}
"""Differentiable op without a usable case in the suite → where it is tested."""


def complaints(outcome: Outcome, op: str) -> list[str]:
    """What is wrong with a case, in words."""
    found = [outcome.problem] if outcome.problem else []
    found += [f"d/d{name} is off by {error:.1e}" for name, error in outcome.errors.items() if not error <= EXACT]
    if {op, outcome.case}.isdisjoint(UNMATCHED_SINGLE):
        near, _ = ROUGH.get(op, (SINGLE, ""))
        found += [f"d/d{name} in float32 is off by {error:.1e}" for name, error in outcome.single.items() if not error <= near]
    if outcome.lacks_kernel and op not in NO_KERNEL:
        found.append(f"onnxruntime: {outcome.lacks_kernel}")
    return [f"{outcome.case}: {text}" for text in found]


GRADIENT = {row.name: row.gradient for row in op_coverage.standard() if row.domain == "ai.onnx"}
DIFFERENTIABLE = sorted(op for op, kind in GRADIENT.items() if kind in ("direct", "through body"))
ZERO = sorted(op for op, kind in GRADIENT.items() if kind == "zero" and op != "BitCast")  # whose cases fix the width of types
DEPRECATED = ("Scatter", "Upsample")

passed: dict[str, bool] = {}


@pytest.fixture(scope="session")
def cases() -> dict[str, list[TestCase]]:
    return suite.by_op(suite.collect())


@pytest.mark.full
@pytest.mark.parametrize("op", [*DIFFERENTIABLE, *DEPRECATED])
def test_gradients_of_all_cases(op: str, cases: dict[str, list[TestCase]]) -> None:
    if op in UNTESTED:
        assert not any(check(case, single=False).errors for case in cases.get(op, ())), f"{op} has a case by now"
        return
    wrong: list[str] = []
    checked = 0
    for case in cases[op]:
        if case.name not in EXCEPTIONS:
            outcome = check(case)
            checked += bool(outcome.errors)
            wrong += complaints(outcome, op)
    passed[op] = not wrong
    assert not wrong, f"{len(wrong)} complaints:\n" + "\n".join(wrong)
    assert checked or GRADIENT.get(op) is None, f"no case of {op} has a float input and a float output"


WITHOUT_CASES = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "SequenceEmpty"}
"""Ops with float outputs of which ONNX has no cases: random numbers, and a sequence of nothing."""


@pytest.mark.full
@pytest.mark.parametrize("op", ZERO)
def test_a_zero_gradient_blocks_nothing(op: str, cases: dict[str, list[TestCase]]) -> None:
    checked = 0
    for case in cases.get(op, ()):
        prepared = suite.prepare(case)
        feeds = {name: suite.cast(x, np.float32) for name, x in prepared.feeds.items()}
        weights = suite.functional(suite.evaluator(prepared.model, suite.T.FLOAT)(feeds))
        if weights:
            _, names = suite.backward_model(prepared, weights)
            assert not names, f"{case.name}: a gradient flows back to {', '.join(names)}"
            checked += 1
    gives_floats = any("tensor(float)" in kind for output in onnx.defs.get_schema(op).outputs for kind in output.types)
    assert checked or op in WITHOUT_CASES or not gives_floats, f"no case of {op} has a float output"


@pytest.mark.full
def test_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how many operators are right in all of their cases; runs after them."""
    if set(passed) != {*DIFFERENTIABLE, *DEPRECATED} - set(UNTESTED):
        pytest.skip("counts only when every operator has been checked before, in one process")
    right = [op for op in passed if passed[op] and op not in DEPRECATED]
    tested = len(DIFFERENTIABLE) - len(UNTESTED)
    with capsys.disabled():
        print(
            f"\n{len(right)} of the {tested} differentiable operators with cases pass in all but {len(EXCEPTIONS)} cases; "
            f"{len(UNTESTED)} have none that can be used"
        )
    assert len(right) == tested


def fails(case: TestCase, **options: Any) -> bool:
    try:
        return bool(complaints(check(case, single=False, **options), suite.op_of(case)))
    except (ValueError, TypeError):
        return True  # onnx.reference cannot run it, or the output changes its size


@pytest.mark.full
def test_the_lists_are_as_short_as_they_can_be(cases: dict[str, list[TestCase]]) -> None:
    """Whatever stands in a list is a case or an op, and fails without it."""
    known = {case.name: [case] for found in cases.values() for case in found}
    known.update(cases)
    assert {*MOVED, *EXCEPTIONS} <= set(known)
    for name in MOVED:
        assert any(fails(case, move=False) for case in known[name]), f"{name} need not be moved"
    for name in EXCEPTIONS:
        assert fails(known[name][0]), f"{name} passes by now"
    for op in NO_KERNEL:
        assert any(check(case).lacks_kernel for case in cases[op]), f"onnxruntime runs {op} by now"


SAMPLE = {
    "attention": "Attention",
    "cumprod": "CumProd",
    "det": "Det",
    "einsum": "Einsum",
    "reduceprod": "ReduceProd",
    "rotaryembedding": "RotaryEmbedding",
    "scatterelements": "ScatterElements",
    "scatternd": "ScatterND",
    "stft": "STFT",
    "tensorscatter": "TensorScatter",
}
"""Module of ``onnx.backend.test.case.node`` → the op of which the quick tier checks a few cases."""


@pytest.mark.parametrize("module", SAMPLE)
def test_gradients_of_a_sample(module: str) -> None:
    op = SAMPLE[module]
    found = [case for case in suite.collect(module) if suite.op_of(case) == op]
    assert found
    wrong = [text for case in found[:: max(1, len(found) // 3)] for text in complaints(check(case), op)]
    assert not wrong, "\n".join(wrong)


def test_every_module_of_the_sample_is_one_of_onnx() -> None:
    assert all(onnx.defs.has(op) and GRADIENT[op] in ("direct", "through body") for op in SAMPLE.values())
