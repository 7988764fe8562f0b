"""The optimizers by their public names: ``graphc.optim.Adam(lr=1e-3)``, with PyTorch's definitions and defaults.

Each is one call of the ``optimizer`` pass. On the command line the same optimizer is ``adam:lr=1e-3``; :func:`parse` reads
that form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from graphc.errors import UsageError, nearest
from graphc.losses import split_choice
from graphc.pipeline import PASSES, PassCall


@dataclass(frozen=True)
class Optimizer:
    """Base of the optimizers; ``lr`` is the learning rate, which a schedule may change between steps."""

    name: ClassVar[str]
    lr: float = 1e-3

    def step(self) -> PassCall:
        """The step of the pipeline that puts this optimizer behind the gradients."""
        options: dict[str, Any] = {"name": self.name}
        options.update({f.name: getattr(self, f.name) for f in fields(self)})
        return PassCall("optimizer", options)


@dataclass(frozen=True)
class SGD(Optimizer):
    """``torch.optim.SGD``: stochastic gradient descent, with momentum (classical or Nesterov) when it is above 0."""

    name: ClassVar[str] = "sgd"
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adam(Optimizer):
    """``torch.optim.Adam``; ``weight_decay`` is an L2 penalty in the gradient."""

    name: ClassVar[str] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamW(Optimizer):
    """``torch.optim.AdamW``: Adam with decoupled weight decay."""

    name: ClassVar[str] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """``torch.optim.Adagrad``."""

    name: ClassVar[str] = "adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """``torch.optim.RMSprop``, plain, with momentum, or centered."""

    name: ClassVar[str] = "rmsprop"
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step: linear scaling, linear warm-up, decay; ``graphc.Trainer(schedule=…)`` takes it.

    The rule of large batches (Goyal et al. 2017, https://arxiv.org/abs/1706.02677): a global batch k times as large takes a
    rate k times as large, reached from the original one over the first steps.

    Attributes:
        lr: of a global batch of ``base_batch`` samples.
        global_batch, base_batch: the peak rate is lr × global_batch ÷ base_batch; None: the peak is lr.
        warmup_steps: steps of a straight line up to the peak, which the last of them reaches. It rises from ``lr`` where the
            peak is larger, and from 0 where it is not.
        decay: after the warm-up: ``constant``; ``cosine``, to 0 at ``total_steps``; ``step``, times ``gamma`` every
            ``decay_steps``.
    """

    lr: float
    global_batch: int | None = None
    base_batch: int | None = None
    warmup_steps: int = 0
    decay: str = "constant"
    total_steps: int | None = None
    decay_steps: int | None = None
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if (self.global_batch is None) != (self.base_batch is None):
            raise UsageError("linear scaling needs both global_batch and base_batch")
        if self.decay not in DECAYS:
            raise UsageError(f"unknown decay {self.decay!r}{nearest(self.decay, DECAYS)}; it is {', '.join(DECAYS)}")
        if self.decay == "cosine" and (self.total_steps or 0) <= self.warmup_steps:
            raise UsageError(f"decay='cosine' needs total_steps above the {self.warmup_steps} of the warm-up")
        if self.decay == "step" and not self.decay_steps:
            raise UsageError("decay='step' needs decay_steps")

    @property
    def peak(self) -> float:
        """The rate at the end of the warm-up."""
        return self.lr * self.global_batch / self.base_batch if self.global_batch and self.base_batch else self.lr

    def __call__(self, step: int) -> float:
        """The rate of the step after ``step`` finished ones."""
        if step < self.warmup_steps:
            start = self.lr if self.peak > self.lr else 0.0
            return start + (self.peak - start) * (step + 1) / self.warmup_steps
        since = step - self.warmup_steps
        if self.decay == "cosine" and self.total_steps is not None:
            share = min(1.0, since / (self.total_steps - self.warmup_steps))
            return self.peak * (1 + math.cos(math.pi * share)) / 2
        if self.decay == "step" and self.decay_steps:
            return float(self.peak * self.gamma ** (since // self.decay_steps))
        return self.peak


def checked_rate(value: Any) -> float:
    """Check a learning rate: a NaN would reach every parameter with the next step.

    Raises:
        UsageError: not a number, not finite, or negative.
    """
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise UsageError(f"a learning rate is a finite number of at least 0, not {value!r}; look at the schedule that gave it")
    return rate


DECAYS = ("constant", "cosine", "step")

OPTIMIZERS: Mapping[str, type[Optimizer]] = {o.name: o for o in (SGD, Adam, AdamW, Adagrad, RMSprop)}
"""Name on the command line → optimizer."""


def parse(text: str) -> Optimizer:
    """Read ``name`` or ``name:option=value,…``, as in ``sgd:lr=0.1,momentum=0.9,nesterov``.

    Raises:
        UsageError: an unknown optimizer or option (with the nearest match), or a value of the wrong type.
    """
    known = {name: [f.name for f in fields(optimizer)] for name, optimizer in OPTIMIZERS.items()}
    name, options = split_choice("optimizer", text, known)
    return OPTIMIZERS[name](**PASSES["optimizer"].bind(options))
