"""Says what the name of a constant tells: a parameter, a buffer, made by an exporter, or nothing.

layers.0.weight, conv1/kernel:0, logit_scale      a parameter
rope.inv_freq, model.22.anchors, stft.window      a buffer: computed once and kept, never trained
onnx::Mul_113, /g/Constant_1_output_0, val_17     made by an exporter, which folded or numbered it
"""

from __future__ import annotations

import re
from enum import Enum


class Told(Enum):
    """What a name tells about its tensor."""

    PARAMETER = "named like a parameter"
    BUFFER = "named like a buffer"
    MADE = "named by an exporter"
    NOTHING = "a name of its own"


_MADE = re.compile(
    r"""
    onnx::\w+ | val_\d+ | _?val_\d+(_\w+)? | %?\d+ | [A-Z]\w*_\d+(_output_\d+)? | .*/[A-Z]\w*_output_\d+ | .*Constant(_\d+)?
    | _?(tensor_constant|lifted_tensor|c_lifted_tensor|scalar_tensor_default|_tensor_constant)_?\d*\w*
    | const(ant)?[._]?\w*\d | .*const_fold_opt.* | .*__\d+ | .*/(x|y|Const\w*|zeros\w*|ones\w*)
    | new_shape.* | .*_recip | p2o\..* | auto[._].* | .*\.tmp_\d+ | fill_constant\w* | \w*cst\d* | (const|zero|one|half)
    """,
    re.VERBOSE,
)
"""Whole names that exporters and graph optimizers give to what they number or fold."""

_FUNCTIONS = """abs add addmm alias arange as_strided bmm cat clamp clone contiguous convert_element_type copy cos cumsum
detach div einsum empty exp expand eye flatten full full_like gather getitem index index_select lift_fresh_copy linear
linspace log matmul maximum minimum mm mul neg ones ones_like outer permute pow prims_convert_element_type reciprocal repeat
reshape roll round rsqrt rsub scalar_tensor select sigmoid sin slice softmax softplus split sqrt squeeze stack sub sum tanh
tensor tile to transpose tril triu unfold unsqueeze view where zeros zeros_like _to_copy"""

_ATEN = frozenset(_FUNCTIONS.split())
"""Functions of PyTorch, after which its exporter names their results: ``exp``, ``mul_3``."""

_NUMBERED = _ATEN | {"const", "constant", "constants", "scalar", "literal", "cast", "identity", "number", "tmp", "temp"}
"""What exporters count with a dot: ``helper.constant.8``, ``Mul.3``."""

_PARAMETER = re.compile(
    r"""(^|_)(weights?|bias(es)?|kernel|gamma|beta|embeddings?|embed|tokens?|temperature|logit_scale|layer_?scale|slopes?
    |filters?|coefficients?|intercepts?|coef|prototypes?|codebook|queries|query_embed|pos_embed|posemb|gain|tau|log_std
    |readvariableop|resource)(_|\d|$)|(^|_)[wbr]_?\d*$|^(a_log|alpha|lambda\d*)$""",
    re.VERBOSE,
)
"""The last part of the name of a parameter, in lower case."""

_BUFFER = re.compile(
    r"""(^|_)(buffers?|anchors?|anchor_grid|strides?|grids?|inv_freq|freqs?(_cis)?|frequencies|cos|sin|cosine|sine|masks?|means?
    |std|vars?|variance|pe|position_ids|coords?|coordinates|coords_table|windows?|hann|hamming|basis|fb|fbank|filterbanks?
    |mel(_scale|_basis|_filters?)?|wsin|wcos|eps|epsilon|sigmas|betas|alphas_cumprod|blur_filter|gaussian|sobel|laplacian
    |running_mean|running_var|cached|cache|prior(s|box)?|indices|index|ids|timesteps?|norm_(mean|std))(_|\d|$)""",
    re.VERBOSE,
)
"""The last part of the name of a buffer, in lower case."""


def told_by(name: str) -> Told:
    """What ``name`` tells."""
    plain = name.removesuffix(":0")
    last = re.split(r"[./:]", plain)[-1].lower()
    if _MADE.fullmatch(plain) or (re.sub(r"_\d+$", "", plain) in _ATEN and "." not in plain):
        return Told.MADE
    *_, kind, count = ["", *plain.split(".")]
    if count.isdigit() and kind.lower() in _NUMBERED:
        return Told.MADE
    if _BUFFER.search(last) and not last.endswith(("weight", "bias", "embedding", "embeddings")):
        return Told.BUFFER
    return Told.PARAMETER if _PARAMETER.search(last) else Told.NOTHING


def is_dotted(name: str) -> bool:
    """Whether a name is a path of modules, as PyTorch writes it: ``encoder.0.scale``."""
    parts = name.split(".")
    return len(parts) > 1 and all(re.fullmatch(r"\w+", part) for part in parts)
