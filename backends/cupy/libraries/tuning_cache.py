"""Stores tuning results on disk: the fastest choice per task, for one device and library version.

    {"bfloat16>bfloat16 1x16384x3072x768 a(768,1,0) …": {"algorithm": [17, …], "seconds": 0.00012}, …}

Several processes may measure at the same time: each merges its results into the file under a lock and replaces the file
atomically. An unreadable file is ignored with a warning, and its choices are measured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Choices:
    """The choices stored in one file.

    Args:
        path: the file; None keeps them in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._found: dict[str, Any] = {} if path is None else _read(path)

    def get(self, key: str) -> Any:
        """The stored choice, or None."""
        return self._found.get(key)

    def put(self, key: str, value: Any, replaced: Any = None) -> Any:
        """Store a choice (of JSON's types) in memory and on disk; warns at each call that cannot write.

        Returns:
            The choice that holds: of processes that measure at once, all take what the first has stored, so that their later
            runs have the same bits.

        Args:
            replaced: a stored choice that is not to be kept.
        """
        self._found[key] = value
        if self.path is None:
            return value
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                stored = _read(self.path) if self.path.exists() else {}
                if stored.get(key) == replaced:
                    stored.pop(key, None)
                self._found = {**self._found, **stored}
                partial = self.path.with_suffix(f".{os.getpid()}.tmp")
                partial.write_text(json.dumps(self._found, indent=0, sort_keys=True))
                partial.replace(self.path)
        except OSError as error:
            warnings.warn(f"measured choices are not kept in {self.path}: {error}", RuntimeWarning, stacklevel=2)
        return self._found[key]


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read and is measured anew ({error})", RuntimeWarning, stacklevel=2)
        return {}
    if not isinstance(held, dict):
        warnings.warn(f"{path} holds no choices and is measured anew", RuntimeWarning, stacklevel=2)
        return {}
    return held


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # without locks, the atomic replacement alone keeps the file whole
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
