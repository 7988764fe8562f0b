"""The cache folder on disk: compiled kernels, compiled segments and tuning results, of one user.

What lies in it runs later, so nobody else may be able to write there: a folder of another user, or one that others may write
to, is refused with a warning, and a fresh folder that ends with the process takes its place.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

CACHE_VARIABLE = "GRAPHC_CACHE_DIR"
"""Environment variable that names the folder; by default it is ``~/.cache/graphc``."""


def cache_folder() -> Path:
    """The cache folder, which exists, belongs to this user and is closed to all others."""
    named = os.environ.get(CACHE_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return _checked(Path(named) if named else Path(cache) / "graphc")


def cache_path(*words: str, suffix: str = "") -> Path:
    """A file or folder in the cache folder, named by words such as a library, the device's name and a version."""
    return cache_folder() / (re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(words)) + suffix)


@functools.cache
def sources_digest() -> bytes:
    """A digest of the text of this package's sources, the same wherever they lie; empty if there are none."""
    packages = [importlib.util.find_spec(name) for name in ("graphc", "graphc.backends", "graphc.passes")]
    folders = {folder for spec in packages if spec is not None for folder in spec.submodule_search_locations or ()}
    files = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest() if files else b""


@functools.cache
def _checked(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = _fault(folder)
    except OSError as error:
        fault = error.strerror or str(error)
    if not fault:
        return folder
    instead = Path(tempfile.mkdtemp(prefix="graphc-cache-"))
    atexit.register(shutil.rmtree, instead, ignore_errors=True)
    warnings.warn(
        f"the cache folder {folder} is not used: {fault}; this process compiles anew, in a folder of its own "
        f"(mend it, or name another folder in {CACHE_VARIABLE})",
        RuntimeWarning,
        stacklevel=3,
    )
    return instead


def _fault(folder: Path) -> str:
    """Describe why what lies in ``folder`` may come from somebody else, or cannot be written; empty if neither."""
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to the user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}; chmod 700 closes it)"
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        os.chmod(folder, 0o700)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it may not be written to"
