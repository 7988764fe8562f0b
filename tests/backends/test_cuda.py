"""The generated kernels and the library calls on a real GPU: the cases that the host runs in test_fusion.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphc.errors import GraphcError
from tests.backends.test_fusion import CASES, check_case, check_network
from tests.conftest import has_gpu


@pytest.fixture(scope="module")
def device() -> object:
    from graphc.backends.cupy.cuda import CudaDevice

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


def test_a_machine_without_gpu_is_told_what_is_missing() -> None:
    if has_gpu():
        pytest.skip("this machine has a GPU")
    from graphc.backends.cupy import CupyBackend

    with pytest.raises(GraphcError, match=r"graphc\[gpu\]|no GPU"):
        CupyBackend()
