"""The packages to carry to a machine with a GPU that reaches no package index."""

from __future__ import annotations

from collections.abc import Mapping

CARRIED: Mapping[str, tuple[str, frozenset[str]]] = {
    name: (version, frozenset(requires.split()))
    for name, version, requires in (
        ("nvmath-python", "1.0.0", "cuda-bindings cuda-core cuda-pathfinder numpy"),
        ("nvidia-cudnn-frontend", "1.32.0", "nvidia-cutlass-dsl apache-tvm-ffi"),
        ("nccl4py", "0.6.0", "cuda-core cuda-pathfinder numpy packaging"),
        ("cuda-bindings", "13.5.0", "cuda-pathfinder"),
        ("cuda-core", "1.2.2", "cuda-pathfinder numpy"),
        ("cuda-pathfinder", "1.9.0", ""),
        ("onnx-ir", "1.1.0", "ml-dtypes numpy onnx packaging sympy typing-extensions"),
        ("setuptools", "84.2.1", ""),
        ("pytest-xdist", "3.8.0", "execnet pytest"),
        ("execnet", "2.1.2", ""),
        ("pytest-timeout", "2.4.0", "pytest"),
        ("hypothesis", "6.170.15", "sortedcontainers"),
        ("sortedcontainers", "2.4.0", ""),
    )
}
"""Package → version that graphc was tried with, and the packages that it requires."""

PRESENT = frozenset(
    "cupy-cuda13x ml-dtypes networkx numpy onnx packaging pytest rich sympy typer typing-extensions".split()  # noqa: SIM905
)
"""Packages that such a machine has to have: CuPy, pytest, and what graphc itself requires."""

UNUSED = frozenset({"nvidia-cutlass-dsl", "apache-tvm-ffi"})
"""What ``nvidia-cudnn-frontend`` requires for its kernels in Python; graphc uses none, and cuDNN loads without."""
