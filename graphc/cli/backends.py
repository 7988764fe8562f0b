"""``graphc backends``: lists the backends and whether they work here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format

EXAMPLES = (
    "graphc backends",
    "graphc backends onnxruntime",
)


READY = "ready"


def statuses(names: Iterable[str] | None = None) -> Iterator[tuple[str, str, str]]:
    """Every backend, or those of ``names``, with :data:`READY` or the reason why it does not start here, and its remark."""
    from graphc.backend import BACKENDS
    from graphc.errors import GraphcError

    for name in BACKENDS if names is None else names:
        factory = BACKENDS[name]
        try:
            with contextlib.closing(factory(threads=1, spin=False)) as backend:
                remark = backend.remark()
        except (GraphcError, ImportError) as error:
            yield name, str(error), ""
        except Exception as error:  # of a plugin, or of a library beneath it
            yield name, f"does not start: {type(error).__name__}: {error}", ""
        else:
            yield name, READY, remark


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this backend, with its options and kernels.")] = None,
    form: options.Format = Format.text,
) -> None:
    """List the backends and whether each works here."""
    from graphc.backend import BACKENDS, KERNELS, backend_options

    rows: list[dict[str, Any]] = []
    for found, status, remark in statuses(None if name is None else (name,)):
        kernels = sorted(op for backend, op in KERNELS if backend == found)
        origin, known = BACKENDS.origin(found), list(backend_options(found))
        rows.append({"name": found, "status": status, "remark": remark, "options": known, "kernels": kernels, "origin": origin})
    if form is Format.json:
        output.document(rows if name is None else rows[0])
    elif name is None:
        output.table(
            ("backend", "native kernels", "module", "status"),
            [(row["name"], len(row["kernels"]), row["origin"], row["status"]) for row in rows],
        )
    else:
        row = rows[0]
        output.pairs(
            {
                "backend": row["name"],
                "module": row["origin"],
                "status": "; ".join(filter(None, (row["status"], row["remark"]))),
                "options": ", ".join(row["options"]) or "none",
                "kernels": ", ".join(row["kernels"]) or "none of its own: it runs standard ops",
            }
        )
