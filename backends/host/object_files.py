"""Files of compiled code, each behind its digest.

Those of the cache folder that no start has read for :data:`UNUSED` are removed: other versions, other models, other processors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from pathlib import Path

from graphc.cache_folder import cache_folder

DAY = 86400.0
"""Seconds between two notes that a file was read."""

UNUSED = 90 * DAY
"""Seconds after which a file that no start has read is removed."""


def read_object(path: Path) -> bytes | None:
    """What :func:`write_object` wrote; None where there is no file, or a damaged one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_object(path: Path, code: bytes) -> None:
    """Write a file whole or not at all; without room on the disk its code is made again next time."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_bytes(hashlib.sha256(code).digest() + code)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)


def read_cached(name: str) -> bytes | None:
    """:func:`read_object` in the cache folder; notes in the time of the file's last change, once a day, that it was read."""
    path = _folder() / name
    code = read_object(path)
    if code is not None:
        with contextlib.suppress(OSError):  # another process may have removed it, or the folder may only be read
            if time.time() - path.stat().st_mtime > DAY:
                os.utime(path)
    return code


def write_cached(name: str, code: bytes) -> None:
    """:func:`write_object` in the cache folder; the first of a process removes files that are not read any more."""
    write_object(_folder() / name, code)
    _remove_unused(_folder())


def _folder() -> Path:
    return cache_folder() / "host"


@functools.cache
def _remove_unused(folder: Path) -> None:
    limit = time.time() - UNUSED
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < limit:
                    os.unlink(entry.path)
