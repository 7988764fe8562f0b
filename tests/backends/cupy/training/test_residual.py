"""Residual networks on the GPU backend: what a block moves through memory, and training against PyTorch on a pretended one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import graphc
from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.device.planning_device import PlannedDevice
from graphc.backends.cupy.predict.cost_model import CostModel
from graphc.backends.cupy.predict.hardware import FINISH
from graphc.backends.cupy.segment import compile as segment_compile
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall, NodeCall
from graphc.ir.facts import static_dims
from graphc.plan.specialise import prepare
from tests.backends.cupy.predict.cost_cases import HEAD, passes
from tests.backends.host_kernels import EmulatedDevice, HostDevice, cupy_on, run_segment
from tests.passes.optimize.channels_last_cases import Residual

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SHAPE = "bfloat16[64,28,28,256]"

COUNT = 64 * 28 * 28


def normalised(x: str) -> str:
    """``x`` with the statistics of its batch, as y{x}."""
    return f"""
  a{x} = Cast<to=1>({x})  m{x} = ReduceMean<keepdims=0>(a{x}, axes)  q{x} = Mul(a{x}, a{x})
  e{x} = ReduceMean<keepdims=0>(q{x}, axes)  p{x} = Mul(m{x}, m{x})  v{x} = Sub(e{x}, p{x})  w{x} = Add(v{x}, eps)
  r{x} = Sqrt(w{x})  i{x} = Reciprocal(r{x})  c{x} = Sub(a{x}, m{x})  f{x} = Mul(i{x}, s)  n{x} = Mul(c{x}, f{x})
  o{x} = Add(n{x}, b)  y{x} = Cast<to=16>(o{x})"""


def gradient(x: str) -> str:
    """d{x} from the gradient gz of what ``x`` is normalised to; ds{x} and db{x} with it."""
    return f"""
  g{x} = Cast<to=1>(gz)  db{x} = ReduceSum<keepdims=0>(g{x}, axes)  h{x} = Mul(g{x}, c{x})
  k{x} = ReduceSum<keepdims=0>(h{x}, axes)  ds{x} = Mul(k{x}, i{x})  l{x} = Div(db{x}, count)  t{x} = Div(ds{x}, count)
  u{x} = Mul(t{x}, i{x})  j{x} = Sub(g{x}, l{x})  z{x} = Mul(c{x}, u{x})  A{x} = Sub(j{x}, z{x})  B{x} = Mul(A{x}, f{x})
  d{x} = Cast<to=16>(B{x})"""


CONSTANTS = f"""axes = Constant<value_ints=[0,1,2]>()  eps = Constant<value_float=1e-5>()
  count = Constant<value_float={COUNT}.0>()"""

JOINED = f"""({SHAPE} x, {SHAPE} k, float[256] s, float[256] b, {SHAPE} d, {SHAPE} e)
  => ({SHAPE} z, {SHAPE} dx, {SHAPE} dk, float[256] dsx, float[256] dbx, float[256] dsk, float[256] dbk) {{
  {CONSTANTS}{normalised("x")}{normalised("k")}
  sum = Add(yx, yk)  z = Relu(sum)  g = Add(d, e)  gz = graphc.ReluGrad(g, z){gradient("x")}{gradient("k")}
}}"""

PLAIN = f"""({SHAPE} x, float[256] mx, float[256] ix, float[256] s, float[256] b, {SHAPE} g)
  => ({SHAPE} dx, float[256] dsx, float[256] dbx) {{
  {CONSTANTS}  ax = Cast<to=1>(x)  cx = Sub(ax, mx)  fx = Mul(ix, s)  nx = Mul(cx, fx)  ox = Add(nx, b)  yx = Cast<to=16>(ox)
  gz = graphc.ReluGrad(g, yx){gradient("x")}
}}"""

IDENTITY = f"""({SHAPE} x, {SHAPE} k, float[256] s, float[256] b, {SHAPE} d, bfloat16[256,1,1,256] w)
  => ({SHAPE} z, {SHAPE} dx, {SHAPE} gz, float[256] dsx, float[256] dbx) {{
  {CONSTANTS}{normalised("x")}
  r = Relu(k)  sum = Add(yx, r)  z = Relu(sum)
  e = graphc.ChannelsLastConv<kernel_shape=[1,1]>(z, w)
  g = Add(d, e)  gz = graphc.ReluGrad(g, z){gradient("x")}
}}"""

STRIDED = """(bfloat16[8,8,8,64] dy, bfloat16[32,1,1,64] w, bfloat16[8,16,16,32] x)
  => (bfloat16[64,1,1,32] dw, bfloat16[8,8,8,64] y) {
  s = Constant<value_ints=[64,1,1,32]>()
  v = Constant<value_ints=[64,1,1,32]>()  u = Reshape(w, v)
  y = graphc.ChannelsLastConv<strides=[2,2], kernel_shape=[1,1]>(x, u)
  dw = graphc.ChannelsLastConvGradWeight<strides=[2,2], kernel_shape=[1,1]>(x, dy, s)
}"""


def test_two_normalisations_that_meet_share_the_passes_of_their_gradient() -> None:
    """Statistics; x, k, d, e read, z and the sum's gradient written beside the sums; that, x and k read, dx and dk written."""
    assert passes(JOINED, "x") == pytest.approx(2 + 6 + 5, abs=0.35)


def test_the_gradient_of_a_residual_sum_reads_bits_in_place_of_the_sum() -> None:
    """Statistics; x and k read, z and its signs written; signs, d, e and x read, gz written; gz and x read, dx written."""
    model = ir.from_proto(onnx.parser.parse_model(HEAD + IDENTITY))
    shapes = {v.name or "": list(static_dims(v) or ()) for v in model.graph.inputs}
    calls = compile_segment(ir.to_proto(prepare(model, shapes, CupyBackend(device=PlannedDevice())))).calls
    moved = sum(CostModel().call(call).nbytes for call in calls if isinstance(call, KernelCall))
    assert moved / (COUNT * 256 * 2) == pytest.approx(1 + 3 + 3 + 1 + 3 + 2 / 16, abs=0.25)


def test_the_rectified_gradient_of_one_normalisation_is_never_written() -> None:
    """x and g for the sums; x and g again for dx. The mask and the masked gradient are computed twice."""
    assert passes(PLAIN, "x") == pytest.approx(5, abs=0.1)


def test_a_strided_convolution_of_one_pixel_reads_the_pixels_it_meets() -> None:
    calls = compile_segment(onnx.parser.parse_model(HEAD + STRIDED)).calls
    for call in calls:
        if isinstance(call, NodeCall):
            x, dy, w = 8 * 16 * 16 * 32 * 2, 8 * 8 * 8 * 64 * 2, 64 * 32 * 2
            assert CostModel().call(call).nbytes == pytest.approx(x / 4 + dy + w, abs=64), call.node.op_type
    assert sum(isinstance(call, NodeCall) for call in calls) == 2


def test_the_second_half_of_a_shared_sum_costs_what_is_left_to_add() -> None:
    text = (
        "(bfloat16[400000,64] x) => (bfloat16[64] y, bfloat16[64] z) { a = Constant<value_ints=[0]>()"
        " y = ReduceSum<keepdims=0>(x, a) s = Mul(x, x) z = ReduceSum<keepdims=0>(s, a) }"
    )
    first, second = compile_segment(onnx.parser.parse_model(HEAD + text)).calls
    assert isinstance(first, KernelCall)
    assert first.parts > 1
    assert CostModel().call(first).nbytes > 400000 * 64 * 2
    assert CostModel().call(second).high == pytest.approx(FINISH.slow), (
        "a launch that adds up a few hundred numbers for each of 64 rows"
    )


SMALL_JOINED = JOINED.replace("64,28,28,256", "3,6,5,16").replace("[256]", "[16]").replace(f"{COUNT}.0", "90.0")


@needs_compiler
@pytest.mark.parametrize("emulated", [False, True], ids=["host", "cuda"])
def test_the_joined_gradient_is_that_of_pytorch(emulated: bool) -> None:
    rng = np.random.default_rng(0)
    text = SMALL_JOINED.replace("bfloat16", "float").replace("Cast<to=16>", "Cast<to=1>")
    arrays = {n: rng.standard_normal((3, 6, 5, 16)).astype(np.float32) for n in "xkde"}
    feeds = {**arrays, "s": rng.random(16, np.float32) + 0.5, "b": rng.standard_normal(16).astype(np.float32)}
    found, made = run_segment(onnx.parser.parse_model(HEAD + text), feeds, EmulatedDevice() if emulated else HostDevice())
    assert not made.fallbacks
    of = {n: torch.tensor(a.transpose(0, 3, 1, 2), requires_grad=True) for n, a in arrays.items()}
    pairs = [[torch.tensor(feeds[n], requires_grad=True) for n in "sb"] for _ in range(2)]
    parts = [torch.nn.functional.batch_norm(of[n], None, None, *p, training=True) for n, p in zip("xk", pairs, strict=True)]
    z = torch.relu(parts[0] + parts[1])
    z.backward(of["d"].detach() + of["e"].detach())
    expected = {"z": z, "dx": of["x"].grad, "dk": of["k"].grad}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.detach().numpy().transpose(0, 2, 3, 1), atol=2e-5, err_msg=name)
    for names, pair in zip((("dsx", "dbx"), ("dsk", "dbk")), pairs, strict=True):
        for name, parameter in zip(names, pair, strict=True):
            np.testing.assert_allclose(found[name], parameter.grad.numpy(), atol=1e-4, err_msg=name)


@needs_compiler
@pytest.mark.parametrize("emulated", [False, True], ids=["host", "cuda"])
def test_masks_of_bits_are_the_signs_of_the_sum(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by a kernel of its own shape and by one that also sums over positions; read by both kinds."""
    monkeypatch.setattr(segment_compile, "SMALL", 0)
    rng = np.random.default_rng(0)
    text = """(float[3,6,5,16] x, float[3,6,5,16] k, float[16,1,1,16] w)
      => (float[3,6,5,16] e, float[3,16] p, float[3,6,5,16] d, float[16] t) {
      axes = Constant<value_ints=[1,2]>()  rest = Constant<value_ints=[0,1,2]>()
      r = Relu(k)  sum = Add(x, r)  z = Relu(sum)  e = graphc.ChannelsLastConv<kernel_shape=[1,1]>(z, w)
      next = Add(e, z)  last = Relu(next)  p = ReduceMean<keepdims=0>(last, axes)
      f = graphc.ChannelsLastConv<kernel_shape=[1,1]>(last, w)
      g = graphc.ReluGrad(f, last)  h = Add(g, e)  d = graphc.ReluGrad(h, z)  t = ReduceSum<keepdims=0>(d, rest)
    }"""
    feeds = {n: rng.standard_normal((3, 6, 5, 16)).astype(np.float32) for n in "xk"}
    feeds["w"] = rng.standard_normal((16, 1, 1, 16)).astype(np.float32)
    found, made = run_segment(onnx.parser.parse_model(HEAD + text), feeds, EmulatedDevice() if emulated else HostDevice())
    held = {v.name for call in made.calls if isinstance(call, KernelCall) for v in call.source.operands}
    assert {"z.bits", "last.bits"} <= held
    w = feeds["w"][:, 0, 0].T
    z = np.maximum(feeds["x"] + np.maximum(feeds["k"], 0), 0)
    last = np.maximum(z @ w + z, 0)
    d = (((last @ w) * (last > 0)) + z @ w) * (z > 0)
    for name, value in {"e": z @ w, "p": last.mean((1, 2)), "d": d, "t": d.sum((0, 1, 2))}.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_sum_and_its_gradient_in_one_kernel_need_no_bits() -> None:
    text = f"""({SHAPE} x, {SHAPE} k, {SHAPE} g) => ({SHAPE} z, {SHAPE} d) {{
      r = Relu(k)  sum = Add(x, r)  z = Relu(sum)  d = graphc.ReluGrad(g, z)
    }}"""
    assert passes(text, "x") == 5


def trained(device: HostDevice, steps: int, register_backend: Callable[..., None]) -> tuple[list[float], list[float], Any]:
    """Losses of graphc on ``device`` and of PyTorch for a network of ResNet-50's parts, and the largest difference left."""
    register_backend("pretended", lambda **_: cupy_on(device))
    torch.manual_seed(0)
    module, rng = Residual().train(), np.random.default_rng(0)
    x, label = rng.standard_normal((4, 3, 33, 32)).astype(np.float32), rng.integers(0, 10, 4)
    program = graphc.compile(
        copy.deepcopy(module),
        example_inputs=(torch.from_numpy(x),),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.05, momentum=0.9),
        backend="pretended",
    )
    feed = next(v.name for v in program.model.graph.inputs if v.name != "label")
    with graphc.Trainer(program, threads=1) as trainer:
        losses = [float(trainer.step({feed: x, "label": label})["loss"]) for _ in range(steps)]
        state = trainer.trained_values()
    optimizer, wanted = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(label))
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    names = dict(module.named_parameters())
    worst = max(float(np.abs(np.asarray(state[n]) - p.detach().numpy()).max()) for n, p in names.items() if n in state)
    assert names.keys() <= state.keys()
    return losses, wanted, worst


@needs_compiler
@pytest.mark.full
def test_training_follows_pytorch(register_backend: Callable[..., None]) -> None:
    """With the pool that notes its maxima, and a strided shortcut whose gradient is spread by what adds it."""
    device = HostDevice()
    losses, wanted, worst = trained(device, 3, register_backend)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert worst < 2e-4
    steps = [call.strides for call in device.dnn.calls if call.kind == "ConvGradInput" and set(call.w.dims[2:]) == {1}]
    assert steps
    assert all(step == (1, 1) for step in steps)
