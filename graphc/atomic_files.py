"""Writes files that appear whole or not at all; opens regular files only."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

_UNNAMED_IMPOSSIBLE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path``, complete and on the disk, when the block ends without an error.

    Where the file system allows it, the data has no name until it is complete: a killed process leaves nothing behind. A
    symbolic link stays one: its target is replaced. The new file has the permissions of the old one. A device or a pipe is
    written to directly, since replacing it by a file would lose it.

    Raises:
        OSError: the file cannot be written; ``path`` is as it was, and nothing else is left in its folder.
    """
    path, mode = _target(path)
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            yield file
        return
    temporary = _temporary(path)
    try:
        with _open_unnamed(path.parent) or open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not temporary.exists():
                _give_name(file.fileno(), temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading; a pipe, which might never end, or a device is refused.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
        raise OSError(errno.EINVAL, "it is no regular file; copy what it holds into one", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str]) -> str:
    """The text of a file, as :func:`open_regular` opens it.

    Raises:
        OSError: it cannot be read, or is no regular file.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        return file.read().decode()


def replace_regular(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Move ``source`` to ``path`` as :func:`os.replace` does, but never in the place of a link, a device or a pipe.

    Raises:
        OSError: what is there is no regular file; ``source`` stays.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "a link, device or pipe is there, which is not replaced", str(path))
    os.replace(source, path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that :func:`whole_file` could start to write ``path``; leaves nothing behind.

    Raises:
        OSError: it is a folder, it or its folder may not be written to, or there is no such folder.
    """
    path, mode = _target(path)
    if mode is not None and not stat.S_ISREG(mode):
        return
    temporary = _temporary(path)
    try:
        with _open_unnamed(path.parent) or open(temporary, "xb"):
            pass
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _target(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Follow symbolic links; returns the target and the mode of what exists there, or None.

    Raises:
        OSError: a folder, or a file that its owner has protected from being written to.
    """
    found = Path(os.path.realpath(path))
    try:
        mode = found.stat().st_mode
    except FileNotFoundError:
        return found, None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
    if not os.access(found, os.W_OK):
        raise PermissionError(errno.EACCES, "it is there already, and may not be written to", str(path))
    return found, mode


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _open_unnamed(folder: Path) -> IO[bytes] | None:
    """A file without a name in ``folder``, or None where the file system supports none."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError as error:
        if error.errno in _UNNAMED_IMPOSSIBLE:
            return None
        raise


def _give_name(descriptor: int, path: Path) -> None:
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
