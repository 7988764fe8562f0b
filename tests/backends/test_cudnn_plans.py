"""The library itself is asked for plans for an H200, which need not be there: cuDNN can build for a device that is described.

Runs where cudnn-frontend and a CUDA driver's library are installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest

from graphc.backends.cupy.attention import attention_of
from graphc.backends.cupy.convolutions import convolution_of
from graphc.backends.cupy.dnn import WORKSPACE, Description, build, named, propose, usable
from graphc.pipeline import Context, run
from tests.backends.library_cases import ATTENTIONS, CONVOLUTIONS, attention, attention_feeds, convolutions

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


def check_plans(library: tuple[Any, dict[str, Any]], description: Description, **rules: bool) -> None:
    """There is a plan in the common workspace, and it is found again by its name and by what is kept of it on disk."""
    cudnn, options = library
    graph, _ = build(cudnn, description, **options)
    plans = propose(cudnn, graph, description, **{"deterministic": False, "tf32": False, **rules})
    first = next(usable(cudnn, graph, plans), None)
    assert first is not None, f"{len(plans)} proposals, none of which builds in {WORKSPACE} bytes"
    again, _ = build(cudnn, description, **options)
    plans = propose(cudnn, again, description, **{"deterministic": False, "tf32": False, **rules})
    assert next(usable(cudnn, again, named(again, plans, graph.get_plan_name_at_index(first))), None) is not None
    kept = cudnn.pygraph(**options)
    kept.deserialize(bytes(again.serialize()))
    assert kept.get_workspace_size() == graph.get_workspace_size_plan_at_index(first)


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
