"""Comparisons between ranks; what differs is named in the same error on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from graphc.distributed.communicator import Communicator
from graphc.errors import WorldError


def require_equal(what: str, values: Sequence[str], shown: Sequence[str]) -> None:
    """Raise WorldError unless the ``values`` of all ranks are equal.

    Args:
        values: by rank, as gathered by the caller.
        shown: what the error says instead of the value of a rank.
    """
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise WorldError(f"the ranks have different {what}: {shown[0]} on rank 0 and {shown[other]} on rank {other}")


def agree(communicator: Communicator, entries: Sequence[str], what: str) -> None:
    """Check that all ranks hold the same list, for example their sequence of collectives.

    Only hashes are exchanged unless they differ.

    Raises:
        WorldError: on every rank, naming the first entry that differs and two ranks that differ in it.
    """
    mine = list(entries)
    digests = communicator.allgather_object(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    lists = communicator.allgather_object(mine)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = lists[0], lists[other]
    shared = min(len(first), len(second))
    index = next((k for k in range(shared) if first[k] != second[k]), shared)
    shown = [repr(entries[index]) if index < len(entries) else "nothing" for entries in (first, second)]
    raise WorldError(f"the ranks disagree on {what}: entry {index} is {shown[0]} on rank 0 and {shown[1]} on rank {other}")
