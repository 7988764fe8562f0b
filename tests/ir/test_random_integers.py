"""Random computations with sizes, tables and masks: what the passes fold, for a batch that is a name or a number, is the same.

Each program starts with the shape of its input, a table of integers and one of booleans, and applies random ops to what it has.
onnxruntime computes it as it is, and after the passes that follow the elements of integer tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphc.frontends.onnx import load
from graphc.pipeline import run as run_pipeline
from tests.frontends.zoo import run
from tests.tiers import params

pytestmark = pytest.mark.full

SAMPLES = 3
MOST = 400
"""Elements of a value."""


class Program:
    """Nodes that compute from ``x``: float [batch, 4, 2], and what they give for :data:`SAMPLES` samples."""

    def __init__(self, seed: int) -> None:
        self.choose, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.values: dict[str, np.ndarray] = {"x": np.zeros((SAMPLES, 4, 2), np.float32)}
        self.integers = [self.constant(self.numbers.integers(-2, 5, (3, 4)))]
        self.masks = [self.constant(self.numbers.integers(0, 2, (2, 3)).astype(bool))]
        for last in (3, 1):
            self.apply("Shape", ["x"], start=0, end=last)
        for _ in range(18):
            self.choose.choice(RULES)(self, self.choose.choice(self.integers))

    def constant(self, array: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = self.values[name] = np.asarray(array)
        return name

    def apply(self, kind: str, inputs: list[str], **attributes: object) -> None:
        """Append a node if its operands fit and the result is neither large nor huge."""
        node = helper.make_node(kind, inputs, [f"v{len(self.nodes)}"], **attributes)
        feeds = {name: self.values[name] for name in inputs}
        try:
            (value,) = run(ir.from_proto(self._model([node], feeds, node.output)), feeds)
        except Exception:  # sizes that do not broadcast, a division by zero
            return
        if value.size > MOST or value.ndim > 4 or (value.dtype == np.int64 and np.abs(value).max(initial=0) > 10**9):
            return
        self.nodes.append(node)
        self.values[node.output[0]] = value
        (self.masks if value.dtype == bool else self.integers).append(node.output[0])

    def axis(self, name: str) -> int:
        return self.choose.randrange(max(1, self.values[name].ndim))

    def model(self, batch: int | str) -> onnx.ModelProto:
        results = [node.output[0] for node in self.nodes][-8:]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        return self._model(self.nodes, {"x": self.values["x"]}, results, constants, batch)

    def _model(self, nodes, feeds, results, constants=(), batch=None) -> onnx.ModelProto:  # type: ignore[no-untyped-def]
        def info(name: str, sizes: object) -> onnx.ValueInfoProto:
            kind = self.values[name].dtype if name in self.values else np.dtype(np.int64)
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind), sizes)

        inputs = [info(k, v.shape if batch is None else (batch, *v.shape[1:])) for k, v in feeds.items()]
        known = [info(k, [None] * self.values[k].ndim) for k in results if k in self.values]
        outputs = known or [helper.make_empty_tensor_value_info(k) for k in results]
        graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def gather(p: Program, a: str) -> None:
    axis, shape = p.axis(a), p.choose.choice([(), (1,), (2,), (2, 2)])
    size = (*p.values[a].shape, 0)[axis] if p.values[a].ndim else 0
    if size:
        p.apply("Gather", [a, p.constant(p.numbers.integers(-size, size, shape))], axis=axis)


def cut(p: Program, a: str) -> None:
    ranges = (p.choose.choice([0, 0, 1, -1]), p.choose.choice([1, 2, 2**62, -1]), p.axis(a), p.choose.choice([1, 1, 2, -1]))
    p.apply("Slice", [a, *(p.constant([n]) for n in ranges)])


def two(kinds: list[str]) -> Callable[[Program, str], None]:
    return lambda p, a: p.apply(p.choose.choice(kinds), [a, p.choose.choice(p.integers)])


def reduced(p: Program, a: str) -> None:
    if p.values[a].ndim:
        kind = p.choose.choice(["ReduceProd", "ReduceSum", "ReduceMax"])
        p.apply(kind, [a, p.constant([p.axis(a)])], keepdims=p.choose.randint(0, 1))


def scattered(p: Program, a: str) -> None:
    axis, shape = p.axis(a), list(p.values[a].shape)
    if shape and p.values[a].size:
        size, shape[axis] = shape[axis], 1
        places, updates = p.numbers.integers(-size, size, shape), p.numbers.integers(0, 5, shape)
        p.apply("ScatterElements", [a, p.constant(places), p.constant(updates)], axis=axis)


def filled(p: Program, a: str) -> None:
    if p.values[a].ndim == 1 and 0 < p.values[a].min(initial=1) <= p.values[a].max(initial=1) < 8:
        p.apply("ConstantOfShape", [a], value=numpy_helper.from_array(np.array([p.choose.choice([0, 1, 3])])))


def counted(p: Program, a: str) -> None:
    if p.values[a].ndim == 0 and 0 < p.values[a] < 20:
        p.apply("Range", [p.constant(np.int64(0)), a, p.constant(np.int64(p.choose.choice([1, 2])))])


RULES: list[Callable[[Program, str], None]] = [
    *[gather] * 3, *[cut] * 2, *[reduced] * 2, scattered, filled, counted,
    *[two(["Add", "Mul", "Sub", "Min", "Max"])] * 3, two(["Equal", "Less"]), two(["Expand"]),
    lambda p, a: p.apply("Concat", [a, p.choose.choice(p.integers)], axis=p.axis(a)),
    lambda p, a: p.apply(p.choose.choice(["Div", "Mod"]), [a, p.constant(np.int64(p.choose.choice([2, 3, -2])))]),
    lambda p, a: p.apply("Unsqueeze", [a, p.constant([p.choose.choice([0, -1])])]),
    lambda p, a: p.apply("Squeeze", [a, p.constant([p.axis(a)])]),
    lambda p, a: p.apply("Reshape", [a, p.constant(p.choose.choice([[-1], [1, -1], [-1, 1]]))]),
    lambda p, a: p.apply("Where", [p.choose.choice(p.masks), a, p.choose.choice(p.integers)]),
    lambda p, a: p.apply("Cast", [p.choose.choice(p.masks)], to=TensorProto.INT64),
    lambda p, a: p.apply("Not", [p.choose.choice(p.masks)]),
    lambda p, a: p.apply("CumSum", [a, p.constant(np.int64(p.axis(a)))], exclusive=p.choose.randint(0, 1)),
    lambda p, a: p.apply("Transpose", [a]),
    lambda p, a: p.apply("ArgMax", [a], axis=p.axis(a), keepdims=p.choose.randint(0, 1)),
    lambda p, a: p.apply(p.choose.choice(["Shape", "Size"]), [p.choose.choice(p.integers + p.masks)]),
    lambda p, a: p.apply("Flatten", [a], axis=p.axis(a)),
]  # fmt: skip


@pytest.mark.parametrize("seed", params(range(40), large=range(16, 40)))
def test_passes_fold_what_onnxruntime_computes(seed: int) -> None:
    program = Program(seed)
    for batch in ("batch", SAMPLES, 5):
        written = program.model(batch)
        wanted = {
            n: results for n in ((1, 2, SAMPLES, 5) if batch == "batch" else (batch,)) if (results := computed(written, n))
        }
        assert batch == 5 or SAMPLES in wanted
        if not wanted:
            continue
        model = load(written)
        run_pipeline(model, "legalize,gathers,boxes,simplify,verify")
        for samples, results in wanted.items():
            for have, want in zip(run(model, fed(samples)), results, strict=True):
                assert have.dtype == want.dtype
                np.testing.assert_array_equal(have, want, strict=True)


def fed(samples: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros((samples, 4, 2), np.float32)}


def computed(model: onnx.ModelProto, samples: int) -> list[np.ndarray] | None:
    """None where a program that was made for three samples fits no others."""
    try:
        return run(ir.from_proto(model), fed(samples))
    except Exception:
        return None
