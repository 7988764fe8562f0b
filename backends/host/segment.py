"""Compiles a segment to kernels for the host, and leaves the nodes that it cannot compile to another runtime.

    Add ─► LayerNorm ─► Gather ─► MatMul ─► Gelu     becomes     [Add, normalisation]  (Gather, MatMul)  [Gelu]

Brackets are kernels (:mod:`graphc.backends.fusion.grouping`), the rest keeps its order and runs in as few pieces as possible.
A kernel takes some 25 ms to compile, once for all processes, so a segment with little arithmetic is left whole.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backends.fusion.graph_queries import operands, results, sweep
from graphc.backends.fusion.grouping import group, in_place_of
from graphc.backends.fusion.groups import FusedKernel
from graphc.backends.fusion.kernel_source import KernelSource
from graphc.backends.fusion.op_kernels import ARITHMETIC, OP_KERNELS, is_expression, op_kernel
from graphc.backends.fusion.rules import losses, normalisation, signals
from graphc.backends.fusion.rules.decompose import take_apart
from graphc.backends.host.compiler import Function, HostKernel, compiler
from graphc.backends.host.generator import HostGenerator
from graphc.backends.host.language import LanguageError
from graphc.backends.host.rewrites import rewrite
from graphc.backends.host.segment_code import KernelPart, RestPart, SegmentCode, ValuePlace
from graphc.gradient import key_of
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import constant, dtype_of, shape_of, size_of, static_dims
from graphc.ir.infer import propagate
from graphc.ir.serialize import to_proto
from graphc.ir.subgraphs import CONTROL

LEAST = 1 << 6
"""Elements from which arithmetic pays for a kernel: below, a step saves a microsecond or two, and a start takes longer."""

TRANSFORM = 512
"""Length up to which a Fourier transform is a product; twice that where it is no power of two, at which onnxruntime is slow."""

ELEMENTS = frozenset({"Cast", "CastLike", "graphc::GeluGrad"})
"""Ops with code of their own that are compiled. The others read at indices from data, which another runtime checks."""


@dataclass(slots=True)
class _Kernel:
    """A compiled kernel and its operands."""

    source: KernelSource
    compiled: HostKernel
    nodes: Sequence[ir.Node]

    @property
    def reads(self) -> Sequence[ir.Value]:
        return self.source.operands[: self.source.reads]

    @property
    def writes(self) -> Sequence[ir.Value]:
        return self.source.operands[self.source.reads :]


@dataclass(slots=True)
class _Rest:
    """Neighbouring nodes that are left."""

    nodes: list[ir.Node]
    reads: list[ir.Value]
    writes: list[ir.Value]


def compile_segment(model: onnx.ModelProto, least: int = 1, *, varying: bool = False) -> SegmentCode:
    """The parts of a segment in order.

    Args:
        model: the segment.
        least: elements that the largest kernel takes at least, unless all operands and results are single numbers: such
            segments, as that of the mean loss, are the same in all models.
        varying: whether feeds have many shapes; see :meth:`~graphc.backends.host.compiler.Compiler.compile`.

    Raises:
        LanguageError: nothing of it can be compiled, or it is too little.
    """
    refused: set[str] = set()
    least = 1 if _holds_single_numbers(model) or _holds_an_exact_op(model) else least
    while True:
        try:
            return _Segment(model, least, refused, varying).code()
        except _RefusedError as error:
            refused |= error.ops


def _holds_single_numbers(model: onnx.ModelProto) -> bool:
    dims = (d for v in (*model.graph.input, *model.graph.output) for d in v.type.tensor_type.shape.dim)
    return all(d.dim_value == 1 for d in dims)


class _Segment:
    def __init__(self, model: onnx.ModelProto, least: int, refused: set[str], varying: bool) -> None:
        self.model = model
        self._varying = varying
        self.least = least
        self._refused = refused
        self.graph = _prepared(model, least)
        self._compile()

    def _compile(self) -> None:
        if any(node.op_type in CONTROL and not node.domain for node in self.graph):
            raise LanguageError("control flow")
        grouping = group(self.graph, self._is_left, lambda spec: True, may_skew=False)
        if not any(isinstance(k, FusedKernel) and math.prod(k.shape) >= self.least for k in grouping.launches):
            raise LanguageError("too little arithmetic")
        self.aliases = grouping.aliases
        self.parts: list[_Kernel | _Rest] = []
        left: list[ir.Node] = []
        for launch in grouping.launches:
            if isinstance(launch, FusedKernel):
                self._close(left)
                self.parts += self._kernels(launch, grouping.memory)
            else:
                made = {v for node in left for v in node.outputs}
                if any(self.aliases.get(v) in made for v in operands(launch.node) if v is not None):
                    self._close(left)  # it reads another shape of what they write, which one session would not wait for
                left.append(launch.node)
        self._close(left)

    def _is_left(self, node: ir.Node) -> bool:
        key = key_of(node.domain, node.op_type)
        if node.op_type in self._refused or not is_expression(node) or (op_kernel(node).element and key not in ELEMENTS):
            return True
        if key == "Concat" and _has_many_pieces(node):
            return True
        return any(v.dtype not in _TYPES for v in (*node.inputs, *node.outputs) if v is not None)

    def _kernels(self, kernel: FusedKernel, memory: set[ir.Value]) -> list[_Kernel]:
        own = set(kernel.stores) | {out for node in kernel.reductions for out in node.outputs}

        def in_memory(value: ir.Value) -> bool:
            producer = value.producer()
            if value in own or value in kernel.recomputed:
                return False
            return value in memory or producer is None or producer.op_type == "Constant"

        generator = HostGenerator(kernel.spec, in_memory)
        nodes = list(_inside(kernel, in_memory))
        try:
            return [
                _Kernel(source, compiler().compile(source, loops, varying=self._varying), nodes)
                for source, loops in generator.kernels()
            ]
        except LanguageError:
            ops = {node.op_type for node in nodes} - _ALWAYS
            if not ops:
                raise  # plain arithmetic of a type that no kernel computes
            raise _RefusedError(ops) from None

    def _close(self, nodes: list[ir.Node]) -> None:
        """Make a part of the nodes that are left so far."""
        if not nodes:
            return
        made = {v for node in nodes for v in node.outputs}
        reads = [v for node in nodes for v in operands(node) if v is not None and v not in made and constant(v) is None]
        inside = set(nodes)
        writes = [
            v for node in nodes for v in results(node) if v.is_graph_output() or any(user not in inside for user, _ in v.uses())
        ]
        self.parts.append(_Rest(list(nodes), list(dict.fromkeys(reads)), writes))
        nodes.clear()

    def code(self) -> SegmentCode:
        """The segment as plain data."""
        numbers: dict[ir.Value, int] = {}
        values: list[ir.Value] = []

        def number(value: ir.Value) -> int:
            if value not in numbers:
                numbers[value] = len(values)
                values.append(value)
                number(in_place_of(self.aliases.get(value, value)))
            return numbers[value]

        inputs, outputs = tuple(map(number, self.graph.inputs)), tuple(map(number, self.graph.outputs))
        order = {node: k for k, node in enumerate(self.graph)}
        parts: list[KernelPart | RestPart] = []
        kernels: dict[str, Callable[[], Function]] = {}
        for part in self.parts:
            own = sorted((node for node in part.nodes if node.op_type != "Constant"), key=lambda node: order[node])
            nodes = tuple(node.name or node.op_type for node in own)
            reads, writes = tuple(map(number, part.reads)), tuple(map(number, part.writes))
            if isinstance(part, _Kernel):
                kernel = part.compiled
                kernels[kernel.name] = kernel.load
                parts.append(KernelPart(kernel.name, kernel.units, kernel.elements, reads, writes, nodes, kernel.sizes))
            else:
                made = in_standard_ops(_model_of(part, self.model)).SerializeToString()
                parts.append(RestPart(base64.b64encode(made).decode(), reads, writes, nodes))
        made_here = {*inputs, *(k for part in parts for k in part.writes)}
        places = [self._place(value, numbers, made_here) for value in values]
        return SegmentCode(places, inputs, outputs, parts, kernels)

    def _place(self, value: ir.Value, numbers: Mapping[ir.Value, int], made: set[int]) -> ValuePlace:
        base, known = numbers[in_place_of(self.aliases.get(value, value))], constant(value)
        if numbers[value] not in made and base not in made and known is None:
            raise LanguageError(f"{value.name} is nowhere")
        text = None
        if numbers[value] not in made and base not in made:
            text = base64.b64encode(np.asarray(known, order="C").tobytes()).decode()
        return ValuePlace(value.name or "", dtype_of(value).numpy().name, shape_of(value), base, text)


class _RefusedError(Exception):
    """A kernel with these ops cannot be compiled; without them the others may be."""

    def __init__(self, ops: set[str]) -> None:
        super().__init__(ops)
        self.ops = ops


_ALWAYS = frozenset({"Add", "Sub", "Mul", "Div", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "ReduceSum"})

_TYPES = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.UINT8}
)


def _holds_an_exact_op(model: onnx.ModelProto) -> bool:
    """Whether onnxruntime is kept from an op of a few numbers, too. Its sigmoid is 0 below -18, and at -5 off by 1e-5 of its
    value: a ranking loss ``log(sigmoid(x) + 1e-10)`` then has no gradient where it is most wrong.
    """
    records = (OP_KERNELS.get(key_of(node.domain, node.op_type)) for node in model.graph.node)
    return any(found is not None and found.exact for found in records)


def _prepared(model: onnx.ModelProto, least: int) -> ir.Graph:
    """The segment's graph with composite ops taken apart where generated kernels compute all of their parts."""
    graph = ir.from_proto(model).graph
    graph.initializers.clear()  # their values stay as constants
    propagate(graph)
    if any(static_dims(v) is None for node in graph for v in results(node)):
        raise LanguageError("shapes that depend on data")
    rewrite(graph)
    if not any(pays(node, least) for node in graph if is_expression(node) or _is_composite(node)):
        raise LanguageError("too little arithmetic")
    take_apart(graph, lambda node: not _is_composite(node))
    decompose_graph(graph, is_expression)
    propagate(graph)
    sweep(graph)
    return graph


def _has_many_pieces(node: ir.Node) -> bool:
    """Whether a kernel would take longer to find the operand of each element of a Concat than another runtime to copy them.

    LLVM makes vectors of a choice of two; of more it makes branches, which are predicted where an operand has long pieces, in
    the order in which a reader takes them: query, key and value of [3, n, heads, t, d] are short in [n, t, 3, heads, d].
    """
    shape = shape_of(node.outputs[0])
    axis = node.attributes.get_int("axis", 0) % len(shape)
    sizes = [shape_of(v)[axis] for v in node.inputs if v is not None]
    if len(sizes) <= 2:
        return False
    orders = [list(range(len(shape)))]
    for user, _ in node.outputs[0].uses():
        if user.op_type == "Transpose" and not user.domain and "perm" in user.attributes:
            orders.append(list(user.attributes["perm"].as_ints()))
    between = min(math.prod(shape[k] for k in order[order.index(axis) + 1 :]) for order in orders)
    return len(sizes) > 4 or max(sizes) * between < 1024


def _is_composite(node: ir.Node) -> bool:
    """Whether a node is taken apart into arithmetic and reductions: norms, softmax and the like; short Fourier transforms."""
    rule = op_kernel(node).decomposition
    if rule is None:
        return False
    return rule.__module__ in (losses.__name__, normalisation.__name__) or (
        rule.__module__ == signals.__name__ and _is_short_transform(node)
    )


def _is_short_transform(node: ir.Node) -> bool:
    """Whether a Fourier transform takes longer in onnxruntime than products with matrices of sines and cosines."""
    length = signals.length_of(node)
    return 0 < length <= (TRANSFORM if length & (length - 1) == 0 else 2 * TRANSFORM)


def _inside(kernel: FusedKernel, in_memory: Callable[[ir.Value], bool]) -> Iterator[ir.Node]:
    """The nodes that a kernel computes."""
    pending, seen = [*kernel.stores, *(v for n in kernel.reductions for v in n.outputs)], set[ir.Node]()
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [v for v in node.inputs if v is not None and not in_memory(v)]


def _model_of(part: _Rest, model: onnx.ModelProto) -> onnx.ModelProto:
    """The nodes of a part as a model of their own; constants that they read are its initializers."""
    names: Mapping[str, ir.Value] = {
        v.name or "": v for node in part.nodes for v in operands(node) if v is not None and constant(v) is not None
    }
    proto = onnx.ModelProto(ir_version=model.ir_version)
    proto.opset_import.extend(model.opset_import)
    proto.graph.name = "rest"
    proto.graph.node.extend(to_proto(node) for node in part.nodes)
    made = {out for node in proto.graph.node for out in node.output}
    for name, value in names.items():
        if name not in made:
            array = constant(value)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, order="C"), name))
    for values, target in ((part.reads, proto.graph.input), (part.writes, proto.graph.output)):
        for value in values:
            kind = int(dtype_of(value))
            target.append(onnx.helper.make_tensor_value_info(value.name or "", kind, list(shape_of(value))))
    return proto


def in_standard_ops(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with ``graphc`` ops decomposed, for a runtime that lacks them."""
    if not any(node.domain for node in model.graph.node):
        return model
    made = ir.from_proto(model)
    propagate(made.graph)  # decompositions ask for types, which the nodes alone do not say
    decompose_graph(made.graph, lambda node: False)
    return to_proto(made)


def pays(node: ir.Node, least: int = LEAST) -> bool:
    """Whether an operand or a result of the node has ``least`` elements."""
    values = (v for v in (*node.inputs, *node.outputs) if v is not None and static_dims(v) is not None)
    return any(size_of(v) >= least for v in values)


def holds(node: ir.Node) -> bool:
    """Whether a segment may hold this ``graphc`` op: a kernel computes it without a decomposition."""
    return key_of(node.domain, node.op_type) in ELEMENTS and all(
        v.dtype == ir.DataType.FLOAT for v in node.inputs if v is not None
    )


BRIEF = 8
"""Operations for each element of float32, at most, that take less time than to write and read it.

Repeated rather than stored, the sigmoids of SiLU make the steps of a U-Net and an EfficientNet 2 % shorter, and the latter's
arena 166 → 116 MB.
"""


def repeats(node: ir.Node) -> bool:
    """Whether a kernel computes the node in less time than it takes to write and read its result."""
    if node.domain:
        return False
    rule = op_kernel(node)
    weighed = rule.expression is not None and rule.work > 1  # an op that nobody has weighed has a work of 1
    brief = weighed and rule.work <= BRIEF and dtype_of(node.outputs[0]) == ir.DataType.FLOAT
    return node.op_type in ARITHMETIC or brief
