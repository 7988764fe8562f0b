"""Registries: who wins, what is refused, and that a test can undo what it registers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphc.errors import UsageError
from graphc.registry import PluginWarning, Registry
from tests.cli.models import write_blobs, write_mlp


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


def plugin(folder: Path, group: str, name: str, text: str) -> None:
    """A package ``NAME-plugin`` on the import path with one entry point."""
    (folder / f"{name}_module.py").write_text(text)
    info = folder / f"{name}_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}_module\n")


def test_a_broken_plugin_is_named_once_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others load; what the broken one registered before it failed is taken back, and asking for it says why."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("graphc.registry.BROKEN", {})
    table = things(a=1)
    table.group = "graphc.tests.broken"
    monkeypatch.setattr("tests.test_registry.BROKEN_TABLE", table)
    register = "from tests.test_registry import BROKEN_TABLE as table\n"
    plugin(tmp_path, table.group, "bad", f"{register}table.register('a', 7, origin=__name__, override=True)\nimport nowhere")
    plugin(tmp_path, table.group, "ends", f"{register}table.register('c', 7, origin=__name__)\nraise SystemExit('no licence')")
    plugin(tmp_path, table.group, "good", f"{register}table.register('g', 3, origin=__name__)")
    with pytest.warns(PluginWarning) as seen:
        assert dict(table) == {"a": 1, "g": 3}
    assert [str(w.message).partition(" cannot")[0] for w in seen] == [
        "plugin 'bad' of package bad-plugin 1.0",
        "plugin 'ends' of package ends-plugin 1.0",
    ]
    assert "ModuleNotFoundError: No module named 'nowhere'" in str(seen[0].message)
    with pytest.raises(UsageError, match=r"thing 'bad' cannot be used: plugin 'bad' of package bad-plugin 1.0"):
        table["bad"]
    with pytest.raises(UsageError, match=r"unknown thing 'zzz'; the things are a, g; left out: plugin 'bad'"):
        table["zzz"]


BROKEN_TABLE: Registry[int] = Registry("thing", "graphc.tests.broken")


GROUPS = ("ops", "passes", "gradients", "optimizers", "backends")


@pytest.mark.full
def test_commands_work_beside_broken_plugins(tmp_path: Path) -> None:
    """One package, broken in every group: each plugin is named once on standard error, and the commands do their work."""
    for group in GROUPS:
        plugin(tmp_path, f"graphc.{group}", f"bad_{group}", "raise RuntimeError('too old')")
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    loss = ["--loss", "softmax_cross_entropy", "--optimizer", "sgd:lr=0.1"]
    code = (
        "import sys; from graphc.cli import main\n"
        f"assert main(['check', 'mlp.onnx']) == 0 and main(['passes']) == 0 and main(['backends']) == 0\n"
        f"assert main(['train', 'mlp.onnx', '--data', 'd.npz', *{loss}, '-n', '2', '--transport', 'threads']) == 0\n"
        f"assert main(['compile', 'mlp.onnx', '-o', 't.onnx', *{loss}, '--strategy', 'bad_passes']) == 2\n"
        "assert main(['opt', 'mlp.onnx', '-p', 'bad_passes']) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("graphc: warning: ")]
    assert sorted(re.findall(r"plugin '(\w+)'", " ".join(warned))) == sorted(f"bad_{group}" for group in GROUPS)
    assert all("RuntimeError: too old" in line for line in warned)
    assert "pass 'bad_passes' cannot be used: plugin 'bad_passes' of package bad_passes-plugin 1.0" in done.stderr
    assert "Traceback" not in done.stderr


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
