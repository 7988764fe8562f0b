"""Help, tables and streams: what a person sees on any terminal, in any locale."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings

import pytest

from graphc.cli import COMMANDS, main
from graphc.cli.terminal import output, streams
from tests.cli.models import cli
from tests.tiers import params

LISTS = (["passes"], ["backends"], ["ops"], ["passes", "legalize"], ["ops", "Conv"])
HELP = [[name] for name in COMMANDS if name != "show"] + [["show", "plan"], ["show", "flight"]]


def test_without_arguments_the_help_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    help_, _ = capfd.readouterr()
    for arguments in ([], ["-h"]):
        assert main(arguments) == 0
        assert capfd.readouterr() == (help_, "")
    assert main(["show"]) == 0
    shown = capfd.readouterr()
    assert "flight" in shown.out
    assert shown.err == ""


def test_the_version_has_a_short_option(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-V"]) == 0
    assert re.fullmatch(r"graphc \d+\.\d+\.\d+\n", capfd.readouterr().out)


@pytest.mark.full
def test_a_shell_completes_commands_and_options() -> None:
    for words, wanted in (("graphc tr", "train"), ("graphc train --bat", "--batch-size")):
        asked = {"_GRAPHC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        assert wanted in cli(**asked).stdout.decode().split()


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_is_plain_and_ends_with_examples(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "-h"]) == 0
    text = capfd.readouterr().out
    _, _, examples = text.partition("\nExamples:\n")
    assert f"  graphc {' '.join(command)}" in examples or f"  graphc {command[0]} training.onnx" in examples
    assert "`" not in text
    assert "range>" not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("columns", params([40, 60, 80, 100, 140, None], full=[60, 100, 140]))
@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_tables_fit_and_keep_names(
    command: list[str], columns: int | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of a terminal is longer than it, but for a single word; every name is whole, in a pipe in a line of its own."""
    assert main([*command, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    rows = [*found["onnx"], *found["graphc"]] if isinstance(found, dict) and "onnx" in found else found
    names = [row["name"] for row in (rows if isinstance(rows, list) else [rows])]
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv(output.TERMINALS, "stdout")
        monkeypatch.setenv("NO_COLOR", "1")
    assert main(command) == 0
    text = capfd.readouterr().out
    assert "`" not in text
    assert not re.search(r":\w+:", text.replace("::", ""))
    first = {line.split()[0].split(".")[-1] for line in text.splitlines() if line and not line.startswith("  ")}
    words = set(re.findall(r"[\w.-]+", text))
    assert all(name in words or name in first for name in names)
    if columns is not None:
        long = [line for line in text.splitlines() if len(line) > columns]
        assert not [line for line in long if len(line.split(maxsplit=2)) > 2 and len(line) > columns + 20], long


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_every_text_can_be_written_in_ascii(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for form in ("text", "json"):
        written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", written)
        assert main([*command, "--format", form]) == 0
        text = written.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
        if form == "json":
            json.loads(text)


@pytest.mark.full
def test_a_process_writes_ascii_where_it_must() -> None:
    done = cli("passes", "bucket", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.stdout.isascii()
    assert done.stderr == b""


def test_signs_that_an_encoding_lacks_are_written_in_another_way() -> None:
    streams.open_standard_streams()
    text = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors=streams.HANDLER)
    text.write("rank ≥ 1 → é … 语")
    text.flush()
    assert text.buffer.getvalue().decode("latin-1") == r"rank >= 1 -> é ... \u8bed"  # type: ignore[attr-defined]


def test_markup_of_docstrings_is_no_text() -> None:
    text = "Shard ``n`` of :func:`~graphc.compile` into ``graphc.Mesh`` and `y`; see :class:`Trainer <graphc.Trainer>`."
    assert output.plain(text) == "Shard 'n' of graphc.compile into graphc.Mesh and 'y'; see graphc.Trainer."


def test_an_option_given_twice_is_mentioned(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "--format", "text", "--format=json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)
    assert err == "graphc: --format is given more than once; the last one counts\n"


@pytest.mark.parametrize("unwanted", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_colours_where_they_are_not_wanted(
    unwanted: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(output.TERMINALS, "stdout")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["passes"]) == 0
    assert "\x1b[1m" in capfd.readouterr().out
    for name, value in unwanted.items():
        monkeypatch.setenv(name, value)
    assert main(["passes"]) == 0
    assert "\x1b" not in capfd.readouterr().out


def test_a_warning_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphc.cli.passes._described", lambda row: warnings.warn("look\nhere", RuntimeWarning, stacklevel=1))
    assert main(["passes"]) == 0
    assert set(capfd.readouterr().err.splitlines()) == {"graphc: warning: look here"}
