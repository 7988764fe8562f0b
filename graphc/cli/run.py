"""``graphc run``: inference through graphc's own plan and backend."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Annotated, Any

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option, ReadOptions

if TYPE_CHECKING:
    import onnx_ir as ir

EXAMPLES = (
    "graphc run model.onnx --inputs inputs.npz -o outputs.npz",
    "graphc run model.onnx --inputs inputs.npz --backend numpy",
)


@options.takes_options
def command(
    model: options.Model,
    inputs: Annotated[str, Option("One array per graph input; '-': standard input.", "I.npz")],
    out: Annotated[
        str | None, Option("One array per graph output; '-': standard output.", "OUT.npz", flags=("-o", "--output"))
    ] = None,
    backend: options.Backend = "auto",
    form: options.Format = Format.text,
    *,
    reading: ReadOptions,
) -> None:
    """Run MODEL once on arrays from a file."""
    import numpy as np

    from graphc import frontends
    from graphc.cli.training.arrays import convert, gather_sequences, read_arrays
    from graphc.cli.training.places import check_place
    from graphc.errors import UsageError
    from graphc.frontends.writing import atomic_write, write_standard_output
    from graphc.training.inference import run_model

    if model == "-" and inputs == "-":
        raise UsageError("MODEL and --inputs cannot both come from standard input")
    check_place("--output", out, {"the model": model, "the inputs": inputs})
    loaded, feeds = frontends.load(model, reading=reading), read_arrays(inputs)
    for value in loaded.graph.inputs:
        if value.name in feeds and value.dtype is not None and feeds[value.name].dtype.kind != "U":
            feeds[value.name] = convert(feeds[value.name], np.dtype(value.dtype.numpy()), value.name, inputs, output.note)
    results = _flat(run_model(loaded, _without_labels(loaded, gather_sequences(loaded.graph, feeds), inputs), backend))
    if out == "-":
        # Written in one piece: numpy seeks while writing, which standard output may not support.
        buffer = io.BytesIO()
        np.savez(buffer, **results)
        write_standard_output(buffer.getvalue())
        return
    if out is not None:
        with atomic_write(out) as file:
            np.savez(file, **results)
    rows = [{"output": name, "dtype": str(a.dtype), "shape": list(a.shape), **_statistics(a)} for name, a in results.items()]
    if form is Format.json:
        output.document(rows)
    else:
        columns = list(rows[0]) if rows else ["output"]
        output.table(columns, [[str(row[c]) if c == "shape" else row[c] for c in columns] for row in rows])


def _without_labels(model: ir.Model, feeds: dict[str, Any], where: str) -> dict[str, Any]:
    """Leave out arrays that no input takes, such as the labels of test data, if every input has its own."""
    known = [value.name for value in model.graph.inputs if not value.is_initializer()]
    extra = [name for name in feeds if name not in {value.name for value in model.graph.inputs}]
    if not extra or any(name not in feeds for name in known):
        return feeds
    names = ", ".join(map(repr, extra))
    output.note(f"{where}: the model has no input {names}, which is left out")
    return {name: array for name, array in feeds.items() if name not in extra}


def _flat(results: dict[str, Any]) -> dict[str, Any]:
    """Return one array per entry: the elements of a sequence ``s`` as ``s.0``, ``s.1`` …; empty optionals are left out."""
    import numpy as np

    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, list):
            flat |= _flat({f"{name}.{k}": element for k, element in enumerate(value)})
        elif value is not None:
            array = np.asarray(value)
            flat[name] = array.astype(str) if array.dtype == object else array
    return flat


def _statistics(array: object) -> dict[str, float | None]:
    import numpy as np

    values = np.asarray(array)
    if values.size == 0 or values.dtype.kind not in "fiub":
        return {"min": None, "mean": None, "max": None}
    return {name: round(float(getattr(values, name)()), 6) for name in ("min", "mean", "max")}
