"""Registries: who wins, what is refused, and that a test can undo what it registers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from graphc.errors import UsageError
from graphc.registry import Registry


def things(**items: int) -> Registry[int]:
    found: Registry[int] = Registry("thing", "graphc.tests.none")
    for name, item in items.items():
        found.register(name, item, origin="built-in")
    return found


def test_an_override_stands_whichever_module_comes_first() -> None:
    first, second = things(a=1), things()
    first.register("a", 2, origin="mine", override=True)
    second.register("a", 2, origin="mine", override=True)
    second.register("a", 1, origin="built-in")
    assert (first["a"], second["a"]) == (2, 2)


def test_two_modules_cannot_register_one_name() -> None:
    with pytest.raises(UsageError, match=r"'b' is registered twice: by built-in and by mine"):
        things(b=1).register("b", 1, origin="mine")


def test_whatever_the_body_registers_or_removes_is_undone() -> None:
    table = things(a=1, b=2)
    with contextlib.suppress(ZeroDivisionError), table.restored():
        table.register("a", 3, origin="mine", override=True)
        table.register("c", 4, origin="mine")
        table.remove("b")
        assert (dict(table), table.origin("a")) == ({"a": 3, "c": 4}, "mine")
        with pytest.raises(UsageError, match="unknown thing 'b'"):
            table["b"]
        raise ZeroDivisionError
    assert dict(table) == {"a": 1, "b": 2}
    assert table.origin("a") == "built-in"
    table.register("b", 5, origin="built-in")
    with pytest.raises(UsageError, match="registered twice"):  # nothing is remembered of the override
        table.register("a", 6, origin="other")


LATE: Registry[int] = Registry("thing", "graphc.tests.late")


def test_modules_that_are_imported_inside_the_body_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module registers only when it is imported first; what it has registered must not be undone."""
    (tmp_path / "late_things.py").write_text("from tests.test_registry import LATE\nLATE.register('a', 1, origin=__name__)\n")
    info = tmp_path / "late-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[graphc.tests.late]\nlate = late_things\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with LATE.restored():
        assert "a" in LATE
    assert "a" in LATE
