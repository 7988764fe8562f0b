"""What ``graphc doctor`` says of packages for GPUs: installed ones are folders on the path, as pip leaves them."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from graphc.cli import doctor
from graphc.cli.diagnosis import gpu

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    graphc = Path(importlib.metadata.distribution("graphc")._path)  # type: ignore[attr-defined]
    (folder / graphc.name).symlink_to(graphc)
    monkeypatch.setattr(sys, "path", [str(folder)])


def test_the_extra_is_read_from_the_package_itself() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["gpu"]
    assert sorted(gpu.requirements("gpu")) == sorted(re.split("[><=\\[]", line)[0] for line in declared)


def test_the_extra_brings_the_libraries_that_the_bindings_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy, nvmath, nccl4py and cudnn-frontend ask for none of them. Where they come from elsewhere, none is missed."""
    assert set(gpu.requirements("gpu")) >= gpu.WHEELS
    install(tmp_path, monkeypatch, cupy_cuda13x="14.2.0", nvidia_cudnn_cu13="9.19.0.56")
    found = packages((13, 0))
    assert found["nvidia-cudnn-cu13"] == ("ok", "9.19.0.56")
    assert not {"nvidia-cublas", "nvidia-nccl-cu13"} & found.keys()


def packages(driver: tuple[int, int] | None) -> dict[str, tuple[str, str]]:
    return {f.what: (f.state, f.detail) for f in gpu._packages(driver)}


def test_what_is_there_is_listed_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, cupy_cuda13x="14.2.0", nvmath_python="1.0.0")
    found = packages((13, 0))
    assert found["cupy-cuda13x"] == ("ok", "14.2.0")
    assert found["nvmath-python"] == ("ok", "1.0.0")
    assert found["nccl4py"] == ("missing", "not installed; pip install 'graphc[gpu]', or 'nccl4py>=0.6' alone")


def test_a_version_that_graphc_was_not_tried_with_is_told_with_those_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, nvmath_python="0.9.0", onnx_ir="1.0.0")
    assert packages((13, 0))["nvmath-python"] == ("other", "0.9.0, tried with >=1.0; pip install 'nvmath-python>=1.0'")
    finding = doctor._module("onnx_ir", "broken", "pip install graphc")
    assert (finding.what, finding.state) == ("onnx-ir", "other")
    assert finding.detail.startswith("1.0.0, tried with <1.2,>=1.1; ")


def test_of_two_versions_the_one_that_is_imported_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, nvmath_python="0.9.0")
    carried = tmp_path / "carried"
    carried.mkdir()
    install(carried, monkeypatch, nvmath_python="1.0.0")
    monkeypatch.setattr("sys.path", [str(carried), str(tmp_path)])
    assert packages((13, 0))["nvmath-python"] == ("ok", "1.0.0")


def test_a_library_that_does_not_load_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(gpu, "LIBRARIES", {"NVRTC": lambda: "13.0", "cuDNN": fails})
    nvrtc, cudnn = gpu._libraries()
    assert (nvrtc.state, nvrtc.detail) == ("ok", "13.0")
    assert cudnn.state == "missing"
    assert "libcudnn.so.9" in cudnn.detail


def test_a_driver_older_than_cupy_is_told_which_driver_or_which_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, cupy_cuda13x="14.2.0")
    state, detail = packages((12, 4))["cupy-cuda13x"]
    assert state == "missing"
    assert "the driver runs 12.4" in detail
    assert "driver 580 or newer" in detail
    assert "pip uninstall -y cupy-cuda13x && pip install cupy-cuda12x" in detail


def test_two_cupies_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, cupy_cuda13x="14.2.0", cupy_cuda12x="14.2.0")
    state, detail = packages((13, 0))["cupy"]
    assert state == "missing"
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in detail


def test_a_newer_driver_runs_an_older_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, cupy_cuda12x="14.2.0")
    assert packages((13, 0))["cupy-cuda12x"] == ("ok", "14.2.0")


def test_onnxruntime_for_gpus_beside_the_one_for_cpus_is_no_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    install(tmp_path, monkeypatch, onnxruntime_gpu="1.31.1", onnxruntime="1.31.1")
    (found,) = gpu._onnxruntime()
    assert found.state == "missing"
    assert "fill one folder" in found.detail
