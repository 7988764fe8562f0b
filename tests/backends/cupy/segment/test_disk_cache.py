"""Compiled segments are found again on disk and compute the same; what is damaged or of other sources is compiled anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest

from graphc.backends.cupy.libraries.registry import NodeKernel
from graphc.backends.cupy.segment import disk_cache
from graphc.backends.cupy.segment.bind import BoundSegment, SegmentScratch
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.disk_cache import SegmentCache
from graphc.backends.cupy.segment.program import Segment
from graphc.backends.fusion.op_kernels import OpKernel
from graphc.ir.facts import shape_of
from tests.backends.host_kernels import HostDevice

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

MODEL = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 26]>
    segment (float[4, 6] x, float[6, 8] w, float[8] b) => (float[8, 4] y, float[4] largest) {
        h = Gemm (x, w, b)
        r = Relu (h)
        axis = Constant <value = int64[1] {1}> ()
        total = CumSum (r, axis)
        p = Softmax <axis = 1> (total)
        y = Transpose <perm = [1, 0]> (p)
        largest = ReduceMax <keepdims = 0> (h, axis)
    }
""")


def _compile() -> Segment:
    return compile_segment(MODEL, device=False)


def _refuse() -> NoReturn:
    pytest.fail("it is compiled again")


def _run(segment: Segment, feeds: dict[str, Any]) -> dict[str, Any]:
    device = HostDevice()
    inputs = {v.name or "": device.put(feeds[v.name or ""]) for v in segment.graph.inputs}
    outputs = {v.name or "": device.put(np.zeros(shape_of(v), np.float32)) for v in segment.graph.outputs}
    BoundSegment(segment, device, SegmentScratch(device), inputs, outputs)()
    return {name: device.fetch(array) for name, array in outputs.items()}


@needs_compiler
def test_what_comes_back_from_disk_computes_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in (("x", (4, 6)), ("w", (6, 8)), ("b", (8,)))}
    SegmentCache(tmp_path / "segments").of(MODEL, "", _compile)
    found = _run(SegmentCache(tmp_path / "segments").of(MODEL, "", _refuse), feeds)
    h = feeds["x"] @ feeds["w"] + feeds["b"]
    e = np.exp(np.cumsum(np.maximum(h, 0), 1))
    np.testing.assert_allclose(found["y"], (e / e.sum(1, keepdims=True)).T, rtol=1e-5)
    np.testing.assert_allclose(found["largest"], h.max(1), rtol=1e-5)
    assert not list(tmp_path.rglob("*.tmp"))


def test_other_options_sources_and_segments_are_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def asked(why: str, model: onnx.ModelProto = MODEL, options: str = "") -> None:
        SegmentCache(tmp_path).of(model, options, lambda: compiled.append(why) or _compile())  # type: ignore[func-returns-value]

    asked("first")
    asked("again")
    asked("options", options="tf32")
    other = onnx.ModelProto()
    other.CopyFrom(MODEL)
    other.graph.node[4].attribute[0].i = 0
    asked("segment", other)
    monkeypatch.setattr(disk_cache, "_sources", lambda: b"of another version")
    asked("sources")
    monkeypatch.setattr(disk_cache, "_sources", lambda: b"")  # an installation without sources keeps nothing
    asked("no sources")
    asked("no sources")
    assert compiled == ["first", "options", "segment", "sources", "no sources", "no sources"]


def test_a_plugin_has_its_segments_compiled_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SegmentCache(tmp_path).of(MODEL, "", _compile)

    def made_elsewhere(node: Any) -> list[Any]:
        return []

    plugin = OpKernel(kernels=[NodeKernel("plugin::Op", made_elsewhere, ())])
    monkeypatch.setitem(disk_cache.OP_KERNELS, "plugin::Op", plugin)
    again: list[str] = []
    SegmentCache(tmp_path).of(MODEL, "", lambda: again.append("compiled") or _compile())  # type: ignore[func-returns-value]
    assert again == ["compiled"]


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_written_anew(tmp_path: Path, damage: bytes | None) -> None:
    SegmentCache(tmp_path).of(MODEL, "", _compile)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]]) if damage is None else damage)
    again: list[str] = []
    SegmentCache(tmp_path).of(MODEL, "", lambda: again.append("compiled") or _compile())  # type: ignore[func-returns-value]
    assert again == ["compiled"]
    SegmentCache(tmp_path).of(MODEL, "", _refuse)


def test_a_disk_that_refuses_costs_the_next_start_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert SegmentCache(tmp_path / "file" / "segments").of(MODEL, "", _compile).calls
