"""``graphc ops``: the graphc operators, and which standard operators have a gradient."""

from __future__ import annotations

from typing import Any

from graphc.cli import options, output
from graphc.cli.output import Format


def command(form: options.Format = Format.text) -> None:
    """List graphc's own operators, and the gradient of every standard one: direct, zero (piecewise constant) or none."""
    own, standard = _own(), _standard()
    if form is Format.json:
        output.document({"graphc": own, "onnx": standard})
        return
    output.table(
        ("graphc op", "kind", "standard form", "what it is"),
        [(o["name"], o["kind"], "yes" if o["decomposes"] else "no", o["doc"]) for o in own],
    )
    output.say()
    output.table(("standard op", "gradient"), [(o["name"], o["gradient"]) for o in standard])
    counts = {kind: sum(o["gradient"] == kind for o in standard) for kind in ("direct", "zero", "none")}
    output.say(f"{len(standard)} standard ops: " + ", ".join(f"{number} {kind}" for kind, number in counts.items()))


def _own() -> list[dict[str, Any]]:
    from graphc.gradient import GRADIENTS
    from graphc.ir.declare import OPS

    rows = []
    for name in OPS:
        declaration = OPS[name]
        kind = "update" if declaration.next_value else "collective" if declaration.effect else "compute"
        rows.append(
            {
                "name": name,
                "kind": kind,
                "decomposes": declaration.decompose is not None,
                "gradient": _gradient(GRADIENTS.get(f"graphc::{name}")),
                "doc": declaration.doc.partition("\n")[0],
            }
        )
    return rows


def _standard() -> list[dict[str, str]]:
    import onnx

    from graphc.gradient import GRADIENTS
    from graphc.ir import OPSET

    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= OPSET:
            known = newest.get(schema.name)
            if known is None or known.since_version < schema.since_version:
                newest[schema.name] = schema
    names = sorted(name for name, schema in newest.items() if not schema.deprecated)
    return [{"name": name, "gradient": _gradient(GRADIENTS.get(name))} for name in names]


def _gradient(rule: Any) -> str:
    if rule is None:
        return "none"
    return "zero" if rule.function is None else "direct"
