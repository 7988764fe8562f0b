"""A GPU or link that fails during a run ends all ranks with a full report.

The report says which rank failed, when, what was running and what is saved. The emulated CUDA injects the error, so these tests
cannot run on a real GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


AHEAD = """
import os, sys
import graphc
from graphc.training.progress import Log
from tests.training import small
program = small.compiled("sgd:lr=0.1,momentum=0.9", backend="cupy")
feeds = [dict(zip(("input", "label"), small.batch(16, step))) for step in range(7)]
def log(event):
    print("read", event["step"], event["loss"], flush=True)
    if event["step"] == 3:  # step 4, the one of number 3, is queued
        os.environ["HOSTCUDA_FAULT"] = sys.argv[1]
with graphc.Trainer(program) as trainer:
    trainer.fit(feeds, callbacks=[Log(log)], log_every=1)
"""


@pytest.mark.parametrize(
    ("fault", "eager", "step", "during"),
    [
        pytest.param("214@kernel:2", "", 3, "waited for", id="in the step that is queued"),
        pytest.param("214@kernel:2", "1", 4, "(queued|took)", id="in the one after it, which runs at once"),
        pytest.param("46@call:3", "1", 4, "(queued|took)", id="while the one after it is queued"),
    ],
)
def test_the_error_of_a_step_that_was_queued_early_names_it(fault: str, eager: str, step: int, during: str) -> None:
    """All steps before it are told."""
    env = {**os.environ, **({"HOSTCUDA_EAGER": eager} if eager else {})}
    done = subprocess.run(
        [sys.executable, "-c", AHEAD, fault], capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert done.returncode != 0
    assert re.search(rf"rank 0 lost its GPU in step {step} while it {during}", done.stderr), done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [str(k + 1) for k in range(step)]


STAGES = """
import os, sys
import graphc
from tests.training import pipe_cases as cases
model = cases.mlp()
program = cases.compiled(model, graphc.Mesh(pipe=2), 4, backend="cupy")
with graphc.Trainer(program, transport="nccl") as trainer:
    for step, batch in enumerate(cases.batches(model, [8] * 5)):
        if step == 3 and trainer.rank == 1:
            os.environ[sys.argv[1]] = sys.argv[2]
        trainer.step(batch)
"""


def test_a_lost_gpu_of_a_pipeline_is_named_with_its_stage() -> None:
    done = run_mpi(2, STAGES, "HOSTCUDA_FAULT", "46@call:1", timeout=120, env={"HOSTCUDA_DEVICES": "2"})
    assert done.code != 0, done.text
    assert re.search(rf"rank 1 lost its GPU in step 3 while it queued .* of 1 stage 1.*{GONE}", done.err), done.text


def test_a_failed_transfer_between_stages_is_named() -> None:
    done = run_mpi(2, STAGES, "HOSTCUDA_NCCL_FAULT", "6@send:2", timeout=120, env={"HOSTCUDA_DEVICES": "2"})
    assert done.code != 0, done.text
    assert re.search(r"NCCL failed in 'send 1B→0B[^']*' \(step 3\) on rank 1: .*network error", done.err), done.text
