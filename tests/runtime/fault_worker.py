"""What every rank of a fault test runs: an endless training with checkpoints and exports, in which something goes wrong.

``python fault_worker.py '{"folder": …, "kind": …, "rank": …, "moment": …}'``; kind ``loader`` raises while a sample is read,
``mismatch`` changes one collective of one rank by a pass, ``exit``, ``leave`` and ``slow`` end or delay one rank in step
``moment``, or before anything else where that is negative; ``whole`` ends in good order after that step. Other faults come from
outside.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

JOB: dict[str, Any] = json.loads(sys.argv[1])
print("pid", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")), os.getpid(), flush=True)

import numpy as np  # noqa: E402
import onnx_ir as ir  # noqa: E402

import graphc  # noqa: E402
from graphc.compiler import training_pipeline  # noqa: E402
from graphc.distributed.world import find_world  # noqa: E402
from graphc.options import CompileOptions  # noqa: E402
from graphc.pipeline import Context, PassCall, graph_pass  # noqa: E402

MINE = find_world().rank == JOB["rank"]


def go_wrong(step: int) -> None:
    """End or delay this rank, if its moment has come."""
    if not MINE or step != JOB["moment"]:
        return
    if JOB["kind"] == "exit":
        os._exit(7)
    if JOB["kind"] == "leave":
        sys.exit(5)
    if JOB["kind"] == "slow":
        time.sleep(3600)


class Samples:
    """Random samples, of which a rank can read only so many."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        if MINE and JOB["kind"] == "loader" and self.read > JOB["moment"]:
            raise ValueError(f"sample {index} is damaged")
        generator = np.random.default_rng(index)
        return {"x": generator.standard_normal(4, np.float32), "label": generator.integers(0, 3)}


def mismatch(model: ir.Model, ctx: Context, *, seed: int = 0) -> bool:
    """Change the tag, the reduction or the group of one collective, on one rank only."""
    if not MINE:
        return False
    choice = random.Random(seed)
    tags = [node.attributes["tag"].as_string() for node in model.graph if node.op_type == "AllReduceStart"]
    tag = choice.choice(tags)
    change = choice.choice([("tag", f"{tag}/other"), ("reduce", "max"), ("group", "pipe")])
    for node in model.graph:
        if "tag" in node.attributes and node.attributes["tag"].as_string() == tag:
            node.attributes[change[0]] = ir.AttrString(*change)
    return True


def main() -> None:
    go_wrong(-1)
    folder = Path(JOB["folder"])
    steps = training_pipeline(graphc.losses.SoftmaxCrossEntropy(), graphc.optim.Adam(lr=1e-3), CompileOptions(bucket_mb=1e-5))
    if JOB["kind"] == "mismatch":
        graph_pass("mismatch")(mismatch)
        before = next(k for k, step in enumerate(steps) if step.name == "simplify")
        steps.insert(before, PassCall("mismatch", {"seed": JOB["moment"]}))
    program = graphc.compile(
        folder / "mlp.onnx",
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.Adam(lr=1e-3),
        backend="numpy",
        passes=steps,
    )
    with graphc.Trainer(program) as trainer:
        batches = graphc.data.shard(Samples(), global_batch=16, rank=trainer.rank, size=trainer.size, seed=3)
        for number, batch in enumerate(batches):
            go_wrong(number)
            trainer.step(batch.feeds, offset=batch.offset)
            if JOB["kind"] == "whole" and number == JOB["moment"]:
                break
            if number % 3 == 0:
                trainer.save(folder / "checkpoint")
            if number % 7 == 0:
                trainer.export(folder / "trained.onnx")
            if number == 4:
                print("training", trainer.rank, flush=True)


main()
