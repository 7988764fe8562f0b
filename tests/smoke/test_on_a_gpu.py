"""Every stage of ``graphc doctor --smoke`` on a GPU, as it is or made up (tests/hostcuda)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from graphc.smoke.runner import run
from graphc.smoke.stages import STAGES

pytestmark = pytest.mark.gpu

LONGER = 5
"""The made-up GPU compiles kernels with a compiler for the host."""


def outcome(*names: str, **environment: str) -> list[dict[str, Any]]:
    from dataclasses import replace

    stages = [replace(stage, needs=(), limit=LONGER * stage.limit) for stage in STAGES if stage.name in names]
    return [*run(stages, {**os.environ, **environment})]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [s.name for s in STAGES if s.name not in ("convolution", "attention", "stored plans")])
def test_a_stage_succeeds(name: str) -> None:
    (found,) = outcome(name)
    assert found["state"] in ("ok", "skipped"), found
    assert found["detail"]


def test_libraries_succeed_again_with_what_they_stored(tmp_path: Path) -> None:
    found = outcome("convolution", "attention", "stored plans", GRAPHC_CACHE_DIR=str(tmp_path))
    assert [result["state"] for result in found] == ["ok"] * 3, found
    assert found[2]["plans_read"] == len([*tmp_path.rglob("*.plan")])
