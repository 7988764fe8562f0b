"""Says what a constant is for: the roles of the inputs that read it."""

from __future__ import annotations

from enum import Enum

import onnx_ir as ir

from graphc.ir.subgraphs import bodies


class Use(Enum):
    """What an input of an op does with a constant operand."""

    WEIGHT = "weight"
    BIAS = "bias"
    AFFINE = "scale or bias"
    STATISTIC = "running statistic"
    TABLE = "table"
    STATE = "initial state"
    MODULATION = "scale or shift"
    SETTING = "setting"
    FUNCTION = "operand"


_OF: dict[tuple[str, int], Use] = {
    **{(op, k): Use.WEIGHT for op in ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits") for k in (0, 1)},
    **{(op, 1): Use.WEIGHT for op in ("Conv", "ConvTranspose", "DeformConv", "PRelu", "Attention", "FusedConv")},
    **{(op, k): Use.WEIGHT for op in ("LSTM", "GRU", "RNN") for k in (1, 2)},
    **{(op, 2): Use.BIAS for op in ("Conv", "ConvTranspose", "Gemm", "FusedConv", "Attention")},
    **{(op, 3): Use.BIAS for op in ("LSTM", "GRU", "RNN", "DeformConv", "SkipLayerNormalization")},
    **{(op, 1): Use.BIAS for op in ("BiasGelu", "FastGelu")},
    **{(op, k): Use.STATE for op in ("LSTM", "GRU", "RNN") for k in (5, 6)},
    ("SkipLayerNormalization", 2): Use.AFFINE,
    ("SkipLayerNormalization", 4): Use.BIAS,
    ("LSTM", 7): Use.WEIGHT,
    ("Einsum", 0): Use.WEIGHT,
    ("Einsum", 1): Use.WEIGHT,
    ("Gather", 0): Use.TABLE,
    ("GatherND", 0): Use.TABLE,
    ("GatherElements", 0): Use.TABLE,
    ("BatchNormalization", 3): Use.STATISTIC,
    ("BatchNormalization", 4): Use.STATISTIC,
    ("STFT", 2): Use.SETTING,
    ("Pow", 1): Use.MODULATION,
}

_NORMALISES = ("Normalization", "LayerNorm")
"""How the names of normalising ops end; their inputs 1 and 2 scale and shift."""

_IGNORED = """Range OneHot NonMaxSuppression Less Greater LessOrEqual GreaterOrEqual Equal Mod Shape Size TopK ArgMax ArgMin
Sign Floor Ceil Round MelWeightMatrix HannWindow HammingWindow BlackmanWindow IsNaN IsInf"""

_SETTINGS = frozenset(_IGNORED.split())
"""Ops through which no operand trains."""

_SET = "Resize Upsample Clip Dropout RoiAlign MaxRoiPool CenterCropPad QuantizeLinear DequantizeLinear Pad"

_SET_BY_INPUTS = frozenset(_SET.split())
"""Ops whose inputs are settings, except input 0."""

_MODULATES = frozenset({"Add", "Sub", "Mul", "Div", "Sum", "Mean"})

VIEWS = frozenset({"Identity", "Cast", "CastLike", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Flatten"})
"""Ops that pass their input 0 on: it is used as their output is."""

_LONGEST = 8
"""Views on the way to a use that are followed."""

_FUNCTIONS = """Abs Exp Log Neg Sigmoid Softplus Softmax Tanh Relu Elu Sqrt Reciprocal Softsign Sin Cos HardSigmoid
LogSoftmax"""

_REPARAMETRISES = frozenset(_FUNCTIONS.split())
"""Functions of one operand. A model that applies one to a constant in each run does so because the constant changes."""


def use_of(node: ir.Node, index: int) -> Use:
    """What input ``index`` of the node does with a constant operand."""
    if (node.op_type, index) in _OF:
        return _OF[node.op_type, index]
    if node.op_type.endswith(_NORMALISES):
        return Use.AFFINE if index in (1, 2) else Use.FUNCTION
    if node.op_type in _SETTINGS or (node.op_type in _SET_BY_INPUTS and index > 0):
        return Use.SETTING
    return Use.MODULATION if node.op_type in _MODULATES else Use.FUNCTION


def uses_of(value: ir.Value, depth: int = 0) -> list[tuple[ir.Node, int]]:
    """The (node, input) pairs that read ``value``, behind casts, reshapes and transposes."""
    found: list[tuple[ir.Node, int]] = []
    for node, index in value.uses():
        if node.op_type in VIEWS and index == 0 and node.domain == "" and depth < _LONGEST:
            found += uses_of(node.outputs[0], depth + 1) or [(node, index)]
        else:
            found.append((node, index))
    return found


def reparametrises(node: ir.Node) -> bool:
    """Whether the node is a function of one operand alone, such as ``Exp``."""
    return node.domain == "" and node.op_type in _REPARAMETRISES


def other_operand(node: ir.Node, index: int) -> ir.Value | None:
    """The first other operand of an elementwise node."""
    return next((v for k, v in enumerate(node.inputs) if k != index and v is not None), None)


def behind_views(value: ir.Value | None) -> ir.Value | None:
    """The value that ``value`` is a view of."""
    for _ in range(_LONGEST):
        producer = value.producer() if value is not None else None
        if producer is None or producer.op_type not in VIEWS:
            break
        value = producer.inputs[0]
    return value


def comes_from(value: ir.Value | None, kinds: tuple[str, ...]) -> bool:
    """Whether an op whose name ends with one of ``kinds`` computes the value, views and scaling in between aside."""
    for _ in range(3):
        value = behind_views(value)
        producer = value.producer() if value is not None else None
        if producer is None:
            return False
        if producer.op_type.endswith(kinds):
            return True
        if producer.op_type != "Mul":
            return False
        value = next((v for v in producer.inputs if v is not None and not _is_held(behind_views(v))), None)
    return False


def _is_held(value: ir.Value | None) -> bool:
    """Whether the value is stored in the file."""
    producer = value.producer() if value is not None else None
    return value is not None and (value.is_initializer() or (producer is not None and producer.op_type == "Constant"))


def before_weights(graph: ir.Graph) -> set[ir.Value]:
    """Values that depend on graph inputs and on no product with a weight: inputs that are cropped, scaled, reshaped."""
    found = {v for v in graph.inputs if not v.is_initializer()}
    for node in graph:
        operands = [v for v in node.inputs if v is not None]
        fed = [v for v in operands if v in found]
        weighs = any(use_of(node, k) in _WEIGHS for k, v in enumerate(node.inputs) if _is_held(behind_views(v)))
        if fed and not bodies(node) and not weighs and all(v in found or _is_held(behind_views(v)) for v in operands):
            found.update(node.outputs)
    return found


_WEIGHS = frozenset({Use.WEIGHT, Use.TABLE, Use.AFFINE})
