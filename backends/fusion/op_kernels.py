"""One record per op: its generated code, cost and library calls.

    "Gelu": OpKernel(e.gelu, work=12, epilogue=Epilogue("gelu", exact=is_tanh_form))

Grouping, code generation, epilogues of products, predictions and the list of ops read these records. A target adds its calls
and decompositions (:mod:`graphc.backends.cupy.libraries.registry`, :mod:`graphc.backends.fusion.rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx
import onnx_ir as ir

from graphc.backends.fusion import elementwise as e
from graphc.backends.fusion import lowering_rules as rules
from graphc.backends.fusion import reductions as r
from graphc.backends.fusion import views
from graphc.backends.fusion.elementwise import Expression
from graphc.backends.fusion.indexing import Map
from graphc.backends.fusion.packed_masks import UNPACKED
from graphc.backends.fusion.reductions import Reduction
from graphc.gradient import key_of
from graphc.ir import DOMAIN

if TYPE_CHECKING:
    from graphc.ir.builder import Builder

Element: TypeAlias = Callable[[rules.Lowering, ir.Node, Map, str | None], str]
"""(kernel lowering, node, index of the result, guard) → C text of one element; it lowers its operands itself."""

IndexMap: TypeAlias = Callable[[ir.Node, int, Map], Sequence[views.Piece] | None]
"""(node, output, index of the result) → the source of the element; None if the node does more than move elements."""

Decomposition: TypeAlias = "Callable[[Builder, ir.Node], Sequence[ir.Value | None] | None]"
"""(builder, node) → new values for the node's outputs, or None if the rule does not apply."""


def every_node(node: ir.Node) -> bool:
    """Accept every node of the op."""
    return True


def is_tanh_form(node: ir.Node) -> bool:
    """Whether a Gelu or its gradient is the tanh approximation."""
    return node.attributes.get_string("approximate", "none") == "tanh"


@dataclass(frozen=True, slots=True)
class Epilogue:
    """How a matrix product absorbs the op.

    Attributes:
        name: of the library's epilogue.
        exact: whether the library computes exactly this node; other nodes are absorbed only if the user permits it.
        gradient: the op multiplies the product, its input 0, by a slope that depends on its input 1.
        signs: the slope depends on a sign only, which the forward product writes as a bit.
    """

    name: str
    exact: Callable[[ir.Node], bool] = every_node
    gradient: bool = False
    signs: bool = False


@dataclass(slots=True)
class OpKernel:
    """How one op is computed. Generated kernels never contain an op without any of the first four fields.

    Attributes:
        expression: C text of an elementwise op.
        element: C text of an op that reads its operands at other indices, or needs more of the generator than arithmetic.
        index_map: index arithmetic of an op that moves elements, which costs no pass over memory.
        reduction: how an op reduces axes.
        typed_by: the operand whose element type the expression computes in.
        same_memory: the result shares the operand's memory under another shape.
        same_elements: the result holds every element of the operand once.
        neighbours: each element reads several operand elements, so the operands are written to memory, not computed repeatedly.
        picks: the elements of operand 0 that the result holds are found by indices, operand 1.
        work: operations per element, by which grouping weighs recomputing a value against reading it.
        exact: a runtime's own kernel of the op loses digits, so that a few numbers, too, are computed by this record.
        instructions: C function that only this op calls → its instructions, for predictions.
        epilogue: its form in a matrix product.
        decomposition: the op expressed in simpler ops.
        decomposed_first: whether the decomposition takes precedence over every other way to run the node.
        libraries, kernels: calls that run nodes instead of a generated kernel; the first that accepts a node runs it.
    """

    expression: Expression | None = None
    element: Element | None = None
    index_map: IndexMap | None = None
    reduction: Reduction | None = None
    typed_by: int = 0
    same_memory: bool = False
    same_elements: bool = False
    neighbours: bool = False
    picks: bool = False
    work: int = 1
    exact: bool = False
    instructions: Mapping[str, int] = field(default_factory=dict)
    epilogue: Epilogue | None = None
    decomposition: Decomposition | None = None
    decomposed_first: bool = False
    libraries: list[Any] = field(default_factory=list)
    kernels: list[Any] = field(default_factory=list)

    @property
    def is_generated(self) -> bool:
        """Whether generated kernels support the op."""
        return any(way is not None for way in (self.expression, self.element, self.index_map, self.reduction))


def _reshape(index_map: IndexMap = views.reshape) -> OpKernel:
    return OpKernel(index_map=index_map, work=0, same_memory=True, same_elements=True)


def _move(index_map: IndexMap, *, same_elements: bool = False) -> OpKernel:
    return OpKernel(index_map=index_map, work=0, same_elements=same_elements)


OP_KERNELS: dict[str, OpKernel] = {
    # Elementwise
    "Add": OpKernel(e.infix("+")), "Sub": OpKernel(e.infix("-")), "Mul": OpKernel(e.infix("*")),
    "Div": OpKernel(e.infix("/"), work=4), "Mod": OpKernel(e.modulo), "Pow": OpKernel(e.power, work=12),
    "Sum": OpKernel(e.fold(e.infix("+"))), "Mean": OpKernel(e.mean),
    "Max": OpKernel(e.fold(e.extreme(">"))), "Min": OpKernel(e.fold(e.extreme("<"))),
    "Neg": OpKernel(lambda a, node, dtype: f"(-{a[0]})"), "Abs": OpKernel(e.absolute), "Sign": OpKernel(e.sign),
    "Reciprocal": OpKernel(e.reciprocal), "Sqrt": OpKernel(e.call("sqrt"), work=4),
    "Exp": OpKernel(e.call("exp"), work=4), "Log": OpKernel(e.call("log"), work=4), "Erf": OpKernel(e.call("erf"), work=8),
    "Sin": OpKernel(e.call("sin"), work=9), "Cos": OpKernel(e.call("cos"), work=9), "Tan": OpKernel(e.call("tan")),
    "Asin": OpKernel(e.call("asin")), "Acos": OpKernel(e.call("acos")), "Atan": OpKernel(e.call("atan")),
    "Sinh": OpKernel(e.call("sinh")), "Cosh": OpKernel(e.call("cosh")), "Tanh": OpKernel(e.call("tanh"), work=8),
    "Asinh": OpKernel(e.call("asinh")), "Acosh": OpKernel(e.call("acosh")), "Atanh": OpKernel(e.call("atanh")),
    "Floor": OpKernel(e.call("floor")), "Ceil": OpKernel(e.call("ceil")), "Round": OpKernel(e.call("rint")),
    "Clip": OpKernel(e.clip), "Where": OpKernel(e.where, typed_by=1),
    "Equal": OpKernel(e.infix("==")), "Greater": OpKernel(e.infix(">")), "GreaterOrEqual": OpKernel(e.infix(">=")),
    "Less": OpKernel(e.infix("<")), "LessOrEqual": OpKernel(e.infix("<=")),
    "And": OpKernel(e.infix("&&")), "Or": OpKernel(e.infix("||")), "Xor": OpKernel(e.infix("!=")),
    "Not": OpKernel(lambda a, node, dtype: f"(!{a[0]})"),
    "BitwiseAnd": OpKernel(e.infix("&")), "BitwiseOr": OpKernel(e.infix("|")), "BitwiseXor": OpKernel(e.infix("^")),
    "BitwiseNot": OpKernel(lambda a, node, dtype: f"(~{a[0]})"), "BitShift": OpKernel(e.bit_shift),
    "IsNaN": OpKernel(lambda a, node, dtype: f"({a[0]} != {a[0]})"), "IsInf": OpKernel(e.is_infinite),
    # Activations and their gradients
    "Sigmoid": OpKernel(e.sigmoid, work=6, exact=True), "Softplus": OpKernel(e.softplus), "Softsign": OpKernel(e.softsign),
    "Relu": OpKernel(e.relu, epilogue=Epilogue("relu", signs=True)),
    "graphc::ReluGrad": OpKernel(epilogue=Epilogue("relu_grad", gradient=True, signs=True)),
    "Gelu": OpKernel(e.gelu, work=12, instructions={"gelu": 17}, epilogue=Epilogue("gelu", exact=is_tanh_form)),
    "graphc::GeluGrad": OpKernel(
        element=rules.gelu_gradient, work=16, instructions={"gelu_slope": 18, "gelu_tanh_slope": 30},
        epilogue=Epilogue("gelu_grad", exact=is_tanh_form, gradient=True),
    ),
    "LeakyRelu": OpKernel(e.leaky_relu), "HardSigmoid": OpKernel(e.hard_sigmoid), "PRelu": OpKernel(e.prelu),
    "ThresholdedRelu": OpKernel(e.thresholded_relu), "Elu": OpKernel(e.scaled_exponential(1.0, 1.0)),
    "Celu": OpKernel(e.celu, work=6), "HardSwish": OpKernel(e.hard_swish, work=6), "Mish": OpKernel(e.mish, work=12),
    "Shrink": OpKernel(e.shrink),
    "Selu": OpKernel(e.scaled_exponential(1.67326319217681884765625, 1.05070102214813232421875)),
    # Moves
    "Identity": _reshape(views.identity), "Reshape": _reshape(), "Flatten": _reshape(), "Squeeze": _reshape(),
    "Unsqueeze": _reshape(),
    "Transpose": _move(views.transpose, same_elements=True), "Expand": _move(views.expand), "Slice": _move(views.sliced),
    "Split": _move(views.split), "Concat": _move(views.concat), "Pad": _move(views.pad), "Tile": _move(views.tile),
    "DepthToSpace": _move(views.depth_to_space), "SpaceToDepth": _move(views.space_to_depth),
    # Reductions
    "ReduceSum": OpKernel(reduction=Reduction(r.zero, "Sum")),
    "ReduceMean": OpKernel(reduction=Reduction(r.zero, "Sum", last=r.over_count)),
    "ReduceMax": OpKernel(reduction=Reduction(r.least, "Maximum")),
    "ReduceMin": OpKernel(reduction=Reduction(r.greatest, "Minimum")),
    "ReduceProd": OpKernel(reduction=Reduction(r.one, "Prod")),
    "ReduceL1": OpKernel(reduction=Reduction(r.zero, "Sum", r.absolute)),
    "ReduceL2": OpKernel(reduction=Reduction(r.zero, "Sum", r.square, r.root)),
    "ReduceSumSquare": OpKernel(reduction=Reduction(r.zero, "Sum", r.square)),
    "ReduceLogSum": OpKernel(reduction=Reduction(r.zero, "Sum", last=r.logarithm)),
    # Elements that read more than the operands at the same index
    "Cast": OpKernel(element=rules.cast), "CastLike": OpKernel(element=rules.cast), "BitCast": OpKernel(element=rules.bit_cast),
    "Gather": OpKernel(element=rules.gather), "GatherElements": OpKernel(element=rules.gather_elements, picks=True),
    "GatherND": OpKernel(element=rules.gather_nd), "ScatterElements": OpKernel(element=rules.scatter_elements),
    "OneHot": OpKernel(element=rules.one_hot), "Trilu": OpKernel(element=rules.triangle),
    "EyeLike": OpKernel(element=rules.diagonal), "graphc::DropoutMask": OpKernel(element=rules.dropout_mask, work=16),
    "graphc::Uniform": OpKernel(element=rules.uniform, work=16),
    "graphc::ChannelsLastMaxPoolTapsGrad": OpKernel(element=rules.pooled_gradient, neighbours=True, work=48),
    f"graphc::{UNPACKED}": OpKernel(element=rules.unpacked, neighbours=True),
}  # fmt: skip
"""Op (``"Gelu"``, ``"graphc::GeluGrad"``) → its record."""

_COMPARE = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Not", "Or", "Where")
ARITHMETIC = frozenset(
    (*_COMPARE, "Abs", "Add", "Cast", "Clip", "Div", "Expand", "LeakyRelu", "Max", "Min", "Mul", "Neg", "Relu", "Sub", "Sum")
)
"""Ops of one or two instructions, which cost less than to read their result from memory."""

_UNKNOWN = OpKernel()


def op_kernel(node: ir.Node) -> OpKernel:
    """The record of a node's op; an empty record if it has none."""
    return OP_KERNELS.get(key_of(node.domain, node.op_type), _UNKNOWN)


def record(op: str) -> OpKernel:
    """The record of an op, created if missing, for a target to extend."""
    return OP_KERNELS.setdefault(op, OpKernel())


def reduction_of(node: ir.Node) -> Reduction:
    """How a reduction node reduces; only for ops with a ``reduction``."""
    found = op_kernel(node).reduction
    if found is None:
        raise KeyError(f"{node.op_type} is not a reduction")
    return found


def is_expression(node: ir.Node) -> bool:
    """Whether generated kernels support the op; they may still reject a particular node."""
    # Only Pad with constant edges is index arithmetic; a rule decomposes the other modes.
    edges = node.op_type == "Pad" and node.attributes.get_string("mode", "constant") != "constant"
    return op_kernel(node).is_generated and not edges


def is_ours(model: onnx.ModelProto) -> bool:
    """Whether only code of this package compiles a segment; plugins may add records, whose sources nobody compares."""
    makers = [
        maker for found in OP_KERNELS.values() for maker in (found.decomposition, *(call.build for call in found.kernels))
    ]
    binders = [call.bind for found in OP_KERNELS.values() for call in found.libraries]
    known = all(maker is None or maker.__module__.startswith("graphc.") for maker in (*makers, *binders))
    return known and all(opset.domain in ("", "ai.onnx", DOMAIN) for opset in model.opset_import)
