"""Test modules do not import one another: what two of them share lies in a module that is no test, ``*_cases.py`` mostly."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def imported(path: Path) -> set[str]:
    """Every module, and every name of a module, that the file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.full
def test_no_module_imports_a_test_module() -> None:
    names = {path.stem: path for path in TESTS.rglob("test_*.py")}
    wrong = [
        f"{path.relative_to(TESTS)} imports {module}"
        for path in sorted(TESTS.rglob("*.py"))
        for module in sorted(imported(path))
        if module.startswith("tests.") and set(module.split(".")) & names.keys()
    ]
    assert not wrong, "\n".join(wrong)
