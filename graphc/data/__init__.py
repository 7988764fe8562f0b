"""Feeds workers with disjoint shards of arrays, files, iterables and PyTorch data.

    shards = graphc.data.shard({"input": x, "label": y}, global_batch=256, rank=trainer.rank, size=trainer.size)
    trainer.fit(shards, epochs=3)

One global batch of B samples over W workers gives each worker B // W samples, and the first B % W workers one more. The order
of an epoch depends only on (seed, epoch), so samples and checkpointed positions are the same for any number of workers.
"""

from __future__ import annotations

from graphc.data.batches import TAILS, ArrayBatches, Batch, Shards, shard, share
from graphc.data.files import open_arrays
from graphc.data.sources import ArraySource, SampleSource, Source, StreamSource

__all__ = [
    "TAILS",
    "ArrayBatches",
    "ArraySource",
    "Batch",
    "SampleSource",
    "Shards",
    "Source",
    "StreamSource",
    "open_arrays",
    "shard",
    "share",
]
