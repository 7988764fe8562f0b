"""The optimizers, as a user names them: ``graphc.optim.Adam(lr=1e-3)``. Definitions, names and defaults are PyTorch's.

Each is one step of the pipeline (the ``optimizer`` pass does the work). On the command line the same optimizer is
``adam:lr=1e-3``; :func:`parse` reads that form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from graphc.losses import split_choice
from graphc.pipeline import PASSES, Step


@dataclass(frozen=True)
class Optimizer:
    """Base of the optimizers; ``lr`` is the learning rate, which a schedule may change between steps."""

    name: ClassVar[str]
    lr: float = 1e-3

    def step(self) -> Step:
        """The step of the pipeline that puts this optimizer behind the gradients."""
        options: dict[str, Any] = {"name": self.name}
        options.update({f.name: getattr(self, f.name) for f in fields(self)})
        return Step("optimizer", options)


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
