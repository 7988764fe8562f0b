"""Computes values again where segments read them, instead of storing them, if that takes arithmetic over what is stored anyway.

    before   segment 1:  n = Norm(x); a = n · γ + β; y = Relu(a)  →  n, a, y        segment 9 reads n, a
    after    segment 1:  the same                                 →  n, y           segment 9 reads n, and computes a again

For backends that compile a segment to kernels: there the arithmetic costs nothing beside the memory that it saves, neither
written nor read, and the activations that wait for the backward pass become fewer. The backend says which ops are that cheap,
and no value is stored longer than without. The pass ``recompute`` goes further and costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from graphc.ir.facts import constant, inputs_of, known_nbytes, static_dims
from graphc.plan.specialise import VIEWS
from graphc.plan.steps import PlanStep

LEAST = 1 << 16
"""Bytes of a value from which on it is worthwhile."""

MOST = 8
"""Nodes that are repeated in one segment for one value."""


def rematerialise(
    graph: ir.Graph, steps: Sequence[PlanStep], views: Mapping[ir.Value, ir.Value], repeats: Callable[[ir.Node], bool]
) -> list[PlanStep]:
    """Repeat arithmetic in the segments that read its results; returns the steps that still have something to do.

    Args:
        steps: in the order of execution, with their nodes; inputs and outputs are not known yet.
        views: value → the value whose memory it shares.
        repeats: whether the backend computes a node in less time than it takes to write and read its result.
    """
    found = _Rematerialisation(graph, steps, views, repeats)
    for k, step in enumerate(steps):
        for node in list(step.nodes) if step.kind == "segment" else ():
            if node.graph is not None:  # it has not been removed
                found.spare(node, k)
    return [step for step in steps if step.nodes or step.kind != "segment"]


class _Rematerialisation:
    def __init__(
        self,
        graph: ir.Graph,
        steps: Sequence[PlanStep],
        views: Mapping[ir.Value, ir.Value],
        repeats: Callable[[ir.Node], bool],
    ) -> None:
        self._graph, self._steps, self._views, self._repeats = graph, steps, views, repeats
        self._results = set(graph.outputs)
        self._apart = {*graph.outputs, *views, *views.values()}  # results, and what several names stand for
        self._home = {node: k for k, step in enumerate(steps) for node in step.nodes}
        self._names: dict[ir.Value, list[ir.Value]] = {}  # stored value → its views
        for view, root in views.items():
            self._names.setdefault(root, []).append(view)
        self._changed: dict[ir.Value, int] = {}  # state → the first step that may overwrite it
        for node, k in self._home.items():
            for value in inputs_of(node) if steps[k].kind not in ("segment", "kernel") else ():
                root = views.get(value, value)
                self._changed[root] = min(self._changed.get(root, k), k)
        self._again: dict[tuple[ir.Value, int], ir.Value] = {}
        self._copies: set[ir.Node] = set()  # which a segment begins with

    def spare(self, node: ir.Node, home: int) -> None:
        """Repeat a node wherever other steps read its result, if all of them can do it; then nobody stores that."""
        value = node.outputs[0]
        if not self._is_repeatable(node) or node.op_type in VIEWS or value in self._apart or known_nbytes(value) < LEAST:
            return
        users = [(user, self._home.get(user, -1)) for user in value.consumers()]
        if any(step < 0 or self._steps[step].kind != "segment" for _, step in users):
            return
        chains = {step: self._chain(node, step) for _, step in users if step != home}
        if not chains or not all(chains.values()):
            return
        for step, chain in chains.items():
            self._repeat(chain, step)
        for user, step in users:
            for index, operand in enumerate(user.inputs):
                if operand is value and step != home:
                    user.replace_input_with(index, self._again[value, step])
        self._remove_unread(node)

    def _remove_unread(self, node: ir.Node) -> None:
        """Remove a node of a segment whose results nobody reads any more, and then those that only it has read."""
        home = self._home.get(node, -1)
        if home < 0 or self._steps[home].kind != "segment" or any(out.uses() or out in self._results for out in node.outputs):
            return
        made_by = {value.producer() for value in inputs_of(node)}
        self._steps[home].nodes.remove(node)
        del self._home[node]
        self._graph.remove(node, safe=True)
        for producer in made_by:
            if producer is not None:
                self._remove_unread(producer)

    def _chain(self, last: ir.Node, step: int) -> list[ir.Node]:
        """The nodes to repeat in a segment, in order; empty: too many, or they need what is not stored by then."""
        chain: dict[ir.Node, None] = {}
        fresh: set[ir.Value] = set()  # large values that the segment does not read so far

        def visit(node: ir.Node) -> bool:
            if node in chain:
                return True
            if not self._is_repeatable(node):
                return False
            for value in inputs_of(node):
                if constant(value) is not None or (value, step) in self._again:
                    continue
                root = self._views.get(value, value)
                if self._is_stored(root, step):
                    if step not in self._reads(root) and known_nbytes(root) >= LEAST:
                        fresh.add(root)
                elif (producer := value.producer()) is None or producer not in self._home or not visit(producer):
                    return False
            chain[node] = None
            return len(chain) <= MOST and len(fresh) <= 1

        return list(chain) if visit(last) else []

    def _is_stored(self, root: ir.Value, step: int) -> bool:
        """Whether a value is in memory until ``step`` in any case."""
        if root.is_initializer():
            return self._changed.get(root, len(self._steps)) > step
        return max(self._reads(root), default=-1) >= step

    def _reads(self, root: ir.Value) -> set[int]:
        """The segments and kernels that read a stored value or a view of it."""
        users = (user for value in (root, *self._names.get(root, ())) for user in value.consumers())
        homes = {self._home[user] for user in users if user in self._home}
        return {step for step in homes if self._steps[step].kind in ("segment", "kernel")}

    def _repeat(self, chain: Sequence[ir.Node], step: int) -> None:
        nodes = self._steps[step].nodes
        start = next(k for k, node in enumerate(nodes) if node not in self._copies)
        copies = []
        for node in chain:
            (old,), name = node.outputs, f"{node.name or node.op_type}/again/{step}"
            inputs = [v if v is None else self._again.get((v, step), v) for v in node.inputs]
            copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=1, name=name)
            (new,) = copy.outputs
            new.name, new.type, new.shape = f"{old.name}/again/{step}", old.type, old.shape
            self._again[old, step], self._home[copy] = new, step
            copies.append(copy)
        self._graph.insert_before(nodes[start], copies)
        nodes[start:start] = copies
        self._copies.update(copies)

    def _is_repeatable(self, node: ir.Node) -> bool:
        view = node.op_type in VIEWS and not node.domain
        return (view or self._repeats(node)) and len(node.outputs) == 1 and static_dims(node.outputs[0]) is not None
