"""Rewrites each node to the one canonical form of its op.

ONNX has several forms for some computations; the inputs of the nodes are typed already. Indices, axes and lengths, for
which ONNX takes int32 too, are int64 in every legal graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import OPSET
from graphc.ir.builder import Builder
from graphc.ir.facts import describe, dims, unknown_rank
from graphc.ir.operand_shapes import covered_once
from graphc.ir.signatures import index_operands
from graphc.passes.gradients.linear import einsum_terms
from graphc.passes.legalize.logarithms import stable_logarithm
from graphc.passes.legalize.rows import INDEXED, by_rows
from graphc.passes.parameters.promote import constant_tensor

_WINDOWED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "ConvInteger", "QLinearConv", "DeformConv"})

_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})

_OF_ONE = frozenset({"Sum", "Max", "Min", "Mean", "Concat"})
"""Variadic ops that return their only input unchanged."""


def canonicalise(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Rewrite ``node`` to its canonical form; returns new output values where the node had to be replaced."""
    if node.op_type == "Resize":  # of opset 11: an operand that is left out is an empty tensor
        for k, value in enumerate(node.inputs):
            if k and value is not None and dims(value) == (0,):
                node.replace_input_with(k, None)
    while node.inputs and node.inputs[-1] is None:
        node.resize_inputs(len(node.inputs) - 1)
    for k in index_operands(node.op_type, OPSET) if node.domain == "" else ():
        value = node.inputs[k] if k < len(node.inputs) else None
        if value is not None and value.dtype == ir.DataType.INT32:
            node.replace_input_with(k, op.int64(value))
    if node.op_type in _WINDOWED:
        explicit_pads(node)
        if "ceil_mode" in node.attributes:
            _trim_window(node)
    elif node.op_type == "STFT" and len(dims(_first(node)) or ()) == 2:  # runtimes disagree about a signal of two axes
        node.replace_input_with(0, op.Unsqueeze(node.inputs[0], [2]))
    elif node.op_type in _OF_ONE and len(node.inputs) == 1:
        return [op.Identity(node.inputs[0])]
    elif node.op_type in ("Dropout", "MaxPool", "LayerNormalization"):
        _drop_unused_outputs(node)
    elif node.op_type == "BatchNormalization":
        training = node.attributes.get("training_mode")
        if training is None or not training.as_int():
            node.attributes.pop("training_mode", None)
            _drop_unused_outputs(node)
    elif node.op_type == "Constant" and "value" not in node.attributes:
        tensor = constant_tensor(node)
        if tensor is None:
            raise ModelError(f"a sparse Constant is not supported: {describe(node)}; export it as a dense tensor")
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
    elif node.op_type == "Einsum":
        return _without_repetition(op, node)
    elif node.op_type == "SpaceToDepth" and "mode" in node.attributes:
        return [_space_to_depth(op, node)]
    elif node.op_type == "Swish":
        return [_swish(op, node)]
    elif node.op_type == "Log":
        stable = stable_logarithm(op, node)
        return None if stable is None else [stable]
    elif node.op_type == "GlobalLpPool":
        return [_global_lp_pool(op, node)]
    elif node.op_type == "MatMul" and node.domain == "" and _columns(node):
        matrix, columns = node.inputs
        return [op.Unsqueeze(op.MatMul(op.Squeeze(columns, [-1]), op.Transpose(matrix, perm=[1, 0])), [-1])]
    elif node.op_type in INDEXED and node.domain == "":
        rows = by_rows(op, node)
        return None if rows is None else [rows]
    elif node.op_type == "Resize" and "axes" in node.attributes and dims(_first(node)) is not None:
        count = op.rank(_first(node))  # onnx.reference does not support negative axes
        node.attributes["axes"] = ir.AttrInt64s("axes", [a % count for a in node.attributes["axes"].as_ints()])
    elif node.op_type in _RECURRENT and _int(node, "layout"):
        return _sequence_first(op, node)
    if node.op_type == "MaxPool":
        _drop_unused_outputs(node)
    return None


def _without_repetition(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Drop the axes of one element that an Einsum repeats along its other operands: inference takes the result to have one.

    before   Einsum(a[1, 3], b[8, 3]; "bi,bi->bi")        after   Einsum(Squeeze(a, 0), b; "i,bi->bi")
    """
    inputs = [v for v in node.inputs if v is not None]
    named = node.attributes.get_string("equation", "").partition("->")[0].count(",") + 1
    if node.domain != "" or named != len(inputs) or any(dims(v) is None for v in inputs):
        return None
    terms, result = einsum_terms(node, inputs)
    if any(len(term) != len(dims(v) or ()) for term, v in zip(terms, inputs, strict=True)):
        return None  # inference says what is wrong
    longer = {
        label
        for term, v in zip(terms, inputs, strict=True)
        for label, size in zip(term, dims(v) or (), strict=True)
        if size != 1
    }
    operands, kept = [], []
    for term, v in zip(terms, inputs, strict=True):
        ones = [k for k, label in enumerate(term) if (dims(v) or ())[k] == 1 and label in longer]
        operands.append(op.Squeeze(v, ones) if ones else v)
        kept.append("".join(label for k, label in enumerate(term) if k not in ones))
    return [op.Einsum(*operands, equation=f"{','.join(kept)}->{result}")] if kept != terms else None


def _swish(op: Builder, node: ir.Node) -> ir.Value:
    """Decompose Swish into x·sigmoid(αx): onnxruntime has no kernel for it, and fuses this form."""
    x, alpha = node.inputs[0], node.attributes.get_float("alpha", 1.0)
    return op.Mul(x, op.Sigmoid(x if alpha == 1 else op.Mul(x, alpha)))  # type: ignore[no-any-return]


def _sequence_first(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Put transposes around a recurrent node with ``layout=1`` (batch first), which onnxruntime rejects."""
    inputs = [op.Transpose(v, perm=[1, 0, 2]) if v is not None and k in (0, 5, 6) else v for k, v in enumerate(node.inputs)]
    attributes = {name: attr for name, attr in node.attributes.items() if name != "layout"}
    outputs = op.emit(node.op_type, inputs, attributes, outputs=len(node.outputs))
    return [op.Transpose(v, perm=[2, 0, 1, 3] if k == 0 else [1, 0, 2]) for k, v in enumerate(outputs)]


def _space_to_depth(op: Builder, node: ir.Node) -> ir.Value:
    """Rewrite mode CRD by reordering channels: since opset 28, mode CRD only swaps the order of blocks and channels."""
    size = node.attributes["blocksize"].as_int()
    y: ir.Value = op.SpaceToDepth(node.inputs[0], blocksize=size)
    if node.attributes["mode"].as_string() != "CRD":
        return y
    rest = [op.Shape(y, start=2, end=3), op.Shape(y, start=3, end=4)]
    apart = op.Reshape(y, op.Concat(op.const([0, size * size, -1]), *rest, axis=0))
    return op.reshape_like(op.Transpose(apart, perm=[0, 2, 1, 3, 4]), y)


def _columns(node: ir.Node) -> bool:
    """Say whether one matrix [M, K] multiplies a batch of columns [..., K, 1]; as rows they make a single product.

    So do the gradients: of the matrix, that is one product too, in place of an outer product for each column and their sum.
    """
    matrix, columns = (None if value is None else dims(value) for value in node.inputs)
    return matrix is not None and columns is not None and len(matrix) == 2 and len(columns) > 2 and columns[-1] == 1


def _first(node: ir.Node) -> ir.Value:
    (x,) = (v for v in node.inputs[:1] if v is not None)
    return x


def _global_lp_pool(op: Builder, node: ir.Node) -> ir.Value:
    """Decompose LpPool into (Σ|x|ᵖ)^(1/p) by other ops: neither runtime has a kernel for it."""
    x, p = _first(node), node.attributes.get_int("p", 2)
    if dims(x) is None:
        raise unknown_rank(x)
    axes = list(range(2, op.rank(x)))
    if p <= 2:
        return op.ReduceL1(x, axes) if p == 1 else op.ReduceL2(x, axes)  # type: ignore[no-any-return]
    size = (dims(x) or ())[2:]
    if 1 <= len(size) <= 3 and all(isinstance(d, int) for d in size):
        return op.LpPool(x, p=p, kernel_shape=list(size))  # type: ignore[no-any-return]
    total = op.ReduceSum(op.Pow(op.Abs(x), float(p)), axes)
    return op.Pow(total, 1.0 / p)  # type: ignore[no-any-return]


def _drop_unused_outputs(node: ir.Node) -> None:
    count = len(node.outputs)
    while count > 1 and not node.outputs[count - 1].uses() and not node.outputs[count - 1].is_graph_output():
        count -= 1
    if count != len(node.outputs):
        node.resize_outputs(count)


def _trim_window(node: ir.Node) -> None:
    """Cut a window of a pool at the end of its axis, where ``ceil_mode`` lets a single one reach beyond.

    Some networks pool a map of any size so, with a window of as many elements as there are channels.
    """
    taps, sizes = _ints(node, "kernel_shape") or [], (dims(_first(node)) or ())[2:]
    for axis, size in enumerate(sizes[: len(taps)]):
        total = covered_once(node.attributes, axis, size) if isinstance(size, int) else None
        if total is not None:
            taps[axis] = total
            node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", taps)


def explicit_pads(node: ir.Node) -> bool:
    """Replace ``auto_pad`` (and ConvTranspose's ``output_shape``) by ``pads``; False when sizes are unknown."""
    auto = node.attributes["auto_pad"].as_string() if "auto_pad" in node.attributes else "NOTSET"
    transposed = node.op_type == "ConvTranspose"
    wanted = _ints(node, "output_shape") if transposed else None
    if auto in ("NOTSET", "") and wanted is None:
        node.attributes.pop("auto_pad", None)
        return True
    kernel = _kernel(node)
    if kernel is None:
        return False
    spatial = len(kernel)
    if auto == "VALID" and wanted is None:
        pads: list[int] | None = [0] * (2 * spatial)
    else:
        pads = _pads(node, kernel, upper=auto == "SAME_UPPER", wanted=wanted)
    if pads is None:
        return False
    node.attributes.pop("auto_pad", None)
    node.attributes.pop("output_shape", None)
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    return True


def _kernel(node: ir.Node) -> list[int] | None:
    kernel = _ints(node, "kernel_shape")
    if kernel is not None:
        return kernel
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    shape = dims(weight) if weight is not None else None
    if shape is None or not all(isinstance(d, int) for d in shape[2:]):
        return None
    return [int(d) for d in shape[2:] if isinstance(d, int)]


def _pads(node: ir.Node, kernel: list[int], *, upper: bool, wanted: list[int] | None) -> list[int] | None:
    x = node.inputs[0]
    shape = dims(x) if x is not None else None
    ones = [1] * len(kernel)
    strides, dilations = _ints(node, "strides") or ones, _ints(node, "dilations") or ones
    extra = _ints(node, "output_padding") or [0] * len(kernel)
    if shape is None or not len(shape) - 2 == len(kernel) == len(strides) == len(dilations) == len(extra):
        return None  # inference names what does not fit
    size = shape[2:]
    begins, ends = [], []
    for k, (d, width) in enumerate(zip(size, kernel, strict=True)):
        reach = (width - 1) * dilations[k] + 1
        if node.op_type == "ConvTranspose":
            if wanted is None:  # SAME: the output size is ceil(input / stride)
                total = max(0, reach + extra[k] - strides[k])
            elif isinstance(d, int):
                total = strides[k] * (d - 1) + extra[k] + reach - wanted[len(wanted) - len(kernel) + k]
                if total < 0:  # the requested output is larger than the windows reach: the rest is zeros at the end
                    extra[k], total = extra[k] - total, 0
                    node.attributes["output_padding"] = ir.AttrInt64s("output_padding", extra)
            else:
                return None
        elif isinstance(d, int):
            total = max(0, (-(-d // strides[k]) - 1) * strides[k] + reach - d)
        elif strides[k] == 1:
            total = reach - 1
        else:
            return None
        small, large = total // 2, total - total // 2
        begins.append(small if upper else large)
        ends.append(large if upper else small)
    return begins + ends


def _int(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int() if name in node.attributes else 0


def _ints(node: ir.Node, name: str) -> list[int] | None:
    return list(node.attributes[name].as_ints()) if name in node.attributes else None
