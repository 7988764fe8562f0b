"""Takes trained weights out of a trainer, and refuses those that training has broken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphc import frontends
from graphc.device import Array
from graphc.errors import NonFiniteError
from graphc.frontends import torch_values
from graphc.ir.facts import array_of, is_float, is_state
from graphc.ir.names import BUFFER, RESERVED
from graphc.ir.updates import state_of, trains

if TYPE_CHECKING:
    import torch

    from graphc.training.trainer import Trainer


def trained_values(trainer: Trainer) -> dict[str, Array]:
    """The model's current initializers under the file's names; if any are sharded, every rank calls it."""
    state, graph = trainer.state, trainer.program.inference.graph
    read = [n for n, v in graph.initializers.items() if n not in RESERVED and is_float(v)]
    kept = [n for n, v in trainer.program.model.graph.initializers.items() if BUFFER in v.metadata_props and is_state(v)]
    found = trainer.strategy.values(list(dict.fromkeys(read + kept)))
    for name in state.apart() if trainer.size > 1 else ():
        if name in found:  # ranks that update independently: the mean of their parameters
            found[name] = found[name].copy()
            trainer.comm.allreduce(found[name].reshape(-1), "mean", f"state/{name}")
    return found


def export(trainer: Trainer, path: str | Path) -> None:
    """See :meth:`graphc.Trainer.export`."""
    trainer.strategy.collect()
    values = trained_values(trainer)
    if trainer.rank == 0 or not trainer.servers:  # other ranks than 0 of parameter servers may hold old values
        check_finite(trainer, values, f"{path} was not written")
    if trainer.rank == 0:
        frontends.save(trainer.program.trained(values), path)
    trainer.strategy.wait_for_file()


def load_into(trainer: Trainer, module: torch.nn.Module) -> None:
    """See :meth:`graphc.Trainer.load_into`."""
    trainer.strategy.collect()
    values = trained_values(trainer)
    check_finite(trainer, values, "the module keeps its values")
    torch_values.load(module, values, {str(state_of(node).name) for node in trainer.program.model.graph if trains(node)})


def check_finite(trainer: Trainer, values: Mapping[str, Array], consequence: str) -> None:
    """Refuse to hand out weights that training has made NaN or infinite.

    Args:
        consequence: what the error says of that which did not happen.

    Raises:
        NonFiniteError: with the first of them.
    """
    given = trainer.program.model.graph.initializers
    for name, array in values.items():
        if array.dtype.kind in "iub" or name not in given or bool(np.isfinite(array).all()):
            continue
        if given[name].const_value is not None and not np.isfinite(array_of(given[name])).all():
            continue  # the file came with it: a mask, say
        raise NonFiniteError(
            f"{name!r} holds a NaN or infinity after step {trainer.steps_done}, so {consequence}: the last update"
            f" overflowed, at a learning rate of {trainer.learning_rate:g}; a smaller one or gradient clipping may help",
            step=trainer.steps_done,
            tensor=name,
        )
