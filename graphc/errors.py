"""Defines the errors that graphc raises on purpose, each with the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraphcError(Exception):
    """Base of every error with a message meant for the user. ``exit_code`` is what the CLI returns."""

    exit_code = 1


class InternalError(GraphcError):
    """A graph breaks graphc's own rules: a bug in graphc, or in a pass or op of a plugin."""


def describe_error(error: BaseException) -> tuple[str, int]:
    """Message and exit code of an error or of a ``sys.exit``; unexpected errors are shown with their type."""
    if isinstance(error, SystemExit):
        return (f"exit code {error.code}", error.code) if isinstance(error.code, int) else (str(error.code), 1)
    if isinstance(error, GraphcError):
        return str(error), error.exit_code
    return f"{type(error).__name__}: {error}", 1


def leaves_well(error: BaseException) -> bool:
    """Whether it is a ``sys.exit`` without an error."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


class UsageError(GraphcError, ValueError):
    """A wrong argument: an unknown pass, option, loss, feed name, mesh …"""

    exit_code = 2


class ModelError(GraphcError):
    """The model file or graph is broken: unreadable, truncated, ill-typed, cyclic."""


class DataDependentShapeError(ModelError):
    """A value whose shape depends on data, so no buffer can be planned for it."""


class UnknownRankError(ModelError):
    """A rank that only the sizes of the inputs decide; the message names the node and the inputs to fix."""


class UnsupportedOpError(GraphcError):
    """An operator that graphc cannot differentiate, decompose or execute; the message names it and its place in the graph."""

    exit_code = 3


class NotTrainableError(GraphcError):
    """Nothing in the model can train: ``graphc check`` says why."""

    exit_code = 3


class NewerOpsetError(UnsupportedOpError):
    """An operator, or a form of one, that the opset of a legalised graph lacks."""


class ExecutionError(GraphcError):
    """A node failed while it ran, such as an index beyond the end; the message names node and feeds.

    Attributes:
        op, node: the node's op and name, empty if the runtime does not say.
    """

    def __init__(self, message: str, *, op: str = "", node: str = "") -> None:
        super().__init__(message)
        self.op, self.node = op, node


class FeedError(GraphcError, ValueError):
    """A feed with a wrong name, shape, dtype or value."""


class DataError(GraphcError):
    """Reading data failed; the message names the batch, and the cause is the original exception.

    Attributes:
        epoch, batch: zero-based.
        sample: index of the sample in the dataset or stream, if known.
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
        tensor: name of the first non-finite value in graph order, or None if the replay did not reproduce it.
    """

    def __init__(self, message: str, *, step: int, tensor: str | None) -> None:
        super().__init__(message)
        self.step = step
        self.tensor = tensor


class WorldError(GraphcError):
    """Workers disagree, or one of them has died."""


class PeerError(WorldError):
    """Another worker is gone, late, or in something else, which the message says; this one did nothing wrong."""


class DeviceError(GraphcError):
    """A GPU reported an error or disappeared; the message explains it and what to do.

    Attributes:
        during: the operation in progress, in words; a GPU often reports an error later than it happens.
    """

    during = ""


class DeviceMemoryError(DeviceError):
    """An allocation of GPU memory failed.

    Attributes:
        wanted: bytes of the allocation that failed.
        available: bytes that were free.
    """

    def __init__(self, wanted: int, available: int, message: str = "") -> None:
        self.wanted, self.available = wanted, available
        super().__init__(message or f"{wanted:,} bytes do not fit into the {available:,} bytes that are free on the GPU")


class HostMemoryError(GraphcError, MemoryError):
    """A buffer does not fit into the memory of the host."""


class MissingExtraError(GraphcError, ImportError):
    """A feature needs a package that is not installed; the message names the extra that installs it."""


_CUTOFF = 0.65
"""Similarity, between 0 and 1, from which a name may be meant by a misspelt one."""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest candidate, or an empty string.

    A candidate is close if most letters agree in order, or if it goes on where ``word`` ends. A common suffix of file names
    does not count.
    """
    names = list(candidates)
    stem, dot, suffix = word.rpartition(".")
    if dot and stem and all(name.endswith(dot + suffix) for name in names):
        match = [found + dot + suffix for found in _close(stem, [name.removesuffix(dot + suffix) for name in names])]
    else:
        match = _close(word, names)
    return f"; did you mean {match[0]!r}?" if match else ""


def _close(word: str, names: list[str]) -> list[str]:
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    return longer[:1] or difflib.get_close_matches(word, names, n=1, cutoff=_CUTOFF)


LISTED = 40
"""Most names that a message lists by default."""


def listed(noun: str, names: Iterable[str], plural: str = "", *, most: int = LISTED) -> str:
    """``the backends are cupy, numpy``: what there is, for an error about an unknown name; at most ``most`` names."""
    found = list(names)
    plural = plural or f"{noun}{'es' if noun.endswith('s') else 's'}"
    if not found:
        return f"there are no {plural}"
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return f"the {plural} are {', '.join(found[:most])}{rest}" if len(found) > 1 else f"the only {noun} is {found[0]}"


def near_names(pattern: str, candidates: Iterable[str], most: int = 5) -> str:
    """Return ``"; near: 'x', 'y'"`` for the names that come close to a glob pattern, or an empty string."""
    bare = pattern.strip("*?.[]/").lower()
    names = list(candidates)
    inside = [name for name in names if bare and bare in name.lower()]
    found = list(dict.fromkeys([*inside, *difflib.get_close_matches(pattern, names, n=most, cutoff=_CUTOFF)]))[:most]
    return f"; near: {', '.join(map(repr, found))}" if found else ""


def counted(number: float, noun: str, plural: str = "") -> str:
    """``1 node``, ``2 nodes``; ``plural`` for nouns that do not end in ``s``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"
