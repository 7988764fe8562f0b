"""onnxruntime bound to memory of a device: with its CPU provider on a pretended one, and what is said where CUDA is missing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import graphc
from graphc.backend import BACKENDS
from graphc.bench.specs import SPECS
from graphc.errors import GraphcError, MissingExtraError, NonFiniteError, UnsupportedOpError
from tests.backends.strict import StrictMemory, host_of

ort = pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime.cuda import (  # noqa: E402
    PROVIDER,
    DeviceBackend,
    check_loads,
    check_provider,
    provider_options,
)

HAS_PROVIDER = PROVIDER in ort.get_available_providers()


def pretended() -> DeviceBackend:
    """The backend for GPUs over memory that the host cannot touch, its sessions on the CPU."""
    memory = StrictMemory()
    return DeviceBackend(memory, [("CPUExecutionProvider", {})], ("cpu", 0), queued=memory.queued)


def product_model(dtype: int = onnx.TensorProto.FLOAT) -> onnx.ModelProto:
    x, w, y = (helper.make_tensor_value_info(n, dtype, s) for n, s in (("x", [3, 4]), ("w", [4, 2]), ("y", [3, 2])))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x, w], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_a_segment_reads_and_writes_slices_of_device_memory_when_its_turn_comes() -> None:
    backend = pretended()
    memory = backend.memory
    flat = memory.zeros(256 + 128 + 64)
    x = flat[:48].view(np.float32).reshape((3, 4))
    w = flat[256:288].view(np.float32).reshape((4, 2))
    y = flat[384:408].view(np.float32).reshape((3, 2))
    run = backend.record([backend.bind_segment(product_model(), {"x": x, "w": w}, {"y": y})])
    rng = np.random.default_rng(0)
    for _ in range(2):
        values = [rng.standard_normal(a.shape).astype(np.float32) for a in (x, w)]
        for target, value in zip((x, w), values, strict=True):
            memory.copy(target, value)
        run()
        assert not np.array_equal(host_of(y), np.maximum(values[0] @ values[1], 0)), "it is queued, not run"
        np.testing.assert_allclose(memory.fetch(y), np.maximum(values[0] @ values[1], 0), rtol=1e-6)


def test_packed_integers_cannot_cross_segments_on_a_device() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    backend = pretended()
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.INT4, [8]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    array = backend.memory.zeros(8).view(ml_dtypes.int4)
    with pytest.raises(UnsupportedOpError, match=r"'x'.*int4"):
        backend.bind_segment(model, {"x": array}, {"y": array})


@pytest.mark.skipif(HAS_PROVIDER, reason="this onnxruntime has the CUDA provider")
def test_the_onnxruntime_for_cpus_is_told_from_the_one_for_gpus() -> None:
    with pytest.raises(MissingExtraError, match=r"one for CPUs.*pip uninstall -y onnxruntime && pip install"):
        BACKENDS["onnxruntime-cuda"](threads=1, spin=False)
    with pytest.raises(MissingExtraError):
        check_provider()


def test_a_provider_that_does_not_load_is_no_reason_to_go_on_without_it(capfd: pytest.CaptureFixture[str]) -> None:
    from tests.conftest import has_gpu

    if has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(GraphcError, match=r"cannot load its CUDAExecutionProvider.*cuDNN 9.*driver"):
        check_loads([(PROVIDER, provider_options(0, 0, tf32=False)), ("CPUExecutionProvider", {})])
    assert not capfd.readouterr().err


def test_the_api_of_onnxruntime_is_the_one_that_is_called() -> None:
    """Both packages of onnxruntime have the same Python files, so the package for CPUs tells."""
    place = ["self", "name", "device_type", "device_id", "element_type", "shape", "buffer_ptr"]
    assert list(inspect.signature(ort.IOBinding.bind_input).parameters) == place
    assert list(inspect.signature(ort.IOBinding.bind_output).parameters) == place
    assert list(inspect.signature(ort.InferenceSession.run_with_iobinding).parameters) == ["self", "iobinding", "run_options"]
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
    assert hasattr(ort, "cuda_version")


def test_the_provider_knows_every_option_that_it_is_given() -> None:
    """Where onnxruntime-gpu is installed; it needs no driver."""
    library = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not library.exists():
        pytest.skip("onnxruntime-gpu is not installed")
    text = library.read_bytes()
    assert [name for name in provider_options(0, 1, tf32=False) if name.encode() not in text] == []


def test_float32_stays_float32_unless_tf32_is_asked_for() -> None:
    """As on the cupy backend; onnxruntime's own default rounds."""
    assert inspect.signature(BACKENDS["onnxruntime-cuda"]).parameters["tf32"].default is False
    assert provider_options(0, 1, tf32=False)["use_tf32"] == "0"


@pytest.mark.full
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_training_on_a_device_follows_the_backend_of_the_host(
    name: str, exported: Callable[[str], str], register_backend: Callable[..., None]
) -> None:
    register_backend("pretended", lambda **_: pretended())
    x, y = SPECS[name].batch(6)
    losses, states = {}, {}
    for backend in ("onnxruntime", "pretended"):
        program = graphc.compile(
            exported(name),
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.SGD(lr=0.05, momentum=0.9),  # Adam would blow up what rounding leaves of tiny gradients
            backend=backend,
            accumulate=2,
            clip_norm=1.0,
        )
        with graphc.Trainer(program, threads=1) as trainer:
            losses[backend] = [trainer.step({"input": x, "label": y})["loss"] for _ in range(4)]
            states[backend] = trainer.state.snapshot()
            with pytest.raises(NonFiniteError, match="step 4"):
                trainer.step({"input": np.full_like(x, np.nan), "label": y})
            assert all((trainer.state.snapshot()[key] == value).all() for key, value in states[backend].items())
    assert losses["onnxruntime"][3] < losses["onnxruntime"][0]
    np.testing.assert_allclose(losses["pretended"], losses["onnxruntime"], rtol=1e-5)
    for key, value in states["onnxruntime"].items():
        np.testing.assert_allclose(
            states["pretended"][key], value, rtol=0, atol=1e-5 * max(1.0, np.abs(value).max()), err_msg=key
        )
