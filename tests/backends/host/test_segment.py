"""Generated kernels compiled by LLVM: ONNX's own cases, elementary functions at their limits, whole trainings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import graphc
from graphc.backend import BACKENDS, Backend, make_backend
from graphc.backends.host.generator import HostGenerator
from graphc.backends.host.language import LanguageError
from graphc.backends.host.segment import compile_segment
from graphc.backends.host.segment_code import KernelPart
from graphc.device import aligned_zeros
from tests.backends.fusion.fusion_cases import CASES, legal_case
from tests.backends.guard_pages import Side, guarded
from tests.backends.host.segment_models import results_of, text
from tests.conformance.suite import plain

LEFT = frozenset(
    [
        "test_cast_FLOAT_to_FLOAT16",
        "test_cast_FLOAT16_to_FLOAT",
        "test_eyelike_with_dtype",
        "test_gather_1",
        "test_gather_negative_indices",
        "test_gather_elements_0",
        "test_mod_mixed_sign_int32",
        "test_onehot_negative_indices",
        "test_triu_neg",
        "test_tril_square",
    ]
)
"""Cases that onnxruntime runs, because it checks indices, or for types that kernels do not compute."""


@pytest.fixture
def backend() -> Any:
    made = BACKENDS["onnxruntime"](threads=2, spin=False)
    yield made
    made.close()


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_standard_run_as_compiled_kernels(name: str, backend: Backend) -> None:
    case, proto, feeds = legal_case(name)
    _, outputs = case.data_sets[0]
    if name in LEFT:
        with pytest.raises(LanguageError):
            compile_segment(proto)
        return
    found = results_of(proto, feeds, backend)
    for value, expected in zip(case.model.graph.output, map(plain, outputs), strict=True):
        np.testing.assert_allclose(found[value.name], expected, rtol=case.rtol, atol=max(case.atol, 1e-6))


X = np.concatenate([np.linspace(-100, 100, 20001), np.geomspace(1e-40, 1e38, 4000), -np.geomspace(1e-40, 1e2, 999)])
ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45])
EXACT: dict[str, Any] = {
    "Exp": np.exp,
    "Log": np.log,
    "Tanh": np.tanh,
    "Erf": lambda x: torch.erf(torch.tensor(x)).numpy(),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softplus": lambda x: np.logaddexp(x, 0),
    "Mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "Sqrt": np.sqrt,
    "Asin": np.arcsin,
    "Acos": np.arccos,
    "Atan": np.arctan,
    "Sinh": np.sinh,
    "Cosh": np.cosh,
    "Asinh": np.arcsinh,
    "Acosh": np.arccosh,
    "Atanh": np.arctanh,
}


@pytest.mark.parametrize("op", ["Sin", "Cos", "Tan"])
def test_circular_functions_follow_float64_over_the_whole_range(op: str, backend: Backend) -> None:
    whole = np.geomspace(1e10, 3e38, 4000)
    x = np.concatenate([X, whole, -whole, np.arange(-500, 500) * np.pi / 2, ODD]).astype(np.float32)
    found = results_of(text(f"y = {op}(x)", str(x.size)), {"x": x}, backend)["y"]
    with np.errstate(all="ignore"):
        expected = getattr(np, op.lower())(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    near = abs(x) < 1e10
    np.testing.assert_allclose(found[near], expected[near], rtol=1e-6, atol=2e-38)
    np.testing.assert_array_equal(np.signbit(found[x == 0]), np.signbit(expected[x == 0]))


def test_powers_follow_float64_and_have_the_values_that_c_prescribes(backend: Backend) -> None:
    bases = np.concatenate([np.geomspace(1e-44, 3e38, 300), [0.5, 1, 2, 1 + 2**-23, 1 - 2**-24], ODD])
    exponents = np.array([0, -0.0, 0.1, 0.75, 1, 3, 5, -1, -0.5, 1.7, -33, 1e-30, 2**24 + 2, -7e20, np.inf, -np.inf, np.nan])
    x, y = (a.ravel().astype(np.float32) for a in np.meshgrid(np.concatenate([bases, -bases]), exponents))
    model = text("y = Pow(x, e)", str(x.size))
    model.graph.input.append(onnx.helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, [y.size]))
    found = results_of(model, {"x": x, "e": y}, backend)["y"]
    with np.errstate(all="ignore"):
        expected = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-45)
    np.testing.assert_array_equal(np.signbit(found) & (found == found), np.signbit(expected) & (expected == expected))


@pytest.mark.parametrize("power", [4.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, -0.5, -1.0, -1.5, -2.0])
def test_known_powers_follow_float64(power: float, backend: Backend) -> None:
    """Of negative zero and infinity they are what roots and quotients of these are: of -inf often NaN, where C has a number."""
    x = np.concatenate([np.geomspace(1e-9, 1e9, 300), -np.geomspace(1e-9, 1e9, 300), [0, np.inf, np.nan]]).astype(np.float32)
    model = text("y = Pow(x, e)", str(x.size))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(power), "e"))
    with np.errstate(all="ignore"):
        expected = np.power(x.astype(np.float64), power)
    np.testing.assert_allclose(results_of(model, {"x": x}, backend)["y"], expected, rtol=2.5e-7)


@pytest.mark.parametrize("op", EXACT)
def test_elementary_functions_keep_their_digits_and_their_limits(op: str, backend: Backend) -> None:
    x = np.concatenate([X, np.linspace(-1, 1, 4001), ODD]).astype(np.float32)
    found = results_of(text(f"y = {op}(x)", str(x.size)), {"x": x}, backend)["y"]
    with np.errstate(all="ignore"):
        expected = EXACT[op](x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-38)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (100, 65), (7, 1000), (1000, 3), (60, 1337)])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_along_either_axis_reach_every_element(rows: int, columns: int, axis: int, backend: Backend) -> None:
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    model = text("s = Mul(x, x) y = ReduceSum<keepdims = 0>(s, a)", f"{rows},{columns}", str(x.shape[1 - axis]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([axis]), "a"))
    found = results_of(model, {"x": x}, backend)["y"]
    np.testing.assert_allclose(found, (x.astype(np.float64) ** 2).sum(axis), rtol=1e-5)


def test_sums_down_a_middle_axis_have_the_same_bits_on_any_number_of_threads() -> None:
    x = np.random.default_rng(0).standard_normal((3, 50, 1100)).astype(np.float32)
    model = text("s = Mul(x, x) y = ReduceSum<keepdims = 0>(s, a)", "3,50,1100", "3,1100")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "a"))
    found = []
    for threads in (1, 2, 5):
        made = BACKENDS["onnxruntime"](threads=threads, spin=False)
        found.append(results_of(model, {"x": x}, made)["y"])
        made.close()
    np.testing.assert_allclose(found[0], (x.astype(np.float64) ** 2).sum(1), rtol=1e-5)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_a_mask_over_rows_side_by_side_is_added_up_along_distant_columns(backend: Backend) -> None:
    model = text("b = Greater(x, k) c = Not(b) s = Where(c, x, k) y = ReduceSum<keepdims = 0>(s, a)", "70,80", "80")
    for name, value in (("k", np.float32(0.5)), ("a", np.array([0]))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    x = np.random.default_rng(0).standard_normal((70, 80)).astype(np.float32)
    np.testing.assert_allclose(results_of(model, {"x": x}, backend)["y"], np.minimum(x, 0.5).sum(0), rtol=1e-5, atol=1e-5)


DISTANCES = {
    "columns": "a = Sub(x, y) b = Mul(a, a) c = ReduceSum<keepdims = 0>(b, last) z = Sub(c, s)",
    "rows": "t = Unsqueeze(s, last) a = Sub(x, y) b = Mul(a, t) z = ReduceSum<keepdims = 0>(b, middle)",
}
"""Between all rows of x and y, less s; the differences, weighted by s."""


@pytest.mark.parametrize("along", DISTANCES)
def test_vectors_go_along_what_neighbours_share(along: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of x and y lie side by side, however much else is read once a row, or is one number for many rows."""
    forms: list[str] = []
    plain = HostGenerator.kernels

    def kernels(generator: HostGenerator) -> Any:
        found = plain(generator)
        forms.extend("rows" if loops.vector > 1 else "columns" for _, loops in found)
        return found

    monkeypatch.setattr(HostGenerator, "kernels", kernels)
    rng = np.random.default_rng(0)
    x, y, s = (rng.standard_normal(shape).astype(np.float32) for shape in ((200, 1, 40), (1, 300, 40), (200, 300)))
    apart = x.astype(np.float64) - y
    wanted = (apart**2).sum(2) - s if along == "columns" else (apart * s[..., None]).sum(1)
    sizes = ",".join(map(str, wanted.shape))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[200,1,40] x, float[1,300,40] y, float[200,300] s)'
        f" => (float[{sizes}] z) {{ {DISTANCES[along]} }}"
    )
    for axis, name in ((2, "last"), (1, "middle")):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([axis]), name))
    z = results_of(model, {"x": x, "y": y, "s": s}, backend)["z"]
    np.testing.assert_allclose(z, wanted, rtol=1e-5, atol=2e-6 * np.abs(wanted).max())
    assert forms == [along]


@pytest.mark.parametrize("neighbours", [1, 2, 3, 4, 7, 8, 9, 12, 15, 17])
@pytest.mark.parametrize("columns", [5, 64, 131])
def test_reductions_over_an_axis_in_front_of_a_few_elements(columns: int, neighbours: int, backend: Backend) -> None:
    proto = text(
        "axis = Constant <value = int64[1] {1}> () s = ReduceSum (x, axis) m = ReduceMax (x, axis) p = Softmax <axis = 1> (x)"
        " q = Mul (p, m) y = Add (q, s)",
        f"3,{columns},{neighbours}",
    )
    x = np.random.default_rng(0).standard_normal((3, columns, neighbours)).astype(np.float32)
    whole = x.astype(np.float64)
    high, e = whole.max(1, keepdims=True), np.exp(whole - whole.max(1, keepdims=True))
    expected = e / e.sum(1, keepdims=True) * high + whole.sum(1, keepdims=True)
    np.testing.assert_allclose(results_of(proto, {"x": x}, backend)["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("neighbours", [3, 12])
@pytest.mark.parametrize("kind", ["float", "double", "int32"])
def test_lanes_that_fill_up_a_vector_touch_no_memory(kind: str, neighbours: int, backend: Any) -> None:
    """Arrays lie beside closed pages; an access beyond them ends the process."""
    proto = text("axis = Constant <value = int64[1] {1}> () s = ReduceSum (x, axis) y = Mul (x, s)", f"3,20,{neighbours}")
    types = {"float": np.float32, "double": np.float64, "int32": np.int32}
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(types[kind]))
    x = np.random.default_rng(0).integers(-9, 9, (3, 20, neighbours)).astype(types[kind])
    code = compile_segment(proto)
    assert all(isinstance(part, KernelPart) for part in code.parts)
    sides: tuple[Side, Side] = ("before", "behind")
    for side in sides:
        y = guarded(np.zeros_like(x), side)
        code.bind({"x": guarded(x, side)}, {"y": y}, backend.pool, backend.bind_session, aligned_zeros, {})()
        np.testing.assert_array_equal(y, x * x.sum(1, keepdims=True, dtype=x.dtype))


def test_a_reshaped_value_that_a_larger_one_shares_is_stored_before_its_reshape(backend: Backend) -> None:
    proto = text(
        "axes = Constant <value = int64[1] {1}> () all = Constant <value = int64[2] {0, 1}> ()"
        " n = Constant <value = float {7}> () a = ReduceSum <keepdims = 0> (x, axes) b = Exp (a) c = Div (b, n)"
        " d = Unsqueeze (c, axes) e = Mul (d, x) f = ReduceSum <keepdims = 1> (e, axes) g = Add (e, f) h = Mul (g, x)"
        " y = ReduceSum <keepdims = 0> (h, all)",
        "200,300,5",
        "5",
    )
    x = np.random.default_rng(0).standard_normal((200, 300, 5)).astype(np.float32) / 20
    wide = x.astype(np.float64)
    e = np.exp(wide.sum(1, keepdims=True)) / 7 * wide
    expected = ((e + e.sum(1, keepdims=True)) * wide).sum((0, 1))
    np.testing.assert_allclose(results_of(proto, {"x": x}, backend)["y"], expected, rtol=1e-4)


def test_a_scalar_constant_stays_a_scalar_for_the_nodes_that_are_left(backend: Backend) -> None:
    model = text("s = Gather<axis = 1>(x, k) y = Exp(s)", "3,4", "3")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2), "k"))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_allclose(results_of(model, {"x": x}, backend)["y"], np.exp(x[:, 2]), rtol=1e-6)


def test_a_reshape_between_nodes_that_are_left_keeps_their_order(backend: Backend) -> None:
    model = text("h = MatMul(x, x) r = Reshape(h, s) g = Gather(r, k) y = Exp(g)", "3,3", "2")
    for name, value in (("s", [-1]), ("k", [8, 1])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    x = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    np.testing.assert_allclose(results_of(model, {"x": x}, backend)["y"], np.exp((x @ x).ravel()[[8, 1]]), rtol=1e-5)


class Blocks(nn.Module):
    """A transformer with what lies between its products, and a convolution with its norm."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.embed, self.layers = nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.conv, self.norm = nn.Conv1d(16, 12, 3, padding=1), nn.GroupNorm(3, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embed(ids)).transpose(1, 2)
        return self.head(nn.functional.silu(self.norm(self.conv(x))).mean(2))


@pytest.mark.full
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.large), 2])
def test_a_training_with_fused_kernels_follows_pytorch(threads: int) -> None:
    torch.manual_seed(0)
    module, ids, label = Blocks(), torch.randint(0, 20, (6, 9)), torch.randint(0, 5, (6,))
    program = graphc.compile(
        module,
        example_inputs=(ids,),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.1),
        backend="onnxruntime:fuse_small=true",
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with graphc.Trainer(program, threads=threads) as trainer:
        feeds = {program.model.graph.inputs[0].name: ids.numpy(), "label": label.numpy()}
        found = [trainer.step(feeds)["loss"] for _ in range(5)]
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(ids), label)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.large  # the next test keeps whole segments, with their machine code
def test_machine_code_is_kept_for_the_next_process_and_made_again_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))
    script = (
        "import numpy as np, onnx; from graphc.backend import BACKENDS;"
        "from tests.backends.host.segment_models import results_of, text;"
        "b = BACKENDS['onnxruntime'](threads=1, spin=False); x = np.arange(8, dtype=np.float32);"
        "print(results_of(text('y = Sigmoid(x)', '8'), {'x': x}, b)['y'].tobytes().hex())"
    )

    def process() -> str:
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    first = process()
    (kept,) = (tmp_path / "host").glob("k*.o")  # beside what calls it
    made = kept.stat().st_mtime_ns
    assert process() == first
    assert kept.stat().st_mtime_ns == made, "the second process compiled again"
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert process() == first
    assert kept.stat().st_mtime_ns != made, "a damaged file was used"


KEPT = """
import sys
import numpy as np, onnx
from graphc.backend import BACKENDS
from graphc.backends.host import shared
from tests.backends.host.segment_models import text

if sys.argv[1] == "later":
    def compile_segment(*arguments, **options): raise AssertionError("compiled again")
    shared.compile_segment = compile_segment
if sys.argv[1] == "plugin":
    from graphc.backends.fusion.op_kernels import OP_KERNELS, OpKernel
    def rule(builder, node): return None
    OP_KERNELS["Plugin"] = OpKernel(decomposition=rule)
    found, make = [], shared.compile_segment
    shared.compile_segment = lambda *arguments, **options: found.append(1) or make(*arguments, **options)
model = text("s = Sigmoid(x) g = Gather(s, i) y = Mul(g, c)", "3000,4", "2,4")
for name, value in (("i", np.array([1, 2999])), ("c", np.float32([1, 2, 3, 4]))):
    model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
x, y = np.arange(12000, dtype=np.float32).reshape(3000, 4) / 6000, np.zeros((2, 4), np.float32)
BACKENDS["onnxruntime"](threads=1, spin=False).bind_segment(model, {"x": x}, {"y": y})()
assert sys.argv[1] != "plugin" or found == [1], "a plugin's rule may have changed since"
print(y.tobytes().hex())
"""


@pytest.mark.full  # five processes
def test_a_segment_is_kept_for_the_next_process_and_made_again_where_it_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))

    def process(kind: str) -> str:
        return subprocess.run([sys.executable, "-c", KEPT, kind], capture_output=True, text=True, check=True).stdout

    first = process("first")
    (kept,) = (tmp_path / "host").glob("*.json")
    assert process("later") == first
    assert process("plugin") == first
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert process("first") == first, "a damaged file"
    for code in (tmp_path / "host").glob("k*.o"):
        code.unlink()
    assert process("first") == first, "kernels that are gone"
    assert process("later") == first


def test_little_arithmetic_is_left_to_onnxruntime_unless_asked_for() -> None:
    def parts(options: str, size: int, last: str = "Tanh") -> list[str]:
        made = make_backend(f"onnxruntime{options}", threads=1)
        try:
            return [part.runs for part in made.segment_parts(text(f"s = Mul(x, x) y = {last}(s)", str(size)))]
        finally:
            made.close()

    assert parts("", 20) == []
    assert parts("", 20, "Sigmoid") == ["kernel"]  # onnxruntime's loses digits
    assert parts("", 10000) == ["kernel"]
    assert parts(":fuse=false", 10000) == []
    assert parts(":fuse_small=true", 20) == ["kernel"]


@pytest.mark.parametrize(
    ("pieces", "length", "first"),
    [(2, 8, "kernel"), (3, 8, "onnxruntime"), (4, 2048, "kernel"), (5, 2048, "onnxruntime")],
)
def test_a_concat_of_many_short_pieces_is_copied_by_onnxruntime(pieces: int, length: int, first: str, backend: Backend) -> None:
    rows = 1 << 15 if length < 100 else 16
    names = [f"x{k}" for k in range(pieces)]
    inputs = ", ".join(f"float[{rows},{length}] {name}" for name in names)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float[{rows},{pieces * length}] y) '
        f"{{ c = Concat<axis = 1>({', '.join(names)}) y = Mul(c, c) }}"
    )
    model = onnx.shape_inference.infer_shapes(model)
    assert [part.runs for part in backend.segment_parts(model)] == list(dict.fromkeys([first, "kernel"]))
    arrays = [np.random.default_rng(k).standard_normal((rows, length)).astype(np.float32) for k in range(pieces)]
    y = np.zeros((rows, pieces * length), np.float32)
    backend.bind_segment(model, dict(zip(names, arrays, strict=True)), {"y": y})()
    np.testing.assert_array_equal(y, np.concatenate(arrays, axis=1) ** 2)


@pytest.mark.parametrize(("width", "first"), [(2048, "kernel"), (8, "onnxruntime")])
def test_a_concat_is_copied_where_its_reader_takes_short_pieces_of_it(width: int, first: str, backend: Backend) -> None:
    """As query, key and value, one after the other in memory, are taken by rows."""
    rows = (1 << 18) // width
    names = ["q", "k", "v"]
    inputs = ", ".join(f"float[1,{rows},{width}] {name}" for name in names)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float[{rows},3,{width}] y) '
        "{ c = Concat<axis = 0>(q, k, v) t = Transpose<perm = [1, 0, 2]>(c) y = Mul(t, t) }"
    )
    model = onnx.shape_inference.infer_shapes(model)
    assert [part.runs for part in backend.segment_parts(model)] == list(dict.fromkeys([first, "kernel"]))
    arrays = [np.random.default_rng(k).standard_normal((1, rows, width)).astype(np.float32) for k in range(3)]
    y = np.zeros((rows, 3, width), np.float32)
    backend.bind_segment(model, dict(zip(names, arrays, strict=True)), {"y": y})()
    np.testing.assert_array_equal(y, np.concatenate(arrays).transpose(1, 0, 2) ** 2)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux lists them")
def test_a_segment_of_small_nodes_starts_no_threads(backend: Backend) -> None:
    def started(size: int) -> int:
        model = text("y = MatMul(x, x)", f"{size},{size}")
        x, y = np.eye(size, dtype=np.float32), np.zeros((size, size), np.float32)
        before = set(os.listdir("/proc/self/task"))
        run = backend.bind_segment(model, {"x": x}, {"y": y})
        run()
        np.testing.assert_array_equal(x, y)
        return len(set(os.listdir("/proc/self/task")) - before)

    assert started(64) == 0
    assert started(1024) == 1  # the backend has two threads; the second one of the session


LAYERS = [("", ""), ("second/", "other_")]
"""Prefixes of the nodes and of the values of two equal segments."""


@pytest.mark.parametrize(("nodes", "values"), LAYERS)
def test_equal_segments_share_kernels_and_name_their_own_nodes(nodes: str, values: str, backend: Backend) -> None:
    model = text("s = Add(x, x) y = Gather(s, i)", "3000,4", "2,4")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2999]), "i"))
    for node in model.graph.node:
        node.name = f"{nodes}{node.op_type}"
        node.input[:] = [f"{values}{name}" for name in node.input]
        node.output[:] = [f"{values}{name}" for name in node.output]
    for value in (*model.graph.input, *model.graph.initializer, *model.graph.output):
        value.name = values + value.name
    assert [part.nodes for part in backend.segment_parts(model)] == [(f"{nodes}Add",), (f"{nodes}Gather",)]
    x, y = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32), np.zeros((2, 4), np.float32)
    backend.bind_segment(model, {f"{values}x": x}, {f"{values}y": y})()
    np.testing.assert_array_equal(y, 2 * x[[1, 2999]])


@pytest.mark.parametrize(
    ("length", "parts", "inverse", "one_sided"),
    [(64, 1, 0, 1), (400, 1, 0, 1), (480, 2, 0, 0), (96, 2, 1, 0), (512, 1, 0, 0)],
)
def test_a_short_fourier_transform_is_products(length: int, parts: int, inverse: int, one_sided: int, backend: Backend) -> None:
    kept = length // 2 + 1 if one_sided else length
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[200,{length},{parts}] x) => (float[200,{kept},2] y) '
        f"{{ axis = Constant<value = int64 {{1}}>() "
        f"s = DFT<onesided = {one_sided}, inverse = {inverse}>(x, , axis) y = Mul(s, s) }}"
    )
    model.graph.node[1].name = "transform"
    x = np.random.default_rng(0).standard_normal((200, length, parts)).astype(np.float32)
    y = np.zeros((200, kept, 2), np.float32)
    backend.bind_segment(model, {"x": x}, {"y": y})()
    given = x[..., 0] + 1j * x[..., 1] if parts == 2 else x[..., 0]
    found = np.fft.rfft(given) if one_sided else (np.fft.ifft if inverse else np.fft.fft)(given)
    wanted = np.stack([found.real**2, found.imag**2], -1)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * wanted.max())
    assert any(part.runs == "kernel" and "transform" in part.nodes for part in backend.segment_parts(model))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1, 60, 10, 16, 8), (4, 60, 1, 8, 1)),
        ((4, 60, 10, 16, 1), (4, 60, 1, 1, 8)),
        ((16, 1, 100), (16, 100, 64)),
        ((600, 4, 4), (600, 4, 3)),
        ((1, 8, 7), (700, 7, 2)),
        ((300, 50), (50, 1)),
        ((150, 1), (1, 90)),
        ((1, 150), (150, 90)),
        ((150, 90), (90,)),
        ((150,), (150, 90)),
        ((150,), (150,)),
        ((5, 40, 30), (30,)),
        ((30,), (5, 30, 40)),
    ],
)
def test_products_of_vectors_and_many_small_ones_are_kernels(a: tuple[int, ...], b: tuple[int, ...], backend: Backend) -> None:
    x, w = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in (a, b))
    want = np.matmul(x.astype(np.float64), w)
    sizes = (",".join(map(str, shape)) for shape in (a, b, want.shape))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[{}] x, float[{}] w) => (float[{}] y) '.format(*sizes)
        + "{ s = MatMul(x, w) y = Neg(s) }"
    )
    y = np.zeros(want.shape, np.float32)
    backend.bind_segment(model, {"x": x, "w": w}, {"y": y})()
    np.testing.assert_allclose(-y, want, rtol=0, atol=2e-6 * np.abs(want).max())
    assert {part.runs for part in backend.segment_parts(model)} == {"kernel"}


@pytest.mark.parametrize(
    ("shape", "scales", "attributes", "others"),
    [
        ((3, 8, 20, 21), (2.0, 3.0), 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"', 0),
        ((3, 8, 20, 40), (0.5, 0.25), 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"', 0),
        ((2, 4, 6, 10, 11), (2.0, 1.0, 2.0), 'mode = "nearest"', 0),
        ((3, 8, 20, 21), (1.6, 1.3), 'mode = "nearest"', 1),
        ((3, 8, 20, 21), (2.0, 2.0), 'mode = "cubic", coordinate_transformation_mode = "pytorch_half_pixel"', 2),
        ((3, 8, 20, 21), (0.55, 1.5), 'mode = "cubic", exclude_outside = 1', 2),
        ((3, 8, 40, 41), (0.4, 0.3), 'mode = "linear", antialias = 1', 2),
    ],
)
def test_resizing_is_that_of_onnxruntime(
    shape: tuple[int, ...], scales: tuple[float, ...], attributes: str, others: int, backend: Backend
) -> None:
    """``others``: parts that are no kernels: onnxruntime's Resize, or a product for each axis."""
    after = (*shape[:2], *(int(size * scale) for size, scale in zip(shape[2:], scales, strict=True)))
    factors = ", ".join(map(str, (1.0, 1.0, *scales)))
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[{",".join(map(str, shape))}] x) '
        f"=> (float[{','.join(map(str, after))}] y) {{ scales = Constant<value = float[{len(shape)}] {{{factors}}}>() "
        f"s = Resize<{attributes}>(x, , scales) y = Mul(s, s) }}"
    )
    x, y = np.random.default_rng(0).standard_normal(shape).astype(np.float32), np.zeros(after, np.float32)
    backend.bind_segment(model, {"x": x}, {"y": y})()
    (want,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(y, want, rtol=0, atol=0 if others < 2 else 3e-6 * want.max())
    assert sum(part.runs != "kernel" for part in backend.segment_parts(model)) == others


@pytest.mark.parametrize("index", ["int64 {1}", "int64 {-1}", "int64[1] {0}"])
def test_one_of_two_on_the_last_axis_is_read_by_the_kernel_that_uses_it(index: str, backend: Backend) -> None:
    keeps = "[1]" in index
    sizes = "100,100,1" if keeps else "100,100"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[100,100,2] x) => (float[{sizes}] y) '
        f"{{ i = Constant<value = {index}>() s = Gather<axis = 2>(x, i) y = Mul(s, s) }}"
    )
    x, y = np.random.default_rng(0).standard_normal((100, 100, 2)).astype(np.float32), np.zeros((100, 100), np.float32)
    y = y[..., None] if keeps else y
    backend.bind_segment(model, {"x": x}, {"y": y})()
    np.testing.assert_array_equal(y, (x[..., :1] if keeps else x[..., 1]) ** 2)
    assert [part.runs for part in backend.segment_parts(model)] == ["kernel"]


def test_a_short_time_fourier_transform_is_products(backend: Backend) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[4,8000,1] x, float[400] w) => (float[4,48,201,2] y) {
            step = Constant<value = int64 {160}>() length = Constant<value = int64 {400}>()
            s = STFT<onesided = 1>(x, step, w, length) y = Mul(s, s) }"""
    )
    model.graph.node[2].name = "transform"
    x, w = np.random.default_rng(0).standard_normal((4, 8000, 1)).astype(np.float32), np.hanning(400).astype(np.float32)
    y = np.zeros((4, 48, 201, 2), np.float32)
    backend.bind_segment(model, {"x": x, "w": w}, {"y": y})()
    frames = np.stack([x[:, k : k + 400, 0] * w for k in range(0, 7601, 160)], 1)
    found = np.fft.rfft(frames)
    wanted = np.stack([found.real**2, found.imag**2], -1)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * wanted.max())
    assert any(part.runs == "kernel" and "transform" in part.nodes for part in backend.segment_parts(model))


def test_a_chain_of_hundreds_of_ops_is_one_kernel() -> None:
    """The chain of an unrolled loop is deeper than Python's recursion limit."""
    steps, drawn = 400, np.random.default_rng(2)
    places, x = drawn.uniform(0.5, 1.5, steps).astype(np.float32), drawn.standard_normal((8, 16)).astype(np.float32)
    w = drawn.uniform(0.5, 1.5, 16).astype(np.float32)
    lines = [
        f"c{k} = Constant <value = float {{{c}}}> ()  a{k} = Abs (h{k})  h{k + 1} = Sub (c{k}, a{k})"
        for k, c in enumerate(places)
    ]
    head = '<ir_version: 10, opset_import: ["": 21]> net (float[N,16] x) => (float[N,16] y)'
    model = onnx.parser.parse_model(f"{head} {{ h0 = Mul (x, w) {' '.join(lines)} y = Identity (h{steps}) }}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1), train=["w"])
    held = torch.from_numpy(w.copy()).requires_grad_()
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(2):
            h = torch.from_numpy(x) * held
            for c in places:
                h = float(c) - h.abs()
            loss = h.square().mean()
            (gradient,) = torch.autograd.grad(loss, held)
            assert trainer.step({"x": x, "label": np.zeros_like(x)})["loss"] == pytest.approx(loss.item(), rel=1e-5)
            held = (held - 0.1 * gradient).detach().requires_grad_()
        np.testing.assert_allclose(trainer.state.arrays["w"], held.detach().numpy(), rtol=1e-5)
