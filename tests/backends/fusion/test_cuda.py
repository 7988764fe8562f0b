"""The generated kernels and the library calls on a real GPU: the cases that the host runs in test_fusion.py."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphc.backend import make_backend
from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.device.cuda_memory import check_versions
from graphc.errors import GraphcError, MissingExtraError
from tests.backends.fusion.fusion_cases import CASES, check_case, check_network
from tests.conftest import has_gpu


@pytest.fixture(scope="module")
def device() -> object:
    return CudaDevice(0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_standard_run_on_the_gpu(name: str, device: object) -> None:
    check_case(name, device, None)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 4])
@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer-small"])
def test_loss_and_gradients_of_networks_are_those_of_the_cpu(
    name: str, splits: int | None, device: object, tmp_path: Path
) -> None:
    check_network(name, device, splits, tmp_path, tolerance=2e-3)  # products in TF32


class Allocated:
    """What a launch sees of an array of CuPy's; the pool has its memory back when it is gone."""

    def __init__(self) -> None:
        self.data = SimpleNamespace(ptr=4096)


def test_a_launch_keeps_the_memory_that_it_reads_for_as_long_as_somebody_has_it() -> None:
    launched: list[Any] = []
    array = Allocated()
    held = weakref.ref(array)
    stream = SimpleNamespace(stream="compute")
    launch: Any = CudaDevice.launch
    run = launch(stream, lambda *call, stream: launched.append((call, stream)), [array], Shape(32, 1, 1, 1, 5))
    del array
    assert held() is not None
    run()
    assert launched == [(((5, 1, 1), (32, 1, 1), (4096,)), "compute")]
    del run
    assert held() is None


def test_a_machine_without_gpu_is_told_what_is_missing() -> None:
    if has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(GraphcError, match=r"pip install 'graphc\[gpu\]'|no GPU|no NVIDIA driver"):
        make_backend("cupy", threads=1)


def test_a_driver_that_does_not_fit_cupy_is_named_with_the_command_that_helps() -> None:
    check_versions(13, 13, "cupy")
    check_versions(13, 12, "cupy")
    with pytest.raises(MissingExtraError, match=r"pip install cupy-cuda12x, or install driver 580"):
        check_versions(12, 13, "cupy")
    with pytest.raises(MissingExtraError, match=r"the driver runs CUDA 11: install driver 525"):
        check_versions(11, 12, "cupy")
    with pytest.raises(GraphcError, match=r"no NVIDIA driver; it needs driver 580 .* backend='onnxruntime'"):
        check_versions(0, 13, "cupy")


def test_no_machine_trains_on_a_gpu_unasked() -> None:
    backend = make_backend("auto", threads=1)
    assert backend.memory.on_host
    backend.close()
