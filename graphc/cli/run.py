"""``graphc run``: inference, through graphc's own plan and backend."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from graphc.cli import options, output
from graphc.cli.output import Format


def command(
    model: options.Model,
    inputs: Annotated[
        str,
        typer.Option("--inputs", metavar="I.npz", show_default=False, help="One array per graph input; '-': standard input."),
    ],
    out: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="OUT.npz", help="One array per graph output; '-': standard output."),
    ] = None,
    backend: options.Backend = "auto",
    form: options.Format = Format.text,
) -> None:
    """Run MODEL once on arrays from a file."""
    import numpy as np

    from graphc import frontends
    from graphc.cli.arrays import convert, read_npz
    from graphc.errors import UsageError
    from graphc.frontends.onnx import atomic_write
    from graphc.inference import run_model

    if model == "-" and inputs == "-":
        raise UsageError("MODEL and --inputs cannot both come from standard input")
    loaded, feeds = frontends.load(model), read_npz(inputs)
    for value in loaded.graph.inputs:
        if value.name in feeds and value.dtype is not None:
            feeds[value.name] = convert(feeds[value.name], np.dtype(value.dtype.numpy()), value.name, inputs, output.note)
    results = run_model(loaded, feeds, backend)
    if out == "-":
        # Written at once: numpy seeks while it writes, which standard output may not do.
        buffer = io.BytesIO()
        np.savez(buffer, **results)  # type: ignore[arg-type]
        sys.stdout.buffer.write(buffer.getvalue())
        sys.stdout.buffer.flush()
        return
    if out is not None:
        with atomic_write(out) as file:
            np.savez(file, **results)  # type: ignore[arg-type]
    rows = [{"output": name, "dtype": str(a.dtype), "shape": list(a.shape), **_statistics(a)} for name, a in results.items()]
    if form is Format.json:
        output.document(rows)
    else:
        columns = list(rows[0]) if rows else ["output"]
        output.table(columns, [[str(row[c]) if c == "shape" else row[c] for c in columns] for row in rows])


def _statistics(array: object) -> dict[str, float | None]:
    import numpy as np

    values = np.asarray(array)
    if values.size == 0 or values.dtype.kind not in "fiub":
        return {"min": None, "mean": None, "max": None}
    return {name: round(float(getattr(values, name)()), 6) for name in ("min", "mean", "max")}
