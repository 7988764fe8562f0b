"""Damaged, forged and hostile data files end in an error that names the file or the array."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graphc import frontends
from graphc.data import files, shard
from graphc.errors import DataError, FeedError, ModelError


def archive(content: bytes, name: str = "x.npy", compression: int = zipfile.ZIP_STORED) -> bytes:
    """An .npz file with one member."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        file.writestr(name, content)
    return out.getvalue()


def array_file(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


GOOD = array_file(np.arange(6.0))


def encrypted() -> bytes:
    data = bytearray(archive(GOOD))
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.index(signature) + place
        data[at : at + 2] = struct.pack("<H", 1)
    return bytes(data)


def unknown_compression() -> bytes:
    data = bytearray(archive(GOOD))
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.index(signature) + place
        data[at : at + 2] = struct.pack("<H", 97)
    return bytes(data)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        archive(GOOD)[:60],
        archive(GOOD[:50]),
        archive(GOOD.replace(b"(6,)", b"(6,6")),
        archive(GOOD.replace(b"(6,), ", b"(-6,),")),
        archive(GOOD.replace(b"<f8", b"|O8")),
        archive(GOOD.replace(b"'descr'", b"'d\x00scr'")),
        archive(GOOD.replace(b"(6,), ", b"(9**9)")),
        archive(b"not an array"),
        archive(b""),
        encrypted(),
        unknown_compression(),
    ],
    ids=range(13),  # an archive holds the time of its writing
)
def test_a_damaged_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(FeedError, match=r"data\.npz"):
        files.open_arrays(tmp_path / "data.npz")


def test_a_large_member_whose_header_lies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large members are mapped, not read, so their checksum is not compared."""
    monkeypatch.setattr(files, "MAPPED_FROM", 1)
    forged = GOOD.replace(b"(6,), ", b"(60,),")
    (tmp_path / "data.npz").write_bytes(archive(forged))
    with pytest.raises(FeedError, match=r"array 'x' of .*data.npz is damaged: its shape \[60\] of float64 does not fit"):
        files.open_arrays(tmp_path / "data.npz")
    for content in (b"\x93NUMPY\x01\x00\xff\xff", GOOD.replace(b"{", b"\x00")):
        (tmp_path / "data.npz").write_bytes(archive(content))
        with pytest.raises(FeedError, match=r"'x' of .*is damaged"):
            files.open_arrays(tmp_path / "data.npz")


@pytest.mark.parametrize("content", [b"", GOOD[:40], GOOD[:-1], GOOD.replace(b"(6,), ", b"(9**9)"), b"\x80\x04pickle"])
def test_a_damaged_array_in_a_folder_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(FeedError, match="array 'x' of"):
        files.open_arrays(tmp_path)


def test_an_archive_under_the_name_of_an_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(archive(GOOD))
    with pytest.raises(FeedError, match=r"rename it to x\.npz"):
        files.open_arrays(tmp_path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, device])
def test_pipes_and_devices_are_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe that nobody writes to would wait for ever, and /dev/zero never ends."""
    for name in ("data.npz", "x.npy", "model.onnx"):
        make(tmp_path / name)
    with pytest.raises(FeedError, match="it is no regular file"):
        files.open_arrays(tmp_path / "data.npz")
    with pytest.raises(FeedError, match=r"array 'x' of .* it is no regular file"):
        files.open_arrays(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read .*model.onnx: it is no regular file"):
        frontends.load(tmp_path / "model.onnx")


def test_a_name_with_a_nul_character() -> None:
    with pytest.raises(FeedError, match="cannot read"):
        files.open_arrays("a\0b.npz")
    with pytest.raises(ModelError, match="cannot read"):
        frontends.load("a\0b.onnx")


@pytest.mark.parametrize("kind", ["folder", "archive", "view"])
def test_a_file_that_becomes_shorter_while_it_is_read_is_named(kind: str, tmp_path: Path) -> None:
    """Reading the pages that it lost would kill the process with SIGBUS."""
    array = np.zeros((3000, 1000))  # large enough to be mapped from an archive
    path = tmp_path / "x.npy" if kind != "archive" else tmp_path / "d.npz"
    np.save(path, array) if kind != "archive" else np.savez(path, x=array)
    source = {"x": np.load(path, mmap_mode="r")[100:]} if kind == "view" else path if kind == "archive" else tmp_path
    batches = iter(shard(source, global_batch=10, shuffle=False))
    next(batches)
    os.truncate(path, 200_000)
    with pytest.raises(
        DataError, match=r"\.np[yz] became shorter while it was read: it has 200,000 bytes, and its array ends at"
    ):
        next(batches)
