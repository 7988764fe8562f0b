"""The cases of ONNX's backend test suite, from the installed ``onnx`` package."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.model as model_cases
import onnx.backend.test.case.node as node_cases
from onnx import numpy_helper
from onnx.backend.test.loader import DATA_DIR, load_model_tests

from graphc.training.inference import run_model


@dataclass(frozen=True)
class Case:
    """One model with feeds and the outputs that are expected of it."""

    name: str
    model: onnx.ModelProto
    data_sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


SLOW = frozenset({"averagepool", "lppool", "maxpool"})
"""Modules whose expectations take seconds to make."""


@functools.cache
def quick_cases() -> Mapping[str, Case]:
    """All cases but those of :data:`SLOW`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(node_cases.__path__):
            if module.name not in SLOW:
                importlib.import_module(f"{node_cases.__name__}.{module.name}")
    return {c.name: _of(c) for c in node_cases._NodeTestCases} | _others()


@functools.cache
def all_cases() -> Mapping[str, Case]:
    """Every node, simple, PyTorch-converted and PyTorch-operator case by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the arithmetic in which the suite makes its own expectations
        found = load_model_tests(kind="node")
    return {c.name: _of(c) for c in found} | _others()


def _of(case: Any) -> Case:
    return Case(case.name, case.model, case.data_sets, case.rtol, case.atol)


@functools.cache
def _others() -> Mapping[str, Case]:
    """The models: made by the suite, and exported by PyTorch in the days of opset 6."""
    model_cases.collect_testcases()
    made = {c.name: _of(c) for c in model_cases._SimpleModelTestCases}
    for folder in ("pytorch-converted", "pytorch-operator"):
        for case in load_model_tests(kind=folder):
            made[case.name] = _stored(case.name, Path(DATA_DIR) / folder / case.name, case.rtol, case.atol)
    return made


def _stored(name: str, folder: Path, rtol: float, atol: float) -> Case:
    model = onnx.load(folder / "model.onnx")
    sets = [(_tensors(data, "input"), _tensors(data, "output")) for data in sorted(folder.glob("test_data_set_*"))]
    return Case(name, model, sets, rtol, atol)


def _tensors(folder: Path, kind: str) -> list[Any]:
    found = []
    for k in range(len(list(folder.glob(f"{kind}_*.pb")))):
        tensor = onnx.TensorProto.FromString((folder / f"{kind}_{k}.pb").read_bytes())
        found.append(numpy_helper.to_array(tensor))
    return found


def check(case: Case, backend: str) -> None:
    """Run the case through the code path of ``graphc run``; AssertionError where an output differs."""
    for inputs, outputs in case.data_sets:
        names = [value.name for value in case.model.graph.input]
        feeds = dict(zip(names, map(plain, inputs), strict=False))
        results = list(run_model(case.model, feeds, backend, threads=1).values())
        assert len(results) == len(outputs), f"{len(results)} outputs, {len(outputs)} expected"
        for result, expected in zip(results, map(plain, outputs), strict=True):
            _same(result, expected, case)


def plain(value: Any) -> Any:
    """The suite gives some tensors as protos, and scalars of numpy as they are."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if value is None else np.asarray(value)


def _same(result: Any, expected: Any, case: Case) -> None:
    if isinstance(expected, list):
        assert isinstance(result, (list, tuple)), f"{type(result).__name__} instead of a sequence"
        assert len(result) == len(expected), f"{len(result)} elements, {len(expected)} expected"
        for one, other in zip(result, expected, strict=True):
            _same(one, other, case)
        return
    assert result is not None, "nothing instead of a tensor"
    assert result.shape == expected.shape, f"shape {result.shape}, {expected.shape} expected"
    if expected.dtype == object:
        np.testing.assert_array_equal(result, expected)
        return
    assert result.dtype == expected.dtype, f"{result.dtype}, {expected.dtype} expected"
    rtol = case.rtol
    if expected.dtype.name == "bfloat16":  # two units in the last place, as the suite's own runner allows
        rtol, result, expected = max(rtol, 2**-6), result.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=case.atol)
