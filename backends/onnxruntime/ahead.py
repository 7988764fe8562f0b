"""Makes machine code of native kernels ahead of time, so that a first start needs no Numba.

    python -m graphc.backends.onnxruntime.ahead              # for processors like this one
    python -m graphc.backends.onnxruntime.ahead --all        # for every level, as a wheel holds it
    python -m graphc.backends.onnxruntime.ahead --add FILE   # list the kernels of a record too

``kernels.txt`` lists kernels with the types of their arguments; a process appends those that it binds to the file that
``GRAPHC_RECORD_KERNELS`` names. Numba compiles what the list lacks, on first use. The code is found by a digest of the kernels'
sources, so that code of other sources is never run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import os
import subprocess
import sys
from pathlib import Path

from graphc.backends.host.object_files import write_object
from graphc.backends.host.processor import LEVELS, processor
from graphc.backends.onnxruntime.kernels.common.jit import NumbaFunction, numba_package
from graphc.backends.onnxruntime.machine_code import AHEAD, ahead_name, identity_of, object_of
from graphc.errors import InternalError, UsageError

MOST = 8
"""Processes at most; each imports Numba, which takes seconds."""

LIST = Path(__file__).parent / "kernels.txt"


def main() -> int:
    """Parse the command line, compile; 1 where a kernel fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help=f"for {', '.join(LEVELS)}")
    parser.add_argument("--add", type=Path, metavar="FILE", help="add the lines of a record to the list, compile nothing")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.add:
        known = set(LIST.read_text().splitlines()) | set(arguments.add.read_text().splitlines())
        LIST.write_text("".join(f"{line}\n" for line in sorted(known) if function_of(line) is not None))
        return 0
    if arguments.share:
        return _share(*map(int, arguments.share.split("/")))
    levels = list(LEVELS) if arguments.all else [processor().level]
    if levels == [None]:
        print("kernels of this processor are compiled on first use")
        return 0
    names = _listed()
    for path in AHEAD.glob("*/*.o"):
        if path.stem not in names:  # of other sources
            path.unlink(missing_ok=True)
    count = min(os.cpu_count() or 1, MOST)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        codes = list(pool.map(_child, *zip(*((str(level), k, count) for level in levels for k in range(count)), strict=True)))
    for level in levels:
        kept = sum(1 for _ in (AHEAD / str(level)).glob("*.o"))
        print(f"{kept} kernels for {level} in {AHEAD / str(level)}")
    return max(codes)


def function_of(line: str) -> NumbaFunction | None:
    """The kernel of a line of the list; None: this version has none of that name."""
    module, name = line.split()[0].split(":")
    name, *numbers = name.rstrip("]").replace("[", ",").split(",")
    if not module.startswith(f"{__package__}."):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    if numbers and found is not None:
        found = found(*map(int, numbers))
    return found if isinstance(found, NumbaFunction) else None


def _child(level: str, share: int, count: int) -> int:
    command = [sys.executable, "-m", "graphc.backends.onnxruntime.ahead", "--share", f"{share}/{count}"]
    return subprocess.run(command, env={**os.environ, "GRAPHC_PROCESSOR": level}, check=False).returncode


def state() -> str:
    """How many kernels of the list are compiled ahead of time for this processor, and what to do when some are not."""
    level = processor().level
    if level is None:
        return "Numba compiles kernels for this processor on first use"
    names = _listed()
    ready = sum((AHEAD / str(level) / f"{name}.o").exists() for name in names)
    found = f"{ready} of {len(names)} kernels compiled ahead of time ({level})"
    if ready == len(names):
        return found
    return f"{found}; Numba compiles others on first use, 'python -m {__package__}.ahead' all of them now"


def _listed() -> dict[str, tuple[NumbaFunction, list[str]]]:
    """Name of the code, kernel and argument types of each line of the list."""
    found = {}
    for line in LIST.read_text().splitlines():
        function, kinds = function_of(line), line.split()[1:]
        identity = identity_of(function, kinds) if function is not None else None
        if function is not None and identity is not None:
            found[ahead_name(identity)] = (function, kinds)
    return found


def _share(share: int, count: int) -> int:
    """Compile every ``count``-th kernel of the list that has no code."""
    failed, refused = 0, numba_package().core.errors.NumbaError  # a line whose types its kernel does not take
    for name, (function, kinds) in list(_listed().items())[share::count]:
        path = AHEAD / str(processor().level) / f"{name}.o"
        try:
            if not path.exists():
                write_object(path, object_of(function, kinds, name))
                if not path.exists():
                    raise UsageError(f"{path.parent} cannot be written")
        except (InternalError, UsageError, refused) as error:
            failed = 1
            print(f"{function.place} {' '.join(kinds)}: {error}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
