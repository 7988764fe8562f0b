"""Products as the library is told of them: which epilogues a training graph gives, and that their numbers are PyTorch's."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from graphc.backends.cupy.device.protocol import CudaOptions
from graphc.backends.cupy.libraries import tuning_cache
from graphc.backends.cupy.libraries.cublaslt import Products
from graphc.backends.cupy.libraries.gemm import DOMAIN, Product, by_rule, call_of, product_of
from graphc.backends.cupy.libraries.tuning_cache import Choices
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall, NodeCall, Segment
from tests.backends.cupy.libraries.gemm_cases import CASES, FEEDS, HEAD, TORCH, by_torch, check_case, gradients_segment, network
from tests.backends.host_kernels import HostDevice, run_segment
from tests.conftest import emulated

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def epilogues(segment: Segment) -> list[str]:
    return [call_of(product).epilogue for product in products(segment)]


def products(segment: Segment) -> list[Product]:
    return [product_of(c.node) for c in segment.calls if isinstance(c, NodeCall) and c.node.domain == DOMAIN]


@needs_compiler
@pytest.mark.parametrize("precision", [None, "bf16", pytest.param("fp16", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["relu", "tanh", "none"])
def test_gradients_through_epilogues_are_those_of_pytorch(kind: str, precision: str | None) -> None:
    model = gradients_segment(network("Relu") if kind == "relu" else network("Gelu", kind), precision)
    results, segment = run_segment(model, FEEDS, HostDevice())
    found = epilogues(segment)
    forward, backward = {"relu": ("RELU_AUX_BIAS", "DRELU_BGRAD"), "tanh": ("GELU_AUX_BIAS", "DGELU_BGRAD")}.get(kind, ("", ""))
    if kind == "none":
        assert not any("GELU" in name for name in found), "the library's GELU is the tanh form"
    else:
        assert forward in found
        assert backward in found
    assert any(p.c is not None for p in products(segment)), "the residual sum goes through C"
    assert any(name in ("BGRADA", "BGRADB") for name in found), "a bias gradient comes beside a weight gradient"
    expected = by_torch(TORCH[kind], {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    tolerance = {None: 2e-6, "bf16": 2**-6, "fp16": 2**-9}[precision]
    loss_scale = 1024.0 if precision == "fp16" else 1.0
    for name, value in expected.items():
        scale = float(np.abs(value).max())
        got = results[name] / (loss_scale if name != "loss" else 1.0)
        np.testing.assert_allclose(got / scale, value / scale, rtol=0, atol=tolerance, err_msg=name)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_views_sums_and_factors_cost_no_kernels(name: str) -> None:
    check_case(name, HostDevice(), 2e-6)


def test_an_epilogue_that_does_not_pay_stays_a_kernel() -> None:
    model = gradients_segment(network("Gelu"), "bf16")
    refused: list[Product] = []

    def choose(joined: Any, apart: Any, saved: int) -> bool:
        refused.extend(p for p in joined if p.aux is not None)
        return all(p.aux is None for p in joined)

    found = epilogues(compile_segment(model, choose=choose))
    assert {p.epilogue for p in refused} == {"gelu", "gelu_grad"}
    assert not any("GELU" in name for name in found)
    by_default = epilogues(compile_segment(model, choose=by_rule))
    assert not any("GELU" in name for name in by_default), "too few elements are summed for a second matrix to pay"


def test_the_exact_gelu_is_taken_for_the_tanh_form_on_request_only() -> None:
    model = gradients_segment(network("Gelu", "none"), None)
    results, segment = run_segment(model, FEEDS, HostDevice(), loose_gelu=True)
    assert {"GELU_AUX_BIAS", "DGELU_BGRAD"} <= set(epilogues(segment))
    for name, value in by_torch(TORCH["none"], torch.float32).items():
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(results[name] / scale, value / scale, rtol=0, atol=1e-3, err_msg=name)


def test_choices_survive_other_processes_and_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    mine, other = Choices(path), Choices(path)
    mine.put("a", {"seconds": 1.0})
    other.put("b", {"seconds": 2.0})
    assert Choices(path).get("a") == {"seconds": 1.0}
    assert other.get("a") == {"seconds": 1.0}, "what others found is taken over"
    late = Choices(tmp_path / "none.json")
    late.path = path
    assert late.put("b", {"seconds": 3.0}) == {"seconds": 2.0} == late.get("b"), "who measures at once takes the first choice"
    assert late.put("b", {"seconds": 3.0}, replaced={"seconds": 2.0}) == {"seconds": 3.0} == Choices(path).get("b")
    script = Path(tuning_cache.__file__).read_text() + "\nimport sys\nc = Choices(Path(sys.argv[1]))\n"
    script += "for k in range(12): c.put(f'{sys.argv[2]}-{k}', k)"
    running = [subprocess.Popen([sys.executable, "-S", "-c", script, str(path), name]) for name in "xy"]
    assert all(process.wait() == 0 for process in running)
    held = json.loads(path.read_text())
    assert all(held[f"{name}-{k}"] == k for name in "xy" for k in range(12)), "nobody's finds are lost"
    path.write_text('{"a": {"seconds"')
    with pytest.warns(RuntimeWarning, match="measured anew"):
        fresh = Choices(path)
    assert fresh.get("a") is None
    with pytest.warns(RuntimeWarning, match="measured anew"):
        fresh.put("c", 3)
    assert Choices(path).get("c") == 3


def test_the_librarys_names_are_those_of_its_bindings() -> None:
    lt = pytest.importorskip("nvmath.bindings.cublasLt")
    cublas = pytest.importorskip("nvmath.bindings.cublas")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("needs NVIDIA's driver")
    from graphc.backends.cupy.libraries.cublaslt import MatmulPlan, Pointers, description_attributes

    at = Pointers(*(4096 * k for k in range(1, 7)))
    for kind in ("relu", "tanh"):
        for precision in (None, "bf16"):
            model = gradients_segment(network("Relu") if kind == "relu" else network("Gelu"), precision)
            for product in products(compile_segment(model, choose=lambda *_: True)):
                call = call_of(product)
                plan = MatmulPlan(lt, cublas.ComputeType, product, at, True)
                for name, value in description_attributes(lt, call, at).items():
                    attribute = int(lt.MatmulDescAttribute[name])
                    held = np.zeros(1, lt.get_matmul_desc_attribute_dtype(attribute))
                    size = np.zeros(1, np.uint64)
                    lt.matmul_desc_get_attribute(plan.description, attribute, held.ctypes.data, held.nbytes, size.ctypes.data)
                    assert held[0] == value, name
                for layout, handle in zip((call.first, call.second, call.addend, call.result), plan.layouts, strict=True):
                    wanted = {"TYPE": layout.kind, "ROWS": layout.rows, "COLS": layout.columns, "LD": layout.ld}
                    for name, value in wanted.items():
                        attribute = int(lt.MatrixLayoutAttribute[name])
                        held = np.zeros(1, lt.get_matrix_layout_attribute_dtype(attribute))
                        size = np.zeros(1, np.uint64)
                        lt.matrix_layout_get_attribute(handle, attribute, held.ctypes.data, held.nbytes, size.ctypes.data)
                        assert held[0] == value, name


def test_the_biases_of_all_layers_are_rounded_by_one_kernel() -> None:
    layers = range(8)
    inputs = ", ".join(["bfloat16[4,16] x", *(f"bfloat16[16,16] w{k}, float[16] b{k}" for k in layers)])
    nodes = [
        f"c{k} = Cast<to=16>(b{k})  y{k} = Gemm({'x' if k == 0 else f'e{k - 1}'}, w{k}, c{k})  e{k} = Exp(y{k})" for k in layers
    ]
    model = onnx.parser.parse_model(f"{HEAD} ({inputs}) => (bfloat16[4,16] e7) {{ {'  '.join(nodes)} }}")
    segment = compile_segment(onnx.shape_inference.infer_shapes(model), choose=lambda *_: True)
    assert epilogues(segment) == ["BIAS"] * 8
    assert sum(isinstance(call, KernelCall) for call in segment.calls) == 1 + 8, "one for the casts, one for each Exp"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[CudaOptions], Any]]:
    """Makes the GPU with options; what is measured goes to a folder of its own."""
    from graphc.backends.cupy.device.cuda_device import CudaDevice
    from graphc.cache_folder import CACHE_VARIABLE

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield lambda options: CudaDevice(0, options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_library_reads_views_and_adds_sums_as_it_is_told(name: str, gpu: Callable[[CudaOptions], Any]) -> None:
    check_case(name, gpu(CudaOptions()), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("precision", [None, "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["relu", "tanh"])
def test_the_librarys_epilogues_give_pytorchs_gradients(
    kind: str, precision: str | None, every: bool, gpu: Callable[[CudaOptions], Any]
) -> None:
    """With every epilogue that the library has, and with those that pay."""
    device = gpu(CudaOptions(tf32=precision == "tf32"))
    measured = device.library(Products)
    possible = lambda joined, apart, saved: all(np.isfinite(measured.seconds(p)) for p in joined)  # noqa: E731
    low = precision if precision in ("bf16", "fp16") else None
    results, _ = run_segment(
        gradients_segment(network("Relu") if kind == "relu" else network("Gelu"), low),
        FEEDS,
        device,
        choose=possible if every else None,
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(low or "", torch.float32)
    tolerance = {None: 1e-5, "tf32": 4e-3, "bf16": 2**-6, "fp16": 2**-8}[precision]
    for name, value in by_torch(TORCH[kind], dtype).items():
        got = results[name] / (1024.0 if low == "fp16" and name != "loss" else 1.0)
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(got / scale, value / scale, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.gpu
def test_large_products_on_the_gpu_repeat_their_bits_and_keep_what_was_measured(gpu: Callable[[CudaOptions], Any]) -> None:
    m, k, n = (64, 512, 96) if emulated() else (512, 4096, 768)
    text = f"(float[{m},{k}] a, float[{k},{n}] b, float[{n}] c) => (float[{m},{n}] y) {{ g = Gemm(a, b, c)  y = Relu(g) }}"
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (m, k)), ("b", (k, n)), ("c", n))}
    found = [run_segment(model, feeds, gpu(CudaOptions(deterministic=True)))[0]["y"] for _ in range(3)]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    device = gpu(CudaOptions())
    results, _ = run_segment(model, feeds, device)
    expected = np.maximum(feeds["a"].astype(np.float64) @ feeds["b"] + feeds["c"], 0)
    np.testing.assert_allclose(results["y"], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    path = device.library(Products)._file()
    held = path.read_text()
    assert "relu" in held
    run_segment(model, feeds, gpu(CudaOptions()))
    assert path.read_text() == held, "nothing is measured twice"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_sums_of_half_precision_are_taken_in_float32_to_the_end(kind: str, gpu: Callable[[CudaOptions], Any]) -> None:
    """However many blocks share them: 4096.5 would be rounded where a part of a sum is left in half precision."""
    dtype = np.dtype(getattr(ml_dtypes, kind, np.float16))
    text = f"({kind}[16,32768] a, {kind}[32768,16] b) => ({kind}[16,16] y) {{ y = MatMul(a, b) }}"
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    b = np.zeros((32768, 16), dtype)
    b[0], b[1], b[-1] = 4096, 0.5, -4096
    results, _ = run_segment(model, {"a": np.ones((16, 32768), dtype), "b": b}, gpu(CudaOptions()))
    assert (results["y"] == 0.5).all()


@pytest.mark.gpu
def test_what_the_library_lacks_is_no_epilogue_in_runs_that_repeat_their_bits(gpu: Callable[[CudaOptions], Any]) -> None:
    """Three columns of float32 do not begin at 16 bytes; whatever the library makes of that, the results are right."""
    text = "(float[64,160] a, float[160,3] b, float[3] c) => (float[64,3] y)"
    text += ' { z0 = MatMul(a, b)  z = Add(z0, c)  y = Gelu <approximate="tanh"> (z) }'
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (64, 160)), ("b", (160, 3)), ("c", 3))}
    results, _ = run_segment(model, feeds, gpu(CudaOptions(deterministic=True)))
    z = feeds["a"].astype(np.float64) @ feeds["b"] + feeds["c"]
    expected = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    np.testing.assert_allclose(results["y"], expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_a_product_without_an_algorithm_runs_as_a_kernel(
    gpu: Callable[[CudaOptions], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Products, "_choose", lambda *_: None)
    with pytest.warns(UserWarning, match=r"cuBLASLt has no algorithm for .*: float>float 1x4x5x8"):
        check_case("a sum of two products goes through C", gpu(CudaOptions()), 1e-5)


@pytest.mark.gpu
def test_a_bias_may_begin_anywhere(gpu: Callable[[CudaOptions], Any]) -> None:
    """As a slice that a loop walks over does: the library would read 16 bytes at once where it is told nothing."""
    text = "(float[16,16] a, float[16,16] b, float[16] c) => (float[16,16] y) { z = MatMul(a, b)  y = Add(z, c) }"
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    device = gpu(CudaOptions())
    (call,) = compile_segment(model, choose=lambda *_: True).calls
    assert isinstance(call, NodeCall)
    rng = np.random.default_rng(0)
    a, b, held = (rng.standard_normal(s).astype(np.float32) for s in ((16, 16), (16, 16), 20))
    given = [device.put(x) for x in (a, b, held)]
    for start in (0, 1, 2, 4):
        y = device.zeros(1024).view(np.float32).reshape(16, 16)
        device.library(Products).bind(call.node, [*given[:2], None, given[2][start : start + 16]], [y])()
        np.testing.assert_allclose(device.fetch(y), a @ b + held[start : start + 16], rtol=0, atol=1e-5)
