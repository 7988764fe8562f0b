"""A GPU or link that fails during a run ends all ranks with a full report.

The report says which rank failed, when, what was running and what is saved. The emulated CUDA injects the error, so these tests
cannot run on a real GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import emulated
from tests.runtime.mpi_run import run_mpi

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.skipif(not emulated(), reason="needs errors that are put in")]

TRAINING = """
import os, sys
import graphc
from tests.training import small
program = small.compiled("sgd:lr=0.1,momentum=0.9", backend="cupy")
with graphc.Trainer(program, transport=os.environ["TRANSPORT"]) as trainer:
    print("transport", type(trainer.comm).__name__, flush=True)
    for step in range(6):
        x, y = small.batch(16, step)
        if step == int(sys.argv[1]) and trainer.rank == 1:
            os.environ[sys.argv[2]] = sys.argv[3]
        half = slice(8 * trainer.rank, 8 * trainer.rank + 8)
        trainer.step({"input": x[half], "label": y[half]})
        if step == 1:
            trainer.save(sys.argv[4])
"""

MEMORY, GONE, OUTSIDE = "memory has an error that cannot be corrected", "the GPU is gone", "outside its memory"
ALONE = {"HOSTCUDA_DEVICES": "2", "TRANSPORT": "nccl"}
SHARED = {"HOSTCUDA_DEVICES": "1", "TRANSPORT": "mpi"}


@pytest.mark.parametrize(
    ("devices", "step", "fault", "meaning", "during"),
    [
        pytest.param(2, 3, "214@kernel:5", MEMORY, "while it waited for .* … the results", id="a kernel of a replayed graph"),
        pytest.param(2, 3, "46@call:1", GONE, "while it (queued|took) ", id="the launch of a graph"),
        pytest.param(2, 0, "700@kernel:5", OUTSIDE, "while it (queued|waited for) .* … ", id="a kernel of the first step"),
        pytest.param(1, 3, "700@kernel:5", OUTSIDE, "while it (queued|waited for) ", id="a GPU that two ranks share"),
    ],
)
def test_a_lost_gpu_ends_all_ranks_and_says_what_is_known(
    devices: int, step: int, fault: str, meaning: str, during: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    arguments = (str(step), "HOSTCUDA_FAULT", fault, str(folder))
    done = run_mpi(2, TRAINING, *arguments, timeout=120, env=ALONE if devices == 2 else SHARED)
    assert done.code != 0, done.text
    assert done.out.count("Nccl" if devices == 2 else "Staged") == 2, done.text
    saved = f"the last checkpoint is {folder}, after step 2" if step > 1 else "no checkpoint was saved"
    found = re.search(rf"rank 1 lost its GPU in step {step} {during}.*{meaning}.*restart from.*{re.escape(saved)}", done.err)
    assert found, done.text


def test_an_error_of_nccl_names_collective_step_and_rank(tmp_path: Path) -> None:
    arguments = ("3", "HOSTCUDA_NCCL_FAULT", "6@collective:2", str(tmp_path / "checkpoint"))
    done = run_mpi(2, TRAINING, *arguments, timeout=120, env=ALONE)
    assert done.code != 0, done.text
    assert re.search(r"NCCL failed in 'allreduce data/\w+' \(step 3\) on rank 1: .*network error", done.err), done.text
