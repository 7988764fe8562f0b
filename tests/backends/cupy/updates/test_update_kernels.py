"""Update kernels of the GPU backend: PyTorch's numbers, one pass in place, and few launches for many small states."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

import graphc
from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.updates.bind import Update, is_elementwise, join_updates
from graphc.backends.cupy.updates.kernel import written
from graphc.backends.cupy.updates.multi_tensor import Launched
from graphc.bench.specs import SPECS
from graphc.ir import DOMAIN_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.declare import OPS, declare
from graphc.ir.ops.updates import like_parameter
from graphc.plan.segment_model import bind_op
from tests.backends.host_kernels import EmulatedDevice, HostDevice, cupy_on

pytestmark = pytest.mark.full

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SIZE = 64 * 5 + 2
"""No multiple of what a thread takes at once."""

DIVISOR, LR = 4.0, 0.05


def node_of(op: str, arrays: Sequence[Any], attributes: Mapping[str, Any]) -> ir.Node:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": DOMAIN_VERSION})
    values = [
        None if a is None else ir.Value(
            name=f"i{k}", type=ir.TensorType(ir.DataType.from_numpy(a.dtype)), shape=ir.Shape(list(a.shape))
        )
        for k, a in enumerate(arrays)
    ]  # fmt: skip
    produced = Builder(graph).emit(op, values, attributes, domain="graphc")
    (node,) = {value.producer() for value in produced}
    assert node is not None
    return node


def bind(device: Any, op: str, arrays: Sequence[Any], **attributes: Any) -> Update:
    node = node_of(op, arrays, attributes)
    backend = CupyBackend(device=device)
    assert backend.prefers_native(node)
    run = backend.bind_kernel(node, arrays, [], {})
    assert isinstance(run, Update)
    return run


def put(device: Any, value: Any, dtype: Any = np.float32) -> Any:
    return device.put(np.array(value, dtype))


OPTIMIZERS: dict[str, tuple[str, dict[str, Any], list[str], Callable[..., Any]]] = {
    "sgd": ("SGD", {"weight_decay": 0.1}, ["param", "grad", "lr"], lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.1)),
    "momentum": (
        "Momentum",
        {"momentum": 0.8, "dampening": 0.1},
        ["param", "grad", "state", "step", "lr"],
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, dampening=0.1),
    ),
    "nesterov": (
        "Momentum",
        {"momentum": 0.8, "nesterov": 1},
        ["param", "grad", "state", "step", "lr"],
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True),
    ),
    "adam": ("Adam", {}, ["param", "grad", "state", "state", "step", "lr"], lambda p: torch.optim.Adam(p, lr=LR)),
    "adamw": (
        "AdamW",
        {"weight_decay": 0.1},
        ["param", "grad", "state", "state", "step", "lr"],
        lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.1),
    ),
    "adagrad": (
        "Adagrad",
        {"lr_decay": 0.1},
        ["param", "grad", "state", "step", "lr"],
        lambda p: torch.optim.Adagrad(p, lr=LR, lr_decay=0.1),
    ),
    "rmsprop": ("RMSprop", {}, ["param", "grad", "state", "", "", "lr"], lambda p: torch.optim.RMSprop(p, lr=LR)),
    "rmsprop, centered, with momentum": (
        "RMSprop",
        {"centered": 1, "momentum": 0.5},
        ["param", "grad", "state", "state", "state", "lr"],
        lambda p: torch.optim.RMSprop(p, lr=LR, centered=True, momentum=0.5),
    ),
}


@needs_compiler
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_in_place_are_those_of_pytorch(name: str, low: bool) -> None:
    op, attributes, roles, make = OPTIMIZERS[name]
    device, rng = HostDevice(), np.random.default_rng(0)
    start = rng.standard_normal(SIZE).astype(np.float32)
    kind = ml_dtypes.bfloat16 if low else np.float32
    gradient, step = put(device, np.zeros(SIZE), kind), put(device, 0, np.int64)
    arrays: list[Any] = []
    for role in roles:
        made = {"param": start, "grad": None, "state": np.zeros(SIZE), "lr": LR, "step": None, "": None}[role]
        arrays.append({"grad": gradient, "step": step, "": None}[role] if made is None else put(device, made))
    update = bind(device, op, [*arrays, put(device, DIVISOR)], **attributes)
    parameter = torch.tensor(start, requires_grad=True)
    optimizer = make([parameter])
    for k in range(3):
        new = rng.standard_normal(SIZE).astype(kind)
        device.copy(gradient, new)
        device.copy(step, np.array(k + 1))
        update()
        parameter.grad = torch.tensor(new.astype(np.float32)) / DIVISOR
        optimizer.step()
    np.testing.assert_allclose(device.fetch(arrays[0]), parameter.detach().numpy(), rtol=2e-6, atol=2e-6)


def adamw(device: Any, size: int, skip: Any = None, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    names = ["param", "grad", "first", "second"]
    found = {name: put(device, np.abs(rng.standard_normal(size))) for name in names}
    return {**found, "step": put(device, 3, np.int64), "lr": put(device, LR), "divisor": put(device, 2.0), "skip": skip}


@needs_compiler
@pytest.mark.parametrize("held", [False, True])
def test_a_flag_on_the_device_leaves_every_state_as_it_is(held: bool) -> None:
    device = HostDevice()
    flag = put(device, held, np.bool_)
    state = adamw(device, SIZE, flag)
    before = {name: device.fetch(a).copy() for name, a in state.items()}
    device.copy(state["grad"], np.full(SIZE, np.nan if held else 1.0, np.float32))
    bind(device, "AdamW", list(state.values()))()
    for name in ("param", "first", "second"):
        same = np.array_equal(device.fetch(state[name]), before[name])
        assert same is held, name


class Counting(HostDevice):
    """Counts launches."""

    launches = 0

    def launch(self, kernel: Any, arrays: Sequence[Any], shape: Any) -> Callable[[], None]:
        run = super().launch(kernel, arrays, shape)

        def counted() -> None:
            self.launches += 1
            run()

        return counted


def small_states(device: Any, layers: int) -> tuple[list[Update], list[Any]]:
    """A step counter, running statistics, and two buckets of AdamW with copies in bfloat16."""
    step, skip = put(device, np.full(8, 2), np.int64), put(device, False, np.bool_)
    updates = [bind(device, "Increment", [step, skip])]
    held = [step]
    rng = np.random.default_rng(1)
    for k in range(layers):
        count, batch = put(device, 2.0), put(device, rng.standard_normal(16 * (k % 3 + 1)))
        running = put(device, rng.standard_normal(16 * (k % 3 + 1)))
        updates.append(bind(device, "RunningAverage", [running, batch, count, skip], momentum=0.9))
        held.append(running)
    copies = []
    for bucket in range(2):
        state = {**adamw(device, 640 * (bucket + 1), skip, seed=bucket), "step": step[:1].reshape(())}
        copy = put(device, np.zeros(640 * (bucket + 1)), ml_dtypes.bfloat16)
        updates.append(bind(device, "AdamW", list(state.values())))
        copies.append(bind(device, "Narrow", [copy, state["param"], skip]))
        held += [state["param"], state["first"], state["second"], copy]
    return [*updates, *copies], held


@needs_compiler
def test_a_hundred_small_updates_are_few_launches_with_the_same_numbers() -> None:
    one_by_one, joined = Counting(), Counting()
    updates, expected = small_states(one_by_one, 100)
    for update in updates:
        update()
    others, found = small_states(joined, 100)
    for run in join_updates(others):
        run()
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one_by_one.fetch(a), joined.fetch(b))
    assert one_by_one.launches == 105
    assert joined.launches == 3, "the counter; the statistics; AdamW and Narrow of both buckets"


@needs_compiler
def test_an_update_waits_for_what_it_reads() -> None:
    """The step counter is read as a scalar by what follows it: never in one launch, whatever else is there."""
    device = HostDevice()
    step = put(device, np.full(8, 2), np.int64)
    state = {**adamw(device, 64), "step": step[:1].reshape(())}
    first, second = bind(device, "AdamW", [*state.values()][:-1]), bind(device, "Increment", [step])
    last = bind(device, "AdamW", [*{**adamw(device, 64, seed=5), "step": state["step"]}.values()][:-1])
    runs = join_updates([first, second, last])
    assert [len(run.rows) for run in runs if isinstance(run, Launched)] == [1, 1, 1]
    (together,) = join_updates([first, last])
    assert isinstance(together, Launched)
    assert [row.arrays for row in together.rows] == [first.arrays, last.arrays]


@needs_compiler
@pytest.mark.parametrize("order", [0, 3])
def test_the_kernel_is_right_as_cuda(order: int) -> None:
    device, host = EmulatedDevice(order, watched=True), HostDevice()
    for machine in (device, host):
        machine.states = small_states(machine, 5)
        for run in join_updates(machine.states[0]):
            run()
    for a, b in zip(device.states[1], host.states[1], strict=True):
        np.testing.assert_array_equal(device.fetch(a), host.fetch(b))


@pytest.fixture
def ops() -> Iterator[None]:
    """Ops that a test declares are gone after it."""
    with OPS.restored():
        yield


@needs_compiler
@pytest.mark.usefixtures("ops")
def test_an_optimizer_of_a_plugin_gets_a_kernel_and_one_with_norms_does_not() -> None:
    def lion(op: Any, param: Any, grad: Any, momentum: Any, lr: Any, *, beta: float) -> Any:
        """param' = param − lr·sign(β·m + (1 − β)·g);  m' = g"""
        sign = op.Sign(op.Add(op.Mul(momentum, beta), op.Mul(grad, 1.0 - beta)))
        return op.Sub(param, op.Mul(op.cast_like(lr, param), sign)), op.Identity(grad)

    def lars(op: Any, param: Any, grad: Any, lr: Any) -> Any:
        """param' = param − lr·‖param‖/‖grad‖·g"""
        ratio = op.Div(op.ReduceL2(param, keepdims=0), op.ReduceL2(grad, keepdims=0))
        return op.Sub(param, op.Mul(op.Mul(op.cast_like(lr, param), ratio), grad))

    declare(
        "TestLion", inputs="param grad momentum lr", outputs="next_param next_momentum",
        attributes={"beta": 0.9}, infer=like_parameter(2, 1, 2), next_value={0: 0, 1: 2}, gradient=1,
        elementwise=True,
    )(lion)  # fmt: skip
    declare(
        "TestLars", inputs="param grad lr", outputs="next_param", infer=like_parameter(1, 1), next_value={0: 0},
        gradient=1,
    )(lars)  # fmt: skip
    device, rng = HostDevice(), np.random.default_rng(2)
    p, g, m = (rng.standard_normal(SIZE).astype(np.float32) for _ in range(3))
    arrays = [put(device, p), put(device, g), put(device, m), put(device, LR)]
    bind(device, "TestLion", arrays, beta=0.75)()
    np.testing.assert_allclose(device.fetch(arrays[0]), p - LR * np.sign(0.75 * m + 0.25 * g), rtol=1e-6)
    np.testing.assert_array_equal(device.fetch(arrays[2]), g)
    assert not is_elementwise(node_of("TestLars", [arrays[0], arrays[1], arrays[3]], {}))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
def test_the_text_is_cuda_that_loads_sixteen_bytes_at_once(tmp_path: Path) -> None:
    state = adamw(HostDevice(), 640)
    update = bind(HostDevice(), "AdamW", list(state.values()))
    name, text = written(update.program, device=True)
    source = tmp_path / f"{name}.cu"
    source.write_text(text)
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-ptx", "-o", str(tmp_path / "out.ptx"), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[:2000]
    ptx = (tmp_path / "out.ptx").read_text()
    assert ptx.count("ld.v4.f32") + ptx.count("ld.global.v4.f32") >= 4, "parameter, gradient and both moments"


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_gradients_are_measured_in_two_launches(dtype: Any) -> None:
    """However many arrays there are, and wherever in one of them a number is not finite."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(dtype) for n in (5, 16384, 1, 40000, 64)]
    expected = sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays)
    for device in (Counting(), EmulatedDevice(3)):
        held = [device.put(a) for a in arrays]
        total, flag = put(device, -1.0, np.float64), put(device, True, np.bool_)
        backend = CupyBackend(device=device)
        bind_op(backend, "SumOfSquares", {}, held, [total])()
        measure = bind_op(backend, "AnyNonFinite", {}, held, [flag])
        for bad in (None, np.nan, np.inf, -np.inf):
            if bad is not None:
                changed = arrays[3].copy()
                changed[39999] = bad
                device.copy(held[3], changed)
            measure()
            assert bool(device.fetch(flag)) is (bad is not None)
        np.testing.assert_allclose(device.fetch(total), expected, rtol=1e-12)
        if isinstance(device, Counting):
            assert device.launches == 2 + 4 * 2


@needs_compiler
def test_a_flag_of_nans_stays_set_until_it_is_cleared() -> None:
    arrays = [np.ones(n, np.float32) for n in (5, 40000)]
    for device in (Counting(), EmulatedDevice(3)):
        held, flag, copy = [device.put(a) for a in arrays], put(device, False, np.bool_), put(device, True, np.bool_)
        scan = bind_op(CupyBackend(device=device), "AnyNonFiniteOr", {}, [flag, *held], [flag])
        elsewhere = bind_op(CupyBackend(device=device), "AnyNonFiniteOr", {}, [flag, *held], [copy])
        found = []
        for value in (1, np.nan, 1):
            device.copy(held[1], np.full(40000, value, np.float32))
            scan()
            elsewhere()
            found.append((bool(device.fetch(flag)), bool(device.fetch(copy))))
        assert found == [(False, False), (True, True), (True, True)]
        device.bind_fill(flag, 0)()
        scan()
        assert not device.fetch(flag)
        if isinstance(device, Counting):
            assert device.launches == 4 + 3


@pytest.mark.gpu
def test_updates_and_measures_on_the_gpu_are_those_of_the_host() -> None:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    device, host = CudaDevice(0), HostDevice()
    states = []
    for machine in (device, host):
        runs, held = small_states(machine, 20)
        for run in join_updates(runs):
            run()
        states.append([machine.fetch(a) for a in held])
    for a, b in zip(*states, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-6, atol=1e-7)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (5, 3_000_000, 64)]
    held = [device.put(a) for a in arrays]
    total, flag = put(device, -1.0, np.float64), put(device, True, np.bool_)
    backend = CupyBackend(device=device)
    bind_op(backend, "SumOfSquares", {}, held, [total])()
    bind_op(backend, "AnyNonFinite", {}, held, [flag])()
    expected = sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays)
    np.testing.assert_allclose(device.fetch(total), expected, rtol=1e-12)
    assert not device.fetch(flag)
    arrays[1][2_999_999] = np.inf
    device.copy(held[1], arrays[1])
    bind_op(backend, "AnyNonFinite", {}, held, [flag])()
    assert device.fetch(flag)


@needs_compiler
@pytest.mark.parametrize(
    ("optimizer", "options", "tolerance"),
    [
        # with a large eps, for otherwise the first step is the sign of each gradient, however small
        ("rmsprop:lr=1e-4,eps=1e-2", {"clip_norm": 0.5}, 1e-5),
        ("adagrad:lr=1e-3,eps=1e-2", {"nonfinite": "skip", "clip_value": 0.01}, 1e-5),
        ("adamw:lr=1e-3", {"precision": "bf16", "strategy": "zero"}, 2e-2),
        ("adamw:lr=1e-3", {"precision": "fp16", "accumulate": 2}, 2e-2),
    ],
)
def test_training_with_clipping_skipping_and_low_copies_follows_the_host(
    optimizer: str,
    options: dict[str, Any],
    tolerance: float,
    exported: Callable[[str], str],
    register_backend: Callable[..., None],
) -> None:
    device = Counting()
    register_backend("pretended", lambda **_: cupy_on(device))
    x, y = SPECS["mlp"].batch(8)
    losses = {}
    for backend in ("onnxruntime", "pretended"):
        program = graphc.compile(
            exported("mlp"),
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.parse(optimizer),
            backend=backend,
            **options,
        )
        with graphc.Trainer(program, threads=1) as trainer:
            found = [trainer.step({"input": x, "label": y}) for _ in range(6)]
        losses[backend] = [step["loss"] for step in found]
        losses[f"{backend} norm"] = [step.get("grad_norm", 0.0) for step in found]
    assert losses["onnxruntime"][-1] < losses["onnxruntime"][0]
    np.testing.assert_allclose(losses["pretended"], losses["onnxruntime"], rtol=tolerance)
    np.testing.assert_allclose(losses["pretended norm"], losses["onnxruntime norm"], rtol=max(tolerance, 1e-4))
