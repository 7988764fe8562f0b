"""Compiled code in the cache folder: damaged files count as missing, and those that no start reads any more go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from graphc import cache_folder
from graphc.backends.host import object_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "host"


def _age(path: Path, days: float) -> None:
    then = time.time() - days * object_files.DAY
    os.utime(path, (then, then))


def test_a_file_is_read_as_it_was_written_and_a_damaged_one_counts_as_missing(folder: Path) -> None:
    assert object_files.read_cached("k.o") is None
    object_files.write_cached("k.o", b"code")
    assert object_files.read_cached("k.o") == b"code"
    (folder / "k.o").write_bytes((folder / "k.o").read_bytes()[:-1])
    assert object_files.read_cached("k.o") is None


def test_files_that_no_start_has_read_for_long_are_removed_by_the_next_one_that_compiles(folder: Path) -> None:
    for name in ("read.o", "unread.o", "younger.o"):
        object_files.write_object(folder / name, b"code")
    _age(folder / "read.o", 100)
    _age(folder / "unread.o", 100)
    _age(folder / "younger.o", 80)
    outside = folder.parent / "job-key"
    outside.write_text("kept")
    _age(outside, 100)
    assert object_files.read_cached("read.o") == b"code"
    object_files.write_cached("new.json", b"segment")
    assert sorted(path.name for path in folder.iterdir()) == ["new.json", "read.o", "younger.o"]
    assert outside.exists()
