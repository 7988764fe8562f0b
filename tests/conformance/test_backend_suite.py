"""ONNX's own backend test suite through the code path of ``graphc run``, on both backends."""

from __future__ import annotations

import re

import pytest

from tests.conformance.backend_cases import EVER_WRONG, failures
from tests.conformance.exceptions import EXCEPTIONS, reason
from tests.conformance.suite import all_cases, quick_cases
from tests.tiers import params

BACKENDS = ("numpy", "onnxruntime")

PARTS = 8


@pytest.mark.full
@pytest.mark.parametrize("part", params(range(0, PARTS, 3), large=[3, 6]))
def test_every_eighth_case(part: int) -> None:
    """But those of pooling, which take 7 s to make: ``test_gradient_suite.py`` runs and differentiates them."""
    lines = failures("onnxruntime", quick_cases(), sorted(quick_cases())[part::PARTS])
    assert not lines, "\n".join(lines)


@pytest.mark.large
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_case(backend: str, part: int) -> None:
    lines = failures(backend, all_cases(), sorted(all_cases())[part::PARTS])
    assert not lines, "\n".join(lines)


@pytest.mark.large
def test_exceptions_are_few_and_all_named() -> None:
    names = all_cases()
    assert len(names) > 2000
    for backend, patterns in EXCEPTIONS.items():
        excepted = [name for name in names if reason(backend, name) is not None]
        assert len(excepted) < (0.05 if backend == "numpy" else 0.08) * len(names)
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in names), f"{pattern!r} matches no case"


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample(backend: str) -> None:
    names = sorted(quick_cases())
    wrong = [name for name in names if re.fullmatch(EVER_WRONG, name.removeprefix("test_"))]
    lines = failures(backend, quick_cases(), sorted({*names[::40], *wrong}))
    assert not lines, "\n".join(lines)
