"""Registries that find ops, passes, gradients and backends by name.

Built-ins and plugins register in one way: a module named by an entry point of group ``graphc.ops``, ``graphc.passes``,
``graphc.gradients``, ``graphc.optimizers`` or ``graphc.backends`` is imported, and the decorators in it add entries to the
table of that group. No module of the core imports a pass, a gradient or a backend by name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import threading
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from graphc.errors import MissingExtraError, UsageError, nearest

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A name → object table filled on first use by importing the modules of an entry-point group.

    Args:
        apart: each entry point has the name of what its module registers, so that one item costs only its own module.
    """

    def __init__(self, kind: str, group: str, *, apart: bool = False) -> None:
        self.kind = kind
        self.group = group
        self._apart = apart
        self._items: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._origin: dict[str, str] = {}
        self._overrides: set[str] = set()
        self._missing: dict[str, MissingExtraError] = {}
        self._loaded = False
        self._loading = False
        self._lock = threading.RLock()

    def load(self) -> None:
        """Import every module of the group once, in name order, so that registration order is the same everywhere."""
        if self._loaded:
            return
        with self._lock:
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                for name, module in self._points():
                    self._import(name, module)
                self._loaded = True
            finally:
                self._loading = False

    def _load_one(self, name: str) -> None:
        """Import the modules of the entry points ``name`` alone, where that is enough."""
        if self._loaded or self._loading or not self._apart or name in self._items:
            return
        with self._lock:
            for point, module in self._points():
                if point == name:
                    self._import(name, module)

    def _points(self) -> list[tuple[str, str]]:
        points = importlib.metadata.entry_points(group=self.group)
        return sorted({(point.name, point.value.partition(":")[0]) for point in points})

    def _import(self, name: str, module: str) -> None:
        try:
            importlib.import_module(module)
        except MissingExtraError as error:
            # the others stay usable; asking for this one by name raises the error that says what to install
            self._missing[name] = error

    def register(self, name: str, item: T, *, origin: str, override: bool = False) -> None:
        """Add ``item``; a second registration from another module is refused unless ``override`` is set.

        An override stands whichever of the two modules is imported first.
        """
        if name in self._items and self._origin[name] != origin and not override:
            if name in self._overrides:
                return
            raise UsageError(f"{self.kind} {name!r} is registered twice: by {self._origin[name]} and by {origin}")
        if override:
            self._overrides.add(name)
        self._items[name] = item
        self._origin[name] = origin

    def alias(self, other: str, name: str) -> None:
        """Let ``other`` find what is registered as ``name``; listings leave it out."""
        self._aliases[other] = name

    def remove(self, name: str) -> None:
        """Take ``name`` out of the table."""
        self.load()
        del self._items[name], self._origin[name]
        self._overrides.discard(name)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Undo on exit whatever the body registers or removes. Tests use it; it must not run in two threads at once."""
        self.load()
        before = self._items, self._origin, self._overrides
        self._items, self._origin, self._overrides = dict(self._items), dict(self._origin), set(self._overrides)
        try:
            yield
        finally:
            self._items, self._origin, self._overrides = before

    def origin(self, name: str) -> str:
        """The module that registered ``name``."""
        self.load()
        return self._origin[name]

    def __getitem__(self, name: str) -> T:
        self._load_one(name)
        if name not in self._items:
            self.load()
            name = self._aliases.get(name, name)
        try:
            return self._items[name]
        except KeyError:
            if name in self._missing:
                raise self._missing[name] from None
            raise UsageError(f"unknown {self.kind} {name!r}{nearest(name, self._items)}") from None

    def get(self, name: str, default: T | None = None) -> T | None:  # type: ignore[override]
        self.load()
        return self._items.get(self._aliases.get(name, name), default)

    def __contains__(self, name: object) -> bool:
        self.load()
        return name in self._items or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        self.load()
        return iter(sorted(self._items))

    def __len__(self) -> int:
        self.load()
        return len(self._items)
