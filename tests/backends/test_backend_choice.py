"""Backends by their text: options reach the device, and a program that asks for equal bits gets a backend that gives them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backend import make_backend
from graphc.backends.cupy.device.protocol import CudaOptions
from graphc.bench.specs import SPECS
from graphc.errors import UsageError
from tests.backends.host_kernels import HostDevice, every_epilogue


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[CudaOptions]:
    """The options of every GPU that is asked for; the host stands for it."""
    found: list[CudaOptions] = []

    def gpu(options: CudaOptions) -> Any:
        found.append(options)
        return HostDevice(), None, every_epilogue

    monkeypatch.setattr("graphc.backends.cupy._gpu", gpu)
    return found


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("cupy", CudaOptions()),
        ("cupy:tf32", CudaOptions(tf32=True)),
        ("cupy:tf32=on, loose_gelu=1", CudaOptions(tf32=True, loose_gelu=True)),
        ("cupy:deterministic=true,tf32=false", CudaOptions(deterministic=True)),
    ],
)
def test_options_reach_the_device(text: str, options: CudaOptions, given: list[CudaOptions]) -> None:
    make_backend(text, threads=1)
    assert given == [options]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cupy:tf23=true", "no option 'tf23'; did you mean 'tf32'"),
        ("cupy:tf32=maybe", "tf32=maybe is neither true nor false"),
        ("numpy:tf32=true", "it has none"),
        ("cupi:tf32=true", "did you mean 'cupy'"),
    ],
)
def test_what_a_backend_does_not_know_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_backend(text, threads=1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.full
@pytest.mark.parametrize("mode", [None, "run", "any-world:shards=2"])
def test_a_program_that_asks_for_equal_bits_gets_them(
    mode: str | None, given: list[CudaOptions], exported: Callable[[str], str]
) -> None:
    loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
    program = graphc.compile(exported("mlp"), loss=loss, optimizer=optimizer, backend="cupy:tf32=true", deterministic=mode)
    x, y = SPECS["mlp"].batch(4)
    digests = []
    for _ in range(1 if mode is None else 2):
        with graphc.Trainer(program, threads=1) as trainer:
            assert np.isfinite(trainer.step({"input": x, "label": y})["loss"])
            digests.append(trainer.state_sha256())
    assert {options.deterministic for options in given} == {mode is not None}
    assert all(options.tf32 for options in given)
    assert len(set(digests)) == 1
