"""The library itself is asked for plans for an H200, which need not be there: cuDNN can build for a device that is described.

Runs where cudnn-frontend and a CUDA driver's library are installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from graphc.backends.cupy.libraries.cudnn import MODES, WORKSPACE, Description, Dnn, Tensor, build, propose, usable
from graphc.backends.cupy.libraries.cudnn_attention import Attention, Place, attention_of
from graphc.backends.cupy.libraries.cudnn_convolution import convolution_of
from graphc.bench.gpu_specs import JOBS
from graphc.pipeline import Context, run
from tests.backends.library_cases import ATTENTIONS, CONVOLUTIONS, attention, attention_feeds, convolutions
from tests.backends.timed_device import TimedDevice

H200: Mapping[str, Any] = {
    "deviceName": "NVIDIA H200", "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000, "totalGlobalMem": 150109880320,
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "multiProcessorCount": 132, "smCountOrigin": 0, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "oversizedSharedMemoryPerBlock": 0, "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
    "maxSharedMemoryPerSM": 233472, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000, "memoryBusWidth": 6144, "l2CacheSize": 62914560,
}  # fmt: skip

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@pytest.fixture(scope="module")
def library() -> tuple[Any, dict[str, Any]]:
    """cuDNN, and the options of a graph for an H200."""
    cudnn = pytest.importorskip("cudnn")
    try:
        properties = cudnn.create_device_properties(json.dumps(H200))
    except RuntimeError as error:
        pytest.skip(f"cuDNN cannot describe a device here: {error}")
    return cudnn, {"device_property": properties, "sm_version": 90}


def check_plans(library: tuple[Any, dict[str, Any]], description: Description, limit: int = WORKSPACE, **rules: bool) -> None:
    """There is a plan of at most ``limit`` bytes of workspace, found again by its name and by what is kept of it on disk."""
    cudnn, options = library
    for mode in MODES:
        graph, _ = build(cudnn, description, **options)
        plans = propose(cudnn, graph, description, **{"deterministic": False, "tf32": False, **rules}, mode=mode)
        first = next(usable(cudnn, graph, plans, limit), None)
        if first is not None:
            break
    assert first is not None, f"{len(plans)} proposals, none of which builds in {limit} bytes"
    again, _ = build(cudnn, description, **options)
    plans = propose(cudnn, again, description, **{"deterministic": False, "tf32": False, **rules}, mode=mode)
    name = graph.get_plan_name_at_index(first)
    same = [index for index in plans if again.get_plan_name_at_index(index) == name]
    assert next(usable(cudnn, again, same, limit), None) is not None
    kept = cudnn.pygraph(**options)
    kept.deserialize(bytes(again.serialize()))
    assert kept.get_workspace_size() == graph.get_workspace_size_plan_at_index(first)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_have_plans(name: str, last: bool, dtype: ir.DataType, library: tuple[Any, dict[str, Any]]) -> None:
    for node in convolutions(name, last, dtype).graph:
        if "Conv" in node.op_type:
            check_plans(library, convolution_of(node))
            if dtype == ir.DataType.FLOAT:
                check_plans(library, convolution_of(node), tf32=True)
            check_plans(library, convolution_of(node), deterministic=True)


@pytest.mark.full
@pytest.mark.parametrize("deterministic", [False, True], ids=["fastest", "deterministic"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_has_plans(name: str, dtype: ir.DataType, deterministic: bool, library: tuple[Any, dict[str, Any]]) -> None:
    feeds, names = attention_feeds(ATTENTIONS[name], dtype.numpy())
    model = attention(ATTENTIONS[name], feeds, names)
    run(model, "flash_attention", Context())
    calls = [attention_of(n, deterministic=deterministic).call for n in model.graph if n.op_type.startswith("Scaled")]
    assert len(calls) == 2
    for call in calls:
        check_plans(library, call, deterministic=deterministic)


@pytest.mark.full
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_attention_of_the_benchmark_has_plans(name: str, dropout: bool, library: tuple[Any, dict[str, Any]]) -> None:
    """Queries, keys and values where one projection left them, as the options of the backend are by default."""
    job = JOBS[name]
    (length,), size = job.inputs, job.width // job.heads
    read = Place.of((job.batch, length, 3, job.heads, size), "bt0hd", ir.DataType.BFLOAT16).form
    written = Place.of((job.batch, length, job.heads, size), "bthd", ir.DataType.BFLOAT16).form
    for backward in (False, True):
        call = Attention(read, read, read, written, None, size**-0.5, name == "gpt2", backward)
        if dropout:
            bits = Tensor.dense((job.batch, job.heads, length, length), ir.DataType.BFLOAT16)
            seen = Tensor((job.batch, 1, length, length), (length, length, 0, 1), ir.DataType.FLOAT) if name == "bert" else None
            call = replace(call, mask=seen, keep=bits)
        check_plans(library, call)
        check_plans(library, replace(call, deterministic=backward), 2 * WORKSPACE, deterministic=True)


class Clock:
    """The library, with calls that take a time of their own in place of a GPU.

    Attributes:
        ran: the plans that were run, by name.
    """

    def __init__(self, cudnn: Any, options: dict[str, Any]) -> None:
        self._cudnn, self._options = cudnn, options
        self.device, self.ran = TimedDevice(), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cudnn, name)

    def create_handle(self) -> None:
        """There is no GPU to have one."""

    def set_stream(self, handle: None, stream: int) -> None:
        """Nor a stream."""

    def pygraph(self, handle: None = None, **options: Any) -> Any:
        graph = self._cudnn.pygraph(**self._options, **options)
        build, deserialize, name = graph.build_plan_at_index, graph.deserialize, ""

        def built(index: int) -> None:
            nonlocal name
            build(index)
            name = graph.get_plan_name_at_index(index)

        def run(pointers: Mapping[int, int], workspace: int, handle: None) -> None:
            self.ran.append(name)
            self.device.now += 10.0 - len(set(self.ran))  # the last plan is the fastest

        graph.build_plan_at_index, graph.execute, graph.deserialize = built, run, lambda handle, kept: deserialize(kept)
        return graph


def test_the_fastest_plan_is_taken_and_found_again_without_measuring(
    library: tuple[Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(*library)
    monkeypatch.setitem(sys.modules, "cudnn", clock)
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))
    call = next(convolution_of(n) for n in convolutions("plain", True, ir.DataType.FLOAT16).graph if "Conv" in n.op_type)

    def workspace(device: TimedDevice) -> int:
        clock.device = device
        dnn = Dnn(device)  # type: ignore[arg-type]
        dnn.bind(call, {name: device.zeros(1 << 20) for name in call.tensors})
        (built,) = dnn._built.values()
        return built.nbytes

    chosen = workspace(TimedDevice())
    assert len(set(clock.ran)) > 1
    (kept,) = tmp_path.glob("cudnn-H200-*.json")
    assert list(json.loads(kept.read_text()).values()) == [clock.ran[-1]]
    clock.ran.clear()
    assert workspace(TimedDevice()) == chosen
    assert set(clock.ran) == {""}, "only the stored plan runs"
    clock.ran.clear()
    workspace(TimedDevice(deterministic=True))
    assert not clock.ran
