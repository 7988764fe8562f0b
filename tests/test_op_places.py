"""An op is named in at most three places: its declaration, its gradient rule, its kernel record.

Counted is each source file of graphc/, passes/ and backends/ in which the op's name stands as a string: alone, or behind
``graphc::``. A constant such as ``convolution.INPUT`` counts in the file that defines it. Calls of the builder (``op.Gelu(x)``)
are not counted: a rule that creates an op does not change with how the op is computed. Rooms that are not counted, and why:

* ``backends/numpy``, ``backends/onnxruntime``: other targets, with at most one kernel of their own for an op
* ``passes`` except ``gradients``, ``backends/cupy/rewrite`` except ``rules``, ``backends/host/rewrites.py``: a rewrite matches
  particular ops
* ``graphc/frontends``, ``graphc/ir/opset_adapters.py``: they translate what other programs wrote
* ``graphc/ir/refined_shapes.py``: the sizes that ONNX's inference leaves open
* ``graphc/plan/node_costs.py``, ``graphc/report/step_measure.py``: what is known of the time of products
* ``graphc/cli``: diagnostics that explain a model's ops to a person
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

import graphc.backends.cupy  # noqa: F401 - its calls and decompositions are part of the records
from graphc.backends.fusion.op_kernels import OP_KERNELS
from graphc.ir.declare import OPS

ROOT = Path(__file__).parents[1]
MOST = 3

ACTIVATIONS = ("Gelu", "GeluGrad", "Relu", "ReluGrad", "Sigmoid", "Softmax", "LogSoftmax", "SoftmaxGrad")
NORMALIZATIONS = ("LayerNormalization", "LayerNormalizationGrad", "BatchNormalizationTraining")
CONVOLUTIONS = ("Conv", "ConvGradInput", "ConvGradWeight", "MaxPoolGrad", "ChannelsLastMaxPoolTapsGrad")
LOSSES = ("SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad")
OTHERS = ("DropoutMask", "ScaledDotProductAttention", "Gemm", "MatMul", "TopK")

SHAPES = ("Expand", "Flatten", "Identity", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Transpose", "Unsqueeze")
NUMBERS = ("Add", "Cast", "CastLike", "Concat", "ConstantOfShape", "Div", "Gather", "Mul", "Sub", "Sum", "Where")
"""What analyses follow through a graph: moves, casts, and the arithmetic of shapes and constant factors."""

MATCHED = {
    "AllGather": "buffers, updates and the tasks of a pipeline know whose state is made whole",
    "AllReduce": "the state and the rule of synchronized normalisation know the collective",
    "AnyNonFinite": "the NaN check looks for it",
    "AnyNonFiniteOr": "the NaN check of a device calls it",
    "Mean": "it is two ops, of the standard and of graphc",
    "QuantizeLinear": "reverse mode passes gradients straight through it",
    "Recompute": "plan and memory report show what it repeats",
    "ReduceSum": "a softmax over long rows and a bias gradient are recognised by it",
    "ReduceScatter": "plan, planner and updates know whose sums are divided",
    "Scan": "a control flow op, whose body is a segment",
}
"""Other ops in more places, and why."""


def _counts(path: str) -> bool:
    if path.startswith(("backends/numpy/", "backends/onnxruntime/", "graphc/frontends/", "graphc/cli/")):
        return False
    if path in ("graphc/ir/opset_adapters.py", "graphc/ir/index_operands.py", "graphc/ir/refined_shapes.py"):  # facts of ONNX
        return False
    if path == "graphc/ir/numpy_ops.py":  # a shorter way to what ONNX's evaluator computes
        return False
    if path in ("graphc/plan/node_costs.py", "graphc/report/step_measure.py"):
        return False
    if path == "backends/host/rewrites.py":
        return False
    if path.startswith("passes/"):
        return path.startswith("passes/gradients/")
    return not path.startswith("backends/cupy/rewrite/") or path.startswith("backends/fusion/rules/")


@functools.cache
def _places() -> Mapping[str, frozenset[str]]:
    """String → the counted files in which it stands."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for room in ("graphc", "passes", "backends"):
        for file in (ROOT / room).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            if _counts(path):
                for node in ast.walk(ast.parse(file.read_text())):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        found[node.value.removeprefix("graphc::")].add(path)
    return {name: frozenset(paths) for name, paths in found.items()}


@pytest.mark.full
@pytest.mark.parametrize("op", [*ACTIVATIONS, *NORMALIZATIONS, *CONVOLUTIONS, *LOSSES, *OTHERS])
def test_an_op_is_named_in_at_most_three_places(op: str) -> None:
    files = sorted(_places()[op])
    assert len(files) <= MOST, f"{op} is named in {len(files)} files:\n  " + "\n  ".join(files)
    assert len([f for f in files if f.startswith("backends/")]) <= 2, f"{op} is named all over the backends: {files}"


@pytest.mark.full
def test_only_ops_that_stand_for_the_structure_of_graphs_are_named_in_more() -> None:
    names = {op.removeprefix("graphc::") for op in (*OP_KERNELS, *OPS)}
    many = {name: sorted(_places().get(name, ())) for name in names if len(_places().get(name, ())) > MOST}
    new = {name: files for name, files in many.items() if name not in {*SHAPES, *NUMBERS, *MATCHED}}
    assert not new, f"name it in declaration, gradient and record only: {new}"


def test_a_record_says_how_its_op_is_computed() -> None:
    for op, kernel in OP_KERNELS.items():
        ways = (kernel.decomposition, kernel.epilogue, *kernel.libraries, *kernel.kernels)
        assert kernel.is_generated or any(way is not None for way in ways), f"the record of {op} says nothing"
