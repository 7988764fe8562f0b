"""Defines the optimizers; names, definitions and defaults follow PyTorch: ``graphc.optim.Adam(lr=1e-3)``.

Each is one call of the ``optimizer`` pass. On the command line the same optimizer is ``adam:lr=1e-3``; :func:`parse` reads
that form. A package adds its own with :func:`register` (``docs/writing-a-pass.md`` shows one) and names the module in an
entry point of group ``graphc.optimizers``, so that graphc finds it everywhere.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from graphc.errors import UsageError, nearest
from graphc.losses import split_choice
from graphc.pipeline import PassCall, convert
from graphc.registry import Registry

__all__ = [
    "DECAYS",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSprop",
    "Schedule",
    "make",
    "parse",
    "register",
]


def __dir__() -> list[str]:
    return sorted(__all__)


OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer", "graphc.optimizers")
"""Name on the command line → optimizer."""


@dataclass(frozen=True)
class Optimizer:
    """Base of the optimizers; ``lr`` is the learning rate, which a schedule may change between steps.

    Fields with the name of an attribute of the update op become that attribute.

    Attributes:
        name: name on the command line.
        op: the update op: of the ``graphc`` domain, or ``domain::Op``; empty: called as the class. Its declaration says which
            input is the gradient and which are states.
        initial: initial values of its states.
    """

    name: ClassVar[str]
    op: ClassVar[str] = ""
    lr: float = 1e-3

    @property
    def initial(self) -> float:
        return 0.0

    @property
    def update_op(self) -> str:
        """The update op for these options; :attr:`op` by default."""
        return self.op or type(self).__name__

    def keeps(self, state: str) -> bool:
        """Whether the optional input ``state`` of the op is needed."""
        return True

    def check(self) -> None:
        """Reject options out of range: by default negative and non-finite numbers.

        Raises:
            UsageError: the option, and its allowed values.
        """
        for key, value in self.options().items():
            below_one = key in ("beta1", "beta2")
            if not value >= 0 or (below_one and not value < 1) or not math.isfinite(value):
                wanted = "a finite number, at least 0" + " and below 1" * below_one
                raise UsageError(f"{self.name}: {key}={value} is out of range: it must be {wanted}")

    def options(self) -> dict[str, Any]:
        """All options by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def step(self) -> PassCall:
        """The pipeline step that adds this optimizer's updates."""
        return PassCall("optimizer", {"name": self.name, **self.options()})


T = TypeVar("T", bound=type[Optimizer])


def register(optimizer: T) -> T:
    """Register a subclass of :class:`Optimizer` under its ``name`` for ``graphc.optim.parse`` and the command line."""
    OPTIMIZERS.register(optimizer.name, optimizer, origin=optimizer.__module__)
    return optimizer


@register
@dataclass(frozen=True)
class SGD(Optimizer):
    """``torch.optim.SGD``: stochastic gradient descent, with momentum (classical or Nesterov) when it is above 0."""

    name: ClassVar[str] = "sgd"
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def update_op(self) -> str:
        return "Momentum" if self.momentum else "SGD"

    def check(self) -> None:
        super().check()
        if self.nesterov and (not self.momentum or self.dampening):
            raise UsageError(f"{self.name}: nesterov needs a momentum above 0 and no dampening")


@register
@dataclass(frozen=True)
class Adam(Optimizer):
    """``torch.optim.Adam``; ``weight_decay`` is an L2 penalty in the gradient."""

    name: ClassVar[str] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@register
@dataclass(frozen=True)
class AdamW(Optimizer):
    """``torch.optim.AdamW``: Adam with decoupled weight decay."""

    name: ClassVar[str] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


@register
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """``torch.optim.Adagrad``."""

    name: ClassVar[str] = "adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0

    @property
    def initial(self) -> float:
        return self.initial_accumulator_value


@register
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

    def keeps(self, state: str) -> bool:
        return {"grad_avg": self.centered, "momentum_buffer": self.momentum > 0}.get(state, True)


def make(name: str, options: Mapping[str, Any]) -> Optimizer:
    """Create the optimizer ``name`` with ``options``; options given as text are converted.

    Raises:
        UsageError: an unknown optimizer or option (with the nearest match), or a value of the wrong type.
    """
    kind, known = OPTIMIZERS[name], [f.name for f in fields(OPTIMIZERS[name])]
    for key in options:
        if key not in known:
            raise UsageError(
                f"optimizer {name!r} has no option {key!r}{nearest(key, known)}; its options are {', '.join(known)}"
            )
    types = typing.get_type_hints(kind)
    return kind(**{key: convert("optimizer", key, value, types[key]) for key, value in options.items()})


def parse(text: str) -> Optimizer:
    """Parse ``name`` or ``name:option=value,…``, as in ``sgd:lr=0.1,momentum=0.9,nesterov``.

    Raises:
        UsageError: an unknown optimizer or option (with the nearest match), or a value of the wrong type.
    """
    return make(*split_choice("optimizer", text, OPTIMIZERS))


@dataclass(frozen=True)
class Schedule:
    """Learning rate schedule: linear scaling, linear warm-up, decay; ``graphc.Trainer(schedule=…)`` takes it.

    The linear scaling rule (Goyal et al. 2017, https://arxiv.org/abs/1706.02677): a global batch k times as large uses a
    rate k times as large, reached from the original one over the first steps.

    Attributes:
        lr: rate for a global batch of ``base_batch`` samples.
        global_batch, base_batch: the peak rate is lr × global_batch ÷ base_batch; None: the peak is lr.
        warmup_steps: steps of a linear rise to the peak, which the last of them reaches. It starts at ``lr`` if the
            peak is larger, else at 0.
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
        """The rate of the next step after ``step`` finished ones."""
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
    """Check a learning rate: a NaN would spread to every parameter in the next step.

    Raises:
        UsageError: not a number, not finite, or negative.
    """
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise UsageError(f"a learning rate must be a finite number of at least 0, not {value!r}; check the schedule")
    return rate


DECAYS = ("constant", "cosine", "step")
