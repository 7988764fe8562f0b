"""Lists every ONNX operator with its gradient and the backends that run it.

Makes the table of ``graphc ops`` and ``docs/ops.md`` from the registries:

* **direct**: a rule in :mod:`graphc.passes.gradients`.
* **through body**: no rule; the op's definition by simpler ops in the standard is differentiated.
* **zero**: piecewise constant, or without a float input; the gradient is zero.
* **none**: not differentiable, with the reason.
* **refused**: asking for the derivative raises an error with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from graphc.gradient import GRADIENTS, key_of
from graphc.ir import DOMAIN
from graphc.ir.declare import OPS
from graphc.ir.evaluate import NOT_DETERMINED

DOMAINS = ("", "ai.onnx.preview", "ai.onnx.preview.training")

_STRINGS = "its operands are strings"
_UPDATE = "updates a parameter: the `optimizer` pass writes graphc's own update ops instead"
NO_GRADIENT: dict[str, str] = {
    "ImageDecoder": "decodes bytes into integers",
    "RegexFullMatch": _STRINGS,
    "StringConcat": _STRINGS,
    "StringNormalizer": _STRINGS,
    "StringSplit": _STRINGS,
    "TfIdfVectorizer": "counts strings or integers",
    "ai.onnx.preview::FlexAttention": "a draft of the standard, which no runtime has",
    "ai.onnx.preview.training::Adagrad": _UPDATE,
    "ai.onnx.preview.training::Adam": _UPDATE,
    "ai.onnx.preview.training::Gradient": "a request for gradients: the `autodiff` pass answers it",
    "ai.onnx.preview.training::Momentum": _UPDATE,
}
"""Ops without a gradient → the reason."""


@dataclass(frozen=True)
class Coverage:
    """One operator.

    Attributes:
        since: the opset of its newest version.
        gradient: ``direct``, ``through body``, ``zero``, ``none``, or ``missing`` if neither a rule nor a reason is registered.
        reason: why there is no gradient.
        kernels: the backends with a native kernel.
        gpu: how the cupy backend runs it; ``host``: on the host, and the plan reports such nodes.
    """

    name: str
    domain: str
    since: int
    gradient: str
    reason: str
    kernels: tuple[str, ...]
    gpu: str

    @property
    def second_order(self) -> bool:
        """Whether the gradient can be differentiated again; the tests of the rules check the ops they emit."""
        return self.gradient in ("direct", "through body")

    @property
    def cells(self) -> tuple[str, ...]:
        """Table row: operator, since, gradient, second order, native kernels, on a GPU."""
        name = self.name if self.domain == "ai.onnx" else f"{self.domain}.{self.name}"
        gradient = f"none: {self.reason}" if self.gradient == "none" else self.gradient
        twice = "yes" if self.second_order else ""
        return name, str(self.since), gradient, twice, ", ".join(self.kernels), self.gpu

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "second_order": self.second_order, "kernels": list(self.kernels)}


def schemas() -> list[Any]:
    """Newest ``onnx.defs.OpSchema`` of every op that is not deprecated, by domain and name."""
    newest: dict[tuple[str, str], Any] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        key = schema.domain, schema.name
        if schema.domain in DOMAINS and (key not in newest or newest[key].since_version < schema.since_version):
            newest[key] = schema
    return [newest[key] for key in sorted(newest) if not newest[key].deprecated]


def standard() -> list[Coverage]:
    """Every op of the standard, preview domains included."""
    return [_of(schema) for schema in schemas()]


def _of(schema: Any) -> Coverage:
    key = key_of(schema.domain, schema.name)
    kind = gradient_of(key, schema)
    return Coverage(
        name=schema.name,
        domain=schema.domain or "ai.onnx",
        since=schema.since_version,
        gradient=kind,
        reason=NO_GRADIENT.get(key, "") if kind == "none" else "",
        kernels=_kernels(key),
        gpu=_on_gpu(key),
    )


def gradient_of(key: str, schema: Any = None) -> str:
    """Return how the op with this registry key is differentiated."""
    rule = GRADIENTS.get(key)
    if rule is not None and rule.refuses:
        return "refused"
    if rule is not None:
        return "zero" if rule.function is None else "direct"
    if key in NO_GRADIENT:
        return "none"
    domain, _, name = key.rpartition("::")
    if domain == DOMAIN:
        declaration = OPS[name]
        return "through body" if declaration.decompose is not None and not declaration.effect else "none"
    schema = schema or (onnx.defs.get_schema(name, domain) if onnx.defs.has(name, domain) else None)
    body = schema is not None and (schema.has_function or schema.has_context_dependent_function)
    return "through body" if body else "missing"


def own() -> list[dict[str, Any]]:
    """The ops of the ``graphc`` domain."""
    rows = []
    for name in OPS:
        declaration = OPS[name]
        kind = "update" if declaration.roles else "collective" if declaration.effect else "compute"
        key = key_of(DOMAIN, name)
        rows.append(
            {
                "name": name,
                "kind": kind,
                "decomposes": declaration.decompose is not None,
                "gradient": "none" if kind == "update" else gradient_of(key),
                "kernels": list(_kernels(key)),
                "gpu": _on_gpu(key),
                "doc": declaration.doc.partition("\n")[0],
            }
        )
    return rows


def summary(rows: Iterable[Coverage]) -> dict[str, int]:
    """Count the ``ai.onnx`` ops: differentiable, covered, zero, none, twice differentiable."""
    rows = [row for row in rows if row.domain == "ai.onnx"]
    count = {kind: sum(r.gradient == kind for r in rows) for kind in ("direct", "through body", "zero", "none", "missing")}
    covered = count["direct"] + count["through body"]
    return {
        "operators": len(rows),
        "differentiable": covered + count["missing"],
        "covered": covered,
        "direct": count["direct"],
        "through_body": count["through body"],
        "zero": count["zero"],
        "none": count["none"],
        "second_order": sum(r.second_order for r in rows),
    }


def _kernels(key: str) -> tuple[str, ...]:
    from graphc.backend import BACKENDS, KERNELS

    BACKENDS.load()
    return tuple(sorted(backend for backend, op in KERNELS if op == key))


def _on_gpu(key: str) -> str:
    from graphc.backend import BACKENDS, COVERAGE

    BACKENDS.load()
    if key in NOT_DETERMINED:
        return "decomposed"  # by the pass 'draws'
    return COVERAGE["cupy"](key) if "cupy" in COVERAGE else ""


# The page ------------------------------------------------------------------------------------------------------------


def page() -> str:
    """Return the text of ``docs/ops.md``."""
    rows = standard()
    counts = summary(rows)
    lines = [
        "# Operators",
        "",
        "Written by `python -m graphc.report.op_coverage docs/ops.md`; `graphc ops` prints the same.",
        "",
        f"Of {counts['operators']} operators of `ai.onnx`, {counts['differentiable']} can be differentiated and "
        f"{counts['covered']} are: {counts['direct']} by a rule, {counts['through_body']} through their ONNX definition. "
        f"{counts['zero']} are piecewise constant or take no floats: nothing flows back, nothing is blocked. "
        f"{counts['none']} have nothing to differentiate. {counts['second_order']} gradients can be differentiated again.",
        "",
        "On a GPU (`cupy`): *generated* ops are fused into kernels written for the model; a *library* or a *kernel* of its own "
        "runs a node; *decomposed* ones become others of this list; a *loop* runs its body on the device; *folded* ones are "
        "known before anything runs. What is left to the *host*, `graphc show plan --backend cupy` lists for a model.",
        "",
        "| operator | since | gradient | second order | native kernels | on a GPU |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row.cells)} |" for row in rows]
    lines += ["", "## Operators of the `graphc` domain", ""]
    lines += ["| operator | kind | gradient | native kernels | on a GPU | what it is |", "|---|---|---|---|---|---|"]
    for entry in own():
        doc = entry["doc"].replace("|", "\\|")
        kernels = ", ".join(entry["kernels"])
        lines.append(f"| {entry['name']} | {entry['kind']} | {entry['gradient']} | {kernels} | {entry['gpu']} | {doc} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
