"""Returns the model's own outputs of a step, where the loss keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.device import Array, Memory
from graphc.errors import UsageError
from graphc.ir.facts import dims
from graphc.ir.names import kept_outputs
from graphc.runtime.executor import Executor
from graphc.training.microbatch import MicroBatch, MicroBatches


class KeptOutputs:
    """Collects the kept outputs of the micro-batches of a step.

    Args:
        model: the training graph.
        micro: cuts a step into micro-batches.
        memory: where a step leaves its results.

    Raises:
        UsageError: micro-batches, and an output that has not one row for each sample.
    """

    def __init__(self, model: ir.Model, micro: MicroBatches, memory: Memory) -> None:
        self.names = kept_outputs(model)
        self._memory = memory
        values = {v.name: v for v in model.graph.outputs}
        self._rows = {name for name in self.names if micro.has_sample_rows(dims(values[name]) or ())}
        self._parts: list[dict[str, Array]] = []
        for name in self.names:
            if micro.steps > 1 and name not in self._rows:
                raise UsageError(
                    f"keep_outputs: the output {name!r} {list(dims(values[name]) or ())} has not one row for each sample, and a"
                    f" step has {micro.steps} micro-batches (accumulate), each with its own: leave one of the two out"
                )

    def collect(self, executor: Executor, part: MicroBatch, *, index: int, last: bool) -> None:
        """Copy the outputs of micro-batch ``index``, which has just run; of samples that do not count no row."""
        if self.names:
            found = executor.outputs if last else executor.places.outputs
            self.add({name: np.array(self._memory.fetch(found[name])) for name in self.names}, part, index=index)

    def add(self, arrays: Mapping[str, Array], part: MicroBatch, *, index: int) -> None:
        """Keep ``arrays``, the outputs of micro-batch ``index``; of samples that do not count no row."""
        if index == 0:
            self._parts = []
        self._parts.append({n: a[:0] if not part.live and n in self._rows else a for n, a in arrays.items()})

    def collected(self) -> dict[str, Array]:
        """The outputs of all samples of the step."""
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.names if parts}

    def without(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """What a step reports: all but the outputs."""
        return {name: value for name, value in metrics.items() if name not in self.names}
