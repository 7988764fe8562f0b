"""Temporary folders of a launcher, which the next launcher removes if this one is killed.

A launcher holds a lock (flock) on each of its folders. The kernel releases it with the process, however that ends, so a folder
without a lock belongs to nobody any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "graphc-job-"


@contextlib.contextmanager
def job_folder(place: Path | None = None) -> Iterator[Path]:
    """A folder of mode 0700 in ``place`` (None: the temporary directory), until the block ends.

    Folders that killed launchers of this user left there are removed first.
    """
    parent = Path(tempfile.gettempdir()) if place is None else place
    _remove_abandoned(parent)
    descriptor, folder = _locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked(parent: Path) -> tuple[int, Path]:
    """Make a folder and lock it; another launcher may have removed it in between."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks; no launcher removes anything there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, folder):
                return descriptor, folder
            os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, folder):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _is_at(descriptor: int, folder: Path) -> bool:
    """Whether the folder of ``descriptor`` still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except FileNotFoundError:
        return False
