"""mixed_precision: matrix products and convolutions in bfloat16 or float16, with float32 parameters and sums.

    before   y = Gemm(x, W);                                       p = Softmax(y)
    after    y:bf16 = Gemm(Cast(x, bf16), Cast(W, bf16));          p = Softmax(Cast(y, float))

The pass runs before ``autodiff``, so the casts are differentiated with everything else: a parameter stays float32 (the
master copy), its gradient comes back through the cast in float32, and updates do not change. The rule is that of
PyTorch's autocast: products run in the low type, sums and exponentials run in float32, and every other op follows its
operands: low if all operands that depend on the model's inputs are low, float32 otherwise. BatchNormalization follows its
input; its statistics and parameters are float32. A dropout multiplies in float32 and rounds the product.

float16 has a narrow range, so there the differentiated loss is scaled (see :mod:`graphc.ir.ops.precision`); the
pass ``loss_scaling``, after ``allreduce``, removes the factor and adapts it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphc.errors import UsageError, counted, nearest
from graphc.ir import DOMAIN, OPSET
from graphc.ir.builder import Builder
from graphc.ir.facts import producer_of
from graphc.ir.infer import apply
from graphc.ir.names import LOSS_SCALE, LOSS_TOTAL
from graphc.ir.state import scalar
from graphc.ir.subgraphs import captured, replace_reads
from graphc.ir.updates import trains
from graphc.pipeline import Context, graph_pass

DTYPES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}

LOW = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention"})
"""Ops that run in the low type: most of a step's arithmetic, and accurate, because products are summed in float32."""

FULL = (
    frozenset(s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and s.name.startswith(("Reduce", "Random")))
    | frozenset({"Softmax", "LogSoftmax", "Softplus", "Hardmax", "CumSum", "CumProd", "Mean", "GlobalLpPool", "LpPool", "LRN"})
    | frozenset({"BatchNormalization", "LayerNormalization", "GroupNormalization", "InstanceNormalization"})
    | frozenset({"RMSNormalization", "LpNormalization", "MeanVarianceNormalization", "SoftmaxCrossEntropyLoss"})
    | frozenset({"NegativeLogLikelihoodLoss", "Exp", "Log", "Pow", "Reciprocal", "Tan", "Sinh", "Cosh", "Acos", "Asin"})
    | frozenset({"RNN", "GRU", "LSTM", "DeformConv", "GridSample", "AffineGrid", "RoiAlign", "Resize", "Det", "DFT", "STFT"})
    | frozenset({"Loop", "If", "Scan", "CastLike", "BitCast", "QuantizeLinear", "DequantizeLinear"})
)
"""Ops that stay in float32: sums of many terms, steep functions, recurrences, and control flow with its bodies."""


@graph_pass("mixed_precision", requires=("legalize",), changes="training")
def mixed_precision(
    model: ir.Model,
    ctx: Context,
    *,
    dtype: str = "bf16",
    allow: Sequence[str] | None = None,
    deny: Sequence[str] | None = None,
    loss_scale: float = 1024.0,
) -> bool:
    """Run products in a low type and keep parameters, sums and losses in float32.

    Args:
        dtype: bf16 or fp16.
        allow: ops (``Softmax``) or globs of node names (``encoder/*``) to run in the low type against the rule.
        deny: ops or globs of node names that stay in float32; it beats ``allow``.
        loss_scale: with fp16, the initial factor on the loss. The loss is a sum here, so 1024 has the effect of 65536 on
            the mean over 64 samples.

    Raises:
        UsageError: an unknown type, a pattern that matches nothing, or gradients that exist already.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}{nearest(dtype, DTYPES)}; it is bf16 or fp16")
    if not loss_scale >= 1 or not np.isfinite(loss_scale):
        raise UsageError(f"loss_scale={loss_scale} must be a number of at least 1")
    graph = model.graph
    if any(trains(n) for n in graph) or "autodiff" in ctx.done:
        raise UsageError("the graph has its gradients already; mixed_precision belongs between 'loss' and 'autodiff'")
    rewriter = _Rewriter(graph, DTYPES[dtype], _matcher(graph, allow), _matcher(graph, deny))
    low = rewriter.run()
    if dtype == "fp16":
        _scale_loss(graph, loss_scale)
    ctx.note(f"mixed_precision: {counted(low, 'node')} in {dtype}, {counted(rewriter.casts, 'cast')}")
    return low > 0


class _Rewriter:
    """One walk in node order; an operand's precision is decided before its readers are visited."""

    def __init__(self, graph: ir.Graph, low: ir.DataType, allow: _Matcher, deny: _Matcher) -> None:
        self.graph, self.low, self.allow, self.deny = graph, low, allow, deny
        self.op = Builder(graph)
        self.casts = 0
        self.made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.depends: set[ir.Value] = set(graph.inputs)

    def run(self) -> int:
        """Returns how many nodes run in the low type."""
        count = 0
        for node in list(self.graph):
            if node.op_type == "Constant" and node.domain == "":
                continue
            low = self.runs_low(node)
            count += low
            rounded = low and _is_dropout(node)
            self.convert(node, self.low if low and not rounded else ir.DataType.FLOAT)
            # a mask takes the type of the values that it multiplies
            if node.op_type != "DropoutMask" and any(v in self.depends for v in (*node.inputs, *captured(node))):
                self.depends.update(node.outputs)
            if rounded:
                self.narrow(node)
        self.widen_outputs()
        return count

    def runs_low(self, node: ir.Node) -> bool:
        if _is_attention(node):
            return not self.deny.matches(node) and all(self.convertible(v) for v in node.inputs[:3] if v is not None)
        if _is_batch_normalization(node):
            return not self.deny.matches(node) and node.inputs[0] is not None and node.inputs[0].dtype == self.low
        schema = _schema(node)
        if schema is None or not schema.outputs or any(LOSS_TOTAL in out.metadata_props for out in node.outputs):
            return False
        if self.deny.matches(node) or (node.op_type in FULL and not self.allow.matches(node)):
            return False
        variable = schema.outputs[0].type_str
        formals = list(_formals(schema, node))
        ours = [v for v, kind in formals if kind == variable and self.convertible(v)]
        if not ours or not _takes(schema, variable, self.low) or len(ours) < sum(kind == variable for _, kind in formals):
            return False
        if node.op_type in LOW or self.allow.matches(node):
            return True
        followed = [v for v in ours if v in self.depends]
        return bool(followed) and all(v.dtype == self.low for v in followed)

    def convertible(self, value: ir.Value) -> bool:
        return isinstance(value.type, ir.TensorType) and value.dtype in (ir.DataType.FLOAT, self.low)

    def convert(self, node: ir.Node, wanted: ir.DataType) -> None:
        """Cast the node's float operands to ``wanted`` if their type is free, else to float32."""
        if node.op_type == "Cast" and node.domain == "":
            return  # takes any type, and the file fixes its output type
        schema = _schema(node)
        if wanted == self.low and (_is_attention(node) or _is_batch_normalization(node)):
            self.convert_first(node, 3 if _is_attention(node) else 1)
            return
        kinds = list(_formals(schema, node)) if schema is not None else [(v, "") for v in node.inputs if v is not None]
        targets: dict[str, ir.DataType] = {}
        for _, kind in kinds:
            free = schema is not None and _takes(schema, kind, wanted)
            targets[kind] = wanted if free else ir.DataType.FLOAT
        changed = False
        remaining = iter(kinds)
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            _, kind = next(remaining)
            if self.convertible(value) and value.dtype != targets[kind]:
                node.replace_input_with(index, self.cast(value, targets[kind], node))
                changed = True
        wide = {v: self.cast(v, ir.DataType.FLOAT, node) for v in captured(node) if v.dtype == self.low}
        if wide:
            replace_reads(node, wide)
        if changed or wanted == self.low:
            if node.op_type == "Attention" and wanted == self.low:
                node.attributes["softmax_precision"] = ir.AttrInt64("softmax_precision", int(ir.DataType.FLOAT))
            apply(node)

    def convert_first(self, node: ir.Node, count: int) -> None:
        """Cast the first ``count`` operands; the rest, and sums inside the op, are float32."""
        for index, value in enumerate(node.inputs[:count]):
            if value is not None and value.dtype != self.low:
                node.replace_input_with(index, self.cast(value, self.low, node))
        for index, value in enumerate(node.inputs[count:], count):
            if value is not None and value.dtype == self.low:
                node.replace_input_with(index, self.cast(value, ir.DataType.FLOAT, node))
        apply(node)

    def cast(self, value: ir.Value, dtype: ir.DataType, before: ir.Node | None) -> ir.Value:
        """Cast ``value`` to ``dtype`` once for all its readers, before the first of them."""
        known = self.made.get((value, dtype))
        if known is None:
            self.op.before, self.op.scope = before, f"{value.name}/{dtype.name.lower()}"
            known = self.op.Cast(value, to=int(dtype))
            self.made[value, dtype] = known
            self.casts += 1
            if value in self.depends:
                self.depends.add(known)
        return known

    def narrow(self, node: ir.Node) -> None:
        """Cast the node's float32 results to the low type for their readers."""
        out = node.outputs[0]
        readers = list(out.uses())
        low = self.cast(out, self.low, _next(self.graph, node))
        for reader, index in readers:
            reader.replace_input_with(index, low)

    def widen_outputs(self) -> None:
        """Restore the type and the name of a result that its reader expects."""
        for k, value in enumerate(list(self.graph.outputs)):
            if value.dtype != self.low or value.is_initializer():
                continue
            name = value.name
            wide = self.cast(value, ir.DataType.FLOAT, None)
            value.name = self.op.unique(f"{name}.{self.low.name.lower()}", value=True)
            wide.name = name
            self.graph.outputs[k] = wide


def _is_attention(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == "ScaledDotProductAttention"


def _is_batch_normalization(node: ir.Node) -> bool:
    """BatchNormalization in training: its input may be low, its statistics and parameters are float32."""
    return node.domain == DOMAIN and node.op_type == "BatchNormalizationTraining"


def _is_dropout(node: ir.Node) -> bool:
    """x · mask. In the low type 1 ÷ (1 − ratio) would be rounded, which biases every mean; this rounds the product instead."""
    made = [v.producer() for v in node.inputs if v is not None]
    return node.op_type == "Mul" and not node.domain and any(n is not None and n.op_type == "DropoutMask" for n in made)


def _schema(node: ir.Node) -> onnx.defs.OpSchema | None:
    if node.domain != "":
        return None
    return onnx.defs.get_schema(node.op_type, OPSET, "")


def _formals(schema: onnx.defs.OpSchema, node: ir.Node) -> Iterator[tuple[ir.Value, str]]:
    """Every present operand, with the schema's type variable (or fixed type)."""
    for index, value in enumerate(node.inputs):
        if value is not None:
            yield value, schema.inputs[min(index, len(schema.inputs) - 1)].type_str


def _takes(schema: onnx.defs.OpSchema, variable: str, dtype: ir.DataType) -> bool:
    wanted = f"tensor({str(dtype).lower()})"
    return any(c.type_param_str == variable and wanted in c.allowed_type_strs for c in schema.type_constraints)


class _Matcher:
    """Selects ops by name, and nodes by glob."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns

    def matches(self, node: ir.Node) -> bool:
        return any(node.op_type == p or fnmatch.fnmatchcase(node.name or "", p) for p in self.patterns)


def _matcher(graph: ir.Graph, patterns: Sequence[str] | None) -> _Matcher:
    matcher = _Matcher(list(patterns or ()))
    known = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""} | {n.op_type for n in graph}
    for pattern in matcher.patterns:
        if pattern not in known and not any(fnmatch.fnmatchcase(n.name or "", pattern) for n in graph):
            raise UsageError(f"no op and no node matches {pattern!r}{nearest(pattern, known)}")
    return matcher


def _scale_loss(graph: ir.Graph, start: float) -> None:
    """Make autodiff start at a total whose gradient is ``scale`` times as large."""
    totals = [out for node in graph for out in node.outputs if LOSS_TOTAL in out.metadata_props]
    if not totals:
        raise UsageError("no loss to scale: run the 'loss' pass first, or use bf16, which needs no scale")
    scale = scalar(graph, LOSS_SCALE, start, np.float32)
    for total in totals:
        users, producer = list(total.uses()), producer_of(total)
        op = Builder(graph, before=_next(graph, producer), scope="loss/scale")
        scaled = op.graphc.ScaleLoss(total, scale)
        scaled.metadata_props[LOSS_TOTAL] = total.metadata_props.pop(LOSS_TOTAL)
        for user, index in users:
            user.replace_input_with(index, scaled)


def _next(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    found = iter(graph)
    next((n for n in found if n is node), None)
    return next(found, None)
