"""Which of ONNX's backend cases are checked, and how failures are listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphc.errors import GraphcError
from tests.conformance.exceptions import DEPENDS, reason
from tests.conformance.suite import Case, check

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
