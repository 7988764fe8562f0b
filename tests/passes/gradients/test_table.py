"""Every gradient rule against central differences in float64, and in float32 on onnxruntime: one line a case."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphc.ir.builder import Builder
from tests.gradient_check import (
    check_gradient,
    check_op,
    gradients,
    new_model,
    on_onnxruntime,
    positive,
)
from tests.passes.gradients.table_cases import (
    CASES,
    NO_KERNEL,
    SINGLE,
    Case,
    c,
    i64,
    label,
)


@pytest.mark.parametrize("symbolic", [pytest.param(False, marks=pytest.mark.large), True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_rule_agrees_with_differences(case: Case, symbolic: bool) -> None:
    op_type, inputs, attributes = case
    domain, _, name = op_type.rpartition("::")
    most = attributes.get("symbolic", 9)
    check_op(name, inputs, domain=domain, **{**attributes, "symbolic": most if symbolic else 0})


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in NO_KERNEL], ids=label)
def test_backward_graph_runs_on_onnxruntime(case: Case) -> None:
    op_type, inputs, attributes = case
    domain, _, name = op_type.rpartition("::")
    single = [x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x for x in inputs]
    options: dict[str, Any] = {**attributes, **SINGLE, "tolerance": 2e-2, "symbolic": 0, "compile_with": on_onnxruntime}
    if name == "Cast":
        options["to"] = 1
    check_op(name, single, domain=domain, **options)


@st.composite
def broadcast_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that broadcast together: of a common one, each drops leading axes and sets some axes to one."""
    common = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    pair = []
    for _ in range(2):
        kept = common[draw(st.integers(0, len(common))) :]
        pair.append(tuple(d if draw(st.booleans()) else 1 for d in kept))
    return pair[0], pair[1]


@pytest.mark.full
@pytest.mark.parametrize("shapes_known", [True, False])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(shapes=broadcast_shapes())
def test_broadcast_operands(shapes_known: bool, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    feeds = {name: positive(*shape, seed=k).value for k, (name, shape) in enumerate(zip("ab", shapes, strict=True))}
    model, (a, b) = new_model(feeds)
    if not shapes_known:
        for value, shape in ((a, shapes[0]), (b, shapes[1])):
            value.shape = ir.Shape([None] * len(shape))
    op = Builder(model.graph)
    model.graph.outputs.append(op.Sub(op.Mul(a, b), op.Div(a, b)))
    check_gradient(model, feeds)


TIED = np.array([[1.0, -2.0, 0.0], [1.0, 3.0, 0.0]])
KINKS = [
    (c("Relu", TIED), torch.relu),
    (c("Abs", TIED), torch.abs),
    (c("Max", TIED, TIED[::-1].copy()), torch.maximum),
    (c("Min", TIED, TIED[::-1].copy()), torch.minimum),
    (c("LeakyRelu", TIED, alpha=0.5), lambda x: torch.nn.functional.leaky_relu(x, 0.5)),
    (c("PRelu", TIED, np.array([0.5])), torch.nn.functional.prelu),
    (c("Clip", TIED, np.array(-2.0), np.array(1.0)), lambda x, *_: x.clamp(-2, 1)),
    (c("HardSigmoid", TIED * 3, alpha=1 / 6, beta=0.5), torch.nn.functional.hardsigmoid),
    (c("Pow", TIED, np.array([0.0, 2.0, 2.0])), torch.pow),
    (c("ReduceMax", TIED, i64([0])), lambda x, _: x.amax(0, keepdim=True)),
    (c("ReduceMin", TIED, i64([0])), lambda x, _: x.amin(0, keepdim=True)),
    (c("ReduceProd", TIED, i64([1])), lambda x, _: x.prod(1, keepdim=True)),
    (c("ReduceProd", TIED, i64([0])), lambda x, _: x.prod(0, keepdim=True)),
    (c("ReduceL1", TIED, i64([0])), lambda x, _: x.abs().sum(0, keepdim=True)),
    (c("ReduceL2", TIED, i64([0])), lambda x, _: x.norm(dim=0, keepdim=True)),
]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(("case", "peer"), KINKS, ids=[label(case) for case, _ in KINKS])
def test_kinks_and_ties_are_those_of_pytorch(case: Case, peer: Any) -> None:
    op_type, arrays, attributes = case
    feeds = {f"x{k}": x for k, x in enumerate(arrays) if isinstance(x, np.ndarray)}
    model, values = new_model(feeds)
    tensors = [torch.tensor(x, requires_grad=x.dtype == np.float64) for x in feeds.values()]
    (y,) = Builder(model.graph).emit(op_type, values, attributes)
    peer(*tensors).sum().backward()
    flowing = [k for k, t in enumerate(tensors) if t.grad is not None]
    found = gradients(model, feeds, [y], [values[k] for k in flowing])
    for k, gradient in zip(flowing, found, strict=True):
        np.testing.assert_allclose(gradient, tensors[k].grad.numpy(), rtol=1e-6, err_msg=f"input {k}")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("symbolic", [0, 2], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("starts", "ends"), [([1, 0], [3, 6]), ([-3, -100], [-1, 4]), ([2, 100], [100, 200]), ([4, 3], [2, 4])]
)
def test_a_slice_from_a_computed_place(starts: list[int], ends: list[int], symbolic: int, dtype: Any) -> None:
    feeds = {
        "x": np.random.default_rng(0).standard_normal((5, 6)),
        "from": np.array(starts, dtype),
        "to": np.array(ends, dtype),
    }
    model, (x, first, last) = new_model(feeds, symbolic=symbolic)
    op = Builder(model.graph)
    y = op.Slice(x, first, last, op.const([0, 1]))
    (found,) = gradients(model, feeds, [y], [x])
    expected = np.zeros((5, 6))
    expected[tuple(map(slice, starts, ends))] = 1.0
    np.testing.assert_array_equal(found, expected)
    assert "ScatterElements" not in {node.op_type for node in model.graph}
