"""The parts of this folder that pytest needs to run tests in another one."""

from __future__ import annotations

import shutil
from pathlib import Path

FILES = ("__init__.py", "conftest.py", "results.py", "tiers.py", "slow_tests.txt")


def copy_harness(folder: Path) -> None:
    """Copy them to ``folder``."""
    for name in FILES:
        shutil.copy(Path(__file__).parent / name, folder)
