"""The process of one stage: ``python -m graphc.smoke.process MODULE FUNCTION`` prints one JSON object.

The function is called with ``note``, which tells on standard error what comes next, so that a hang or a crash has a place. It
returns what it measured, with a text ``detail``; an exception means that the stage has failed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

NOTE = "smoke: "


class SkippedError(Exception):
    """This machine has nothing to try here; the message says why."""


def note(text: str) -> None:
    """Say on standard error what comes next."""
    print(f"{NOTE}{text}", file=sys.stderr, flush=True)


def main(module: str, function: str) -> None:
    """Call the stage and print its result."""
    said: list[str] = []

    def noted(text: str) -> None:
        said.append(text)
        note(text)

    try:
        found = {"state": "ok", "detail": "", **getattr(importlib.import_module(module), function)(noted)}
    except Exception as error:
        skipped = type(error).__name__ == SkippedError.__name__
        detail = str(error) if skipped else f"{type(error).__name__}: {' '.join(str(error).split())}"
        if not skipped:
            traceback.print_exc()
            detail += f" (during: {said[-1]})" if said else ""
        found = {"state": "skipped" if skipped else "failed", "detail": detail[:1000]}
    print(json.dumps(found), flush=True)
    sys.stderr.flush()
    os._exit(0)  # a broken driver may hang in the destructors


if __name__ == "__main__":
    main(*sys.argv[1:])
