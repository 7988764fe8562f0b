"""What the faults of trainings share: the model, and what must be true of the files however a run has ended."""

from __future__ import annotations

from pathlib import Path

import onnx

from graphc.runtime import checkpoint

WORKER = Path(__file__).with_name("fault_worker.py")


def check_the_files(folder: Path) -> None:
    """A checkpoint or model is whole or absent, and nothing else lies there."""
    expected = {"mlp.onnx", "checkpoint", "trained.onnx"}
    assert {path.name for path in folder.iterdir()} <= expected
    if (folder / "checkpoint").exists():
        assert {path.name for path in (folder / "checkpoint").iterdir()} <= {
            checkpoint.FILE_NAME,
            checkpoint.PREVIOUS,
            checkpoint._LINK,
        }
    if (folder / "checkpoint" / checkpoint.FILE_NAME).exists():
        state, meta = checkpoint.load(folder / "checkpoint")  # which compares the hash over all of it
        assert {"w1", "b1", "w2", "b2"} <= set(state)
        assert meta["steps"] % 3 == 1
    if (folder / "trained.onnx").exists():
        onnx.checker.check_model(onnx.load(folder / "trained.onnx"), full_check=True)
