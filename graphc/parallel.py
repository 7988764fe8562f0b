"""How data-parallel workers divide the work: the options of ``compile`` that become passes of the pipeline.

    strategy="zero:stage=2", accumulate=4, clip_norm=1.0     →     accumulate{steps=4},…,clip{norm=1.0},…,zero{stage=2}

A strategy is one pass over the graph in which every gradient has its AllReduce; ``mirrored`` leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphc.errors import UsageError, nearest
from graphc.pipeline import PASSES, PassCall

STRATEGIES: Mapping[str, str | None] = {
    "mirrored": None,
    "zero": "zero",
    "central_storage": "central_storage",
    "parameter_server": "parameter_server",
    "local_sgd": "local_sgd",
    "adasum": "adasum",
}
"""Name of a strategy → the pass that makes it of the mirrored graph."""

DETERMINISM = ("run", "any-world")
"""``run``: equal bits for equal runs, which holds anyway on the host; ``any-world``: for any number of workers too."""


NONFINITE = ("stop", "skip")
"""``stop``: the run ends with the state of the last good step; ``skip``: the step changes nothing, and the next one follows."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """What ``compile`` takes about workers, each as its text form.

    Attributes:
        strategy: one of :data:`STRATEGIES` with options: ``"zero:stage=2,offload=true"``.
        accumulate: micro-batches of a step, reduced over the workers once.
        sync_batchnorm: BatchNormalization over the global batch in place of each worker's share.
        clip_norm, clip_value: bound of the global norm of the gradient, and of each of its elements.
        compress: what travels in place of float32 gradients: ``fp16``, ``bf16``, ``powersgd:rank=4``, ``topk:ratio=0.01``.
        deterministic: one of :data:`DETERMINISM`, with the number of shards: ``"any-world:shards=4"``.
        nonfinite: one of :data:`NONFINITE`: what a NaN or infinity in loss or gradients does.
    """

    strategy: str = "mirrored"
    accumulate: int = 1
    sync_batchnorm: bool = False
    clip_norm: float | None = None
    clip_value: float | None = None
    compress: str | None = None
    deterministic: str | None = None
    nonfinite: str = "stop"

    def forward_steps(self) -> list[PassCall]:
        """Passes between ``train_mode`` and the loss.

        Raises:
            UsageError: options that exclude each other.
        """
        if self.sync_batchnorm and self._shards():
            raise UsageError(
                "sync_batchnorm needs the whole batch at once, deterministic='any-world' computes it in fixed shards;"
                " choose one of them"
            )
        return [PassCall("sync_batchnorm")] if self.sync_batchnorm else []

    def master_steps(self) -> list[PassCall]:
        """With mixed precision, the pass between the optimizer and ``allreduce`` that keeps float32 masters apart.

        What adds up or transforms gradients on the way takes them in float32.
        """
        if self.strategy.partition(":")[0] not in ("zero", "central_storage"):
            return []
        return [PassCall("master_weights", {"low_gradients": self.accumulate == 1 and not self._shards()})]

    def gradient_steps(self) -> list[PassCall]:
        """Passes between ``allreduce`` and ``bucket``."""
        steps: list[PassCall] = []
        shards = self._shards()
        if self.accumulate < 1:
            raise UsageError(f"accumulate must be a whole number of at least 1, not {self.accumulate}")
        if shards:
            if self.accumulate > 1:
                raise UsageError("deterministic='any-world' sets the micro-batches itself; leave accumulate out")
            steps.append(PassCall("micro_shards", shards))
        elif self.accumulate > 1:
            steps.append(PassCall("accumulate", {"steps": self.accumulate}))
        if self.clip_norm is not None or self.clip_value is not None:
            bounds = {"norm": self.clip_norm, "value": self.clip_value}
            steps.append(PassCall("clip", {k: v for k, v in bounds.items() if v is not None}))
        if self.compress is not None:
            method, options = _parse("compress", self.compress, {}, own=("method",))
            steps.append(PassCall("compress", {"method": method, **options}))
        if self.nonfinite not in NONFINITE:
            raise UsageError(
                f"nonfinite={self.nonfinite!r}{nearest(self.nonfinite, NONFINITE)}; it is {' or '.join(NONFINITE)}"
            )
        if self.nonfinite == "skip":
            steps.append(PassCall("skip_nonfinite"))
        return steps

    def strategy_steps(self) -> list[PassCall]:
        """Passes between ``bucket`` and ``schedule``.

        Raises:
            UsageError: an unknown strategy or option.
        """
        name, _, _ = self.strategy.partition(":")
        if name not in STRATEGIES:
            raise UsageError(f"unknown strategy {name!r}{nearest(name, STRATEGIES)}; known are {', '.join(STRATEGIES)}")
        owner = STRATEGIES[name]
        if owner is None:
            if name != self.strategy:
                raise UsageError(f"strategy {name!r} has no options, not {self.strategy!r}")
            return []
        _, options = _parse(owner, self.strategy, {})
        return [PassCall(owner, options)]

    @property
    def servers(self) -> int:
        """Processes beside the workers: parameter servers."""
        return sum(step.options.get("servers", 1) for step in self.strategy_steps() if step.name == "parameter_server")

    def _shards(self) -> dict[str, Any]:
        """Options of ``micro_shards``; empty unless results may not depend on the number of workers."""
        if self.deterministic is None:
            return {}
        name, _, rest = self.deterministic.partition(":")
        if name not in DETERMINISM:
            raise UsageError(f"deterministic={name!r}{nearest(name, DETERMINISM)}; it is {' or '.join(DETERMINISM)}")
        if name == "run":
            return {}
        _, options = _parse("micro_shards", f"{name}:{rest}", {"shards": "4"})
        return options


def _parse(owner: str, text: str, defaults: Mapping[str, str], own: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """``"name:key=value,…"`` as the name and the bound options of pass ``owner``; the options ``own`` are the name's."""
    name, _, rest = text.partition(":")
    given = dict(defaults)
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        given[key.strip()] = value.strip() if equals else "true"
    bound = PASSES[owner].bind({**given, **dict.fromkeys(own, name)})
    return name, {k: v for k, v in bound.items() if k not in own}
