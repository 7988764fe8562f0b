"""The errors graphc raises on purpose; each carries the exit code the command line ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraphcError(Exception):
    """Base of every error with a message meant for the user. ``exit_code`` is what the CLI returns."""

    exit_code = 1


class InternalError(GraphcError):
    """A graph breaks graphc's own rules: a bug in graphc, or in a pass or op of a plugin."""


def describe_error(error: BaseException) -> tuple[str, int]:
    """Message and exit code of an error; an error that graphc did not raise on purpose is shown with its type."""
    if isinstance(error, GraphcError):
        return str(error), error.exit_code
    return f"{type(error).__name__}: {error}", 1


class UsageError(GraphcError, ValueError):
    """A wrong argument: an unknown pass, option, loss, feed name, mesh …"""

    exit_code = 2


class ModelError(GraphcError):
    """The model file or graph is broken: unreadable, truncated, ill-typed, cyclic."""


class DataDependentShapeError(ModelError):
    """A value whose shape depends on data, so that no buffer can be planned for it."""


class UnsupportedOpError(GraphcError):
    """An operator that graphc cannot differentiate, decompose or execute; the message names it and its place in the graph."""

    exit_code = 3


class NewerOpsetError(UnsupportedOpError):
    """An operator, or a form of one, that the opset of a legalised graph does not have."""


class FeedError(GraphcError, ValueError):
    """A feed with a wrong name, shape, dtype or value."""


class DataError(GraphcError):
    """Reading data failed; the message names the batch, and the cause is the original exception.

    Attributes:
        epoch, batch: zero-based.
        sample: index of the sample in the dataset or stream, where it is known.
    """

    def __init__(self, message: str, *, epoch: int = 0, batch: int = 0, sample: int | None = None) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.batch = batch
        self.sample = sample


class NonFiniteError(GraphcError, ArithmeticError):
    """A NaN or an infinity appeared; the state is that of the last good step.

    Attributes:
        step: the zero-based step in which it appeared.
        tensor: name of the first non-finite value in graph order, or None when it did not appear again on replay.
    """

    def __init__(self, message: str, *, step: int, tensor: str | None) -> None:
        super().__init__(message)
        self.step = step
        self.tensor = tensor


class WorldError(GraphcError):
    """Workers disagree, or one of them is gone."""


class DeviceError(GraphcError):
    """A GPU reported an error, or is gone; the message says what it means and what to do.

    Attributes:
        during: what was under way, in words; an error is often reported later than it happens.
    """

    during = ""


class DeviceMemoryError(DeviceError):
    """Memory of a GPU that could not be had.

    Attributes:
        wanted: bytes of the allocation that failed.
        available: bytes that were free.
    """

    def __init__(self, wanted: int, available: int, message: str = "") -> None:
        self.wanted, self.available = wanted, available
        super().__init__(message or f"{wanted:,} bytes do not fit into the {available:,} bytes that are free on the GPU")


class MissingExtraError(GraphcError, ImportError):
    """A feature needs a package that is not installed; the message names the extra that brings it."""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest candidate, or an empty string."""
    match = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def counted(number: float, noun: str, plural: str = "") -> str:
    """``1 node``, ``2 nodes``; ``plural`` where the noun takes another ending than ``s``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"
