"""Options of a command from a file: a JSON object with the options' names as keys."""

from __future__ import annotations

import json
from typing import Any

import typer


def read_options(context: typer.Context, file: str | None) -> str | None:
    """Take the values of ``file`` for options that the command line does not give; the callback of ``--config``.

    Raises:
        UsageError: a file that cannot be read, an unknown option, or a value that is none.
    """
    from graphc.atomic_files import read_regular
    from graphc.errors import UsageError, nearest

    if file is None:
        return None
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--config {file}: it cannot be read ({error}); it is a JSON object such as 'graphc plan' writes"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {file}: it holds no JSON object with options")
    known: dict[str, Any] = {}
    for parameter in context.command.params:
        names = [text[2:] for text in parameter.opts if text.startswith("--")] or [parameter.name or ""]
        known |= dict.fromkeys(names, parameter)
    known.pop("config", None)
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in known:
            raise UsageError(f"--config {file}: unknown option {key!r}{nearest(key, known)}")
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float) for item in listed):
            raise UsageError(
                f"--config {file}: {key} is {json.dumps(value)}; it takes text, a number, true or false, or a list"
            )
        if isinstance(value, list) != bool(getattr(known[key], "multiple", False)):
            kind = "one value" if isinstance(value, list) else "a list"
            raise UsageError(f"--config {file}: {key} is {json.dumps(value)}; it takes {kind}")
        values[known[key].name] = value
    context.default_map = values
    return file
