"""Attention by library, against its decomposition: what cuDNN is asked for, evaluated on the host; on a GPU, the library."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphc
from graphc.backend import BACKENDS
from graphc.backends.cupy import CupyBackend, nodes
from graphc.backends.cupy.attention import Attention
from graphc.backends.cupy.segment import NodeCall
from graphc.bench.specs import SPECS
from graphc.ir.builder import Builder
from graphc.ir.decomposition import decompose_graph
from graphc.passes.simplify import simplify_graph
from graphc.pipeline import Context, run
from tests.backends.host_kernels import HostDevice, run_segment
from tests.gradient_check import new_model

B, H, T, S, D = 2, 4, 6, 5, 8

CASES: dict[str, dict[str, Any]] = {
    "standard": {"layout": "bhtd,bhtd,bhtd->bhtd"},
    "batch length heads": {"layout": "bthd,bthd,bthd->bthd", "causal": 1},
    "packed": {"layout": "bt0hd,bt1hd,bt2hd->bthd", "causal": 1},
    "packed in front": {"layout": "0bhtd,1bhtd,2bhtd->tbhd"},
    "keys and values packed": {"layout": "bthd,tb0hd,tb1hd->bthd", "parts": 2},
    "grouped": {"layout": "bthd,bthd,bthd->bhtd", "groups": 2, "causal": 1},
    "one head": {"layout": "btd,btd,btd->btd"},
    "numbers": {"layout": "bthd,bthd,bthd->bthd", "mask": "numbers"},
    "hidden": {"layout": "bthd,bthd,bthd->tbhd", "mask": "hidden"},
    "hidden and causal": {"layout": "bt0hd,bt1hd,bt2hd->bthd", "mask": "hidden", "causal": 1},
    "infinite": {"layout": "bhtd,bhtd,bhtd->bthd", "mask": "infinite"},
    "probabilities": {"layout": "bthd,bthd,bthd->bthd", "saves": "probabilities", "causal": 1},
}


def feeds_of(case: dict[str, Any], dtype: Any) -> tuple[dict[str, Any], list[str]]:
    """The operands by name, and the name of each of q, k, v."""
    rng = np.random.default_rng(0)
    axes = case["layout"].partition("->")[0].split(",")
    packed = any(c.isdigit() for c in axes[0])
    lengths = {"b": B, "h": H, "d": D}
    feeds, names = {}, []
    for name, order in zip("qkv", axes, strict=True):
        sizes = {**lengths, "t": T if packed or name == "q" else S, **{str(k): case.get("parts", 3) for k in range(3)}}
        if name != "q" and "groups" in case:
            sizes["h"] = H // case["groups"]
        pattern = "".join("#" if c.isdigit() else c for c in order)
        key = pattern if "#" in pattern else name
        if key not in feeds:
            feeds[key] = rng.standard_normal([sizes[c] for c in order]).astype(dtype)
        names.append(key)
    keys = T if packed else S
    if case.get("mask") == "numbers":
        feeds["mask"] = rng.standard_normal((B, 1, T, keys)).astype(np.float32)
    elif case.get("mask") == "hidden":
        seen = rng.random((B, 1, 1, keys)) < 0.6
        seen[0, ..., 0], seen[1] = False, False  # the first query of sample 0 in a causal mask, and all of sample 1
        feeds["mask"] = seen
    elif case.get("mask") == "infinite":
        numbers = np.where(rng.random((H, T, keys)) < 0.5, -np.inf, 1.0)
        numbers[1, 2], numbers[0, 0, 1:] = -np.inf, np.finfo(np.float32).min
        numbers[0, 0, 0] = 1.0
        feeds["mask"] = numbers.astype(np.float32)
    return feeds, names


def model_of(case: dict[str, Any], feeds: dict[str, Any], names: list[str]) -> ir.Model:
    """The attention and its gradient for an adjoint that depends on y."""
    model, values = new_model(feeds)
    op, held = Builder(model.graph), dict(zip(feeds, values, strict=True))
    options = {"scale": 0.3, "causal": case.get("causal", 0), "layout": case["layout"], "saves": case.get("saves", "logsumexp")}
    q, k, v = (held[name] for name in names)
    y, saved = op.graphc.ScaledDotProductAttention(q, k, v, held.get("mask"), **options)
    dy = op.Mul(y, op.cast_like(op.const(np.linspace(-1, 1, D, dtype=np.float32)), y))
    found = op.graphc.ScaledDotProductAttentionGrad(
        dy, q, k, v, held.get("mask"), y, saved, **options, _outputs=len(set(names)) if len(set(names)) > 1 else 1
    )
    for name, value in (("y", y), *((f"d{k}", g) for k, g in enumerate(found if isinstance(found, tuple) else (found,)))):
        out = op.Identity(value)
        out.name = name
        model.graph.outputs.append(out)
    return model


def check_attention(name: str, device: Any, dtype: ir.DataType, tolerance: float) -> None:
    case = CASES[name]
    feeds, names = feeds_of(case, dtype.numpy())
    model = model_of(case, feeds, names)
    assert all(nodes.special(n) is not None for n in model.graph if n.op_type.startswith("Scaled")), "held in a plan"
    run(model, "flash_attention", Context())
    results, segment = run_segment(ir.to_proto(model), feeds, device)
    called = [c.node.op_type for c in segment.calls if isinstance(c, NodeCall) and c.library is not None]
    assert called == ["ScaledDotProductAttention", "ScaledDotProductAttentionGrad"]
    assert not segment.fallbacks
    single = {n: a if a.dtype == bool else a.astype(np.float32) for n, a in feeds.items()}
    plain = model_of(case, single, names)
    decompose_graph(plain.graph, lambda node: False)
    simplify_graph(plain.graph)
    session = ort.InferenceSession(ir.to_proto(plain).SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [v.name for v in session.get_outputs()]
    for key, value in zip(outputs, session.run(None, single), strict=True):
        scale = float(np.abs(value).max())
        found = results[key].astype(np.float32)
        np.testing.assert_allclose(found / scale, value / scale, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_cudnn_is_told_the_right_attention(name: str) -> None:
    check_attention(name, HostDevice(), ir.DataType.FLOAT16, 3e-3)


def test_a_plan_holds_attention_in_half_precision_only() -> None:
    feeds, names = feeds_of(CASES["packed"], np.float32)
    model = model_of(CASES["packed"], feeds, names)
    assert all(nodes.special(n) is None for n in model.graph if n.op_type.startswith("Scaled"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.full
def test_training_in_bfloat16_takes_attention_from_the_library(
    exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed projections are read where they lie, and the losses are those of the CPU backend."""
    device = HostDevice()
    monkeypatch.setitem(BACKENDS._items, "on host", lambda **_: CupyBackend(device=device))
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
    from graphc.backends.cupy.cuda import CudaDevice

    return CudaDevice(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_cudnn_computes_what_the_decomposition_does(name: str, dtype: ir.DataType, gpu: Any) -> None:
    check_attention(name, gpu, dtype, 5e-3 if dtype == ir.DataType.FLOAT16 else 3e-2)
