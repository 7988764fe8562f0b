"""Gradients against central differences: the harness every gradient rule is tested with.

A new op is one line:

    check_op("Mul", [(2, 3), (3,)])                                  # shapes are random variables, broadcast here
    check_op("Reshape", [(2, 6), np.array([3, 4])])                  # an array is a constant
    check_op("Log", [positive(2, 3)])                                # a variable with a domain
    check_op("ReluGrad", [(2, 3), (2, 3)], domain="graphc")
    check_op("TopK", [(2, 5), np.array([3])], outputs=2, axis=1)

Everything runs in float64. ``f`` is a fixed random linear functional of all float outputs. For each variable x, with a
random direction v, ``<df/dx, v>`` from the graph that autodiff made is compared with ``(f(x + εv) - f(x - εv)) / 2ε``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from graphc.backends.numpy.operators import REPAIRED
from graphc.gradient import key_of
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import FLOATS
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.report.op_coverage import gradient_of
from tests.conformance.sampling_reference import DeformConv, GridSample

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Variable:
    """A differentiable input with this value."""

    value: Array


def normal(*shape: int, seed: int = 0) -> Variable:
    """Standard normal, but no entry closer than 0.05 to zero, where many ops have a kink."""
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return Variable(x + np.copysign(0.05, x))


def positive(*shape: int, seed: int = 0) -> Variable:
    """Uniform in [0.5, 2]."""
    return uniform(0.5, 2.0, *shape, seed=seed)


def uniform(low: float, high: float, *shape: int, seed: int = 0) -> Variable:
    return Variable(np.random.default_rng([seed, *shape]).uniform(low, high, shape))


def distinct(*shape: int, seed: int = 0) -> Variable:
    """A permutation of evenly spaced numbers around zero, for ops with a maximum: no two are closer than 0.1."""
    n = int(np.prod(shape))
    return Variable((np.random.default_rng([seed, *shape]).permutation(n) - (n - 1) / 2).reshape(shape) / 10)


Operand = Variable | Array | tuple[int, ...] | None
"""A variable, a constant, the shape of a normal variable, or None for an input left out."""

Run = Callable[[Mapping[str, Array]], dict[str, Array]]
"""A compiled model: feeds → outputs, by name."""


class Erf(OpRun):
    """Erf in double precision, which that of ``onnx.reference`` is not."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


def reference(model: ir.Model) -> Run:
    """Compile for ``onnx.reference``, after decomposing every ``graphc`` op; ``model`` stays as it is."""
    evaluator = ReferenceEvaluator(standard_model(model), new_ops=[Erf, DeformConv, GridSample, *REPAIRED])
    names = [v.name or "" for v in model.graph.outputs]
    return lambda feeds: _named(names, evaluator.run(None, _arrays(feeds)))


def on_onnxruntime(model: ir.Model) -> Run:
    """Compile for onnxruntime on one thread, after decomposing every ``graphc`` op; ``model`` stays as it is."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        standard_model(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [v.name or "" for v in model.graph.outputs]
    return lambda feeds: _named(names, session.run(names, _arrays(feeds)))


def _arrays(feeds: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.asarray(array) for name, array in feeds.items()}


def _named(names: Sequence[str], arrays: Any) -> dict[str, Array]:
    return dict(zip(names, (np.asarray(array) for array in arrays), strict=True))


def standard_model(model: ir.Model) -> onnx.ModelProto:
    copy = ir.from_proto(ir.to_proto(model))
    decompose_graph(copy.graph, lambda node: False)
    return ir.to_proto(copy)


def new_model(inputs: Mapping[str, Array], *, symbolic: int = 0) -> tuple[ir.Model, list[ir.Value]]:
    """An empty model whose inputs have the types and shapes of the arrays.

    The first ``symbolic`` dimensions of each, but for those of size 1, are symbols, the same for equal sizes.
    """
    values = []
    for name, array in inputs.items():
        shape = ir.Shape([f"d{d}" if k < symbolic and d != 1 else d for k, d in enumerate(array.shape)])
        values.append(ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=shape))
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": OPSET}, name="test")
    return ir.Model(graph, ir_version=IR_VERSION), values


def check_op(
    op_type: str,
    inputs: Sequence[Operand],
    *,
    domain: str = "",
    outputs: int | None = None,
    symbolic: int = 0,
    dtype: Any = np.float64,
    compile_with: Callable[[ir.Model], Run] = reference,
    tolerance: float = 1e-6,
    step: float = 1e-5,
    **attributes: Any,
) -> ir.Model:
    """Check the gradients of one op with respect to all its variables.

    Args:
        inputs: the op's inputs in order, see :data:`Operand`.
        outputs: number of outputs of the node, when it is not the default.
        symbolic: how many leading dimensions of each variable are declared as symbols.
        compile_with, tolerance, step: see :func:`check_gradient`.

    Returns:
        The model, with the backward subgraph appended.
    """
    operands = [normal(*x, seed=k) if isinstance(x, tuple) else x for k, x in enumerate(inputs)]
    feeds = {f"x{k}": x.value.astype(dtype) for k, x in enumerate(operands) if isinstance(x, Variable)}
    model, values = new_model(feeds, symbolic=symbolic)
    op = Builder(model.graph)
    named = {v.name: v for v in values}
    arguments = [
        named[f"x{k}"] if isinstance(x, Variable) else None if x is None else op.const(np.asarray(x))
        for k, x in enumerate(operands)
    ]
    model.graph.outputs.extend(op.emit(op_type, arguments, attributes, domain=domain, outputs=outputs, name=op_type))
    check_gradient(model, feeds, compile_with=compile_with, tolerance=tolerance, step=step)
    return model


def check_gradient(
    model: ir.Model,
    feeds: Mapping[str, Array],
    wrt: Sequence[str] | None = None,
    *,
    compile_with: Callable[[ir.Model], Run] = reference,
    tolerance: float = 1e-6,
    step: float = 1e-5,
) -> dict[str, Array]:
    """Check the gradients of the outputs of a model, to whose graph the functional and its backward subgraph are added.

    Args:
        model: built in float64 (or in float32 with a coarser ``tolerance`` and ``step``). Integer outputs are ignored.
        feeds: one array per graph input.
        wrt: names of graph inputs, default all of float type. A parameter has to be made an input for this.
        compile_with: :func:`reference` or :func:`on_onnxruntime`.
        tolerance: relative to the larger of the numeric derivative and ``Σ |gradient · direction|``.
        step: ε of the central difference.

    Returns:
        The gradients by name of the input.
    """
    graph = model.graph
    sources = [v for v in graph.inputs if v.dtype in FLOATS and (wrt is None or v.name in wrt)]
    feeds = {**feeds, **_weigh_outputs(model, compile_with(model)(feeds))}
    total = graph.outputs[0]
    forward, earlier = compile_with(model), set(graph.all_nodes())
    adjoints = differentiate(graph, [total], sources)
    _check_made_of_ops_with_gradients(node for node in graph.all_nodes() if node not in earlier)
    graph.outputs[:] = list(dict.fromkeys(adjoints.values()))
    backward = compile_with(model)(feeds) if adjoints else {}
    found: dict[str, Array] = {}
    rng = np.random.default_rng(7)
    for source in sources:
        name = source.name or ""
        point = feeds[name]
        direction = np.asarray(rng.standard_normal(point.shape), dtype=point.dtype)
        ahead, behind = (forward({**feeds, name: point + s * direction})[total.name or ""] for s in (step, -step))
        numeric = (float(ahead) - float(behind)) / (2 * step)
        if source not in adjoints:
            assert numeric == 0, f"no gradient flows to {name}, but the derivative along v is {numeric}"
            continue
        gradient = backward[adjoints[source].name or ""]
        assert gradient.dtype == point.dtype, f"the gradient of {name} is {gradient.dtype}, not {point.dtype}"
        assert gradient.shape == point.shape, f"the gradient of {name} has shape {gradient.shape}, not {point.shape}"
        terms = np.asarray(gradient * direction, dtype=np.float64)
        scale = max(abs(numeric), float(np.abs(terms).sum()), 1e-3)
        error = abs(float(terms.sum()) - numeric) / scale
        assert error <= tolerance, (
            f"d/d{name} along v is {terms.sum()} from the graph and {numeric} from differences: relative error {error:.1e}"
        )
        found[name] = gradient
    return found


def _check_made_of_ops_with_gradients(backward: Iterable[ir.Node]) -> None:
    """Whatever a rule emits can be differentiated again, as the table of operators says."""
    for key in sorted({key_of(node.domain, node.op_type) for node in backward}):
        kind = gradient_of(key)
        assert kind in ("direct", "through body", "zero"), f"the gradient holds {key}, whose own gradient is {kind!r}"


def gradients(
    model: ir.Model,
    feeds: Mapping[str, Array],
    of: Sequence[ir.Value],
    wrt: Sequence[ir.Value],
    *,
    compile_with: Callable[[ir.Model], Run] = reference,
) -> list[Array]:
    """Run autodiff and the graph it made: the gradients of the sum of the elements of ``of``, in the order of ``wrt``."""
    found = differentiate(model.graph, of, wrt)
    model.graph.outputs[:] = list(dict.fromkeys(found.values()))
    results = compile_with(model)(feeds)
    return [results[found[value].name or ""] for value in wrt]


def _weigh_outputs(model: ir.Model, results: Mapping[str, Array]) -> dict[str, Array]:
    """Replace the outputs by one scalar ``Σ c · y`` over the float ones; returns the feeds for the new inputs c."""
    graph = model.graph
    op = Builder(graph, scope="functional")
    feeds: dict[str, Array] = {}
    parts = []
    for k, out in enumerate(list(graph.outputs)):
        if out.dtype not in FLOATS:
            continue
        like = results[out.name or ""]
        feeds[f"c{k}"] = np.asarray(normal(*like.shape, seed=100 + k).value, dtype=like.dtype)
        weight = ir.Value(name=f"c{k}", type=out.type, shape=out.shape)
        graph.inputs.append(weight)
        parts.append(op.ReduceSum(op.Mul(out, weight), keepdims=0))
    graph.outputs[:] = [op.Sum(*parts) if len(parts) > 1 else parts[0]]
    return feeds
