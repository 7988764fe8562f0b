"""Which backend a job runs on, from its text: a name, with options where it has some.

    make_backend("cupy:tf32=true,loose_gelu=true", threads=1)

A backend's options are the keyword arguments of its factory that are true or false.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from graphc.backend import BACKENDS, Backend, host_backend
from graphc.errors import UsageError, nearest

DETERMINISTIC = "deterministic"
"""The option of a backend that otherwise chooses by measuring; it comes from what the program asks for."""

_TRUTH = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def make_backend(text: str, *, threads: int, spin: bool = True, deterministic: bool = False) -> Backend:
    """The backend of ``text``; ``auto``: onnxruntime on CPUs, or numpy where it is not installed. A GPU has to be named.

    Args:
        deterministic: two equal runs have equal bits, also where a backend has to give up speed for that.

    Raises:
        UsageError: an unknown backend or option.
    """
    if text == "auto":
        return host_backend(threads=threads, spin=spin)
    factory, options = backend_of(text)
    if deterministic and DETERMINISTIC in _options(factory):
        options[DETERMINISTIC] = True
    return factory(threads=threads, spin=spin, **options)


def name_of(text: str) -> str:
    """The name in front of the options."""
    return text.partition(":")[0]


def backend_of(text: str) -> tuple[Callable[..., Backend], dict[str, Any]]:
    """The factory of a backend, and the options that ``text`` gives it.

    Raises:
        UsageError: an unknown backend or option, or a value that is neither true nor false.
    """
    name, _, rest = text.partition(":")
    factory = BACKENDS[name]
    known = _options(factory)
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if key not in known:
            listed = f"its options are {', '.join(known)}" if known else "it has none"
            raise UsageError(f"backend {name!r} has no option {key!r}{nearest(key, known)}; {listed}")
        if equals and value not in _TRUTH:
            raise UsageError(f"backend {name!r}: {key}={value} is neither true nor false")
        found[key] = _TRUTH[value] if equals else True
    return factory, found


def _options(factory: Callable[..., Backend]) -> list[str]:
    parameters = inspect.signature(factory).parameters.values()
    return [p.name for p in parameters if isinstance(p.default, bool) and p.name != "spin"]
