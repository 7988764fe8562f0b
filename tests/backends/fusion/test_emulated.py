"""The text that a GPU compiles, run thread by thread on an emulation of blocks, barriers and shuffles.

What the host's own version of a kernel cannot show: lanes that share a row, sums through shared memory, vector loads.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from graphc.backends.cupy.codegen.launch_shape import Shape
from tests.backends.fusion.fusion_cases import CASES, REDUCING, check_case, check_network
from tests.backends.host_compiler import compile_kernels
from tests.backends.host_kernels import EmulatedDevice
from tests.tiers import params

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.machine() != "x86_64", reason="the emulation needs a C++ compiler on x86-64"
    ),
]

SUM = """
KERNEL total(const float* x, float* y) {
  __shared__ float parts[64];
  parts[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  for (int step = 32; step > 0; step /= 2) {
    $barrier
    if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
  }
  __syncthreads();
  y[blockIdx.x * 64 + threadIdx.x] = parts[0];
}
"""


def run(text: str, *arrays: np.ndarray, blocks: int = 3, threads: int = 64, order: int = 0) -> str | None:
    text = '#define KERNEL extern "C" __global__ void\n' + text
    name = text[text.rindex("KERNEL ") + 7 :].partition("(")[0]
    function = compile_kernels({name: text}, emulate=True)[name]
    pointers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
    wrong = function(pointers, ctypes.c_longlong(blocks), threads, order)
    return None if wrong is None else wrong.decode()


def test_the_order_of_threads_matters_exactly_where_a_barrier_is_missing() -> None:
    x = np.random.default_rng(0).integers(0, 9, (3, 64)).astype(np.float32)
    for barrier, right in (("__syncthreads();", True), ("", False)):
        found = []
        for order in range(4):
            y = np.zeros_like(x)
            assert run(SUM.replace("$barrier", barrier), x, y, order=order) is None
            found.append(bool((y == x.sum(axis=1, keepdims=True)).all()))
        assert all(found) == right, found


def test_a_barrier_that_some_threads_never_reach_is_named() -> None:
    text = "KERNEL lost(float* y) { if (threadIdx.x < 40) __syncthreads(); else __shfl_xor_sync(0xffffffffu, 1, 1); }"
    assert "hangs: 40 threads at a barrier, 24 in a shuffle" in (run(text, np.zeros(1, np.float32)) or "")


def test_a_vector_load_from_an_odd_place_is_named() -> None:
    text = """struct alignas(16) four { float at[4]; };
    KERNEL odd(const float* x, float* y) { *(four*)(y + 4 * threadIdx.x) = *(const four*)(x + $start + 4 * threadIdx.x); }"""
    raw = np.zeros(300, np.float32)
    start = (-raw.ctypes.data % 16) // 4
    x, y = raw[start : start + 264], np.zeros(272, np.float32)
    y = y[(-y.ctypes.data % 16) // 4 :][:256]
    assert run(text.replace("$start", "0"), x, y, blocks=1) is None
    assert "not aligned" in (run(text.replace("$start", "1").replace(" odd", " odder"), x, y, blocks=1) or "")


WRONG = {
    "a thread writes what another reads": """KERNEL race(float* y) {
      __shared__ float a[64];
      a[threadIdx.x] = 1;
      __syncthreads();
      a[threadIdx.x] = 2;
      y[threadIdx.x] = a[threadIdx.x ^ 1]; }""",
    "shared memory is read that the block did not write": "KERNEL old(int* y) { __shared__ int a[2]; y[blockIdx.x] = a[1]; }",
    "a block reads what another writes": "KERNEL chain(float* y) { y[blockIdx.x + 1] = y[blockIdx.x] + 1; }",
    "memory that is no operand": "KERNEL beyond(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + 64]; }",
}


@pytest.mark.parametrize("fault", WRONG)
def test_accesses_that_no_order_of_threads_may_show_are_named(fault: str) -> None:
    device, text = EmulatedDevice(watched=True), '#define KERNEL extern "C" __global__ void\n' + WRONG[fault]
    name = text[text.rindex("KERNEL ") + 7 :].partition("(")[0]
    kernel, memory = device.compile({name: text})[name], device.empty(4096).view(np.float32)
    arrays = [memory[:64], memory[512:576]][-1 - text.count("const float") :]
    device.launch(kernel, arrays, Shape(64, 1, 1, 1, 2 if "blockIdx" in text else 1))()
    with pytest.raises(AssertionError, match=fault):
        device.synchronize()


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(REDUCING)][::3])
def test_cases_of_the_standard_run_as_cuda(name: str) -> None:
    check_case(name, EmulatedDevice(), None)


@pytest.mark.parametrize("name", CASES)
def test_all_cases_run_as_cuda_in_any_order_of_threads(name: str) -> None:
    for order in (1, 2):
        check_case(name, EmulatedDevice(order), None)


NETWORKS = list(product(("mlp", "lenet", "transformer-small"), (None, 3)))
QUICKEST = [("lenet", None)]


@pytest.mark.parametrize(("name", "splits"), params(NETWORKS, large=[c for c in NETWORKS if c not in QUICKEST]))
def test_networks_run_as_cuda(name: str, splits: int | None, tmp_path: Path) -> None:
    check_network(name, EmulatedDevice(2), splits, tmp_path)
