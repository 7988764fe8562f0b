"""Checks the driver, devices, packages and backends for training on NVIDIA GPUs."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator

from packaging.utils import canonicalize_name

from graphc.cli.diagnosis import versions
from graphc.cli.diagnosis.finding import Finding

QUERY = "name,memory.total,memory.free,compute_cap,driver_version"
CUPY = re.compile(r"cupy-cuda(\d+)x")
WHEELS = {"nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"}
"""Libraries that may come from elsewhere than pip; only loading them is checked."""


def findings() -> Iterator[Finding]:
    """Yield a finding for the driver, each device, package and library, with install commands for missing ones."""
    version = driver_version()
    yield from _driver(version)
    if version is not None:
        yield from _devices()
    yield from _packages(version)
    if version is not None:
        yield from _libraries()
    yield from _onnxruntime()


def driver_version() -> tuple[int, int] | None:
    """Newest CUDA version that the driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value == 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def _driver(version: tuple[int, int] | None) -> Iterator[Finding]:
    if version is None:
        detail = "not installed (libcuda.so.1 is not there); training on a GPU needs NVIDIA's driver, 580 or newer for CUDA 13"
        yield Finding("GPU driver", "missing", detail)
        return
    yield Finding("GPU driver", "ok", f"runs CUDA {version[0]}.{version[1]} and older")


def _devices() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("GPU", "missing", "nvidia-smi is not there, so the devices are not listed")
        return
    try:
        command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("GPU", "missing", "nvidia-smi does not answer; 'dmesg | grep Xid' may say why")
        return
    lines = [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    for index, line in enumerate(lines):
        name, total, free, capability, driver = (part.strip() for part in line.split(","))
        detail = f"{name}, {total}, {free} of it free, compute capability {capability}, driver {driver}"
        yield Finding(f"GPU {index}", "ok", detail)
    if not lines:
        yield Finding("GPU", "missing", f"nvidia-smi lists none: {(done.stderr or done.stdout).strip() or 'no message'}")


def _packages(driver: tuple[int, int] | None) -> Iterator[Finding]:
    """Check the packages of the extra ``gpu``, and that the driver supports CuPy's CUDA version."""
    from graphc.device import LEAST_DRIVER  # imports NumPy, which --help should not load

    installed: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        if found.metadata["Name"]:
            installed.setdefault(
                canonicalize_name(found.metadata["Name"]), found.version
            )  # the first on the path, as for imports
    cupies = [name for name in installed if CUPY.fullmatch(name)]
    for name in requirements("gpu"):
        if CUPY.fullmatch(name) or (name in WHEELS and name not in installed):
            continue
        if name in installed:
            yield versions.installed(name, installed[name], f"pip install '{versions.pinned(name)}'")
        else:
            yield Finding(name, "missing", f"not installed; pip install 'graphc[gpu]', or '{versions.pinned(name)}' alone")
    if len(cupies) > 1:
        names = " and ".join(sorted(cupies))
        yield Finding(
            "cupy", "missing", f"{names} fill one folder: pip uninstall -y {' '.join(sorted(cupies))}, then install one"
        )
        return
    if not cupies:
        wanted = f"cupy-cuda{driver[0]}x" if driver is not None and driver[0] in LEAST_DRIVER else "cupy-cuda13x"
        hint = "" if wanted == "cupy-cuda13x" else f" brings CUDA 13, which this driver does not run: pip install {wanted}"
        yield Finding("cupy", "missing", f"not installed; pip install 'graphc[gpu]'{hint}")
        return
    major = int(CUPY.fullmatch(cupies[0])[1])  # type: ignore[index]
    if driver is not None and driver[0] < major:
        oldest = LEAST_DRIVER.get(major, "a newer one")
        detail = f"is for CUDA {major}, the driver runs {driver[0]}.{driver[1]}: install driver {oldest} or newer"
        if driver[0] in LEAST_DRIVER:
            detail += f", or: pip uninstall -y {cupies[0]} && pip install cupy-cuda{driver[0]}x"
        yield Finding(cupies[0], "missing", detail)
        return
    yield Finding(cupies[0], "ok", installed[cupies[0]])


def _libraries() -> Iterator[Finding]:
    """Load each library once, as CuPy and the bindings do: installed libraries are not always found."""
    for name, ask in LIBRARIES.items():
        try:
            yield Finding(name, "ok", str(ask()))
        except Exception as error:
            brings = "; pip install 'graphc[gpu]' brings it" if not isinstance(error, ModuleNotFoundError) else ""
            yield Finding(name, "missing", f"does not load: {type(error).__name__}: {error}{brings}")


def _nvrtc() -> str:
    from cupy.cuda import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def _cublaslt() -> str:
    from nvmath.bindings import cublasLt

    return str(cublasLt.get_version())


def _cudnn() -> str:
    import cudnn

    return str(cudnn.backend_version())


def _nccl() -> str:
    from nccl.bindings import nccl

    return str(nccl.get_version())


LIBRARIES = {"NVRTC": _nvrtc, "cuBLASLt": _cublaslt, "cuDNN": _cudnn, "NCCL": _nccl}
"""Library → function that queries its version."""


def _onnxruntime() -> Iterator[Finding]:
    """Check that exactly one of onnxruntime's two packages is installed: they share a folder."""
    found = {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(found) == 2:
        command = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install one of them"
        yield Finding(
            "onnxruntime-gpu", "missing", f"onnxruntime and onnxruntime-gpu are both installed and fill one folder: {command}"
        )
    elif "onnxruntime-gpu" in found:
        yield Finding("onnxruntime-gpu", "ok", found["onnxruntime-gpu"])
    else:
        command = "pip uninstall -y onnxruntime && pip install 'graphc[onnxruntime-cuda]'"
        yield Finding("onnxruntime-gpu", "missing", f"not installed (for backend='onnxruntime-cuda'); {command}")


def requirements(extra: str) -> list[str]:
    """Names of the packages in one of graphc's extras."""
    marker = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    lines = [line for line in importlib.metadata.requires("graphc") or () if marker.search(line)]
    return [canonicalize_name(re.split(r"[\s;<>=!~\[]", line, maxsplit=1)[0]) for line in lines]
