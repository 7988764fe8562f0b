"""ONNX's backend suite through the GPU backend: its kernels and loops on the machine of the tests, and on a GPU.

All kernels of the cases are collected first and compiled together; a case then finds its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from graphc.errors import GraphcError
from tests.backends.host_compiler import compile_kernels, refused_by_cuda
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.conformance.backend_cases import EVER_WRONG, failures
from tests.conformance.exceptions import CUPY, NUMPY, ONNXRUNTIME
from tests.conformance.suite import Case, all_cases, check, plain, quick_cases

pytestmark = pytest.mark.full

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="the kernels of the tests need a C++ compiler"
)

SAID = frozenset(
    {"K", "axes", "axis", "condition", "delta", "depth", "dft_length", "ends", "frame_length", "frame_step", "image_shape"}
    | {"block_shape", "k", "limit", "new_shape", "output_shape", "pads", "repeats", "roi", "scales", "shape", "sizes", "split"}
    | {"start", "starts", "step", "steps", "trip_count"}
)
"""Inputs of cases that a model mostly has as constants: as feeds, many of them decide shapes, which no plan can hold."""


class Collecting(HostDevice):
    """Runs nothing, and keeps the kernels that it is given."""

    def __init__(self, texts: dict[str, str], *, cuda: bool = False) -> None:
        super().__init__()
        self._texts = texts
        self.writes_cuda = cuda

    def empty(self, nbytes: int) -> Any:
        return self.zeros(nbytes)

    def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        self._texts.update(texts)
        return dict.fromkeys(texts)

    def launch(self, *_: Any) -> Callable[[], None]:
        return lambda: None

    def call_library(self, *_: Any) -> Callable[[], None]:
        return lambda: None

    def call_host(self, *_: Any) -> Callable[[], None]:
        return lambda: None


def with_constants(case: Case) -> Case | None:
    """The case with the inputs of :data:`SAID` as initializers; None where it has none of them."""
    inputs, outputs = case.data_sets[0]
    names = [value.name for value in case.model.graph.input]
    known = {k for k, x in enumerate(inputs) if names[k] in SAID and isinstance(plain(x), np.ndarray)}
    if not known:
        return None
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for k in sorted(known, reverse=True):
        model.graph.initializer.append(numpy_helper.from_array(plain(inputs[k]), names[k]))
        del model.graph.input[k]
    return dataclasses.replace(case, model=model, data_sets=[([x for k, x in enumerate(inputs) if k not in known], outputs)])


def kernels(cases: Iterable[Case], register_backend: Callable[..., None], *, cuda: bool = False) -> dict[str, str]:
    """The text of the kernels of all cases."""
    texts: dict[str, str] = {}
    logging.getLogger("graphc.cupy").setLevel(logging.ERROR)
    register_backend("cupy", lambda **_: cupy_on(Collecting(texts, cuda=cuda)))
    for case in cases:
        with contextlib.suppress(AssertionError, GraphcError, RuntimeError, ImportError):  # nothing is computed
            check(case, "cupy")
    return texts


def wrong(cases: Mapping[str, Case], names: Sequence[str], register_backend: Callable[..., None]) -> str:
    """One line per case that is neither passed nor excepted, with feeds as they are and as constants."""
    folded = {name: case for name in names if (case := with_constants(cases[name])) is not None}
    compile_kernels(kernels([*(cases[name] for name in names), *folded.values()], register_backend))
    register_backend("cupy", lambda **_: cupy_on(HostDevice()))
    return "\n".join([*failures("cupy", cases, names), *failures("cupy", folded, sorted(folded))])


@needs_compiler
@pytest.mark.large  # the larger sample below is in `make test`
def test_a_sample(register_backend: Callable[..., None]) -> None:
    cases = quick_cases()
    found = wrong(cases, sorted(cases)[::60], register_backend)
    assert not found, found


@needs_compiler
@pytest.mark.large
@pytest.mark.parametrize("part", [0, 1])
def test_a_larger_sample_and_all_that_was_ever_wrong(part: int, register_backend: Callable[..., None]) -> None:
    cases = quick_cases()
    names = sorted(cases)
    ever = {n for n in names if re.fullmatch(EVER_WRONG, n.removeprefix("test_"))}
    found = wrong(cases, sorted({*names[::24], *ever} if part == 0 else {*names[12::24]} - ever), register_backend)
    assert not found, found


@needs_compiler
@pytest.mark.large
@pytest.mark.parametrize("part", range(4))
def test_every_case(part: int, register_backend: Callable[..., None]) -> None:
    cases = all_cases()
    found = wrong(cases, sorted(cases)[part::4], register_backend)
    assert not found, found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
def test_kernels_of_a_sample_are_cuda(register_backend: Callable[..., None]) -> None:
    cases = quick_cases()
    chosen = [cases[name] for name in sorted(cases)[5::40]]
    texts = kernels([*chosen, *filter(None, map(with_constants, chosen))], register_backend, cuda=True)
    assert len(texts) > 30
    assert refused_by_cuda(texts) == ""


def test_the_gpu_backend_passes_what_onnxruntime_passes() -> None:
    """Exceptions of its own are few, and each is named."""
    own = {pattern for pattern in CUPY if pattern not in {**ONNXRUNTIME, **NUMPY}}
    assert len(own) <= 4, own


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_a_sample_on_a_gpu(part: int) -> None:
    cases = quick_cases()
    names = sorted(cases)[::10][part::4]
    folded = {name: case for name in names if (case := with_constants(cases[name])) is not None}
    found = "\n".join([*failures("cupy", cases, names), *failures("cupy", folded, sorted(folded))])
    assert not found, found
