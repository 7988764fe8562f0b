"""Finds ranks that shape inference does not: from what the ops accept, forwards and backwards, in any opset.

    y = Conv(x, w: [8, 1, 3])        x and y have rank 3
    y = Transpose(x, perm=[0, 2, 1]) x has rank 3
    y = If(c)                        has rank 3 where a Conv reads it, although its branches differ in rank

ONNX infers an output from its inputs only, and knows nothing of a value whose inputs have no shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from graphc.ir.facts import constant, shape_of_result
from graphc.ir.subgraphs import CONTROL, bodies

_SWEEPS = 16
"""Most sweeps over the graph; each carries a rank along a whole chain of nodes."""


class Ranks:
    """The ranks that are known so far, by value."""

    def __init__(self, graph: ir.Graph) -> None:
        self._known: dict[ir.Value, int] = {}
        self._changed = False
        nodes = [node for node in graph.all_nodes() if node.domain in ("", "com.microsoft")]
        values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph.all_nodes() for v in node.outputs)]
        values += [v for node in nodes for body in bodies(node) for v in body.inputs]
        self._known.update((v, len(v.shape)) for v in values if v.shape is not None)
        for _ in range(_SWEEPS):
            self._changed = False
            for node in nodes:
                self._visit(node)
            for node in reversed(nodes):
                self._visit(node)
            if not self._changed:
                break

    def __getitem__(self, value: ir.Value | None) -> int | None:
        return self._known.get(value) if value is not None else None

    def learn(self, value: ir.Value | None, rank: int | None) -> None:
        """Record a rank, unless the value has one already."""
        if value is not None and rank is not None and rank >= 0 and value not in self._known and _is_tensor(value):
            self._known[value] = rank
            self._changed = True

    def equal(self, values: Iterable[ir.Value | None], *, to: int | None = None) -> None:
        """All these values have one rank."""
        group = list(values)
        found = next((r for v in group if (r := self[v]) is not None), to)
        for value in group:
            self.learn(value, found)

    def differ(self, low: ir.Value | None, high: ir.Value | None, by: int | None) -> None:
        """rank(high) = rank(low) + by"""
        a, b = self[low], self[high]
        if by is None:
            return
        self.learn(high, a + by if a is not None else None)
        self.learn(low, b - by if b is not None else None)

    def _visit(self, node: ir.Node) -> None:
        if node.op_type in CONTROL:
            _control(self, node)
        elif node.op_type in _LIKE:
            outputs = node.outputs if node.op_type in _EVERY_OUTPUT else node.outputs[:1]
            self.equal([node.inputs[0], *outputs], to=_told(node))
        elif node.op_type in _ALL:
            self.equal([*node.inputs, *node.outputs])
        elif node.op_type in _BROADCAST:
            _broadcast(self, node)
        elif node.op_type in _FIXED:
            taken, made = _FIXED[node.op_type]
            for value, rank in (*zip(node.inputs, taken, strict=False), *zip(node.outputs, made, strict=False)):
                self.learn(value, rank)
        elif (rule := _RULES.get(node.op_type)) is not None:
            rule(self, node)


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LIKE = _named(
    "Abs Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Bernoulli BitwiseNot Cast CastLike Ceil "
    "Celu Clip Cos Cosh CumProd CumSum DequantizeLinear DynamicQuantizeLinear Dropout Elu Erf Exp Floor Gelu "
    "FastGelu BiasGelu QuickGelu GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization HardSigmoid "
    "HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Log LogSoftmax "
    "LpNormalization LpPool MaxPool MaxUnpool MeanVarianceNormalization Mish Neg Not PRelu Pad QuantizeLinear "
    "RMSNormalization RandomNormalLike RandomUniformLike Reciprocal Relu Resize ReverseSequence RotaryEmbedding "
    "Round Scatter ScatterND Selu Shrink Sigmoid Sign SimplifiedLayerNormalization Sin Sinh SkipLayerNormalization "
    "Slice Softmax Softplus Softsign Split Sqrt Swish Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose "
    "Trilu Upsample "
)
"""Ops whose first output has the rank of the first input."""

_EVERY_OUTPUT = frozenset({"Dropout", "MaxPool", "Split", "TopK"})
"""Those of them whose other outputs have it too."""

_ALL = frozenset({"Concat", "GatherElements", "GridSample", "ScatterElements"})
"""Ops all of whose inputs and outputs have one rank."""

_BROADCAST = _named(
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Expand Greater GreaterOrEqual Less LessOrEqual Max "
    "Mean Min Mod Mul Or Pow Sub Sum Where Xor "
)

_REDUCTIONS = _named(
    "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare "
)

_FIXED: dict[str, tuple[Sequence[int | None], Sequence[int | None]]] = {
    "DepthToSpace": ([4], [4]),
    "Flatten": ([], [2]),
    "GRU": ([3, 3, 3, 2, 1, 3], [4, 3]),
    "Gemm": ([2, 2], [2]),
    "LSTM": ([3, 3, 3, 2, 1, 3, 3, 2], [4, 3, 3]),
    "MaxRoiPool": ([4, 2], [4]),
    "NonMaxSuppression": ([3, 3], [2]),
    "NonZero": ([], [2]),
    "RNN": ([3, 3, 3, 2, 1, 3], [4, 3]),
    "Range": ([0, 0, 0], [1]),
    "RoiAlign": ([4, 2, 1], [4]),
    "STFT": ([], [4]),
    "Shape": ([], [1]),
    "Size": ([], [0]),
    "SpaceToDepth": ([4], [4]),
}
"""Op → ranks of its inputs and outputs that are always the same."""


def _told(node: ir.Node) -> int | None:
    """The rank that attributes or constants of a node tell: of kernels, permutations, scales and margins."""
    for name, extra in (("perm", 0), ("kernel_shape", 2), ("scales", 0)):
        attr = node.attributes.get(name)
        if attr is not None and not attr.is_ref():
            return len(attr.value) + extra
    if node.op_type == "Pad" and not _given(node, 3):
        pads = node.attributes["pads"].value if "pads" in node.attributes else None
        count = len(pads) if pads is not None else _length(node, 1)
        return count // 2 if count is not None else None
    if node.op_type in ("Resize", "Upsample") and "axes" not in node.attributes:
        return next((n for k in range(len(node.inputs) - 1, 0, -1) if (n := _length(node, k))), None)
    return _length(node, 1) if node.op_type == "Tile" else None


def _given(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _length(node: ir.Node, index: int) -> int | None:
    """The number of elements of a shape operand."""
    value = node.inputs[index] if len(node.inputs) > index else None
    found = shape_of_result(value)
    return len(found) if found is not None else None


def _axes(node: ir.Node) -> int | None:
    """The number of axes that a node names; None when unknown or when it names none."""
    if "axes" in node.attributes:
        return len(node.attributes["axes"].value)
    known = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return int(known.size) if known is not None else _length(node, 1) if _given(node, 1) else None


def _broadcast(ranks: Ranks, node: ir.Node) -> None:
    inputs, (out,) = [v for v in node.inputs if v is not None], node.outputs
    found: list[int | None] = [ranks[v] for v in inputs]
    if node.op_type == "Expand":
        inputs, found = inputs[:1], [ranks[inputs[0]], _length(node, 1)]
    known = [r for r in found if r is not None]
    if len(known) == len(found):
        ranks.learn(out, max(known))
        return
    whole, open_ = ranks[out], [v for v in inputs if ranks[v] is None]
    if whole is not None and len(open_) == 1 and all(r < whole for r in known):
        ranks.learn(open_[0], whole)


def _reduction(ranks: Ranks, node: ir.Node) -> None:
    x, (out,) = node.inputs[0], node.outputs
    if node.attributes.get_int("keepdims", 1):
        ranks.equal([x, out])
    elif node.op_type in ("ArgMax", "ArgMin"):
        ranks.differ(out, x, 1)
    elif "axes" in node.attributes or _given(node, 1):
        ranks.differ(out, x, _axes(node))
    elif not node.attributes.get_int("noop_with_empty_axes", 0):
        ranks.learn(out, 0)


def _squeeze(ranks: Ranks, node: ir.Node) -> None:
    ranks.differ(node.outputs[0], node.inputs[0], _axes(node))


def _unsqueeze(ranks: Ranks, node: ir.Node) -> None:
    ranks.differ(node.inputs[0], node.outputs[0], _axes(node))


def _reshape(ranks: Ranks, node: ir.Node) -> None:
    target = node.attributes.get("shape")
    ranks.learn(node.outputs[0], len(target.value) if target is not None else _length(node, 1))


def _filled(ranks: Ranks, node: ir.Node) -> None:
    ranks.learn(node.outputs[0], _length(node, 0))


def _convolution(ranks: Ranks, node: ir.Node) -> None:
    kernel = node.attributes.get("kernel_shape")
    weight = 3 if node.op_type == "QLinearConv" else 1
    ranks.equal(
        [node.inputs[0], node.inputs[weight], node.outputs[0]], to=len(kernel.value) + 2 if kernel is not None else None
    )


def _gather(ranks: Ranks, node: ir.Node) -> None:
    x, indices, (out,) = *node.inputs[:2], node.outputs
    a, b, c = ranks[x], ranks[indices], ranks[out]
    ranks.learn(out, a + b - 1 if a is not None and b is not None else None)
    ranks.learn(x, c - b + 1 if b is not None and c is not None else None)
    ranks.learn(indices, c - a + 1 if a is not None and c is not None else None)


def _gather_nd(ranks: Ranks, node: ir.Node) -> None:
    x, indices, (out,) = *node.inputs[:2], node.outputs
    last = indices.shape[-1] if indices is not None and indices.shape is not None and len(indices.shape) else None
    a, b, batch = ranks[x], ranks[indices], node.attributes.get_int("batch_dims", 0)
    if isinstance(last, int) and a is not None and b is not None:
        ranks.learn(out, a + b - last - 1 - batch)


def _one_hot(ranks: Ranks, node: ir.Node) -> None:
    ranks.differ(node.inputs[0], node.outputs[0], 1)


def _matmul(ranks: Ranks, node: ir.Node) -> None:
    """Of two operands of rank 2 or more the result has the larger rank; an operand of rank 1 loses its axis."""
    a, b, (out,) = *node.inputs[:2], node.outputs
    for x, y in ((a, b), (b, a)):
        mine, other, whole = ranks[x], ranks[y], ranks[out]
        if other is None:
            continue
        if mine is not None:
            ranks.learn(
                out, max(mine, other) if min(mine, other) >= 2 else max(mine, other) - 1 if max(mine, other) >= 2 else 0
            )
        elif whole is not None and other == 1:
            ranks.learn(x, whole + 1)
        elif whole is not None and whole > other:
            ranks.learn(x, whole)
        elif whole is not None and whole == other == 2:
            ranks.learn(x, 2)
        elif whole is not None and whole == other - 1:
            ranks.learn(x, 1)


def _class_loss(ranks: Ranks, node: ir.Node) -> None:
    scores, labels = node.inputs[:2]
    ranks.differ(labels, scores, 1)
    if node.attributes.get_string("reduction", "mean") == "none":
        ranks.equal([labels, node.outputs[0]])
    else:
        ranks.learn(node.outputs[0], 0)
    ranks.equal([scores, *node.outputs[1:]])


def _einsum(ranks: Ranks, node: ir.Node) -> None:
    terms, _, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    for value, term in zip(node.inputs, terms.split(","), strict=False):
        ranks.learn(value, len(term) if "..." not in term else None)
    if result and "..." not in result:
        ranks.learn(node.outputs[0], len(result))


def _control(ranks: Ranks, node: ir.Node) -> None:
    """Ties the operands and results of a node to those of its bodies."""
    if node.op_type == "If":
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for then, other, out in zip(*(branch.outputs for branch in branches), node.outputs, strict=False):
            a, b = ranks[then], ranks[other]
            ranks.learn(out, a if a == b else None)
        return
    body = node.attributes["body"].as_graph()
    if node.op_type == "SequenceMap":
        return
    width = node.attributes["num_scan_inputs"].as_int() if node.op_type == "Scan" else 0
    first, skip = (2, 1) if node.op_type == "Loop" else (0, 0)
    count = len(body.inputs) - first - width
    operands = [*node.inputs, *[None] * len(body.inputs)]
    for k in range(count):
        inside = (body.inputs[first + k], body.outputs[skip + k])
        if operands[first + k] is None or ranks[operands[first + k]] == ranks[inside[1]] or ranks[inside[1]] is None:
            ranks.equal([operands[first + k], *inside, node.outputs[k]])
    for k in range(width):
        ranks.differ(body.inputs[count + k], operands[count + k], 1)
    for inner, out in zip(body.outputs[skip + count :], node.outputs[count:], strict=False):
        ranks.differ(inner, out, 1)


_RULES: dict[str, Callable[[Ranks, ir.Node], None]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv"), _convolution),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("MatMul", "MatMulInteger", "FusedMatMul"), _matmul),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), _class_loss),
    "ConstantOfShape": _filled,
    "Einsum": _einsum,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}
