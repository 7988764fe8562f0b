"""The folder on disk for compiled kernels, compiled segments and measured choices."""

from __future__ import annotations

import os
import re
from pathlib import Path

CACHE_VARIABLE = "GRAPHC_CACHE_DIR"
"""Environment variable that names the folder; by default it is ``~/.cache/graphc``."""


def cache_folder() -> Path:
    """The folder; whoever writes into it makes it."""
    found = os.environ.get(CACHE_VARIABLE)
    if found:
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "graphc"


def file_stem(*words: str) -> str:
    """A file's name without its ending, from words such as the name of a device and a version."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(words))
