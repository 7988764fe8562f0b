"""Every differentiable operator × its ONNX backend cases × each float input, against central differences in float64.

The table below says what a case needs beyond the rule of the suite; everything else is checked as it comes from ``onnx``.
At the end of the full tier the number of operators that pass in all of their cases is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.defs
import pytest
from onnx.backend.test.case.test_case import TestCase

from graphc.report import op_coverage
from tests.conformance import gradient_suite as suite
from tests.conformance.gradient_suite import Array, Outcome

EXACT = 1e-6
SINGLE = 1e-3

ROUGH: dict[str, tuple[float, str]] = {
    "RNN": (5e-3, "1 - tanh² of saturated states: float32 holds few of its digits"),
}
"""Op → how far float32 may be from float64, and why."""

KINK = "the op has a kink or a jump where the case puts its operand"
BETWEEN_PIXELS = "its cases sample on pixels or on the border, where the interpolation has a kink"
MOVED: dict[str, str] = {
    "DeformConv": BETWEEN_PIXELS,
    "GridSample": BETWEEN_PIXELS,
    "RoiAlign": BETWEEN_PIXELS,
    "test_acosh_example": "an operand is 1, where the slope is infinite",
    "test_elu_example": KINK,
    "test_leakyrelu_example": KINK,
    "test_l2normalization_axis_0": "the norm of a column is 0",
    "test_maxpool_3d_dilations": "all windows have ties",
    "test_maxpool_3d_dilations_use_ref_impl": "all windows have ties",
    "test_pow": "a base is 0 under a fractional exponent",
    "test_range_bfloat16_type_positive_delta": "the limit is a multiple of the step",
    "test_range_float16_type_positive_delta": "the limit is a multiple of the step",
    "test_range_float_type_positive_delta": "the limit is a multiple of the step",
    "test_reduce_min_default_axes_keepdims_example": "ties",
    "test_selu_example": KINK,
    "test_softsign_example": "an operand is 0, where the second derivative jumps",
    "test_thresholdedrelu_example": KINK,
}
"""Case, or op → why its float inputs are moved, by up to a tenth."""

FIXED: dict[str, tuple[str, ...]] = {
    "Dropout": ("r",),
    "OneHot": ("depth", "indices"),
    "Range": ("limit",),
    "Resize": ("roi", "scales"),
    "Upsample": ("scales",),
}
"""Op → float inputs that are constants here: a shape, a place or a probability."""

AS_FLOAT: dict[str, tuple[str, ...]] = {"Trilu": ("x",)}
"""Op → integer inputs of its cases that are made floats, since it has no cases with floats."""

BY_BODY = {"LinearAttention": "onnx.reference computes in float32; the graph of its definition does not"}

_NOT_FINITE = "its operands are infinite, NaN and zero divisors"
EXCEPTIONS: dict[str, str] = {
    "test_loop16_seq_none": "its one float input is an optional sequence that is absent",
    "test_mod_float_edge_cases_fmod_0_float16": _NOT_FINITE,
    "test_mod_float_edge_cases_fmod_0_float32": _NOT_FINITE,
    "test_mod_float_edge_cases_fmod_0_float64": _NOT_FINITE,
    "test_scan_sum": "the batched Scan of opset 8, which the reference evaluator lacks; test_legalize_bodies has it",
}
"""Case → why it is not checked."""

UNMATCHED_SINGLE: dict[str, str] = {
    "Dropout": "in training, every runtime draws its own mask",
    "test_resize_downsample_scales_cubic_align_corners": "onnxruntime aligns to the rounded size",
    "test_resize_downsample_scales_linear_align_corners": "onnxruntime aligns to the rounded size",
}
"""Op or case → why float32 is not compared with float64."""

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


def moved(name: str, x: Array) -> Array:
    return x + np.random.default_rng([11, len(name), x.size]).uniform(0.02, 0.1, x.shape)


def with_ties(x: Array, v: Array) -> Array:
    """Equal operands move together: Unique is smooth only as long as they stay equal."""
    _, first, inverse = np.unique(x, return_index=True, return_inverse=True)
    return v.reshape(-1)[first][inverse].reshape(x.shape)


DIRECTIONS: dict[str, Callable[[Array, Array], Array]] = {"Unique": with_ties}


def check(case: TestCase, *, move: bool = True, **options: Any) -> Outcome:
    op = suite.op_of(case)
    return suite.check(
        case,
        point=moved if move and not {op, case.name}.isdisjoint(MOVED) else None,
        direction=DIRECTIONS.get(op),
        fixed=FIXED.get(op, ()),
        as_float=AS_FLOAT.get(op, ()),
        by_body=op in BY_BODY,
        **options,
    )


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


@pytest.mark.full
@pytest.mark.parametrize("op", ZERO)
def test_a_zero_gradient_blocks_nothing(op: str, cases: dict[str, list[TestCase]]) -> None:
    for case in cases.get(op, ()):
        prepared = suite.prepare(case)
        feeds = {name: suite.cast(x, np.float32) for name, x in prepared.feeds.items()}
        weights = suite.functional(suite.evaluator(prepared.model, suite.T.FLOAT)(feeds))
        if weights:
            _, names = suite.backward_model(prepared, weights)
            assert not names, f"{case.name}: a gradient flows back to {', '.join(names)}"


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
