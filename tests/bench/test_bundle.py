"""What a machine without a network needs: the documented wheels, against what the packages themselves require."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from graphc.bench.bundle import CARRIED, PRESENT, UNUSED
from graphc.cli.diagnosis.gpu import WHEELS, requirements
from graphc.smoke.machine import MODULES

ROOT = Path(__file__).parents[2]


def required(package: str) -> frozenset[str]:
    """What the installed package requires on Linux, without extras."""
    found = [Requirement(line) for line in importlib.metadata.requires(package) or ()]
    return frozenset(
        canonicalize_name(r.name)
        for r in found
        if r.marker is None or r.marker.evaluate({"extra": "", "python_version": "3.12"})
    )


def test_the_page_lists_the_wheels_to_carry() -> None:
    page = (ROOT / "docs" / "several-machines.md").read_text()
    command = re.search(r"\$ pip download.*?\n\$", page, re.DOTALL)
    assert command is not None
    assert dict(re.findall(r"([\w-]+)==([\w.]+)", command[0])) == {name: version for name, (version, _) in CARRIED.items()}


def test_what_the_wheels_require_is_carried_or_there() -> None:
    for name, (_, needs) in CARRIED.items():
        assert needs <= {*CARRIED, *PRESENT, *UNUSED}, name
    own = {
        canonicalize_name(Requirement(line).name) for line in importlib.metadata.requires("graphc") or () if "extra" not in line
    }
    assert own <= {*CARRIED, *PRESENT}, "what graphc requires"
    assert set(requirements("gpu")) - WHEELS <= {*CARRIED, *PRESENT}, "what the extra brings, beside CUDA's libraries"


@pytest.mark.parametrize("name", CARRIED)
def test_the_table_is_what_the_package_says(name: str) -> None:
    version, needs = CARRIED[name]
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    if installed == version:
        assert required(name) == needs


def test_the_emulation_tries_the_same_versions() -> None:
    """It is where the bindings were tried, so what is carried is what was tried."""
    text = (ROOT / "tests" / "hostcuda" / "build.py").read_text()
    tried = dict(re.findall(r'"([\w-]+)==([\d.]+)"', text))
    for name in ("nvmath-python", "nvidia-cudnn-frontend", "nccl4py", "cuda-bindings", "cuda-core", "cuda-pathfinder"):
        assert tried[name] == CARRIED[name][0]


def test_every_module_that_the_smoke_test_imports_has_a_package() -> None:
    assert {canonicalize_name(package) for package in MODULES.values()} <= {*CARRIED, *PRESENT}


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_without_a_driver(module: str) -> None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip("not installed")
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-600:]
