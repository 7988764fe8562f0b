"""Networks with channels last on the GPU backend, whose machine is the host: pools, convolutions and a training step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import graphc
from graphc.backends.cupy.libraries.cudnn_convolution import Convolution
from graphc.bench.specs import SPECS
from graphc.ir.builder import Builder
from graphc.ir.decomposition import decompose_graph
from graphc.passes.optimize.simplify import simplify_graph
from tests.backends.host_kernels import HostDevice, cupy_on, run_segment
from tests.gradient_check import new_model

pytestmark = pytest.mark.full

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

POOLS: list[dict[str, Any]] = [
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [2, 3], "strides": [1, 2], "pads": [0, 1, 1, 0], "ceil_mode": 1},
    {"kernel_shape": [2, 3], "strides": [2, 1], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [1, 1, 0, 1]},
]


def pools(last: bool) -> tuple[ir.Model, dict[str, Any]]:
    """Every kind of pool and its gradient, with the results behind their channels brought to the front."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (2, 5, 7, 6)).astype(np.float32)  # equal maxima in many windows
    feeds: dict[str, Any] = {"x": x}
    model, values = new_model(feeds)
    op = Builder(model.graph)
    source = op.Transpose(values[0], perm=[0, 2, 3, 1]) if last else values[0]
    domain, prefix = (op.graphc, "ChannelsLast") if last else (op, "")
    results = []
    for case in POOLS:
        y = getattr(domain, f"{prefix}MaxPool")(source, **case)
        slope = op.Mul(y, 0.5)
        results += [y, getattr(op.graphc, f"{prefix}MaxPoolGrad")(slope, source, y, **case)]
        if "dilations" not in case:
            y = getattr(domain, f"{prefix}AveragePool")(source, **case)
            results += [y, getattr(op.graphc, f"{prefix}AveragePoolGrad")(op.Mul(y, 0.5), list(source.shape.numpy()), **case)]
    for k, value in enumerate(results):
        out = op.Transpose(value, perm=[0, 3, 1, 2]) if last else op.Identity(value)
        out.name = f"r{k}"
        model.graph.outputs.append(out)
    return model, feeds


def check_pools(device: Any) -> None:
    model, feeds = pools(last=True)
    results, segment = run_segment(ir.to_proto(model), feeds, device)
    assert not segment.fallbacks
    plain, _ = pools(last=False)
    decompose_graph(plain.graph, lambda node: False)
    simplify_graph(plain.graph)
    session = ort.InferenceSession(ir.to_proto(plain).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs()]
    for name, value in zip(names, session.run(None, feeds), strict=True):
        np.testing.assert_allclose(results[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@needs_compiler
def test_pools_are_those_of_onnxruntime() -> None:
    check_pools(HostDevice())


def losses_of(backend: str, path: str) -> list[float]:
    """Three steps of a small residual network."""
    x, y = SPECS["resnet18-small"].batch(4)
    program = graphc.compile(
        path,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.02, momentum=0.9),
        backend=backend,
    )
    with graphc.Trainer(program, threads=1) as trainer:
        return [trainer.step({"input": x, "label": y})["loss"] for _ in range(3)]


@needs_compiler
def test_training_with_channels_last_follows_onnxruntime(
    exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    """Every convolution goes to cuDNN with its channels fastest in memory; the losses are those of the CPU backend."""
    device, path = HostDevice(), exported("resnet18-small")
    register_backend("on host", lambda **_: cupy_on(device))
    np.testing.assert_allclose(losses_of("on host", path), losses_of("onnxruntime", path), rtol=2e-4)
    calls = [call for call in device.dnn.calls if isinstance(call, Convolution)]
    assert len(calls) == 20 + 19 + 20
    assert all(t.strides[1] == 1 for call in calls for t in (call.x, call.w, call.y))
    assert all(call.x.dims[1] >= 4 for call in calls)
    assert not any(call.bias for call in calls), "the zeros that the exporter writes are left out"


class Small(torch.nn.Module):
    """An image's convolution as ResNet-50 begins with, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Conv2d(3, 8, 7, 2, 3), torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


@needs_compiler
def test_an_image_is_convolved_in_blocks_and_its_weights_stay_as_they_are(register_backend: Callable[..., None]) -> None:
    """Steps in bfloat16 follow PyTorch's in float32, weight by weight; the library gets 16 channels and steps of one pixel."""
    torch.manual_seed(0)
    module, device = Small(), HostDevice()
    register_backend("on host", lambda **_: cupy_on(device))
    rng = np.random.default_rng(0)
    x, label = rng.standard_normal((4, 3, 18, 21)).astype(np.float32), rng.integers(0, 5, 4)
    program = graphc.compile(
        module,
        example_inputs=(torch.from_numpy(x),),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.5),
        precision="bf16",
        backend="on host",
    )
    feed = next(v.name for v in program.model.graph.inputs if v.name != "label")
    before = {name: value.detach().numpy().copy() for name, value in module.named_parameters()}
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(2):
            trainer.step({feed: x, "label": label})
        after = trainer.state.snapshot()
    calls = [call for call in device.dnn.calls if isinstance(call, Convolution)]
    assert [(c.kind, c.x.dims[1], c.w.dims[1:], c.strides) for c in calls] == [
        ("Conv", 16, (16, 4, 4), (1, 1)),
        ("ConvGradWeight", 16, (16, 4, 4), (1, 1)),
    ]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(label)).backward()
        optimizer.step()
    for name, value in module.named_parameters():
        moved, expected = after[name] - before[name], value.detach().numpy() - before[name]
        np.testing.assert_allclose(moved, expected, rtol=0, atol=2e-2 * float(np.abs(expected).max()), err_msg=name)


@pytest.mark.gpu
def test_training_on_the_gpu_follows_onnxruntime(exported: Callable[[str], str]) -> None:
    path = exported("resnet18-small")
    np.testing.assert_allclose(losses_of("cupy", path), losses_of("onnxruntime", path), rtol=2e-3)


@pytest.mark.gpu
def test_pools_on_the_gpu_are_those_of_onnxruntime() -> None:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    check_pools(CudaDevice(0))
