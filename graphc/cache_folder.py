"""The cache folder on disk for compiled kernels, compiled segments and tuning results."""

from __future__ import annotations

import os
import re
from pathlib import Path

CACHE_VARIABLE = "GRAPHC_CACHE_DIR"
"""Environment variable that names the folder; by default it is ``~/.cache/graphc``."""


def cache_folder() -> Path:
    """The cache folder; the code that writes into it creates it."""
    found = os.environ.get(CACHE_VARIABLE)
    if found:
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "graphc"


def cache_path(*words: str, suffix: str = "") -> Path:
    """A file or folder in the cache folder, named by words such as a library, the device's name and a version."""
    return cache_folder() / (re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(words)) + suffix)
