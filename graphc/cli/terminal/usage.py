"""How the commands are called: help with examples, and wrong calls explained in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from graphc.cli.terminal import output
from graphc.errors import nearest

JSON = "--json"


class Command(TyperCommand):
    """A command whose help ends with examples; ``--json`` is short for ``--format json``."""

    examples: Sequence[str] = ()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        text = "\nExamples:\n" + "\n".join(f"  {line}" for line in self.examples)
        if self.rich_markup_mode is None:
            formatter.write(text)
        else:
            print(text)  # rich has printed the help already

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.allow_interspersed_args:  # the rest of the line belongs to a script
            return super().parse_args(ctx, args)
        options = [p for p in self.params if p.param_type_name == "option"]
        if any("--format" in option.opts for option in options):
            args = [part for arg in args for part in (("--format", "json") if arg == JSON else (arg,))]
        given = [arg.partition("=")[0] for arg in args]
        for option in options:
            if not getattr(option, "multiple", False) and sum(map(given.count, option.opts)) > 1:
                output.note(f"{' / '.join(option.opts)} is given more than once; the last one counts")
        return super().parse_args(ctx, args)


def with_examples(lines: Sequence[str]) -> type[Command]:
    """The class of a command with these examples."""
    return type("Command", (Command,), {"examples": lines})


def explain(error: Any, arguments: Sequence[str], commands: Sequence[str]) -> str:
    """A wrong call, which typer noticed, in one line, with the help that tells more."""
    context = error.ctx
    named = next((a for a in arguments if not a.startswith("-")), "")
    command = context.command_path if context is not None else f"graphc {named}" if named in commands else "graphc"
    text = re.sub(r"^Invalid value for (.*?): ", lambda found: found[1].replace("'", "") + ": ", error.format_message())
    text = _in_words(text, _value_of(error)).strip().rstrip(".")
    unknown = re.match(r"No such command '(.+?)'", text)
    if unknown:
        known = list(context.command.commands)
        text = f"there is no command {unknown[1]!r}{nearest(unknown[1], known)}"
    what = "commands" if getattr(context and context.command, "commands", None) or command == "graphc" else "options"
    return f"{text}; '{command} --help' lists the {what}"


_WORDS = (
    (r"Input should be a valid integer.*", "{value}is no whole number"),
    (r"Input should be a valid number.*", "{value}is no number"),
    (r"Input should be greater than or equal to (\S+)", r"{value}is too small; it must be at least \1"),
    (r"Value error, ", ""),
    (r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"these arguments belong to no option: \1"),
    (r"^No such option: (.*)", r"there is no option \1"),
    (r"\(Possible options: (.*)\)", r"(there are \1)"),
    (r"^Missing (argument|option|parameter) (.*?)\.?$", r"the \1 \2 is missing"),
)
"""What typer and pydantic say → the same in plain words; versions of theirs that say it differently are left as they are."""


def _in_words(text: str, value: str) -> str:
    for pattern, words in _WORDS:
        text = re.sub(pattern, words.replace("{value}", value.replace("\\", r"\\")), text)
    return text


def _value_of(error: Any) -> str:
    """The refused value, quoted and with a space behind it, where the error knows it."""
    cause = error.__cause__ or error.__context__
    found = cause.errors() if hasattr(cause, "errors") else []
    return f"{found[0]['input']!r} " if found and "input" in found[0] else ""
