"""The cases of ONNX's backend test suite, from the installed ``onnx`` package."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as node_cases
from onnx import numpy_helper
from onnx.backend.test.loader import DATA_DIR, load_model_tests

from graphc.inference import run_model


@dataclass(frozen=True)
class Case:
    """One model with feeds and the outputs that are expected of it."""

    name: str
    model: onnx.ModelProto
    data_sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float


@functools.cache
def all_cases() -> Mapping[str, Case]:
    """Every node, simple, PyTorch-converted and PyTorch-operator case by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the arithmetic in which the suite makes its own expectations
        found = load_model_tests(kind="node")
        models = importlib.import_module("onnx.backend.test.case.model")
        models.collect_testcases()
    cases = [*found, *models._SimpleModelTestCases]
    made = {c.name: Case(c.name, c.model, c.data_sets, c.rtol, c.atol) for c in cases}
    for folder in ("pytorch-converted", "pytorch-operator"):
        for case in load_model_tests(kind=folder):
            made[case.name] = _stored(case.name, Path(DATA_DIR) / folder / case.name, case.rtol, case.atol)
    return made


def cases_of(*modules: str) -> Mapping[str, Case]:
    """The cases that some modules of the suite define, without making all others: pooling alone takes five seconds."""
    known = {id(case) for case in node_cases._NodeTestCases}
    for module in modules:
        importlib.import_module(f"onnx.backend.test.case.node.{module}")
    fresh = [case for case in node_cases._NodeTestCases if id(case) not in known]
    if not fresh:  # another test has loaded the suite
        return all_cases()
    return {c.name: Case(c.name, c.model, c.data_sets, c.rtol, c.atol) for c in fresh}


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
        feeds = dict(zip(names, map(_plain, inputs), strict=False))
        results = list(run_model(case.model, feeds, backend, threads=1).values())
        assert len(results) == len(outputs), f"{len(results)} outputs, {len(outputs)} expected"
        for result, expected in zip(results, map(_plain, outputs), strict=True):
            _same(result, expected, case)


def _plain(value: Any) -> Any:
    """The suite gives some tensors as protos, and scalars of numpy as they are."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
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
