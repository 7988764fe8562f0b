"""Checks the table of rooms in docs/architecture.md against the imports, and that a class name means one thing.

A room is a folder, or one module at the root of ``graphc``. Imports inside functions count, imports for type checkers do not.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"graphc": "graphc", "passes": "graphc.passes", "backends": "graphc.backends"}

FACE = ("graphc/__init__", "graphc/__main__", "passes", "backends")
"""The public face, which loads names when they are used, and packages that hold folders only."""


def rows() -> dict[str, frozenset[str]]:
    """Room → the rooms that it may import, from the table in docs/architecture.md.

    The last column says ``nothing``, ``rows above``, or names rooms; ``as the row above`` adds those of the row before.
    """
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    allowed: dict[str, frozenset[str]] = {}
    before, previous = frozenset[str](), ""
    for room, column in re.findall(r"^\| `([\w/]+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE):
        named = frozenset(re.findall(r"`([\w/]+)`", column))
        if column == "rows above":
            named = frozenset(allowed)
        elif column.startswith("as the row above"):
            named |= before | {previous}
        else:
            assert named or column == "nothing", column
        allowed[room], before, previous = named, named, room
    return allowed


MAY_IMPORT = rows()

PATHS: dict[str, Path] = {
    ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__"): path
    for folder, package in PACKAGES.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def room_of(module: str) -> str:
    """The nearest folder, or module at the root of ``graphc``, that has a row; else the folder itself."""
    path = PATHS[module].relative_to(ROOT)
    folder = path.with_suffix("") if path.parent == Path("graphc") else path.parent
    return next((p.as_posix() for p in (folder, *folder.parents) if p.as_posix() in MAY_IMPORT), folder.as_posix())


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """The modules of this repository that a file imports, each with its line."""
    tree = tree_of(path)
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module in PATHS:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name if name in PATHS else str(node.module), node.lineno) for name in inner)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in PATHS)


@functools.cache
def edges() -> list[tuple[str, str, str]]:
    """(module, imported module, file and line)."""
    return [
        (module, target, f"{path.relative_to(ROOT)}:{line}")
        for module, path in PATHS.items()
        for target, line in imports(path)
        if target != module
    ]


@pytest.mark.full
def test_a_room_imports_what_its_row_allows() -> None:
    wrong = [
        f"{where}: {room_of(module)} imports {target}, which its row in docs/architecture.md does not allow"
        for module, target, where in edges()
        if not {room_of(module), room_of(target)} & set(FACE)
        and room_of(target) not in {room_of(module)} | MAY_IMPORT[room_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("level", ["folders", "modules"])
def test_nothing_imports_itself_in_a_circle(level: str) -> None:
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, target, where in edges():
        pair = (module, target) if level == "modules" else (folder_of(module), folder_of(target))
        if pair[0] != pair[1]:
            places[pair].append(where)
    found = list(circles(places))
    assert not found, "\n".join(found)


def folder_of(module: str) -> str:
    """The folder of a module; modules at the root of ``graphc`` stand alone."""
    path = PATHS[module].relative_to(ROOT)
    return path.as_posix() if path.parent == Path("graphc") else path.parent.as_posix()


def circles(places: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[str]:
    """One line for each import that is part of a circle."""
    for part in nx.strongly_connected_components(nx.DiGraph(list(places))):
        for (a, b), where in places.items():
            if a != b and {a, b} <= part:
                yield f"{where[0]}: {a} imports {b}, which leads back to it"


SAME_NAME: dict[str, str] = {}
"""Public class names that may be defined twice, each with the reason."""


@pytest.mark.full
def test_a_public_class_name_is_defined_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in PATHS.values():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: places for name, places in found.items() if len(places) > 1 and name not in SAME_NAME}
    assert not twice
    assert len(SAME_NAME) <= 5


def test_the_wheel_has_every_package() -> None:
    """A folder that pyproject.toml does not list is missing for whoever installs graphc."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    places = {"graphc": "graphc", "passes": "graphc.passes", "backends": "graphc.backends"}
    found = {
        ".".join((package, *file.parent.relative_to(ROOT / folder).parts))
        for folder, package in places.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert found == listed
