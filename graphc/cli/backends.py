"""``graphc backends``: lists the backends and whether they work here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphc.cli import options, output
from graphc.cli.output import Format

READY = "ready"


def statuses() -> Iterator[tuple[str, str]]:
    """Return every backend with :data:`READY` or the reason why it does not start here."""
    from graphc.backend import BACKENDS
    from graphc.errors import GraphcError

    for name in BACKENDS:
        try:
            BACKENDS[name](threads=1, spin=False).close()
        except (GraphcError, ImportError) as error:
            yield name, str(error)
        else:
            yield name, READY


def command(form: options.Format = Format.text) -> None:
    """List the backends, whether each works here, and the ops that each has native kernels for."""
    from graphc.backend import BACKENDS, KERNELS

    rows: list[dict[str, Any]] = []
    for name, status in statuses():
        kernels = sorted(op for backend, op in KERNELS if backend == name)
        rows.append({"name": name, "status": status, "kernels": kernels, "origin": BACKENDS.origin(name)})
    if form is Format.json:
        output.document(rows)
        return
    output.table(
        ("backend", "status", "native kernels", "module"),
        [(row["name"], row["status"], ", ".join(row["kernels"]) or "none", row["origin"]) for row in rows],
    )
