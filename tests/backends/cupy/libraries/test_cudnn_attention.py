"""Attention by library, against its decomposition: what cuDNN is asked for, evaluated on the host; on a GPU, the library."""

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
from graphc.backends.cupy.libraries import registry
from graphc.backends.cupy.libraries.cudnn import barred
from graphc.backends.cupy.libraries.cudnn_attention import Attention, attention_of
from graphc.backends.cupy.libraries.cudnn_convolution import convolution_of
from graphc.backends.cupy.segment.program import NodeCall
from graphc.bench.specs import SPECS
from graphc.ir.decomposition import decompose_graph
from graphc.ir.ops.random import philox_uniform
from graphc.passes.optimize.simplify import simplify_graph
from graphc.pipeline import Context, run
from graphc.training.inference import run_model
from tests.backends.host_kernels import HostDevice, cupy_on, run_segment
from tests.backends.library_cases import ATTENTIONS, attention, attention_feeds, convolutions

pytestmark = pytest.mark.full


def check_attention(name: str, device: Any, dtype: ir.DataType, tolerance: float) -> None:
    case = ATTENTIONS[name]
    feeds, names = attention_feeds(case, dtype.numpy())
    model = attention(case, feeds, names)
    assert all(registry.special(n) is not None for n in model.graph if n.op_type.startswith("Scaled")), "held in a plan"
    run(model, "flash_attention", Context())
    results, segment = run_segment(ir.to_proto(model), feeds, device)
    called = [c.node.op_type for c in segment.calls if isinstance(c, NodeCall) and c.library is not None]
    assert called == ["ScaledDotProductAttention", "ScaledDotProductAttentionGrad"]
    assert not segment.fallbacks
    single = {n: a if a.dtype == bool else a.astype(np.float32) for n, a in feeds.items()}
    plain = attention(case, single, names)
    decompose_graph(plain.graph, lambda node: False)
    simplify_graph(plain.graph)
    session = ort.InferenceSession(ir.to_proto(plain).SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [v.name for v in session.get_outputs()]
    for key, value in zip(outputs, session.run(None, single), strict=True):
        scale = float(np.abs(value).max())
        found = results[key].astype(np.float32)
        np.testing.assert_allclose(found / scale, value / scale, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_cudnn_is_told_the_right_attention(name: str) -> None:
    check_attention(name, HostDevice(), ir.DataType.FLOAT16, 3e-3)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16], ids=str)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_dropped_probabilities_are_those_of_pytorch_with_the_same_mask(dtype: ir.DataType) -> None:
    """In half precision by the library, else by its parts."""
    case = ATTENTIONS["dropped and added to"]
    feeds, names = attention_feeds(case, dtype.numpy())
    model = attention(case, feeds, names)
    run(model, "flash_attention", Context())
    half = dtype == ir.DataType.BFLOAT16
    results = run_segment(ir.to_proto(model), feeds, HostDevice())[0] if half else run_model(model, feeds)
    q, k, v = (torch.from_numpy(feeds[name].astype(np.float64)).requires_grad_() for name in names)
    u = philox_uniform((*q.shape[:3], k.shape[2]), seed=3, step=5, tag="drop")
    keep = torch.from_numpy(np.where(u < case["ratio"], 0, 1 / (1 - case["ratio"])))
    y = ((0.3 * q @ k.transpose(2, 3) + torch.from_numpy(feeds["mask"])).softmax(-1) * keep) @ v
    y = y.transpose(1, 2)
    y.backward((y * torch.linspace(-1, 1, y.shape[-1])).detach())
    for key, value in (("y", y), ("d0", q.grad), ("d1", k.grad), ("d2", v.grad)):
        assert value is not None
        wanted = value.detach().numpy()
        found = results[key].astype(np.float64) / np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted / np.abs(wanted).max(), rtol=0, atol=2e-2 if half else 1e-5, err_msg=key)


def test_no_mask_of_a_dropout_waits_for_the_backward_pass() -> None:
    case = ATTENTIONS["dropped"]
    feeds, names = attention_feeds(case, np.float16)
    model = attention(case, feeds, names)
    run(model, "flash_attention,simplify", Context())
    assert run(model, "flash_attention", Context()).done
    masks = [n.outputs[0] for n in model.graph if n.op_type == "DropoutMask"]
    first, second = (n for n in model.graph if n.op_type.startswith("Scaled"))
    order = {n: k for k, n in enumerate(model.graph)}
    assert len(masks) == 2
    assert order[first] < order[masks[1].producer()] < order[second]


def test_one_query_and_one_key_are_not_left_to_cudnn() -> None:
    for length in (1, 2):
        feeds = {name: np.zeros((2, 4, length, 8), np.float16) for name in "qkv"}
        model = attention({"layout": "bhtd,bhtd,bhtd->bhtd"}, feeds, list("qkv"))
        assert [registry.special(n) is None for n in model.graph if n.op_type.startswith("Scaled")] == [length == 1] * 2


def test_a_plan_holds_attention_in_half_precision_only() -> None:
    feeds, names = attention_feeds(ATTENTIONS["packed"], np.float32)
    model = attention(ATTENTIONS["packed"], feeds, names)
    assert all(registry.special(n) is None for n in model.graph if n.op_type.startswith("Scaled"))


def test_numbers_saved_in_float32_do_not_keep_attention_off_tensor_cores() -> None:
    """Every plan of cuDNN's for attention is on tensor cores; without TF32 only convolutions of float32 must not be."""
    feeds, names = attention_feeds(ATTENTIONS["numbers"], np.float16)
    model = attention(ATTENTIONS["numbers"], feeds, names)
    run(model, "flash_attention", Context())
    calls = [attention_of(n).call for n in model.graph if n.op_type.startswith("Scaled")]
    assert [t.dtype for t in calls[0].tensors.values()].count(ir.DataType.FLOAT) == 2
    assert all(barred(call, deterministic=True, tf32=False) == barred(call, deterministic=True, tf32=True) for call in calls)
    for node in convolutions("plain", True).graph:
        if "Conv" in node.op_type:
            assert "TENSOR_CORE" in barred(convolution_of(node), deterministic=False, tf32=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_training_in_bfloat16_takes_attention_from_the_library(
    exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    """Packed projections are read where they lie, and the losses are those of the CPU backend."""
    device = HostDevice()
    register_backend("on host", lambda **_: cupy_on(device))
    x, y = SPECS["transformer-small"].batch(4)
    losses = {}
    for backend in ("onnxruntime", "on host"):
        program = graphc.compile(
            exported("transformer-small"),
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.SGD(lr=0.1),
            backend=backend,
            precision="bf16",
        )
        with graphc.Trainer(program, threads=1) as trainer:
            losses[backend] = [trainer.step({"input": x, "label": y})["loss"] for _ in range(3)]
    np.testing.assert_allclose(losses["on host"], losses["onnxruntime"], rtol=5e-3)
    calls = [call for call in device.dnn.calls if isinstance(call, Attention)]
    assert [call.backward for call in calls] == [False, False, True, True]
    assert all(call.q.strides[2] == 3 * 4 * 4 * 16 for call in calls), "a step of q passes over the batch, and over k and v"


@pytest.fixture(scope="module")
def gpu() -> Any:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    return CudaDevice(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_cudnn_computes_what_the_decomposition_does(name: str, dtype: ir.DataType, gpu: Any) -> None:
    check_attention(name, gpu, dtype, 5e-3 if dtype == ir.DataType.FLOAT16 else 3e-2)
