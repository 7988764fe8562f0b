"""Evaluates a program in inference mode over all workers' batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphc.data import Batch, Shards
from graphc.ir.names import kept_outputs
from graphc.mesh import REPLICAS
from graphc.training.feeds import averages, batches_of, feed_shape
from graphc.training.microbatch import MicroBatch
from graphc.training.strategy import Batches

if TYPE_CHECKING:
    from graphc.training.trainer import Trainer


def evaluate(trainer: Trainer, batches: Batches) -> dict[str, float]:
    """See :meth:`graphc.Trainer.evaluate`."""
    graph = trainer.program.inference.graph
    kept = kept_outputs(trainer.program.inference)
    names = [v.name or "" for v in graph.outputs if v.name not in kept]
    sums = dict.fromkeys(names, 0.0)
    trainer.state.gather(trainer.comm, graph.initializers)
    MicroBatch({}, 0, live=True).set_scalars(trainer.state.scalars)
    for item in batches_of(batches.epoch(0) if isinstance(batches, Shards) else batches):
        feeds = item.feeds if isinstance(item, Batch) else item
        if all(feed_shape(array)[:1] == (0,) for array in feeds.values()):
            continue  # this worker has no sample of the last batch
        for name, value in trainer.strategy.evaluate_batch(feeds).items():
            if name in sums:
                sums[name] += float(value)
    total = np.array([sums[name] for name in names], dtype=np.float64)
    if trainer.size > 1 and not trainer.servers:  # a collective would wait for a lost worker
        groups = trainer.groups  # ranks along the tensor axis have the same sums, one stage has those of its pipeline
        groups.of(f"{REPLICAS}+pipe").allreduce(total, "sum")
    return averages(dict(zip(names, total.tolist(), strict=True)))
