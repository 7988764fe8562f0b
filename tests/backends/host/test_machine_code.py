"""Object files made in this process and in others beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphc.backends.host import machine_code
from graphc.backends.host.machine_code import FEW, MachineCode, object_file, target_machine


def modules(count: int) -> list[str]:
    return [f"define i64 @f{k}(i64 %x) {{\n  %y = mul i64 %x, {k}\n  ret i64 %y\n}}" for k in range(count)]


def made(code: MachineCode, texts: list[str]) -> list[bytes]:
    kept: list[bytes] = []
    found = [future.result(60) for future in [code.submit(text, kept.append) for text in texts]]
    assert sorted(kept) == sorted(found)
    return found


def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that are started from now on."""
    found: list[Any] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        found.append(popen(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(machine_code.subprocess, "Popen", start)
    return found


@pytest.mark.full
def test_many_kernels_are_made_by_several_processes_which_then_end(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, texts, machine = started(monkeypatch), modules(60), target_machine()
    assert made(MachineCode(3), texts) == [object_file(machine, text) for text in texts]
    assert 1 <= len(processes) <= 2
    assert all(process.wait(10) == 0 for process in processes)


@pytest.mark.parametrize(("cores", "count"), [(1, 30), (4, FEW)])
def test_one_core_or_few_kernels_start_no_process(cores: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = started(monkeypatch)
    assert all(made(MachineCode(cores), modules(count)))
    assert not processes


@pytest.mark.full
@pytest.mark.parametrize("does", ["nothing", "exit 1", "echo a greeting of this site", "exec sleep 100"])
def test_without_another_process_this_one_makes_all(does: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts, machine, program = modules(30), target_machine(), tmp_path / "python"
    expected = [object_file(machine, text) for text in texts]
    if does != "nothing":
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(machine_code, "LIMIT", 1.0)
    assert made(MachineCode(3), texts) == expected
