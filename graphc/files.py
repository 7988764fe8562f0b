"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_UNNAMED_IMPOSSIBLE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path``, complete and on the disk, when the block ends without an error.

    Where the file system can do it, the data has no name until it is complete: a process that is killed meanwhile leaves
    nothing behind.

    Raises:
        OSError: the file cannot be written; ``path`` is as it was, and nothing else is left in its folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with _open_unnamed(path.parent) or open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not temporary.exists():
                _give_name(file.fileno(), temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _open_unnamed(folder: Path) -> IO[bytes] | None:
    """A file without a name in ``folder``, or None where such files, or their naming, are not supported."""
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
