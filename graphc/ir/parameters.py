"""Lists the float constants of a model: which train, and by which rule.

``legalize`` decides; a constant that trains is an initializer afterwards, any other a ``Constant`` node. ``--freeze`` and
``--train`` then choose among them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.errors import UsageError, near_names
from graphc.ir.declare import Role
from graphc.ir.facts import is_parameter
from graphc.ir.names import BUFFER
from graphc.ir.updates import has_role


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a float constant of the model trains.

    Attributes:
        name: as in the file.
        shape, dtype: of its tensor.
        trains: before ``--freeze``.
        rule: why, in a few words: ``weight of Conv``.
        doubtful: a user may know better: a named scalar, or irregular values, left out; ``--train NAME`` trains it.
        asked: it trains because ``--train`` names it, and would not otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool
    rule: str
    doubtful: bool = False
    asked: bool = False


DECISIONS = "parameters"
"""Entry of ``Context.values``: the list of :class:`Decision` that ``legalize`` made, in the order of the file."""


def select_trainable(
    graph: ir.Graph, *, train: Sequence[str] | None = None, freeze: Sequence[str] | None = None
) -> list[ir.Value]:
    """The parameters of a legalised graph that train, in the order of the file.

    By default these are all float initializers except running statistics; ``freeze`` removes those that its globs match and
    ``train`` adds those that its globs match (even against ``freeze``).

    Raises:
        UsageError: a pattern that matches nothing.
    """
    return [value for value, reason in explain_trainable(graph, train=train, freeze=freeze) if reason == "trains"]


def explain_trainable(
    graph: ir.Graph, *, train: Sequence[str] | None = None, freeze: Sequence[str] | None = None
) -> list[tuple[ir.Value, str]]:
    """Every initializer with ``"trains"`` or the reason why it does not train."""
    check_patterns(graph, train=train, freeze=freeze)
    result = []
    for name, value in graph.initializers.items():
        if not is_parameter(value):
            reason = "not a float tensor"
        elif is_running_statistic(value):
            reason = "running statistic"
        elif matches(name, freeze) and not matches(name, train):
            reason = "frozen"
        else:
            reason = "trains"
        result.append((value, reason))
    return result


def check_patterns(graph: ir.Graph, *, train: Sequence[str] | None = None, freeze: Sequence[str] | None = None) -> None:
    """Raise UsageError for a pattern of ``train`` or ``freeze`` that matches no tensor of the model."""
    computed = [v.name for node in graph for v in node.outputs if node.op_type == "Constant" and v.name]
    known = list(graph.initializers)
    for pattern in (*(train or ()), *(freeze or ())):
        if fnmatch.filter(known, pattern) or (freeze and pattern in freeze and fnmatch.filter(computed, pattern)):
            continue
        if fnmatch.filter(computed, pattern):
            raise UsageError(f"train: {pattern!r} is a constant by now; give it to 'legalize' too: legalize{{train={pattern}}}")
        raise UsageError(
            f"no parameter matches {pattern!r}{near_names(pattern, known)}; 'graphc inspect MODEL --show params' lists them"
        )


def matches(name: str, patterns: Iterable[str] | None) -> bool:
    """Whether one of the globs matches the name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns or ())


def is_running_statistic(value: ir.Value) -> bool:
    """Whether the value is a running mean or variance of a BatchNormalization, or another running statistic.

    Buffers that a PyTorch module changes while it trains are such, also where they are frozen.
    """
    normalises = any(node.op_type == "BatchNormalization" and index in (3, 4) for node, index in value.uses())
    return normalises or BUFFER in value.metadata_props or has_role(value, Role.STATISTIC)
