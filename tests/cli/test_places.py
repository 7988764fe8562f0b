"""Results go where they are wanted, and nowhere else: nothing that is read or is no file is lost."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from graphc.atomic_files import whole_file
from graphc.cli import main
from tests.cli.models import MLP, parse, write_blobs, write_mlp

LOSS = ("--loss", "softmax_cross_entropy", "--optimizer", "sgd:lr=0.1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    return tmp_path


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "latest.onnx"
    link.symlink_to(tmp_path / "far" / "model.onnx")
    with whole_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "far" / "model.onnx").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as file:
        file.write(b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_permissions_of_a_file_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with whole_file(path) as file:
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_bytes() == b"new"


def test_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), whole_file(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (("-o", "d.npz"), 2, "--output d.npz would overwrite the data"),
        (("-o", "weights.bin"), 2, "would overwrite the weights of the model, weights.bin"),
        (("--trace", "ext.onnx"), 2, "would overwrite the model"),
        (("--trace", "out.onnx", "-o", "out.onnx"), 2, "would overwrite the file of --output"),
        (("--trace", "."), 1, "is a folder"),
        (("--checkpoint", "mlp.onnx"), 1, "is a file; name a folder"),
        (("--checkpoint", ""), 2, "--checkpoint has an empty name"),
        (("--resume", ""), 2, "--resume has an empty name"),
        (("-o", ""), 2, "--output has an empty name"),
    ],
)
def test_training_is_refused_before_it_begins(
    arguments: tuple[str, ...], code: int, fragment: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = parse(MLP)
    onnx.save(model, "ext.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    before = {p.name: p.read_bytes() for p in here.iterdir()}
    assert main(["train", "ext.onnx", "--data", "d.npz", *LOSS, *arguments]) == code
    out, err = capfd.readouterr()
    assert fragment in err
    assert not out
    assert {p.name: p.read_bytes() for p in here.iterdir()} == before


@pytest.mark.full
def test_results_do_not_replace_what_a_command_reads(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    np.savez("i.npz", x=np.zeros((2, 4), np.float32))
    before = {p.name: p.read_bytes() for p in here.iterdir()}
    assert main(["compile", "mlp.onnx", *LOSS, "-o", "mlp.onnx"]) == 2
    assert main(["run", "mlp.onnx", "--inputs", "i.npz", "-o", "i.npz"]) == 2
    assert main(["run", "mlp.onnx", "--inputs", "i.npz", "-o", "mlp.onnx"]) == 2
    assert capfd.readouterr().err.count("would overwrite") == 3
    assert {p.name: p.read_bytes() for p in here.iterdir()} == before


def test_dump_dir_that_is_a_file(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "mlp.onnx", "-p", "legalize", "--dump-dir", "d.npz"]) == 2
    assert "cannot write d.npz" in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("closed", ["> /dev/full", ">&- 2>&- <&-"])
def test_training_ends_well_when_nobody_can_read_its_events(closed: str, here: Path) -> None:
    command = (
        f"{sys.executable} -m graphc train mlp.onnx --data d.npz {' '.join(LOSS)} --epochs 2 --log-every 1 -o t.onnx {closed}"
    )
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"unexpected" not in done.stderr
    onnx.checker.check_model("t.onnx")


@pytest.mark.full
def test_a_full_disk_behind_standard_output_is_said(here: Path) -> None:
    command = f"{sys.executable} -m graphc passes > /dev/full"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, timeout=200, check=False)
    assert done.returncode == 1
    assert b"cannot write to standard output: No space left on device" in done.stderr


def test_json_has_no_nan(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = np.zeros((8, 4), np.float32)
    x[3] = np.nan
    np.savez("nan.npz", x=x, label=np.zeros(8, np.int64))
    assert main(["train", "mlp.onnx", "--data", "d.npz", *LOSS, "--eval-data", "nan.npz", "--format", "json"]) == 0

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    epoch, _ = (json.loads(line, parse_constant=refuse) for line in capfd.readouterr().out.splitlines())
    assert epoch["eval_loss"] is None
