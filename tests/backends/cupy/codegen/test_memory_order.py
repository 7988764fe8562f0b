"""Reductions over arrays that lie in another order than the graph has them: read as vectors, with the right sums."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from graphc.ir.builder import Builder
from tests.backends.host_kernels import EmulatedDevice, HostDevice, run_segment
from tests.backends.library_cases import empty_model, new_input
from tests.tiers import params

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.machine() != "x86_64", reason="the emulation needs a C++ compiler on x86-64"
    ),
]


@pytest.fixture(params=["host", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "gpu":
        from graphc.backends.cupy.device.cuda_device import CudaDevice

        return CudaDevice()
    return HostDevice() if request.param == "host" else EmulatedDevice(order=2)


def last_to_first(shape: tuple[int, ...], view: tuple[int, ...], op_type: str, axes: tuple[int, ...]) -> ir.Model:
    """A reduction of the square of an image [batch, height, width, channels], which the graph has as [batch, channels, …]."""
    model = empty_model()
    op = Builder(model.graph)
    x = new_input(model, "x", shape)
    turned = op.Reshape(op.Transpose(op.Mul(x, x), perm=[0, 3, 1, 2]), list(view))
    y = getattr(op, op_type)(turned, list(axes), keepdims=0)
    y.name = "y"
    model.graph.outputs.append(y)
    return model


CASES = {
    "groups of channels": ((2, 12, 10, 32), (2, 4, 8 * 120), (2,)),
    "groups of five channels": ((3, 7, 9, 15), (3, 3, 5 * 63), (2,)),
    "every channel by itself": ((2, 12, 10, 16), (2, 16, 120), (2,)),
    "channels over the batch": ((2, 12, 10, 16), (2, 16, 120), (0, 2)),
    "lines of groups": ((2, 6, 8, 8), (2, 2, 4, 6, 8), (2, 4)),
    "columns of pixels": ((2, 6, 8, 8), (2, 8, 6, 8), (2,)),
}


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMax"])
@pytest.mark.parametrize("name", CASES)
def test_sums_over_an_image_with_channels_last(name: str, op_type: str, device: Any) -> None:
    shape, view, axes = CASES[name]
    model = last_to_first(shape, view, op_type, axes)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    results, _ = run_segment(ir.to_proto(model), {"x": x}, device)
    turned = np.transpose(x.astype(np.float64) ** 2, (0, 3, 1, 2)).reshape(view)
    want = turned.sum(axes) if op_type == "ReduceSum" else turned.max(axes)
    np.testing.assert_allclose(results["y"], want, rtol=1e-5)  # of a float32 sum of a thousand terms in any order


@pytest.mark.parametrize(
    ("name", "strided", "vector"),
    [("groups of channels", False, 4), ("every channel by itself", True, 4), ("channels over the batch", True, 4)],
)
def test_threads_read_whole_vectors(name: str, strided: bool, vector: int) -> None:
    shape, view, axes = CASES[name]
    calls = compile_segment(ir.to_proto(last_to_first(shape, view, "ReduceSum", axes))).calls
    first = next(call for call in calls if isinstance(call, KernelCall))
    assert first.source.form.vector >= vector
    assert first.source.form.strided == strided
    assert all(access.whole for access in first.source.traffic if access.inner)


def test_a_reduction_that_lies_as_the_graph_has_it_keeps_its_loops() -> None:
    model = last_to_first((2, 12, 10, 16), (2, 16, 120), "ReduceSum", (2,))
    for node in list(model.graph):
        if node.op_type == "Transpose":
            node.attributes["perm"] = ir.AttrInt64s("perm", [0, 1, 2, 3])
    calls = compile_segment(ir.to_proto(model)).calls
    assert all(call.source.form.loops == () for call in calls if isinstance(call, KernelCall))


def views(op: Builder, rng: np.random.Generator, x: ir.Value, array: Any, shape: list[int]) -> tuple[ir.Value, Any]:
    """``x`` and its numbers after a few transposes and reshapes, in the end of ``shape``."""
    sizes = list(array.shape)
    for _ in range(int(rng.integers(1, 4))):
        order = [int(k) for k in rng.permutation(len(sizes))]
        x, array = op.Transpose(x, perm=order), array.transpose(order)
        sizes = [int(n) for n in rng.permutation(shape)] if rng.random() < 0.6 else list(array.shape)
        x, array = op.Reshape(x, sizes), array.reshape(sizes)
    return op.Reshape(x, shape), array.reshape(shape)


@pytest.mark.parametrize("seed", params(range(60), large=range(8, 60)))
def test_reductions_of_random_views(seed: int) -> None:
    """Of two arrays that lie in different orders; some store a result of the whole shape beside."""
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.choice([2, 3, 4, 5, 8, 12], size=4)]
    model, feeds = empty_model(), {}
    op, parts = Builder(model.graph), []
    for name in ("a", "b"):
        lies = [int(n) for n in rng.permutation(shape)]
        feeds[name] = rng.standard_normal(lies).astype(np.float32)
        parts.append(views(op, rng, new_input(model, name, tuple(lies)), feeds[name], shape))
    (x, a), (y, b) = parts
    axes = sorted(int(k) for k in rng.choice(4, size=int(rng.integers(1, 4)), replace=False))
    total, want = op.ReduceSum(op.Mul(x, y), axes, keepdims=1), (a * b).sum(tuple(axes), keepdims=True)
    expected = {
        "total": (total, want),
        "rest": (op.Sub(x, total), a - want),
        "most": (op.ReduceMax(y, axes), b.max(tuple(axes))),
    }
    for name, (value, _) in expected.items():
        value.name = name
        model.graph.outputs.append(value)
    results, _ = run_segment(ir.to_proto(model), feeds, EmulatedDevice(order=2) if seed % 4 == 0 else HostDevice())
    for name, (_, array) in expected.items():
        np.testing.assert_allclose(results[name].reshape(array.shape), array, rtol=1e-4, atol=1e-5, err_msg=name)
