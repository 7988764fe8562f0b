"""A griffe extension for ``make docs``: what our docstrings have and the site's Markdown and Google parser do not know.

before   :class:`~graphc.ir.builder.Builder`        freeze, train: glob patterns over parameter names
after    `graphc.ir.builder.Builder`                freeze: glob patterns over parameter names
                                                    train: glob patterns over parameter names
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_SHARED = re.compile(r"^( +)(\w+(?:, \w+)+): (.+(?:\n\1 .+)*)", re.MULTILINE)
"""A description that several parameters share, with its continuation lines."""


class DocstringMarkdown(griffe.Extension):
    """Rewrites the docstring of every object that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _SHARED.sub(_one_each, text)


def _one_each(found: re.Match[str]) -> str:
    indent, names, text = found.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))
