"""Registries that find ops, passes, gradients and backends by name.

Built-ins and plugins register in one way: a module named by an entry point of group ``graphc.ops``, ``graphc.passes``,
``graphc.gradients``, ``graphc.optimizers`` or ``graphc.backends`` is imported, and the decorators in it add entries to the
table of that group. No module of the core imports a pass, a gradient or a backend by name.

A plugin whose module fails to import is left out with one :class:`PluginWarning`; everything else works on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from graphc.errors import MissingExtraError, UsageError, listed, nearest

T = TypeVar("T")

OWN = "graphc."
"""What the names of graphc's own modules begin with; one that fails to import is a bug and stops everything."""


class PluginWarning(UserWarning):
    """A plugin of another package fails to import and is left out."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """An entry point: the module to import, and which plugin of which package it is."""

    name: str
    module: str
    package: str = ""

    def __str__(self) -> str:
        return f"plugin {self.name!r} of package {self.package}" if self.package else f"plugin {self.name!r}"


BROKEN: dict[str, str] = {}
"""Module of a plugin that failed to import → plugin, package and error in one line."""


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
        self._broken: dict[str, str] = {}
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
                for point in self._points():
                    self._import(point)
                self._loaded = True
            finally:
                self._loading = False

    def _load_one(self, name: str) -> None:
        """Import the modules of the entry points ``name`` alone, where that is enough."""
        if self._loaded or self._loading or not self._apart or name in self._items:
            return
        with self._lock:
            for point in self._points():
                if point.name == name:
                    self._import(point)

    def _points(self) -> list[Point]:
        packages: dict[importlib.metadata.Distribution | None, str] = {None: ""}  # reading one parses a file
        found = set()
        for point in importlib.metadata.entry_points(group=self.group):
            if point.dist not in packages:
                about = point.dist.metadata  # type: ignore[union-attr]
                packages[point.dist] = f"{about['Name']} {about['Version']}"
            found.add(Point(point.name, point.value.partition(":")[0].strip(), packages[point.dist]))
        return sorted(found)

    def _import(self, point: Point) -> None:
        before = dict(self._items), dict(self._origin), set(self._overrides)
        try:
            importlib.import_module(point.module)
        except MissingExtraError as error:
            # the others stay usable; asking for this one by name raises the error that says what to install
            self._missing[point.name] = error
        except (Exception, SystemExit) as error:
            if point.module.startswith(OWN) and not self._apart:
                raise
            self._take_back(point.module, *before)
            reason = " ".join(str(error).split()) or "no message"
            problem = f"{point} cannot be imported from {point.module}: {type(error).__name__}: {reason}"
            self._broken[point.name] = problem
            if BROKEN.setdefault(point.module, problem) is problem:
                text = f"{problem}; it is left out until you repair, update or uninstall it"
                warnings.warn(text, PluginWarning, stacklevel=2)

    def _take_back(self, module: str, items: dict[str, T], origins: dict[str, str], overrides: set[str]) -> None:
        """Undo what ``module`` registered before it failed; what it has imported stays."""
        for name in [name for name, origin in self._origin.items() if origin == module and origins.get(name) != module]:
            del self._items[name], self._origin[name]
            self._overrides.discard(name)
            if name in items:
                self._items[name], self._origin[name] = items[name], origins[name]
                self._overrides |= {name} & overrides

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
            if name in self._broken:
                raise UsageError(f"{self.kind} {name!r} cannot be used: {self._broken[name]}") from None
            also = f"; left out: {'; '.join(self._broken.values())}" if self._broken else ""
            text = f"unknown {self.kind} {name!r}{nearest(name, self._items)}; {listed(self.kind, self)}{also}"
            raise UsageError(text) from None

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
