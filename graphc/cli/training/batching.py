"""Fits the batch of ``graphc train`` to a model whose file fixes it.

file fixed at 4, each worker gets 4                        taken as it is
file fixed at 4, each worker gets 8 with --accumulate 2    taken as it is, twice a step
any other share                                            the model is rewritten for any batch (rebatch)
… and it cannot be rewritten                               micro-batches of 4, or an error with the options that work
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphc import losses
from graphc.errors import UsageError, counted
from graphc.ir.facts import batch_dim
from graphc.parallel import servers
from graphc.report.batch_rule import batch_rule, how_to_keep

if TYPE_CHECKING:
    from graphc.cli.training.job import Job

SAMPLE_WEIGHT = "sample_weight"
"""Input of sample weights: 0 for padding, if no label marks samples as ignored."""


def fit_batch(job: Job, model: ir.Model, note: Callable[[str], None]) -> tuple[Job, int | None]:
    """Choose how a model with a fixed batch trains.

    Returns:
        The job with its options for that, and the fixed batch of a model that stays as it is; None for any other.

    Raises:
        UsageError: the model cannot be rewritten, and the worker's share is no multiple of its batch.
    """
    size, options = batch_dim(model.graph), job.compilation
    if not isinstance(size, int) or options.batch is not None:
        return job, None
    share, rest = divmod(job.batch_size, job.shares)
    rule = batch_rule(model)
    if rule.obstacle is None:
        note(f"rebatch: the model was exported for batches of {size}; trained with a dynamic batch dimension")
        return replace(job, compilation=replace(options, batch="batch")), None
    whole = rest == 0 and options.deterministic != "any-world"  # which cuts the batch into shards of its own
    if whole and share == size * options.accumulate:
        note(f"the model is fixed at batches of {size}, and trains at that")
        return job, size
    if not whole or share % size or options.accumulate > 1 or servers(options):
        raise UsageError(
            f"the model is fixed at batches of {size} and cannot be changed, {how_to_keep(size)}; here a worker gets"
            f" {job.batch_size / job.shares:g} samples{_cut(options.accumulate)}. {rule.obstacle}"
        )
    count = share // size
    mixes = any(node.op_type == "BatchNormalization" for node in model.graph)
    note(
        f"the model is fixed at batches of {size}: each step takes {counted(count, 'micro-batch', 'micro-batches')} of {size}"
        f" a worker, as --accumulate {count} does{'; BatchNormalization normalises each by itself' if mixes else ''}"
    )
    return replace(job, compilation=replace(options, accumulate=count)), size


def _cut(accumulate: int) -> str:
    return f" in {counted(accumulate, 'micro-batch', 'micro-batches')}" if accumulate > 1 else ""


def fill_last_batch(
    job: Job, loss: losses.Loss, size: int | None, samples: int, evaluated: int, note: Callable[[str], None]
) -> tuple[Job, losses.Loss]:
    """Choose what becomes of the samples that fill no batch.

    Args:
        size: the fixed batch of the model; None: any.
        samples, evaluated: the number of samples to train on and to evaluate.

    Returns:
        The job with ``tail``, and the loss, which leaves padding out.

    Raises:
        UsageError: ``--tail pad`` with a loss that cannot leave samples out.
    """
    if job.tail == "pad":
        return job, ignoring_padding(loss)
    left = samples % job.batch_size
    if size is None or (job.tail == "drop" and not evaluated % (size * job.shares)):
        return job, loss
    if not left and not evaluated % (size * job.shares):
        return job, loss
    if isinstance(loss, losses.Output | losses.Model):
        if left:
            note(f"the model is fixed at batches of {size}: the last {counted(left, 'sample')} of each epoch are left out")
        return replace(job, tail="drop"), loss
    if left and job.tail != "drop":
        note(f"the model is fixed at batches of {size}: the last batch of an epoch is filled up with samples that do not count")
        job = replace(job, tail="pad")
    return job, ignoring_padding(loss)


def ignoring_padding(loss: losses.Loss) -> losses.Loss:
    """Give the loss an ignored label, or sample weights.

    Raises:
        UsageError: a loss that is one number.
    """
    if isinstance(loss, losses.Output | losses.Model):
        raise UsageError(f"--tail pad needs a loss over samples, of which some can weigh nothing; {loss.kind!r} is one number")
    if loss.sample_weight is not None:
        return loss
    if isinstance(loss, losses.SoftmaxCrossEntropy | losses.NLL) and getattr(loss, "label_kind", "class") != "probabilities":
        return loss if loss.ignore_index is not None else replace(loss, ignore_index=-100)
    return replace(loss, sample_weight=SAMPLE_WEIGHT)
