"""The cases of ONNX's backend suite that a backend does not pass, each with its reason.

A key is a regular expression that matches whole names. The full tier fails when a case listed here passes, so that the
lists cannot go stale, except for those in :data:`DEPENDS`, which pass on some machines.
"""

from __future__ import annotations

import re

_RANDOM = "draws random numbers, and the suite expects those of one generator"
_PILLOW = "the reference decodes images with Pillow, which graphc does not need"
_HALF = "expects the float16 rounding of another order of operations (two elements of hundreds, one unit in the last place)"
_NEWER = "takes an element type that only opsets newer than 26 allow; onnxruntime knows 26"
_OPTIMIZER = "onnxruntime refuses the domain ai.onnx.preview.training"
_ACCURACY = "sums in float32: 1e-4 where the suite expects exact zeros"
_RANGE = "gives Range tensors of rank 1 where the standard wants scalars; shape inference refuses that"
_NOISE = "the suite expects the noise of its own float32 transform: 2e-7 where the result is 0"
_NARROW = "the standard leaves floats beyond an integer's range open: the suite has ml_dtypes' result, which 0.7 changed"
_LOCALE = "onnxruntime asks the system for the locale en_US.UTF-8"

NUMPY = {
    "test_affine_grid_2d(_align_corners)?_expanded": _RANGE,
    "test_attention_4d_causal_fp16_expanded": _HALF,
    "test_bernoulli.*": _RANDOM,
    "test_image_decoder_.*": _PILLOW,
}

ONNXRUNTIME = {
    "test_(adagrad|adam)(_multiple)?": _OPTIMIZER,
    "test_(nesterov_)?momentum(_multiple)?": _OPTIMIZER,
    "test_affine_grid_2d(_align_corners)?_expanded": _RANGE,
    "test_attention_4d_causal_fp16_expanded": _HALF,
    "test_attention_4d_(causal_)?(diff_heads_mask4d_)?padded_kv(_bf16)?": "onnxruntime wants masks as long as keys and past",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_[34]d_mask_causal": "onnxruntime returns the scores unmasked",
    "test_bernoulli.*": _RANDOM,
    "test_bitshift_(left|right)_int(8|16|32|64)(_.*)?": _NEWER,
    "test_cast(like)?_FLOAT(16)?_to_U?INT[24](_expanded)?": _NARROW,
    "test_compress_bfloat16": _NEWER,
    "test_einsum_.*_bfloat16": _NEWER,
    "test_onehot_with_bfloat16_values": _NEWER,
    "test_range_b?float16_type_positive_delta": _NEWER,
    "test_range_bfloat16_type_positive_delta_expanded": "onnxruntime's Python interface has no bfloat16 arrays for a Loop",
    "test_reversesequence_bfloat16": _NEWER,
    "test_unique_bfloat16_sorted_without_axis": _NEWER,
    "test_convinteger_with_padding": "onnxruntime wants one zero point for all weights",
    "test_dft_inverse": _ACCURACY,
    "test_dft_inverse_opset19": _NOISE,
    "test_image_decoder_.*": "onnxruntime has no ImageDecoder",
    "test_maxunpool_export_with_output_shape": "onnxruntime counts indices by the output shape, not by the pooled input's",
    "test_mod_.*_fmod_0.*": "onnxruntime's Mod takes floats with fmod=1 only, as opsets up to 26 demand",
    "test_mod_fmod_0_signed_zero_.*": "onnxruntime's Mod takes floats with fmod=1 only, as opsets up to 26 demand",
    "test_reduce_max_empty_set_bool": "onnxruntime reduces no empty set",
    "test_resize_downsample_scales_.*_align_corners": "onnxruntime aligns to the rounded size, the suite to the real one",
    "test_strnorm.*_monday_(casesensintive_(lower|upper)|insensintive_upper_twodim|empty_output)": _LOCALE,
    "test_training_dropout(_default)?(_mask)?": _RANDOM,
}

CUPY = {
    **NUMPY,
    "test_attention_4d_causal_fp16": _HALF,
    "test_attention_4d_gqa_with_past_and_present_fp16_expanded": _HALF,
    "test_cast(like)?_FLOAT(16)?_to_U?INT[24](_expanded)?": _NARROW,
    "test_dft(_axis)?|test_dft_inverse(_opset19)?": _NOISE,
    "test_training_dropout(_default)?(_mask)?": _RANDOM,
}

EXCEPTIONS = {"numpy": NUMPY, "onnxruntime": ONNXRUNTIME, "cupy": CUPY}

DEPENDS = frozenset({_PILLOW, _LOCALE, _RANDOM, _HALF, _NOISE, _NARROW})
"""Reasons that do not hold everywhere: what is installed, the locale, the draw, who of kernel and
host computes."""


def reason(backend: str, name: str) -> str | None:
    """Why the case is not expected to pass, or None."""
    return next((why for pattern, why in EXCEPTIONS[backend].items() if re.fullmatch(pattern, name)), None)
