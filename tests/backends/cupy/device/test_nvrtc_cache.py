"""Compiled kernels are kept on disk and found again, whatever the disk does."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import pytest

from graphc.backends.cupy.device import nvrtc_cache
from graphc.backends.cupy.device.nvrtc_cache import Cubins, architecture, folder_name
from graphc.errors import GraphcError


def test_a_kernel_is_compiled_once_and_then_read(tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile(name: str, text: str) -> bytes:
        compiled.append(name)
        return text.upper().encode()

    texts = {"a": "one", "b": "two"}
    for _ in range(2):  # the second process finds what the first has left
        assert Cubins(tmp_path / "kernels", compile).of(texts) == {"a": b"ONE", "b": b"TWO"}
    assert sorted(compiled) == ["a", "b"]
    (tmp_path / "kernels" / "b.cubin").write_bytes(b"")  # what a full disk leaves
    assert Cubins(tmp_path / "kernels", compile).of({**texts, "c": "three"}) == {"a": b"ONE", "b": b"TWO", "c": b"THREE"}
    assert sorted(compiled[2:]) == ["b", "c"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_kernels_are_compiled_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    together = threading.Barrier(2, timeout=30)

    def compile(name: str, text: str) -> bytes:
        together.wait()  # returns only while another thread compiles, too
        return b"x"

    assert len(Cubins(tmp_path, compile).of({"a": "", "b": ""})) == 2


def test_a_disk_that_refuses_costs_the_next_start_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    kernels = Cubins(tmp_path / "file" / "kernels", lambda name, text: b"compiled")
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert kernels.of({"a": ""}) == {"a": b"compiled"}


def test_a_text_that_does_not_compile_leaves_nothing_behind(tmp_path: Path) -> None:
    def compile(name: str, text: str) -> bytes:
        raise GraphcError("a generated kernel does not compile: line 3")

    with pytest.raises(GraphcError, match="line 3"):
        Cubins(tmp_path / "kernels", compile).of({"a": ""})
    assert not (tmp_path / "kernels").exists()


def test_architecture_version_and_options_keep_their_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {folder_name("sm_90", 13000), folder_name("sm_100", 13000), folder_name("sm_90", 13010)}
    monkeypatch.setattr(nvrtc_cache, "OPTIONS", (*nvrtc_cache.OPTIONS, "--use_fast_math"))
    assert len(names | {folder_name("sm_90", 13000)}) == 4


def test_a_gpu_gets_what_it_can_run() -> None:
    known = (75, 80, 86, 87, 88, 89, 90, 100, 103, 120, 121)
    assert [architecture(k, known) for k in (75, 89, 90, 120)] == ["sm_75", "sm_89", "sm_90", "sm_120"]
    assert architecture(89, (75, 80, 86, 90)) == "sm_86", "a program of the same generation"
    assert architecture(130, known) == "compute_121", "PTX, where the compiler is older than the GPU"
    assert architecture(100, (75, 80, 90)) == "compute_90"
    with pytest.raises(GraphcError, match=r"7\.0, the installed NVRTC compiles for 7\.5 .* cupy-cuda12x"):
        architecture(70, known)


def test_the_byte_that_cupy_drops_from_a_cubin_is_put_back() -> None:
    """The program headers are last in what NVRTC writes, and their last byte is 0."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<QQ", header, 32, 64 + 128, 64)  # program headers behind the section headers
    struct.pack_into("<HHHH", header, 54, 56, 1, 64, 2)
    whole = bytes(header) + b"s" * 128 + b"p" * 55 + b"\0"
    assert nvrtc_cache.whole_cubin(whole[:-1]) == whole
    assert nvrtc_cache.whole_cubin(whole) == whole
    assert nvrtc_cache.whole_cubin(b".version 8.0") == b".version 8.0"
