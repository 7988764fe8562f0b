"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# PyTorch is an oracle here; one thread keeps it from fighting with the code under test on small machines.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def det_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every differentiable op of ONNX has a gradient; tests of what happens without one take that of Det away."""
    from graphc.gradient import GRADIENTS

    assert "Det" in GRADIENTS
    monkeypatch.delitem(GRADIENTS._items, "Det")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``exported("lenet")``: path of that benchmark model as ONNX, exported once per test session."""
    folder: Path = tmp_path_factory.mktemp("models")

    def get(name: str) -> str:
        from graphc.bench.models import export

        path = folder / f"{name}.onnx"
        if not path.exists():
            export(name, str(path))
        return str(path)

    return get
