"""The documentation is true: Python blocks run and print what is shown, commands are real ones, links and the site resolve."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphc
from graphc.backend import BACKENDS, KERNELS
from graphc.cli import COMMANDS
from graphc.ir.declare import OPS
from graphc.optim import OPTIMIZERS
from graphc.pipeline import PASSES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")), *sorted(DOCS.glob("*.md"))]

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""A Python block, and the output that is shown right behind it."""


def code(page: Path) -> list[tuple[str, str | None]]:
    """The Python blocks of a page, each with the output that the page shows for it."""
    return [(found[1], found[2]) for found in PYTHON.finditer(page.read_text())]


def commands(page: Path) -> list[str]:
    blocks = [found[2] for found in BLOCK.finditer(page.read_text()) if found[1] == "console"]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def links(page: Path) -> list[tuple[str, str]]:
    """(path, anchor) of every link to a file of the repository."""
    text = BLOCK.sub("", page.read_text())
    return re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", text)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def names(exported: Callable[[str], str], tmp_path: Path) -> dict[str, object]:
    """What the pages take as given: a classifier file with its shapes, and a file with a scalar output ``loss``."""
    scalar = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        square (float[3] x) => (float loss) { y = Mul(x, x)  loss = ReduceSum<keepdims: int = 0>(y) }"""
    )
    onnx.save(scalar, tmp_path / "scalar.onnx")
    return {
        "__name__": "page",
        "path": exported("mlp"),
        "scalar_path": str(tmp_path / "scalar.onnx"),
        "sample_shape": (784,),
        "classes": 10,
        "np": np,
    }


@pytest.fixture
def declarations(registries: None) -> Iterator[None]:
    """Ops, passes, optimizers, kernels and backends that a page registers are gone after it."""
    kernels = dict(KERNELS)
    with OPS.restored(), PASSES.restored(), BACKENDS.restored(), OPTIMIZERS.restored():
        yield
    for key, found in list(KERNELS.items()):
        if key not in kernels and not found.bind.__module__.startswith("graphc."):
            del KERNELS[key]


@pytest.mark.full
@pytest.mark.parametrize("page", [p for p in PAGES if code(p)], ids=lambda p: p.name)
@pytest.mark.usefixtures("declarations")
def test_python_blocks_run_and_print_what_is_shown(
    page: Path, names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (block, shown) in enumerate(code(page), start=1):
        capsys.readouterr()
        exec(compile(block, f"{page.name}, block {number}", "exec", dont_inherit=True), names)
        if shown is not None:
            assert capsys.readouterr().out == shown, f"{page.name}: the output shown behind block {number}"


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_commands_exist_with_their_options(page: Path) -> None:
    import typer.main

    from graphc.cli import _app

    group = typer.main.get_command(_app())
    for line in commands(page):
        program, *words = shlex.split(line, comments=True)
        if program != "graphc":
            continue
        assert words[0] in COMMANDS, line
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        command = getattr(command, "commands", {}).get("".join(words[1:2]), command)
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        for word in words[1:]:
            if word == "--":
                break
            if re.match(r"--?[a-z]", word):
                assert word.partition("=")[0] in known, f"{line}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_resolve(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert page.parent != DOCS or target.parent == DOCS, f"{page.name} links to {path}, which the site does not have"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^ +- .*: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_map_of_the_folders_is_complete() -> None:
    rooms = set(re.findall(r"^\| `([\w/]+)` \|", (DOCS / "architecture.md").read_text(), re.MULTILINE))
    modules = [
        *(ROOT / "graphc").rglob("__init__.py"),
        *ROOT.glob("passes/*/__init__.py"),
        *ROOT.glob("backends/*/__init__.py"),
    ]
    folders = {str(module.parent.relative_to(ROOT)) for module in modules}
    files = {str(file.relative_to(ROOT).with_suffix("")) for file in (ROOT / "graphc").glob("[!_]*.py")}
    assert rooms == (folders | files) - {"graphc"}


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: graphc\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert set(graphc.__all__) - set(listed) == {"GraphcError", "__version__"}  # the first is among the errors


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|^\$ )make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


def test_module_paths_in_backticks_exist() -> None:
    """A page that names a file or a folder of the repository names one that is there."""
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        for path in re.findall(r"`((?:graphc|passes|backends|tests|scripts)/[\w/.*-]+)`", page.read_text()):
            assert [*ROOT.glob(path), *ROOT.glob(f"{path}.py")], f"{page.name} names {path}"
