"""Gradients of ONNX's own single-op cases: the harness of ``test_gradient_suite.py``.

A case is a model of one node with inputs, from ``onnx.backend.test``. Its integer inputs become constants, as exporters
write them; every float input is differentiated. ``f`` is a fixed random linear functional of all float outputs. For each
float input x, with a random direction v, ``<df/dx, v>`` from the graph that autodiff made is compared with
``(f(x + εv) - f(x - εv)) / 2ε``.

Both sides are evaluated by ``onnx.reference`` in float64, whatever the element type of the case: when a graph is finished,
every float type in it is replaced. That gives ops which ONNX defines in float32 only the same sharp test as the others.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.backend.test.case.test_case import TestCase
from onnx.reference import ReferenceEvaluator

from graphc.errors import GraphcError
from graphc.ir.builder import Builder
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import FLOATS
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.pipeline import run
from tests.conformance.reference_repairs import REPAIRS

Array = np.ndarray[Any, Any]
Tree = Any
"""An array, a list of arrays (a sequence), or None (an empty optional)."""

T = onnx.TensorProto
FLOAT_TYPES = (T.FLOAT, T.DOUBLE, T.FLOAT16, T.BFLOAT16)
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "softmax_precision", "stash_type", "output_dtype", "precision"})


def collect(*modules: str) -> list[TestCase]:
    """The cases of those modules of ``onnx.backend.test.case.node``, or all (which takes a few seconds)."""
    package = importlib.import_module("onnx.backend.test.case.node")
    names = modules or tuple(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "ai_onnx_ml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    return [case for case in package._NodeTestCases if is_single(case)]


def is_single(case: TestCase) -> bool:
    """A case of one standard node. The ``_expanded`` ones are function bodies, the work of other ops."""
    nodes = case.model.graph.node
    return len(nodes) == 1 and nodes[0].domain in ("", "ai.onnx") and "_expanded" not in case.name


def op_of(case: TestCase) -> str:
    return str(case.model.graph.node[0].op_type)


# Element types -------------------------------------------------------------------------------------------------------


def retype(model: onnx.ModelProto, to: int) -> onnx.ModelProto:
    """A copy of ``model`` in which every float type is ``to``."""
    model = copy.deepcopy(model)
    _retype_graph(model.graph, to)
    return model


def _retype_graph(graph: onnx.GraphProto, to: int) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        _retype_type(info.type, to)
    for tensor in graph.initializer:
        _retype_tensor(tensor, to)
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(onnx.helper.make_attribute("value", onnx.helper.make_tensor("", to, [1], [0])))
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.GRAPH:
                _retype_graph(attr.g, to)
            elif attr.type == onnx.AttributeProto.TENSOR:
                _retype_tensor(attr.t, to)
            elif attr.name in _TYPE_ATTRIBUTES and attr.i in FLOAT_TYPES:
                attr.i = to
            elif node.op_type == "Constant" and attr.name in ("value_float", "value_floats"):
                value = np.asarray(attr.f if attr.name == "value_float" else attr.floats)
                dtype = onnx.helper.tensor_dtype_to_np_dtype(to)
                attr.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(value.astype(dtype))))


def _retype_type(proto: onnx.TypeProto, to: int) -> None:
    kind = proto.WhichOneof("value")
    if kind == "tensor_type" and proto.tensor_type.elem_type in FLOAT_TYPES:
        proto.tensor_type.elem_type = to
    elif kind in ("sequence_type", "optional_type"):
        _retype_type(getattr(proto, kind).elem_type, to)


def _retype_tensor(tensor: onnx.TensorProto, to: int) -> None:
    if tensor.data_type in FLOAT_TYPES:
        array = onnx.numpy_helper.to_array(tensor).astype(onnx.helper.tensor_dtype_to_np_dtype(to))
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def is_float_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.name in ("float16", "bfloat16", "float32", "float64")


def cast(x: Tree, dtype: Any) -> Tree:
    """The float arrays of a tree in another precision."""
    if isinstance(x, list):
        return [cast(part, dtype) for part in x]
    return x.astype(dtype) if is_float_array(x) else x


# Trees ---------------------------------------------------------------------------------------------------------------


def leaves(x: Tree) -> Iterator[Array]:
    """The float arrays of a tree."""
    if isinstance(x, list):
        for part in x:
            yield from leaves(part)
    elif is_float_array(x):
        yield x


def combine(function: Callable[..., Any], *trees: Tree) -> Tree:
    """``function`` of the leaves of trees of one structure; what is no float stays as in the first tree."""
    if isinstance(trees[0], list):
        return [combine(function, *parts) for parts in zip(*trees, strict=True)]
    return function(*trees) if is_float_array(trees[0]) else trees[0]


# The check -----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one case: the largest error by input, and what is wrong in words."""

    case: str
    errors: dict[str, float] = field(default_factory=dict)
    single: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    lacks_kernel: str = ""


@dataclass
class Prepared:
    """A case with its integer inputs as constants, in float32; feeds in float64."""

    model: onnx.ModelProto
    feeds: dict[str, Tree]
    outputs: list[str]


def prepare(
    case: TestCase,
    point: Callable[[str, Array], Array] | None = None,
    fixed: Collection[str] = (),
    as_float: Collection[str] = (),
) -> Prepared:
    """A case for the suite.

    Args:
        point: ``(name, x)`` moves an input to another place, away from a kink say.
        fixed: names of float inputs that are constants.
        as_float: names of integer inputs that are turned into floats, and the outputs with them.
    """
    model = retype(case.model, T.FLOAT)
    for info in (*model.graph.input, *model.graph.output) if as_float else ():
        if info.name in as_float or info in model.graph.output:
            info.type.tensor_type.elem_type = T.FLOAT
    for info in (*model.graph.input, *model.graph.output):
        _forget_sizes(info.type)
    inputs, _ = case.data_sets[0]
    feeds: dict[str, Tree] = {}
    for info, value in zip(list(model.graph.input), inputs, strict=True):
        if isinstance(value, onnx.TensorProto):
            value = onnx.numpy_helper.to_array(value)
        value = np.asarray(value) if isinstance(value, np.generic) else value
        value = value.astype(np.float64) if info.name in as_float else value
        if isinstance(value, np.ndarray) and (not is_float_array(value) or info.name in fixed):
            given = info.type.tensor_type.elem_type
            model.graph.initializer.append(_tensor(value, given, info.name))
            model.graph.input.remove(info)
            continue
        value = cast(value, np.float64)
        feeds[info.name] = value if point is None else combine(lambda x, name=info.name: np.asarray(point(name, x)), value)
    names = [name for name in model.graph.node[0].output if name]
    return Prepared(model, feeds, names)


def _forget_sizes(proto: onnx.TypeProto) -> None:
    """The parts of a sequence differ in size, although the cases call every size N."""
    if proto.HasField("optional_type"):
        _forget_sizes(proto.optional_type.elem_type)
    elif proto.HasField("sequence_type"):
        proto.sequence_type.elem_type.tensor_type.ClearField("shape")


def _tensor(value: Array, dtype: int, name: str) -> onnx.TensorProto:
    if value.dtype.kind in "OUS":
        return onnx.helper.make_tensor(name, T.STRING, value.shape, [str(s).encode() for s in value.reshape(-1)])
    made = onnx.numpy_helper.from_array(value.astype(np.float32) if is_float_array(value) else value, name)
    made.data_type = dtype
    return made


def evaluator(model: onnx.ModelProto, to: int = T.DOUBLE) -> Callable[[Mapping[str, Tree]], dict[str, Tree]]:
    """``model`` in float64 (or another type), in ``onnx.reference`` with its known mistakes repaired."""
    session = ReferenceEvaluator(retype(model, to), new_ops=list(REPAIRS))
    names = [v.name for v in model.graph.output]

    def evaluate(feeds: Mapping[str, Tree]) -> dict[str, Tree]:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = session.run(None, {k: v for k, v in feeds.items() if k in session.input_names})
        return dict(zip(names, (_plain(value) for value in found), strict=True))

    return evaluate


def _plain(value: Tree) -> Tree:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, np.ndarray) else np.asarray(value)


def functional(results: Mapping[str, Tree]) -> dict[str, Tree]:
    """A random weight for every element of every float output; zero where the output is not finite."""
    weights: dict[str, Tree] = {}
    for k, (name, value) in enumerate(results.items()):
        rng = np.random.default_rng([100, k])
        if any(True for _ in leaves(value)):
            weights[name] = combine(
                lambda y, rng=rng: np.where(np.isfinite(y), rng.standard_normal(y.shape), 0.0), cast(value, np.float64)
            )
    return weights


def weigh(weights: Mapping[str, Tree], results: Mapping[str, Tree]) -> float:
    """Σ weight · output."""
    total = 0.0
    for name, weight in weights.items():
        for c, y in zip(leaves(weight), leaves(results[name]), strict=True):
            total += float(np.sum(c * np.where(c == 0, 0.0, y)))
    return total


def legalised(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = ir.from_proto(model)
    run(graph, "legalize")
    return ir.to_proto(graph)


def backward_model(prepared: Prepared, weights: Mapping[str, Tree]) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The gradients of the functional as a model of standard ops in float32; input name → output name."""
    model = ir.from_proto(prepared.model)
    run(model, "legalize")
    graph = model.graph
    op = Builder(graph, scope="functional")
    parts: list[ir.Value] = []
    named = {v.name: v for v in graph.outputs}
    for name, weight in weights.items():
        out = named[name]
        if isinstance(out.type, ir.OptionalType):
            out = op.OptionalGetElement(out)
        if isinstance(weight, list):
            pieces = [(op.SequenceAt(out, op.const(np.int64(k))), c) for k, c in enumerate(weight)]
        else:
            pieces = [(out, weight)]
        for value, c in pieces:
            constant = op.const(c.astype(np.float32))
            if not np.all(c):
                value = op.Where(op.const(c != 0), value, op.scalar(0, constant))
            parts.append(op.ReduceSum(op.Mul(value, constant), keepdims=0))
    total = op.Sum(*parts) if len(parts) > 1 else parts[0]
    sources = [v for v in graph.inputs if v.dtype in FLOATS]
    found = differentiate(graph, [total], sources)
    graph.outputs[:] = list(dict.fromkeys(found.values()))
    names = {source.name or "": value.name or "" for source, value in found.items()}
    decompose_graph(graph, lambda node: False)
    run(model, "simplify")
    return ir.to_proto(model), names


def check(
    case: TestCase,
    *,
    point: Callable[[str, Array], Array] | None = None,
    direction: Callable[[Array, Array], Array] | None = None,
    fixed: Collection[str] = (),
    as_float: Collection[str] = (),
    by_body: bool = False,
    step: float = 1e-5,
    single: bool = True,
) -> Outcome:
    """Compare the gradients of one case with central differences, and those of float32 with float64.

    Args:
        point, fixed, as_float: see :func:`prepare`.
        direction: ``(x, v) -> v`` changes a random direction, so that it stays where the op is smooth.
        by_body: evaluate the legalised graph, in which an op of a newer opset is replaced by its definition.
        step: ε.
        single: also run the backward graph in float32 on onnxruntime.
    """
    outcome = Outcome(case.name)
    try:
        prepared = prepare(case, point, fixed, as_float)
        forward = evaluator(legalised(prepared.model) if by_body else prepared.model)
        weights = functional(forward(prepared.feeds))
        if not weights or not any(True for x in prepared.feeds.values() for _ in leaves(x)):
            return outcome
        backward, names = backward_model(prepared, weights)
        gradients = evaluator(backward)(prepared.feeds) if names else {}
    except GraphcError as error:
        outcome.problem = f"{type(error).__name__}: {str(error)[:300]}"
        return outcome
    rng = np.random.default_rng(7)
    for name, x in prepared.feeds.items():
        if not any(True for _ in leaves(x)):
            continue
        v = combine(lambda part: np.asarray(rng.standard_normal(part.shape)), x)
        v = combine(direction, x, v) if direction is not None else v
        ends = [
            weigh(weights, forward({**prepared.feeds, name: combine(lambda a, b, s=s: a + s * b, x, v)})) for s in (step, -step)
        ]
        numeric = (ends[0] - ends[1]) / (2 * step)
        terms = [np.zeros(1)]
        if name in names:
            found = gradients[names[name]]
            shapes = [g.shape for g in leaves(found)], [part.shape for part in leaves(x)]
            if shapes[0] != shapes[1]:
                outcome.problem = f"the gradient of {name} has the shapes {shapes[0]}, not {shapes[1]}"
                return outcome
            terms = [np.asarray(g * d).reshape(-1) for g, d in zip(leaves(found), leaves(v), strict=True)]
        flat = np.concatenate(terms)
        scale = max(abs(numeric), float(np.abs(flat).sum()), 1e-3)
        error = abs(float(flat.sum()) - numeric) / scale
        outcome.errors[name] = error if np.isfinite(error) else np.inf
    if single and names:
        _compare_single(outcome, backward, names, prepared.feeds, gradients)
    return outcome


def _compare_single(
    outcome: Outcome,
    backward: onnx.ModelProto,
    names: Mapping[str, str],
    feeds: Mapping[str, Tree],
    gradients: Mapping[str, Tree],
) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    try:
        session = onnxruntime.InferenceSession(backward.SerializeToString(), options, providers=["CPUExecutionProvider"])
        wanted = {v.name for v in session.get_inputs()}
        found = session.run(list(names.values()), {k: cast(v, np.float32) for k, v in feeds.items() if k in wanted})
    except Exception as error:
        outcome.lacks_kernel = str(error)[:300]
        return
    for (name, output), value in zip(names.items(), found, strict=True):
        exact = [g.reshape(-1) for g in leaves(gradients[output])]
        rough = [np.asarray(g, np.float64).reshape(-1) for g in leaves(_plain(value))]
        if not exact:
            continue
        a, b = np.concatenate(exact), np.concatenate(rough)
        error = float(np.abs(a - b).max(initial=0.0)) / max(float(np.abs(a).max(initial=0.0)), 1e-3)
        outcome.single[name] = error if np.isfinite(error) else np.inf


def by_op(cases: Sequence[TestCase]) -> dict[str, list[TestCase]]:
    found: dict[str, list[TestCase]] = {}
    for case in cases:
        found.setdefault(op_of(case), []).append(case)
    return found
