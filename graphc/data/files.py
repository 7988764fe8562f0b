"""Memory-maps arrays in files, so that a machine's workers share one page-cache copy."""

from __future__ import annotations

import io
import lzma
import math
import mmap
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphc.atomic_files import open_regular
from graphc.device import Array
from graphc.errors import DataError, FeedError, nearest

_DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, KeyError, SyntaxError, OverflowError, MemoryError, NotImplementedError),
    *(RuntimeError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
"""What numpy and zipfile raise on damaged, encrypted and forged files."""

MAPPED_FROM = 16 << 20
"""Minimum bytes at which an array of an ``.npz`` file is mapped. Smaller ones are read, which verifies their checksum."""


def open_arrays(path: str | Path | io.BytesIO) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file by name, or of a folder of ``.npy`` files by file stem.

    Arrays of ``.npy`` files, and large ones of an ``.npz`` file that ``numpy.savez`` wrote (uncompressed), stay on disk until
    their rows are read; they are read-only.

    Args:
        path: file or folder; or the bytes of a file, from standard input.

    Raises:
        FeedError: a missing or damaged file or folder, or an array of Python objects.
    """
    if isinstance(path, io.BytesIO):
        return _archive(path, "standard input")
    place = Path(path)
    try:
        if place.is_dir():
            return _folder(place)
        open_regular(place).close()
        return _archive(place, str(path))
    except FileNotFoundError:
        near = [p.name for p in place.parent.glob("*") if p.suffix == ".npz" or p.is_dir()] if place.parent.is_dir() else []
        raise FeedError(f"no such file: {path}{nearest(place.name, near)}") from None
    except (OSError, ValueError) as error:  # a name with a NUL character is a ValueError
        raise FeedError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _folder(folder: Path) -> dict[str, Array]:
    files = sorted(folder.glob("*.npy"))
    if not files:
        raise FeedError(
            f"the folder {folder} has no .npy file; save one array per input: numpy.save('{folder}/NAME.npy', array)"
        )
    found: dict[str, Array] = {}
    for file in files:
        try:
            open_regular(file).close()
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except _DAMAGE as error:
            raise _bad(file.stem, str(folder), error) from None
        if not isinstance(array, np.ndarray):
            raise FeedError(f"{file} is an .npz file under the name of an array; rename it to {file.stem}.npz")
        found[file.stem] = array
    return found


def _archive(file: Path | io.BytesIO, where: str) -> dict[str, Array]:
    if not zipfile.is_zipfile(file):
        raise FeedError(f"{where} is not an .npz file, or is damaged; write it with numpy.savez(file, name=array, …)")
    found: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(file) as archive, np.load(file, allow_pickle=False) as arrays:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                mapped = _map_member(file, entry, name, where) if isinstance(file, Path) else None
                found[name] = _member(arrays, name, where) if mapped is None else mapped
    except _DAMAGE as error:
        raise FeedError(f"cannot read {where}: {error or 'it is damaged'}") from None
    return found


def _member(arrays: Mapping[str, Array], name: str, where: str) -> Array:
    try:
        array = arrays[name]
    except _DAMAGE as error:
        raise _bad(name, where, error) from None
    if not isinstance(array, np.ndarray):
        raise FeedError(f"{name!r} of {where} is not a numpy array")
    return array


def _map_member(path: Path, entry: zipfile.ZipInfo, name: str, where: str) -> Array | None:
    """Map a large, uncompressed member of a zip archive, whose bytes are stored verbatim."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < MAPPED_FROM:
        return None
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        header = file.read(30)  # the member's header: a fixed part, its name and an extra field
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        start = file.tell()
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
            if read is None:
                return None
            shape, fortran, dtype = read(file)
            if dtype.hasobject:
                raise ValueError("objects")
            if file.tell() - start + math.prod(shape) * dtype.itemsize != entry.file_size:
                raise ValueError(f"its shape {list(shape)} of {dtype} does not fit the {entry.file_size} bytes that it has")
            return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
        except _DAMAGE as error:
            raise _bad(name, where, error) from None


def _bad(name: str, where: str, error: Exception) -> FeedError:
    if "pickle" in str(error) or "object" in str(error).lower():
        return FeedError(f"array {name!r} of {where} holds Python objects; store numbers of one type")
    return FeedError(f"array {name!r} of {where} is damaged: {error}")


@dataclass(frozen=True)
class MappedFile:
    """A file that is mapped into memory: touching what it no longer holds would kill the process (SIGBUS)."""

    name: str
    map: mmap.mmap
    size: int

    def check(self) -> None:
        """Raise DataError if the file has become shorter than what is mapped."""
        now = self.map.size()
        if now < self.size:
            raise DataError(
                f"{self.name} became shorter while it was read: it has {now:,} bytes, and its array ends at {self.size:,}; "
                "write new data to another file and rename that"
            )


def mapped_file(array: Array) -> MappedFile | None:
    """The file that an array, or what it is a view of, maps; None if it lies in memory."""
    owner: Any = array
    base: Any = getattr(owner, "base", None)
    while base is not None and not isinstance(base, mmap.mmap):
        owner, base = base, getattr(base, "base", None)
    if base is None or not isinstance(owner, np.memmap):
        return None
    start = owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
    return MappedFile(str(owner.filename), base, start + len(base))
