"""ONNX's own backend test suite through the code path of ``graphc run``, on both backends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from graphc.errors import GraphcError
from tests.conformance.exceptions import DEPENDS, EXCEPTIONS, reason
from tests.conformance.suite import Case, all_cases, check, quick_cases

BACKENDS = ("numpy", "onnxruntime")

PARTS = 8

EVER_WRONG = (
    "affine_grid_2d|attention_local_window|batchnorm_example_training_mode|castlike_no_saturate_FLOAT_to_FLOAT8E5M2|cast_FLOAT_to_INT2"
    "|cast_INT4_to_FLOAT|celu_float16|compress_bfloat16|convtranspose_output_shape|einsum_sum_bfloat16|flexattention_soft_cap"
    "|gradient_of_add(_and_mul)?|gru_batchwise|if_opt|loop16_seq_none|lstm_batchwise|range_int32_type_negative_delta_expanded"
    "|scan_sum|sequence_map_identity_1_sequence_expanded|sequence_model1|swiglu|swish|unique_bfloat16_sorted_without_axis"
    "|(MaxPool|AvgPool)[12]d.*|PReLU_1d_multiparam|operator_(add|addmm).*|ai_onnx_ml_label_encoder_tensor_mapping|not_2d"
)
"""Names, without ``test_``, that once failed through a fault of ours or of the reference."""


def failures(backend: str, cases: Mapping[str, Case], names: Sequence[str]) -> list[str]:
    """One line per case that does not do what is expected of it: to pass, or to be an exception."""
    lines = []
    for name in names:
        why = reason(backend, name)
        try:
            check(cases[name], backend)
        except (AssertionError, GraphcError, RuntimeError, ImportError) as error:
            if why is None:
                lines.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if why is not None and why not in DEPENDS:
                lines.append(f"{name} passes and need not be an exception any more ({why})")
    return lines


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_case(backend: str, part: int) -> None:
    lines = failures(backend, all_cases(), sorted(all_cases())[part::PARTS])
    assert not lines, "\n".join(lines)


@pytest.mark.full
def test_exceptions_are_few_and_all_named() -> None:
    names = all_cases()
    assert len(names) > 2000
    for backend, patterns in EXCEPTIONS.items():
        excepted = [name for name in names if reason(backend, name) is not None]
        assert len(excepted) < (0.05 if backend == "numpy" else 0.08) * len(names)
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in names), f"{pattern!r} matches no case"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample(backend: str) -> None:
    names = sorted(quick_cases())
    wrong = [name for name in names if re.fullmatch(EVER_WRONG, name.removeprefix("test_"))]
    lines = failures(backend, quick_cases(), sorted({*names[::20], *wrong}))
    assert not lines, "\n".join(lines)
