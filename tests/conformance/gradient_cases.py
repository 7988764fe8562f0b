"""Exceptions and tolerances of the gradient suite, and the check of one case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx.backend.test.case.test_case import TestCase

from tests.conformance import gradient_suite as suite
from tests.conformance.gradient_suite import Array, Outcome

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
    "test_scan_sum": "the batched Scan of opset 8, which the reference lacks; tests/passes/legalize/test_subgraphs.py has it",
}
"""Case → why it is not checked."""

UNMATCHED_SINGLE: dict[str, str] = {
    "Dropout": "in training, every runtime draws its own mask",
    "test_resize_downsample_scales_cubic_align_corners": "onnxruntime aligns to the rounded size",
    "test_resize_downsample_scales_linear_align_corners": "onnxruntime aligns to the rounded size",
}
"""Op or case → why float32 is not compared with float64."""


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
