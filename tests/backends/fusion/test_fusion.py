"""Generated kernels: index arithmetic against numpy, ONNX's own cases and whole training graphs against onnxruntime."""

from __future__ import annotations

import math
import re
import shutil
from contextlib import closing
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphc.backend import BACKENDS
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from graphc.backends.fusion.indexing import Linear, Variable, flatten, unflatten
from tests.backends.fusion.fusion_cases import CASES, REDUCING, check_case, check_network
from tests.backends.host.segment_models import results_of
from tests.backends.host_kernels import HostDevice, run_segment
from tests.tiers import params

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.full
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_reshapes_and_transposes_compose_to_the_elements_numpy_finds(shape: list[int], random: object) -> None:
    size = int(np.prod(shape))
    variable = Variable("i", size)
    names = {variable: "i"}
    array = np.arange(size)
    offset = Linear.of(variable)
    for _ in range(3):
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        first = random.choice(divisors)  # type: ignore[attr-defined]
        view = (first, size // first)
        offset = flatten(tuple(reversed(unflatten(offset, (view[1], view[0])))), view)
        array = array.reshape(view).T.reshape(-1)
    text = offset.text(names).replace("/", "//")
    assert [eval(text, {"i": i}) for i in range(size)] == array.tolist()


class Int(int):
    """An integer whose quotients and remainders round as C's do."""

    def __add__(self, other: int) -> Int:
        return Int(int(self) + other)

    def __mul__(self, other: int) -> Int:
        return Int(int(self) * other)

    def __truediv__(self, other: int) -> Int:
        return Int(math.trunc(Fraction(int(self), other)))

    def __mod__(self, other: int) -> Int:
        return Int(int(self) - other * math.trunc(Fraction(int(self), other)))

    __radd__, __rmul__ = __add__, __mul__


@pytest.mark.full
@given(
    st.lists(st.tuples(st.integers(2, 5), st.integers(-24, 24)), min_size=1, max_size=3), st.integers(0, 30), st.integers(2, 24)
)
@settings(max_examples=200, deadline=None)
def test_reversed_axes_are_divided_as_numpy_divides(axes: list[tuple[int, int]], above: int, by: int) -> None:
    """Forms that are never negative, but hold terms that are."""
    variables = [Variable(f"v{k}", size) for k, (size, _) in enumerate(axes)]
    form = Linear.of(above - sum(min(0, step * (size - 1)) for size, step in axes))
    for variable, (_, step) in zip(variables, axes, strict=True):
        form = form + Linear.of(variable) * step
    names = {v: v.name for v in variables}
    for at in product(*(range(v.size) for v in variables)):
        values = {v.name: Int(k) for v, k in zip(variables, at, strict=True)}
        whole = eval(form.text(names), values)
        assert eval((form // by).text(names), values) == whole // by
        assert eval((form % by).text(names), values) == int(whole) % by


def test_a_split_and_its_inverse_cancel() -> None:
    row, column = Variable("r", 12), Variable("c", 768)
    offset = flatten((Linear.of(row), Linear.of(column)), (12, 768))
    heads = unflatten(offset, (12, 12, 64))
    assert flatten(heads, (12, 12, 64)).terms == offset.terms, "merging what was split leaves no division"


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(("name", "splits"), [(n, 1) for n in CASES] + [(n, 3) for n in CASES if n.startswith(REDUCING)])
def test_cases_of_the_standard_run_as_generated_kernels(name: str, splits: int) -> None:
    check_case(name, HostDevice(), splits)


NETWORKS = list(product(("mlp", "lenet", "transformer-small"), (1, 4)))


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "splits"), params(NETWORKS, large=[case for case in NETWORKS if case[1] == 1 or case[0] == "transformer-small"])
)
def test_loss_and_gradients_of_networks_are_those_of_onnxruntime(name: str, splits: int, tmp_path: Path) -> None:
    check_network(name, HostDevice(), splits, tmp_path)


def launches(text: str) -> int:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    return len(compile_segment(model).calls)


HEAD = '<ir_version: 10, opset_import: ["": 26]> g '


def test_a_normalisation_behind_a_residual_sum_is_one_kernel() -> None:
    body = "(float[512,64] x, float[512,64] r, float[64] s, float[64] b) => (float[512,64] y, float[512,64] t)"
    assert launches(HEAD + body + "{ t = Add(x, r)  y = LayerNormalization<axis=-1>(t, s, b) }") == 1


def test_a_chain_through_reshapes_and_transposes_is_one_kernel() -> None:
    body = "(float[8,128,256] x, float[256] b) => (float[8,8,128,32] y)"
    nodes = """{
      h = Add(x, b)
      shape = Constant<value_ints=[8, 128, 8, 32]>()
      s = Reshape(h, shape)
      g = Gelu(s)
      y = Transpose<perm=[0, 2, 1, 3]>(g)
    }"""
    assert launches(HEAD + body + nodes) == 1


SHEARS = {  # of e = Exp(x)
    "of scores": """
      n = Pad(e, left, zero)  tall = Reshape(n, turned)  cut = Slice(tall, one, most, first)
      wide = Reshape(cut, straight)  y = Slice(wide, none, half, last)""",
    "of gradients": """
      n = Pad(e, right, zero)  tall = Reshape(n, turned)  under = Pad(tall, above, zero)
      wide = Reshape(under, even)  y = Slice(wide, one, most, last)""",
}


@pytest.mark.parametrize("kind", SHEARS)
def test_a_shear_is_read_from_a_padded_copy_without_a_division_for_each_element(kind: str) -> None:
    """Relative positions are matched to keys by rows that a reshape moves against each other."""
    columns, seen, tall_rows = (1023, 512, 1024) if kind == "of scores" else (512, 1023, 1023)
    head = f'<ir_version: 10, opset_import: ["": 21]> g (float[512,{columns}] x) => (float[512,{seen}] y)'
    text = f"""{head} {{
      zero = Constant<value_float=0.0>()
      left = Constant<value_ints=[0, 1, 0, 0]>()  right = Constant<value_ints=[0, 0, 0, 511]>()
      above = Constant<value_ints=[1, 0, 0, 0]>()
      turned = Constant<value_ints=[{tall_rows}, 512]>()  straight = Constant<value_ints=[512, 1023]>()
      even = Constant<value_ints=[512, 1024]>()
      one = Constant<value_ints=[1]>()  none = Constant<value_ints=[0]>()  most = Constant<value_ints=[1024]>()
      half = Constant<value_ints=[512]>()  first = Constant<value_ints=[0]>()  last = Constant<value_ints=[1]>()
      e = Exp(x)
      {SHEARS[kind]}
    }}"""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    calls = [call for call in compile_segment(model).calls if isinstance(call, KernelCall)]
    assert len(calls) == 2
    reader = calls[-1].source.body
    assert "exp" not in reader  # that is in the kernel before, which stores the padded values
    assert not re.search(r"r\d \* 10\d\d.*% 10\d\d", reader)  # an offset modulo the length of other lines
    x = np.random.default_rng(0).standard_normal((512, columns)).astype(np.float32)
    e = np.exp(x)
    if kind == "of scores":
        expected = np.pad(e, ((0, 0), (1, 0))).reshape(1024, 512)[1:].reshape(512, 1023)[:, :512]
    else:
        tall = np.pad(e, ((0, 0), (0, 511))).reshape(1023, 512)
        expected = np.pad(tall, ((1, 0), (0, 0))).reshape(512, 1024)[:, 1:]
    with closing(BACKENDS["onnxruntime"](threads=2, spin=False)) as backend:
        np.testing.assert_allclose(results_of(model, {"x": x}, backend)["y"], expected, rtol=1e-6)


def test_what_a_library_reads_transposed_is_written_once() -> None:
    body = "(float[64,32] x, float[64,16] w) => (float[32,16] y)"
    assert launches(HEAD + body + "{ e = Exp(x)  t = Transpose<perm=[1, 0]>(e)  y = MatMul(t, w) }") == 2


def test_long_sums_of_few_rows_are_shared_by_many_blocks() -> None:
    text = HEAD + "(float[8,1000000] x) => (float[8] y) { a = Constant<value_ints=[1]>()  y = ReduceSum<keepdims=0>(x, a) }"
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    (call,) = compile_segment(model).calls
    assert isinstance(call, KernelCall)
    assert call.shape.blocks >= 132, "every multiprocessor has work"
    assert call.source.finishes, "the last block of each row adds up its totals"


def test_equal_kernels_are_one_text_to_compile() -> None:
    body = "(float[64,32] x, float[32,32] k) => (float[64,32] z)"
    model = onnx.parser.parse_model(HEAD + body + "{ y = Softmax(x)  m = MatMul(y, k)  z = Softmax(m) }")
    calls = compile_segment(onnx.shape_inference.infer_shapes(model)).calls
    names = [call.name for call in calls if isinstance(call, KernelCall)]
    assert len(names) == 2
    assert len(set(names)) == 1


@needs_compiler
def test_columns_that_lie_apart_are_not_read_as_vectors() -> None:
    """A column of a matrix is read by two loops over its elements, which are no neighbours."""
    body = "(float[12,2] x) => (float[12,1] y)"
    nodes = """{
      a = Constant<value_ints=[1]>()  b = Constant<value_ints=[2]>()
      c = Slice(x, a, b, a)
      s = ReduceSumSquare<keepdims=1>(c)
      y = Div(c, s)
    }"""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + body + nodes))
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    results, _ = run_segment(model, {"x": x}, HostDevice())
    np.testing.assert_allclose(results["y"], x[:, 1:] / np.square(x[:, 1:]).sum(), rtol=1e-6)


@pytest.mark.parametrize("text", [
    "(float[5,7] a, float[7,3] b, float[3] c) => (float[5,3] y) { y = Gemm(a, b, c) }",
    "(float[7,5] a, float[3,7] b, float[5,1] c) => (float[5,3] y)"
    "{ y = Gemm<transA=1, transB=1, alpha=0.5, beta=2.0>(a, b, c) }",
    "(float[2,4,5,7] a, float[2,4,7,3] b) => (float[2,4,5,3] y) { y = MatMul(a, b) }",
    "(float[2,4,5,7] a, float[7,3] b) => (float[2,4,5,3] y) { y = MatMul(a, b) }",
    "(float[5,7] a, float[4,7,3] b) => (float[4,5,3] y) { y = MatMul(a, b) }",
])  # fmt: skip
def test_products_tell_the_library_the_right_layouts(text: str) -> None:
    """cuBLASLt counts columns first and knows strides only."""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    rng = np.random.default_rng(0)
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    feeds = {v.name: rng.standard_normal(s).astype(np.float32) for v, s in zip(model.graph.input, shapes, strict=True)}
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results, _ = run_segment(model, feeds, HostDevice())
    np.testing.assert_allclose(results["y"], session.run(None, feeds)[0], rtol=1e-5, atol=1e-6)


def test_small_gradients_of_biases_are_widened_together_behind_all_products() -> None:
    body = """(bfloat16[256,256] dy, bfloat16[256,256] w1, bfloat16[256,256] w2, bfloat16[256,256] z1, bfloat16[256,256] z2)
      => (bfloat16[256,256] d2, float[256] b1, float[256] b2) {
      zero = Constant<value_ints=[0]>()
      g1 = MatMul(dy, w1)  d1 = graphc.GeluGrad<approximate="tanh">(g1, z1)  s1 = ReduceSum<keepdims=0>(d1, zero)
      b1 = Cast<to=1>(s1)
      g2 = MatMul(d1, w2)  d2 = graphc.GeluGrad<approximate="tanh">(g2, z2)  s2 = ReduceSum<keepdims=0>(d2, zero)
      b2 = Cast<to=1>(s2)
    }"""
    calls = compile_segment(onnx.parser.parse_model(HEAD + body)).calls
    assert [type(call).__name__ for call in calls] == ["NodeCall", "NodeCall", "KernelCall"]
    assert isinstance(calls[2], KernelCall)
    assert [v.name for v in calls[2].source.operands[calls[2].source.reads :]] == ["b1", "b2"]
