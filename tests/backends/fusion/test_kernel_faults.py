"""What a kernel does at the edges of its types and sizes, where a GPU and the host that plays one part ways."""

from __future__ import annotations

import shutil
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from graphc.backends.cupy.updates.multi_tensor import bind_table
from tests.backends.fusion.fusion_cases import LAYER_NORM_GRADIENT
from tests.backends.host_kernels import EmulatedDevice, run_segment

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
HEAD = '<ir_version: 10, opset_import: ["": 26]> g '
INT64 = np.iinfo(np.int64)


def model_of(text: str) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))


def emulated(text: str, **feeds: Any) -> dict[str, Any]:
    results, segment = run_segment(model_of(text), feeds, EmulatedDevice(2))
    assert not segment.fallbacks
    return results


def kernels(text: str, *, inferred: bool = False) -> list[KernelCall]:
    model = onnx.parser.parse_model(HEAD + text) if inferred else model_of(text)
    return [call for call in compile_segment(model).calls if isinstance(call, KernelCall)]


@needs_compiler
@pytest.mark.full
def test_whole_numbers_are_those_of_numpy() -> None:
    """Powers beyond what a double holds, remainders of narrow types by a constant, labels that no class has."""
    text = """(int64[4] x, int64[4] e, int32[4] a, float[4] f, int8[4] s, uint16[4] u, int64[4] i, float[2] v)
    => (int64[4] p, int32[4] q, int8[4] m, uint16[4] n, float[4,3] h) {
      p = Pow(x, e)  q = Pow(a, f)
      three = Constant<value=int8 {3}>()  m = Mod(s, three)
      seven = Constant<value=uint16 {7}>()  n = Mod(u, seven)
      depth = Constant<value_int=3>()  h = OneHot(i, depth, v)
    }"""
    x, e = np.array([3, 5, -7, 2]), np.array([39, 3, 21, 62])
    a, f = np.array([3, 5, 2, 4], np.int32), np.array([2.0, 3.0, 0.5, 1.0], np.float32)
    s, u = np.array([5, -7, 9, -128], np.int8), np.array([5, 7, 65535, 8], np.uint16)
    i, v = np.array([2, -1, 5, INT64.min]), np.array([0.5, 2.0], np.float32)
    found = emulated(text, x=x, e=e, a=a, f=f, s=s, u=u, i=i, v=v)
    np.testing.assert_array_equal(found["p"], x**e)
    np.testing.assert_array_equal(found["q"], np.power(a, f).astype(np.int32))
    np.testing.assert_array_equal(found["m"], s % np.int8(3))
    np.testing.assert_array_equal(found["n"], u % np.uint16(7))
    np.testing.assert_array_equal(found["h"], np.where(np.arange(3) == np.array([2, 2, -1, -1])[:, None], 2.0, 0.5))


def test_floats_become_narrow_whole_numbers_by_way_of_wider_ones() -> None:
    """As on CPUs; a conversion of the GPU's own makes 0 of -1 in uint8, and 255 of 300."""
    (call,) = kernels(
        "(float[4] x) => (uint8[4] y, int16[4] z, uint32[4] w) { y = Cast<to=2>(x) z = Cast<to=5>(x) w = Cast<to=12>(x) }"
    )
    for way in ("((unsigned char)(int)", "((short)(int)", "((unsigned int)(long long)"):
        assert way in call.source.body


@needs_compiler
@pytest.mark.large
def test_a_long_softmax_where_rows_hold_infinities() -> None:
    """Rows that begin with minus infinity, hold a NaN, or nothing but minus infinity, against onnxruntime."""
    text = "(bfloat16[140,16640] x) => (float[140,16640] y) { f = Cast<to=1>(x) y = LogSoftmax<axis=-1>(f) }"
    x = (np.random.default_rng(0).standard_normal((140, 16640)) * 3).astype(ml_dtypes.bfloat16)
    x[0, :9000], x[1, 1::2], x[2, 77], x[3], x[4, 5], x[5] = -np.inf, -np.inf, np.nan, -np.inf, 3e38, -3e38
    found = emulated(text, x=x)["y"]
    model = onnx.parser.parse_model(HEAD + "(float[140,16640] f) => (float[140,16640] y) { y = LogSoftmax<axis=-1>(f) }")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"f": x.astype(np.float32)})
    finite = [k for k in range(140) if k not in (2, 3)]
    np.testing.assert_allclose(found[finite], expected[finite], rtol=2e-5, atol=2e-5)
    assert np.isnan(found[2]).all()
    assert np.isnan(found[3]).all()


@needs_compiler
@pytest.mark.full
def test_sums_over_nothing() -> None:
    text = """(float[3,0] x) => (float[3] s, float[3] m) {
      a = Constant<value_ints=[1]>()  s = ReduceSum<keepdims=0>(x, a)  m = ReduceMax<keepdims=0>(x, a) }"""
    found = emulated(text, x=np.zeros((3, 0), np.float32))
    assert found["s"].tolist() == [0.0] * 3
    assert found["m"].tolist() == [-np.inf] * 3


def test_a_table_without_elements_is_no_launch() -> None:
    """CUDA refuses an empty grid."""

    class Refusing(EmulatedDevice):
        def launch(self, kernel: Any, arrays: Any, shape: Any) -> Any:
            raise AssertionError("a launch of no blocks")

    bind_table(Refusing(), None, [])()


@needs_compiler
@pytest.mark.full
def test_what_a_scan_slices_off_is_read_from_where_it_begins() -> None:
    """Slices of 18 floats begin at odd multiples of 8 bytes; 16 of them must not be read 16 bytes at once."""
    text = """(float[16] s, float[3,18] x) => (float[16] e, float[3,16] y) {
      e, y = Scan<num_scan_inputs=1, body = b (float[16] s, float[18] x) => (float[16] n, float[16] o) {
        zero = Constant<value_ints=[0]>()  sixteen = Constant<value_ints=[16]>()
        h = Slice(x, zero, sixteen)  n = Add(s, h)  o = Mul(n, h)
      }>(s, x)
    }"""
    rng = np.random.default_rng(0)
    s, x = rng.standard_normal(16, dtype=np.float32), rng.standard_normal((3, 18), dtype=np.float32)
    results, _ = run_segment(model_of(text), {"s": s, "x": x}, EmulatedDevice())
    states = s + np.cumsum(x[:, :16], axis=0)
    np.testing.assert_allclose(results["e"], states[-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results["y"], states * x[:, :16], rtol=1e-5, atol=1e-6)


def width(text: str, *, inferred: bool = False) -> set[str]:
    found = [line for call in kernels(text, inferred=inferred) for line in call.text.splitlines()]
    return {line.split(maxsplit=2)[2] for line in found if line.startswith("#define INDEX ")}


def test_indices_are_as_wide_as_what_they_count() -> None:
    """Of operands, of the elements of a kernel, and of values that lie nowhere: here a mask of which a part is read."""
    small, large = "float[32768,60000]", "float[65536,60000]"
    assert width(f"({small} x) => ({small} y) {{ y = Exp(x) }}") == {"int"}
    assert width(f"({large} x) => ({large} y) {{ y = Exp(x) }}") == {"long long"}
    assert width(f"({large} x) => (float[60000] y) {{ a = Constant<value_ints=[0]>() y = ReduceSum<keepdims=0>(x, a) }}") == {
        "long long"
    }
    part = """(int64 seed, int64 step, int64 at) => (float[64,60000] y) <float[65536,60000] m> {
      shape = Constant<value_ints=[65536,60000]>()  m = graphc.DropoutMask<ratio=0.5, tag="t">(shape, seed, step, at)
      a = Constant<value_ints=[65000]>()  b = Constant<value_ints=[65064]>()  y = Slice(m, a, b)
    }"""
    assert width(part, inferred=True) == {"long long"}


def test_a_scatter_into_more_places_than_an_int_counts_is_no_sort_of_ints() -> None:
    text = "(float[70000,40000] x, int64[9,2] i, float[9] u) => (float[70000,40000] y)"
    assert compile_segment(model_of(text + '{ y = ScatterND<reduction="add">(x, i, u) }')).fallbacks
    rows = "(float[70000,40000] x, int64[9,1] i, float[9,40000] u) => (float[70000,40000] y)"
    assert not compile_segment(model_of(rows + '{ y = ScatterND<reduction="add">(x, i, u) }')).fallbacks
    text = "(float[70000,40000] x, int64[900,1] i, float[900,1] u) => (float[70000,40000] y)"
    (_, add) = compile_segment(model_of(text + '{ y = ScatterElements<axis=0, reduction="add">(x, i, u) }')).calls
    assert isinstance(add, KernelCall)
    assert "INDEX long long" in add.text


def test_what_a_thread_holds_of_a_row_has_registers() -> None:
    """A row of 128,256 bfloats would be 126 for each thread of the largest block: more than loops are unrolled for."""
    body = "{ f = Cast<to=1>(x) s = Softmax<axis=-1>(f) y = Cast<to=16>(s) }"
    for columns, held in ((20000, True), (128256, False), (250001, False)):
        (call,) = kernels(f"(bfloat16[640,{columns}] x) => (bfloat16[640,{columns}] y) {body}")
        assert bool(call.source.form.held) == held


def test_what_all_elements_of_a_vector_share_is_computed_once() -> None:
    """The gradient of a cross-entropy: the logarithm of a row's sum, and the place of the label."""
    ones = ",".join(["-1"] * 64)
    text = f"""(bfloat16[64,800] x, float[64,1] m, float[64,1] s, int64[64,1] t) => (bfloat16[64,800] y) {{
      f = Cast<to=1>(x)  a = Sub(f, m)  l = Log(s)  b = Sub(a, l)  p = Exp(b)
      one = Constant<value=float[64,1] {{{ones}}}>()  g = ScatterElements<axis=1, reduction="add">(p, t, one)
      y = Cast<to=16>(g)
    }}"""
    (call,) = kernels(text)
    before, inside = call.source.body.split("EACH(v) {")
    assert "logf(" in before
    assert "class_index(" in before
    assert "logf(" not in inside
    assert "bfloat_store((float)" in inside, "rounded where it is stored, two at a time"
    assert inside.count("FAST_EXP(") == 1, "rounded to 16 bits, so that the quick exponential is exact enough"


def test_joined_sums_of_two_types_fit_into_the_memory_of_a_block() -> None:
    """A block's static memory ends at 48 KiB: totals of 3,600 columns in float32 and float64 together are 43,200 bytes."""
    sums = LAYER_NORM_GRADIENT.replace(
        "ds = ReduceSum<keepdims=0>(gn, first)", "wide = Cast<to=11>(gn)  ds = ReduceSum<keepdims=0>(wide, first)"
    )
    for columns, joined in ((768, True), (3600, False)):
        inputs = f"bfloat16[500,{columns}] g, bfloat16[500,{columns}] x, float[{columns}] s, float[500,{columns}] o"
        outputs = f"float[500,{columns}] dx, bfloat16[500,{columns}] dl, double[{columns}] ds, float[{columns}] db"
        found = [call for call in kernels(f"({inputs}) => ({outputs}) {sums}") if call.source.totals]
        assert bool(found) == joined


@needs_compiler
def test_an_index_of_each_row_is_read_inside_the_loop_over_rows() -> None:
    """Rows side by side have an index each, which ends in an address that depends on nothing else of the row."""
    text = """(float[6,12,12] x, int64[24] i, int64[24] j, float[6,24,24] z) => (float[1,1,24] y) {
      a = Gather<axis=1>(x, i) b = Gather<axis=2>(a, j) c = Tanh(b) t = Mul(c, z)
      axes = Constant<value_ints=[0, 1]>() y = ReduceSum(t, axes)
    }"""
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((6, 12, 12)).astype(np.float32), rng.standard_normal((6, 24, 24)).astype(np.float32)
    i, j = rng.integers(-12, 12, 24), rng.integers(-12, 12, 24)
    expected = (np.tanh(x[:, i][:, :, j]) * z).sum((0, 1), keepdims=True)
    np.testing.assert_allclose(emulated(text, x=x, i=i, j=j, z=z)["y"], expected, rtol=1e-4, atol=1e-4)
