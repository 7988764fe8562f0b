"""What generated kernels take of a GPU, as the real NVRTC compiles them: registers, warps, loads in flight."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.nvrtc_library import cubin_of
from graphc.backends.cupy.predict.cubin import Resources, read_cubin
from graphc.backends.cupy.predict.hardware import gpu_of
from graphc.backends.cupy.predict.resources import Compiled, compiled_kernels, faults
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.errors import GraphcError
from graphc.ir.facts import static_dims
from tests.backends.cupy.codegen.layer_norm_cases import model as layer_norm
from tests.backends.cupy.predict.cost_cases import CROSS_ENTROPY, HEAD, NORMALISED


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    try:
        cubin_of("nothing", 'extern "C" __global__ void nothing() {}')
    except GraphcError as error:
        pytest.skip(str(error))


H200 = gpu_of("h200")

POOLED = """(bfloat16[256,112,112,64] x, float[64] s, float[64] b) => (bfloat16[256,56,56,64] y, uint8[256,56,56,64] tap) {
  xf = Cast<to=1>(x)  n = Mul(xf, s)  c = Add(n, b)  h = Cast<to=16>(c)  r = Relu(h)
  y, tap = graphc.ChannelsLastMaxPoolTaps<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(r)
}"""


def kernels(found: ir.Model | onnx.ModelProto) -> list[Compiled]:
    model = found if isinstance(found, ir.Model) else ir.from_proto(found)
    return compiled_kernels(model, {v.name or "": list(static_dims(v) or ()) for v in model.graph.inputs})


def test_registers_shared_memory_and_loads_are_read_from_the_compiled_kernel() -> None:
    text = """extern "C" __global__ void __launch_bounds__(128)
    k(const uint4* __restrict__ x, uint4* __restrict__ y, int rounds) {
      __shared__ unsigned int held[3 * 256];
      held[threadIdx.x] = rounds;
      unsigned int sum = 0;
    #pragma unroll 1
      for (int k = 0; k < rounds; ++k) {
        const uint4 a = x[4 * k * 128 + threadIdx.x], b = x[(4 * k + 1) * 128 + threadIdx.x];
        const uint4 c = x[(4 * k + 2) * 128 + threadIdx.x];
        sum += a.x ^ b.y ^ c.z;
      }
      __syncthreads();
      y[threadIdx.x].x = sum + held[127 - threadIdx.x];
    }"""
    found = read_cubin(cubin_of("k", text), "k")
    assert found.in_flight == 3 * 4, "three loads of a word each: the other words are not used"
    whole = read_cubin(cubin_of("k", text.replace("a.x ^ b.y ^ c.z", "(a.x ^ a.y ^ a.z ^ a.w) * (b.x ^ b.y ^ b.z ^ b.w)")), "k")
    assert whole.in_flight == 2 * 16
    assert found.shared >= 3 * 256 * 4
    assert 10 < found.registers < 60
    assert found.stack == 0
    spilled = "int held[64]; for (int k = 0; k < 64; ++k) held[k * n & 63] = x[k]; x[0] = held[n & 63] + held[x[1] & 63];"
    text = f'extern "C" __global__ void s(int* x, int n) {{ {spilled} }}'
    assert read_cubin(cubin_of("s", text), "s").stack == 256


@pytest.mark.full
def test_no_kernel_of_a_network_s_kinds_is_at_fault() -> None:
    for text in (NORMALISED, CROSS_ENTROPY, POOLED):
        assert faults(kernels(onnx.parser.parse_model(HEAD + text))) == []
    assert faults(kernels(layer_norm(16384, 768))) == []


@pytest.mark.full
def test_sums_over_the_batch_request_several_rows_at_once() -> None:
    sums = [k for k in kernels(onnx.parser.parse_model(HEAD + NORMALISED)) if k.shape.splits > 1]
    assert len(sums) == 2
    assert min(k.resources.in_flight for k in sums) >= 48
    assert min(k.in_flight(H200) for k in sums) >= 32 << 10


def test_a_window_loads_the_factors_of_its_channels_once() -> None:
    (pool,) = kernels(onnx.parser.parse_model(HEAD + POOLED))
    assert pool.resources.registers <= 128, "every tap read its own copies: 218 registers, an eighth of the warps"
    assert pool.warps(H200) >= 16


@pytest.mark.full
def test_the_gradient_of_a_layer_normalisation_fits_four_blocks() -> None:
    (joined,) = (k for k in kernels(layer_norm(16384, 768)) if k.shape.resident)
    assert joined.blocks(H200) >= 4
    assert joined.shape.blocks <= 132 * joined.blocks(H200), "all blocks run at once"


def test_an_exponential_that_is_rounded_to_16_bits_takes_the_short_instruction() -> None:
    text = "(bfloat16[4096,8192] x) => ({}[4096,8192] y) {{ f = Cast<to=1>(x) e = Exp(f) y = Cast<to={}>(e) }}"
    half, full = (compile_segment(onnx.parser.parse_model(HEAD + text.format(*to))) for to in (("bfloat16", 16), ("float", 1)))
    assert [" = FAST_EXP(" in call.source.body for call in (*half.calls, *full.calls)] == [True, False]


def test_a_kernel_that_wastes_the_gpu_is_named_with_what_is_asked_for() -> None:
    wide, narrow = Shape(256, 1, 2048, 1, 100_000), Shape(256, 1, 2048, 1, 100_000)
    good = Resources(registers=32, stack=0, shared=0, in_flight=32, instructions=100)
    bad = Resources(registers=255, stack=96, shared=0, in_flight=4, instructions=100)
    moved = 1 << 30
    assert faults([Compiled("k1", "y", 1, wide, moved, good, streams=True)]) == []
    spills, warps, waits = faults([Compiled("k2", "dx", 1, narrow, moved, bad, streams=True)])
    assert "k2 (dx) spills 96 bytes a thread; at most 32" in spills
    assert "fits 8 warps on a multiprocessor; at least 12" in warps
    assert "1024 bytes in flight" in waits
