"""``graphc passes``: lists the passes and their options."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format

if TYPE_CHECKING:
    from graphc.pipeline import Pass

EXAMPLES = (
    "graphc passes",
    "graphc passes mixed_precision",
)


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this pass, with its whole documentation.")] = None,
    form: options.Format = Format.text,
) -> None:
    """List the passes of pipelines with their options and defaults."""
    from graphc.pipeline import PASSES

    if name is not None:
        entry = PASSES[name]
        if form is Format.json:
            output.document({**_row(entry), "documentation": output.plain(entry.doc)})
            return
        output.say(f"{entry.name}  ({PASSES.origin(entry.name)})")
        output.say(f"requires {', '.join(entry.requires)}" if entry.requires else "requires nothing")
        output.say(f"changes {_CHANGES[entry.changes]}")
        if entry.aliases:
            output.say(f"also called {', '.join(entry.aliases)}")
        output.prose("\n" + output.plain(entry.doc) + "\n")
        output.say()
        rows = [(o["name"], _in_words(o["type"]), o["default"]) for o in _options(entry)]
        if rows:
            output.table(("option", "type", "default"), rows)
        return
    rows_of_all = [_row(PASSES[n]) for n in PASSES]
    if form is Format.json:
        output.document(rows_of_all)
        return
    output.table(
        ("pass", "what it does", "options"),
        [
            (row["name"], _described(row), " ".join(f"{o['name']}={_shown(o['default'])}" for o in row["options"]))
            for row in rows_of_all
        ],
    )


_CHANGES = {
    "function": "what the model computes: it runs on the model before that is copied for training and evaluation",
    "form": "the graph, not what it computes",
    "training": "the training graph alone: loss, gradients, updates, or how a step runs",
}


def _described(row: dict[str, Any]) -> str:
    aliases: list[str] = row["aliases"]
    return f"{row['doc']} (also called {', '.join(aliases)})" if aliases else str(row["doc"])


def _shown(default: Any) -> str:
    return "…" if default is None or default == "required" else str(default)


def _row(entry: Pass) -> dict[str, Any]:
    from graphc.pipeline import PASSES

    return {
        "name": entry.name,
        "doc": output.plain(entry.doc.partition("\n")[0]),
        "requires": list(entry.requires),
        "aliases": list(entry.aliases),
        "changes": entry.changes,
        "options": _options(entry),
        "origin": PASSES.origin(entry.name),
    }


def _options(entry: Pass) -> list[dict[str, Any]]:
    return [
        {
            "name": key,
            "type": _type(entry.types.get(key, str)),
            "default": "required" if parameter.default is inspect.Parameter.empty else parameter.default,
        }
        for key, parameter in entry.options.items()
    ]


_WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "Sequence[str]": "texts: a|b"}


def _in_words(kind: str) -> str:
    """A type for people: an option may always be left out where it has a default."""
    return " or ".join(_WORDS.get(part, part) for part in kind.split(" | ") if part != "None")


def _type(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("collections.abc.", "").replace("typing.", "")
