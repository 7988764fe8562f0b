"""Checkpoints: round trip, other readers, damage, atomicity."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphc.errors import GraphcError, UsageError
from graphc.runtime import checkpoint


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "fc.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "layer/0:weight é": rng.normal(size=(2, 2, 2)),
        "half": np.arange(5, dtype=np.float16),
        "brain": np.arange(7).astype(ml_dtypes.bfloat16),
        "graphc.step": np.array(12, np.int64),
        "mask": np.array([True, False, True]),
        "empty": np.zeros((0, 4), np.float32),
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }


def test_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "ckpt"
    checkpoint.save(folder, state(), {"step": 12, "epochs": [1, 2]})
    found, metadata = checkpoint.load(folder)
    assert metadata == {"step": 12, "epochs": [1, 2]}
    assert found.keys() == state().keys()
    for name, array in state().items():
        assert found[name].dtype == array.dtype
        assert found[name].flags.writeable
        np.testing.assert_array_equal(found[name], array)
    assert checkpoint.state_sha256(found) == checkpoint.state_sha256(state())
    assert [path.name for path in folder.iterdir()] == ["state.safetensors"]


def test_other_tools_read_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    plain = {name: array for name, array in state().items() if name != "brain"}
    found = safetensors.load_file(checkpoint.save(tmp_path, plain, {}))
    assert found.keys() == plain.keys()
    for name, array in plain.items():
        np.testing.assert_array_equal(found[name], array)


def test_torch_reads_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    found = safetensors.load_file(checkpoint.save(tmp_path, state(), {}))
    assert found["brain"].dtype == torch.bfloat16
    assert found["brain"].tolist() == list(range(7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "not written to its end|ends inside its header"),
        (lambda data: data[:-1], "not written to its end"),
        (lambda data: data + b"x", "not written to its end"),
        (lambda data: data[:100], "ends inside its header"),
        (lambda data: data[:4], "no header"),
        (lambda data: b"", "no header"),
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "do not match its digest"),
        (lambda data: data[:8] + b"]" + data[9:], "header cannot be read"),
        (lambda data: b"\xff" * len(data), "no header"),
    ],
)
def test_a_damaged_file_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, state(), {"step": 1})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(GraphcError, match=f"is damaged: .*({message})"):
        checkpoint.load(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("part", ["header", "data"])
def test_every_bit_counts(part: str, tmp_path: Path) -> None:
    """Metadata (the number of steps, the position in the data) is part of what the digest guards."""
    path = checkpoint.save(tmp_path, {"w": np.arange(3.0), "s": np.array(1, np.int64)}, {"steps": 12, "pipeline": "a,b"})
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for place in range(end) if part == "header" else range(end, len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(GraphcError, match=r"is damaged|is no checkpoint of this version"):
                checkpoint.load(tmp_path)


def test_a_forged_shape_costs_nothing(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, {"w": np.arange(3.0)}, {})
    text = path.read_bytes()[8:].replace(b"[3]", b"[9999999999999]")
    path.write_bytes(len(text[:-24]).to_bytes(8, "little") + text)
    with pytest.raises(GraphcError, match="its header cannot be read"):
        checkpoint.load(tmp_path)


def test_a_damaged_file_gives_way_to_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, {"w": np.full(3, float(step))}, {"step": step})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="not written to its end; the run goes on from the one before it"):
        found, metadata = checkpoint.load(tmp_path)
    assert metadata == {"step": 2}
    np.testing.assert_array_equal(found["w"], np.full(3, 2.0))
    (tmp_path / checkpoint.PREVIOUS).write_bytes(b"")
    with pytest.raises(GraphcError, match=r"state.safetensors' is damaged"):
        checkpoint.load(tmp_path)


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / checkpoint.FILE_NAME)
    with pytest.raises(GraphcError, match="it is no regular file"):
        checkpoint.load(tmp_path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(GraphcError, match="there is no checkpoint in"):
        checkpoint.load(tmp_path / "nowhere")
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"w": np.ones(3)}, tmp_path / "state.safetensors")
    with pytest.raises(GraphcError, match="no checkpoint of this version of graphc"):
        checkpoint.load(tmp_path)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": np.ones(3)}, {"step": 1})
    with pytest.raises(UsageError, match="'c' of dtype complex64"):
        checkpoint.save(tmp_path, {"c": np.ones(3, np.complex64)}, {})
    with pytest.raises(UsageError, match="must be JSON"):
        checkpoint.save(tmp_path, {"w": np.ones(3)}, {"when": object()})
    assert checkpoint.load(tmp_path)[1] == {"step": 1}
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphcError, match="cannot write the checkpoint"):
        checkpoint.save(tmp_path / "file" / "below", {"w": np.ones(3)}, {})


def test_killed_while_saving_keeps_the_last_one(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": np.ones(3)}, {"step": 1})
    program = (
        "import os, sys, signal, numpy as np\nfrom graphc.runtime import checkpoint\n"
        "os.fsync = lambda d: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save(sys.argv[1], {'w': np.zeros(300000)}, {'step': 2})"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == -9
    found, metadata = checkpoint.load(tmp_path)
    assert metadata == {"step": 1}
    np.testing.assert_array_equal(found["w"], np.ones(3))
    checkpoint.save(tmp_path, {"w": np.zeros(3)}, {"step": 3})
    assert checkpoint.load(tmp_path)[1] == {"step": 3}


def test_the_hash_sees_every_difference() -> None:
    base = {"a": np.zeros(4, np.float32), "b": np.ones(2, np.float32)}
    same = dict(reversed(list(base.items())))
    assert checkpoint.state_sha256(base) == checkpoint.state_sha256(same)
    others: list[dict[str, Any]] = [
        {**base, "a": np.zeros(4, np.int32)},
        {**base, "a": np.zeros((2, 2), np.float32)},
        {**base, "a": -np.zeros(4, np.float32)},
        {"a": base["a"]},
        {"a": base["a"], "c": base["b"]},
    ]
    hashes = {checkpoint.state_sha256(each) for each in [base, *others]}
    assert len(hashes) == len(others) + 1


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path, {"w": np.ones(3)}, {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
