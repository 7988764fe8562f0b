"""No output option replaces a device, a pipe or a link; no input option reads from a pipe or a device without end.

The options are found on the command line itself: a new one that takes a file must be added to a table here.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from typer.main import get_command

from graphc import cli
from graphc.cli import main
from tests.fuzz.child import attempt

LOSS = ["--loss", "mse:label=t", "--optimizer", "sgd:lr=0.1"]
TRAIN = ["train", "m.onnx", *LOSS, "--data", "d.npz", "--batch-size", "2", "-n", "1"]

PLAN = ["plan", "m.onnx", *LOSS, "--devices", "2", "--memory", "1GB", "--network", "n.toml", "--batch-size", "8"]

WRITES: dict[tuple[str, str], tuple[list[str], str]] = {
    ("compile", "--output"): (["compile", "m.onnx", *LOSS], ""),
    ("compile", "--dump-dir"): (["compile", "m.onnx", *LOSS, "-o", "c.onnx"], "00-legalize.onnx"),
    ("opt", "--output"): (["opt", "m.onnx", "-p", "legalize"], ""),
    ("opt", "--dump-dir"): (["opt", "m.onnx", "-p", "legalize"], "00-legalize.onnx"),
    ("train", "--output"): (TRAIN, ""),
    ("train", "--trace"): (TRAIN, ""),
    ("train", "--checkpoint"): (TRAIN, "state.safetensors"),
    ("plan", "--output"): (PLAN, ""),
    ("plan", "--trace"): ([*PLAN, "--simulate", "2"], ""),
    ("run", "--output"): (["run", "m.onnx", "--inputs", "x.npz"], ""),
}
"""(command, option) → the words besides, and, of an option that names a folder, the file in it."""

AS_TRAIN = {("demo", "--output"), ("bench", "--output")}
"""Slow commands that write as ``train`` and ``run`` do: by a training job, and by :func:`graphc.atomic_files.whole_file`."""

READS: dict[tuple[str, str], list[str]] = {
    **{(command, "model"): [command] for command in ("check", "inspect")},
    ("compile", "model"): ["compile", *LOSS, "-o", "c.onnx"],
    ("opt", "model"): ["opt", "-p", "legalize"],
    ("train", "model"): ["train", *LOSS, "--data", "d.npz", "--batch-size", "2"],
    ("run", "model"): ["run", "--inputs", "x.npz"],
    ("show plan", "model"): ["show", "plan"],
    ("train", "--data"): ["train", "m.onnx", *LOSS, "--batch-size", "2"],
    ("train", "--eval-data"): TRAIN,
    ("train", "--resume"): TRAIN,
    ("run", "--inputs"): ["run", "m.onnx"],
    ("show flight", "dumps"): ["show", "flight"],
    ("check", "--input"): ["check", "m.onnx"],
    ("train", "--config"): ["train", "m.onnx", *LOSS, "--data", "d.npz"],
    ("plan", "model"): ["plan", *LOSS, "--devices", "2", "--memory", "1GB", "--network", "n.toml", "--batch-size", "8"],
    ("plan", "--profile"): PLAN,  # what exists is read, and only what does not is written
    ("bench", "--profile"): ["bench", "--predict", "m.onnx"],
    ("plan", "--network"): ["plan", "m.onnx", *LOSS, "--devices", "2", "--memory", "1GB", "--batch-size", "8"],
}
"""(command, option or argument) → the words besides."""

NO_READING = {(command, "--external-data") for command in ("check", "inspect", "compile", "opt", "train", "run", "show plan")}
"""Folders to look in: what is read there is tested in tests/frontends/test_external_data.py."""
AS_CHECK = {("compile", "--input"), ("train", "--input"), ("bench", "models"), ("launch", "script")}
"""The same code as an option above; names of benchmarks; a program, which Python opens."""

NO_FILES = (
    *("N", "K", "S", "B0", "SECONDS", "LOSS", "OPTIMIZER", "GLOB", "N|SYMBOL", "NAME=N,…", "NAME=AXIS", "MODE", "METHOD"),
    *("TYPE", "STRATEGY", "AXES", "NAME", "LIST", "PIPELINE", "PASS", "HOW", "TAIL", "NAME=FACTOR", "WHAT", "GLOB=AXIS"),
    *("GLOB=DEVICE", "SIZE", None),
)
"""What stands for values that are no files, in the help."""


def options() -> Iterator[tuple[str, str, Any]]:
    """(command, option or argument, its metavar) of everything on the command line that takes a value."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*path, name))
        if not hasattr(command, "commands"):
            for parameter in command.params:
                if not getattr(parameter, "is_flag", False):
                    yield " ".join(path), parameter.opts[-1], parameter.metavar

    yield from walk(get_command(cli._app()), ())


def test_every_option_that_takes_a_file_is_listed_here() -> None:
    files = {(command, option) for command, option, metavar in options() if metavar not in NO_FILES}
    listed = {*WRITES, *AS_TRAIN, *READS, *NO_READING, *AS_CHECK}
    assert files <= listed, f"list these, or the metavars of new options: {sorted(files - listed)}"
    known = {(command, option) for command, option, _ in options()}
    assert listed <= known, f"these are gone: {sorted(listed - known)}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> net (float[n, 3] x) => (float[n, 2] y) { y = MatMul (x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 2), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((4, 3), np.float32))
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3), np.float32), t=np.zeros((4, 2), np.float32))
    (tmp_path / "n.toml").write_text("[inside]\ngigabytes_per_second = 10\nlatency_us = 20\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "which", [pytest.param(w, marks=pytest.mark.full if w[0] == "plan" else ()) for w in WRITES], ids=" ".join
)
def test_an_output_replaces_no_pipe_no_device_and_no_link(which: tuple[str, str], place: Path) -> None:
    words, inside = WRITES[which]
    folder = place / "out"
    folder.mkdir()
    target = folder / (inside or "file")
    words = [*words, which[1], str(folder if inside else target)]

    pipe = os.open(_fifo(target), os.O_RDWR)  # a reader, so that writing does not wait for one
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
    assert main(words) in (0, 1)
    assert stat.S_ISFIFO(target.lstat().st_mode)
    os.close(pipe)

    target.unlink()
    target.symlink_to("/dev/null")
    assert main(words) in (0, 1)
    assert os.readlink(target) == "/dev/null"
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)

    target.unlink()
    other = place / "elsewhere"
    other.write_bytes(b"before")
    target.symlink_to(other)
    assert main(words) == 0
    assert target.is_symlink()
    assert other.read_bytes() != b"before"
    assert not [entry.name for entry in folder.iterdir() if entry.name.endswith(".tmp")]


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.full
@pytest.mark.parametrize("which", READS, ids=" ".join)
def test_an_input_that_is_a_pipe_or_a_device_is_refused(which: tuple[str, str], place: Path) -> None:
    os.mkfifo(place / "fifo.npy")
    for name in ("fifo.npy", "/dev/zero"):
        given = f"x={name}" if which[1] == "--input" else name
        words = [*READS[which], given] if not which[1].startswith("-") else [*READS[which], which[1], given]

        def work(words: list[str] = words) -> None:
            os.environ["GRAPHC_DEBUG"] = "1"
            main(words)

        found = attempt(work, seconds=20, megabytes=1024)
        assert found.ending == "refused", (words, found)
