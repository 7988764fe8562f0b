"""Sends feeds to a device while the step before still runs.

    host array ─► pinned memory ─► staging on the device ─► input of the plan
               at once            beside the running step   queued, before the step

    array on the device ─► (staging, where a step still runs ─►) input of the plan

Pinned memory is filled again when its transfer has ended, and a transfer waits until a step has taken what was staged before.
So the caller may reuse its arrays as soon as they are staged, and the inputs stay unchanged until the last node of a step has
read them. Two staging buffers take turns where a step may be queued before the result of the last one is known: the feeds of
that one are still there if it has to be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from graphc.device import ALIGNMENT, Array, Event, Memory, Run

T = TypeVar("T")


class Feeds:
    """The inputs of one bound plan.

    Args:
        memory: where they lie.
        specs: shape and type of every input.
        turns: staging buffers on a device, which take turns.

    Attributes:
        inputs: the arrays that the plan reads, by name.
    """

    def __init__(
        self, memory: Memory, specs: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]], *, turns: int = 1
    ) -> None:
        self._memory = memory
        sizes = {name: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for name, (shape, dtype) in specs.items()}
        step = max(ALIGNMENT, 256)
        offsets: dict[str, int] = {}
        total = 0
        for name, nbytes in sizes.items():
            offsets[name] = total
            total += -(-nbytes // step) * step
        whole = memory.zeros(total)

        def views(flat: Array) -> dict[str, Array]:
            return {
                name: flat[offsets[name] : offsets[name] + sizes[name]].view(dtype).reshape(shape)
                for name, (shape, dtype) in specs.items()
            }

        self.inputs = views(whole)
        self._staged: Mapping[str, Array] | None = None
        self._sent: list[Event] = []
        self._copied: Event | None = None
        if memory.on_host:
            self._feeds = [(name, memory.bind_feed(array)) for name, array in self.inputs.items()]
            return
        self._pinned = memory.pinned(total)
        self._here = views(self._pinned)
        buffers = [memory.zeros(total) for _ in range(turns)]
        start = memory.mark()  # the zeros are queued; a transfer outside the queue must not overtake them
        self._turns = [_Staging(one, views(one), memory.bind_copy(whole, one), start) for one in buffers]
        self._turn = 0

    def stage(self, feeds: Mapping[str, Array]) -> int:
        """Stage feeds for a later :meth:`bring`, and return the staging buffer that holds them.

        Host arrays may be changed afterwards, arrays on the device after :meth:`wait_copied`.
        """
        if self._memory.on_host:
            return 0
        self._turn = (self._turn + 1) % len(self._turns)
        self._send(feeds)
        rest = feeds.keys() - set(_on_host(feeds))
        for name in rest:
            self._memory.copy(self._turns[self._turn].views[name], feeds[name])
        self._copied = self._memory.mark() if rest else None
        self._staged = feeds
        return self._turn

    def wait_copied(self) -> None:
        """Wait until what was staged from arrays on the device has been copied."""
        if self._copied is not None:
            self._copied.wait()

    def _send(self, feeds: Mapping[str, Array]) -> None:
        """Start the transfer of host arrays, as a single one where all feeds are host arrays."""
        for event in self._sent:
            event.wait()
        names, staging = _on_host(feeds), self._turns[self._turn]
        for name in names:
            np.copyto(self._here[name], feeds[name])
        if len(names) == len(feeds):
            self._sent = [self._memory.send(staging.whole, self._pinned, staging.taken)]
        else:
            self._sent = [self._memory.send(staging.views[name], self._here[name], staging.taken) for name in names]

    def bring(self, feeds: Mapping[str, Array]) -> None:
        """Queue the copy of ``feeds`` to the inputs; they are staged first unless they were already."""
        if self._memory.on_host:
            for name, bring in self._feeds:
                bring(feeds[name])
            return
        staged = list(feeds)
        if self._staged is not feeds:
            staged = _on_host(feeds)
            self._send(feeds)
            for name in feeds.keys() - set(staged):
                self._memory.copy(self.inputs[name], feeds[name])
        self._staged = None
        for event in self._sent:
            self._memory.after(event)
        self._take_over(staged)

    def bring_again(self, turn: int) -> None:
        """Queue the copy of feeds that were staged before, in buffer ``turn``, to the inputs."""
        self._turns[turn].take()

    def _take_over(self, names: Sequence[str]) -> None:
        """Queue the copies of what is staged to the inputs."""
        staging = self._turns[self._turn]
        if len(names) == len(self.inputs):
            staging.take()
        else:
            for name in names:
                if name not in staging.takes:
                    staging.takes[name] = self._memory.bind_copy(self.inputs[name], staging.views[name])
                staging.takes[name]()
        if names:
            staging.taken = self._memory.mark()


@dataclass(slots=True, eq=False)
class _Staging:
    """A staging buffer.

    Attributes:
        whole, views: the buffer, and each input in it.
        take: queues the copy of all inputs; ``takes``: of single ones.
        taken: when they were last taken.
    """

    whole: Array
    views: Mapping[str, Array]
    take: Run
    taken: Event
    takes: dict[str, Run] = field(default_factory=dict)


def _on_host(feeds: Mapping[str, Array]) -> list[str]:
    return [name for name, array in feeds.items() if isinstance(array, np.ndarray)]


class Ahead(Generic[T]):
    """An iterator whose next item can be fetched early.

    Args:
        prepare: called with an item that was fetched early.
    """

    def __init__(self, items: Iterable[T], prepare: Callable[[T], None]) -> None:
        self._items, self._prepare = iter(items), prepare
        self._early: list[T] = []
        self._error: Exception | None = None

    def look(self) -> None:
        """Fetch and prepare the next item early; an error is raised when the item is asked for."""
        if self._early or self._error is not None:
            return
        try:
            self._early.append(next(self._items))
            self._prepare(self._early[0])
        except Exception as error:
            self._error = error

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        error, self._error = self._error, None
        early, self._early = self._early, []
        if error is not None:
            raise error
        return early[0] if early else next(self._items)
