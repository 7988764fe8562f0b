"""check: report which parameters train, and which ops on their paths have no gradient rule.

before   x ─► Conv(W) ─► Det ─► loss
after    the same graph; ``ctx.values["check"]`` says that ``W`` would train and that ``Det`` blocks it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import onnx_ir as ir

from graphc.gradient import key_of
from graphc.ir.facts import dims, is_float
from graphc.ir.names import LOSS_TOTAL, find_value
from graphc.ir.parameters import DECISIONS, explain_trainable
from graphc.passes.gradients.reverse_mode import ancestors, descendants, has_no_gradient, path_from_source
from graphc.passes.training.loss_advice import LossAdvice, advise
from graphc.pipeline import Context, graph_pass


@graph_pass("check", requires=("legalize",), changes="form")
def check(
    model: ir.Model,
    ctx: Context,
    *,
    of: Sequence[str] | None = None,
    train: Sequence[str] | None = None,
    freeze: Sequence[str] | None = None,
) -> bool:
    """Report whether the model can be trained; changes nothing.

    Args:
        of: values that would be differentiated. Default: the loss total if there is one, else all float outputs, or what
            other outputs are computed from.
        train, freeze: as for ``autodiff``.

    ``ctx.values["check"]`` becomes a dictionary: ``parameters``, one entry (``name``, ``shape``, ``dtype``, ``trains``,
    ``reason``, ``doubtful``) per initializer and float constant; ``missing``, one entry (``op``, ``count``, ``nodes``,
    ``path``) per op without a rule; ``losses``, one :class:`~.loss_advice.LossAdvice` per loss that fits, the best first.
    """
    graph = model.graph
    losses = advise(graph)
    targets = _targets(graph, of, losses)
    nodes = list(graph)
    explained = explain_trainable(graph, train=train, freeze=freeze)
    reaching = _on_path(nodes, [value for value, reason in explained if reason == "trains"], targets)
    decided = {decision.name: decision for decision in ctx.values.get(DECISIONS, ())}
    parameters, sources = [], []
    for value, reason in explained:
        if reason == "trains" and value not in reaching:
            reason = "not on a differentiable path to the loss"
        if reason == "trains":
            sources.append(value)
        shape = [d if d is not None else "?" for d in dims(value) or ()]
        dtype = value.dtype.name.lower() if value.dtype is not None else "?"
        trains, known = reason == "trains", decided.pop(value.name or "", None)
        reason = known.rule if trains and known is not None else reason
        facts = {"name": value.name, "shape": shape, "dtype": dtype, "trains": trains}
        parameters.append({**facts, "reason": reason, "doubtful": False})
    for decision in decided.values():
        facts = {field.name: getattr(decision, field.name) for field in fields(decision) if field.name != "rule"}
        reason = decision.rule
        if decision.trains:  # it was removed with all that read it
            facts["trains"], reason = False, "no output depends on it"
        parameters.append({**facts, "shape": list(decision.shape), "reason": reason})
    needs, wanted = descendants(nodes, sources), ancestors(nodes, targets)
    missing: dict[str, dict[str, Any]] = {}
    for node in nodes:
        on_path = any(out in needs and out in wanted for out in node.outputs)
        if on_path and has_no_gradient(node):
            key = key_of(node.domain, node.op_type)
            path = path_from_source(node, needs, set(sources))
            found = missing.setdefault(key, {"op": key, "count": 0, "nodes": [], "path": path})
            found["count"] += 1
            found["nodes"].append(node.name)
    ctx.values["check"] = {"parameters": parameters, "missing": [missing[key] for key in sorted(missing)], "losses": losses}
    return False


def _targets(graph: ir.Graph, of: Sequence[str] | None, losses: Sequence[LossAdvice]) -> list[ir.Value]:
    if of:
        return [find_value(graph, name) for name in of]
    marked = [v for node in graph for v in node.outputs if v.metadata_props.get(LOSS_TOTAL)]
    outputs = [v for v in graph.outputs if isinstance(v.type, ir.TensorType) and is_float(v)]
    return marked or outputs or [find_value(graph, loss.value) for loss in losses]


def _on_path(nodes: Sequence[ir.Node], sources: Sequence[ir.Value], targets: Sequence[ir.Value]) -> set[ir.Value]:
    """Values that depend on ``sources`` and from which ``targets`` are computed, as autodiff has it."""
    needs, found = descendants(nodes, sources), set(targets)
    for node in reversed(nodes):
        if any(out in found and out in needs for out in node.outputs):
            # a subgraph may read any outer value; captured values count as operands
            found.update(v for v in ancestors([node], node.outputs) if v in needs)
    return found
