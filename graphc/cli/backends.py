"""``graphc backends``: what can execute a plan here."""

from __future__ import annotations

from typing import Any

from graphc.cli import options, output
from graphc.cli.output import Format


def command(form: options.Format = Format.text) -> None:
    """List the backends, whether each works here, and the ops it has kernels of its own for."""
    from graphc.backend import BACKENDS, KERNELS
    from graphc.errors import GraphcError

    rows: list[dict[str, Any]] = []
    for name in BACKENDS:
        try:
            BACKENDS[name](threads=1, spin=False).close()
            status = "ready"
        except (GraphcError, ImportError) as error:
            status = str(error)
        kernels = sorted(op for backend, op in KERNELS if backend == name)
        rows.append({"name": name, "status": status, "kernels": kernels, "origin": BACKENDS.origin(name)})
    if form is Format.json:
        output.document(rows)
        return
    output.table(
        ("backend", "status", "native kernels", "module"),
        [(row["name"], row["status"], ", ".join(row["kernels"]) or "none", row["origin"]) for row in rows],
    )
