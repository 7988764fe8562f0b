"""The cache folder belongs to one user: what others could have written into it never runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from graphc import cache_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache_folder._checked.cache_clear()
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_a_new_folder_is_closed_to_others(folder: Path) -> None:
    assert cache_folder.cache_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_can_read_is_closed(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    assert cache_folder.cache_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_can_write_to_is_refused_and_a_fresh_one_taken(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"is not used: others may write to it \(mode 777; chmod 700"):
        instead = cache_folder.cache_folder()
    assert instead != folder
    assert stat.S_IMODE(instead.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_folder.cache_folder() == instead  # said once


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)
    with pytest.warns(RuntimeWarning, match="it belongs to the user 12345, not to 0"):
        assert cache_folder.cache_folder() != folder


def test_a_place_that_cannot_be_made_ends_in_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder._checked.cache_clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="is not used: Not a directory"):
        assert cache_folder.cache_folder().is_dir()


def test_onnxruntime_reports_no_usage_unless_the_user_wants_it() -> None:
    for given, found in (({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")):
        environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"} | given
        code = "import graphc, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == found
