"""The documentation runs: every Python block of every page, in order, page by page; every graphc command is a real one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from graphc.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(exported: Callable[[str], str], tmp_path: Path) -> dict[str, object]:
    """What the pages take as given: a classifier file with its shapes, and a file with a scalar output ``loss``."""
    scalar = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        square (float[3] x) => (float loss) { y = Mul(x, x)  loss = ReduceSum<keepdims: int = 0>(y) }"""
    )
    onnx.save(scalar, tmp_path / "scalar.onnx")
    return {
        "path": exported("mlp"),
        "scalar_path": str(tmp_path / "scalar.onnx"),
        "sample_shape": (784,),
        "classes": 10,
        "np": np,
    }


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
@pytest.mark.usefixtures("registries")
def test_python_blocks_run(page: Path, names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), names)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "console")], ids=lambda p: p.name)
def test_commands_exist_with_their_options(page: Path) -> None:
    import typer.main

    from graphc.cli import _app

    group = typer.main.get_command(_app())
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.startswith("$ graphc"):
                continue
            words = shlex.split(line[2:])[1:]
            assert words[0] in COMMANDS, line
            command = group.commands[words[0]]  # type: ignore[attr-defined]
            command = getattr(command, "commands", {}).get(words[1], command)
            known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
            for word in words[1:]:
                if word == "--":
                    break
                if re.match(r"--?[a-z]", word):
                    assert word.partition("=")[0] in known, f"{line}: {word}"
