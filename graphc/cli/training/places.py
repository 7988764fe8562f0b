"""Checks before a run that outputs can be written and replace no input."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from graphc.atomic_files import check_writable
from graphc.errors import ModelError, UsageError


def check_place(option: str, place: str | None, reads: Mapping[str, str | None]) -> None:
    """Check before a run that an output can be written.

    Args:
        option: the command-line option, for messages.
        place: its value, a file; None and ``"-"``: no file.
        reads: description of an input → its file, which must not be overwritten.

    Raises:
        UsageError: an empty name, or the name of an input file.
        ModelError: the folder is missing, the name is a folder, or it cannot be written.
    """
    if place is None or place == "-":
        return
    check_named(option, place)
    for what, path in reads.items():
        if path and path != "-" and os.path.realpath(path) == os.path.realpath(place):
            raise UsageError(f"{option} {place} would overwrite {what}; name another file")
    folder = Path(place).absolute().parent
    if not folder.is_dir():
        raise ModelError(f"{option} {place}: there is no folder {folder}")
    try:
        check_writable(place)
    except IsADirectoryError:
        raise ModelError(f"{option} {place} is a folder; name a file in it") from None
    except OSError as error:
        raise ModelError(f"{option} {place} cannot be written: {error.strerror or error}") from None


def check_checkpoint(option: str, place: str) -> None:
    """Check that checkpoints can be written to a folder, which may not exist yet.

    Raises:
        UsageError: an empty name.
        ModelError: the name is a file, its parent folder is missing, or it cannot be written.
    """
    check_named(option, place)
    folder = Path(place).absolute()
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{option} {place} is a file; name a folder")
    nearest_folder = folder if folder.is_dir() else folder.parent
    if not nearest_folder.is_dir():
        raise ModelError(f"{option} {place}: there is no folder {nearest_folder}")
    try:
        check_writable(nearest_folder / "state.safetensors")
    except OSError as error:
        raise ModelError(f"{option} {place} cannot be written: {error.strerror or error}") from None


def check_named(option: str, place: str | None) -> None:
    """Refuse an empty name: a shell expands an unset variable to it, and it would mean the working directory.

    Raises:
        UsageError: the name is empty.
    """
    if place is not None and not place.strip():
        raise UsageError(f"{option} has an empty name")
