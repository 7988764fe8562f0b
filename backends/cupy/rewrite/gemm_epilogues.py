"""Turns products into library calls: views become strides, the ops after a product its epilogue.

    Gemm(x, Transpose(w), b) ─► Gelu ─► …, GeluGrad(Gemm(dy, v), ·) ─► ReduceSum
        becomes    h, z = Product(x, w, b)  gelu, aux z;    dz, db = Product(dy, v, z)  gelu_grad, Σ rows

This runs before the fusion compiler groups nodes, because nodes of an epilogue leave the graph. Each rule asks ``choose``
whether the library is faster with the epilogue than without it plus a kernel: a GPU measures that once; elsewhere
:func:`.gemm.by_rule` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from graphc.backends.cupy.libraries import registry
from graphc.backends.cupy.libraries.gemm import (
    AUX_ELEMENTS,
    BACKWARD,
    DOMAIN,
    HALVES,
    PRODUCT,
    Choose,
    Matrix,
    Product,
    Strided,
    by_rule,
    is_product,
    mask_row,
    product_of,
)
from graphc.backends.cupy.libraries.gemm_operands import Fitted, fitted, matrices, placed, scalar_factor
from graphc.backends.cupy.rewrite.cast_order import casts_before_views, views_before_casts
from graphc.backends.fusion.graph_queries import (
    before_cast,
    direct_user,
    drop,
    ends,
    in_memory,
    is_cast,
    is_kept,
    leads_to_transpose,
    only_user,
    row_sums,
    stand_in,
    sweep,
    users,
)
from graphc.backends.fusion.op_kernels import Epilogue, op_kernel
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dtype_of, input_of, nbytes_of, shape_of, size_of

A, B, C, BIAS, AUX = range(5)
"""Inputs of a product's node. Its outputs are d, then optionally ``aux`` and the bias gradient."""

FITTED = "fitted"


def join_products(graph: ir.Graph, choose: Choose = by_rule, *, loose_gelu: bool = False) -> None:
    """Replace every Gemm and MatMul that the library runs, together with the nodes that its call absorbs.

    Args:
        loose_gelu: use the library's tanh form for the exact Gelu too: values differ by up to 5e-4, slopes by up to 9e-4.
    """
    _Joiner(graph, choose, loose_gelu).run()


class _Joiner:
    def __init__(self, graph: ir.Graph, choose: Choose, loose_gelu: bool) -> None:
        self.graph = graph
        self.choose = choose
        self.loose = loose_gelu
        self.op = Builder(graph)
        self.masks: dict[ir.Value, ir.Node] = {}
        self.order = {node: k for k, node in enumerate(graph)}

    def run(self) -> None:
        casts_before_views(self.graph, self.op)
        products = [self._product(node) for node in list(self.graph) if node.domain == "" and is_product(node)]
        views_before_casts(self.graph, self.op)
        rules = (
            self._scale,
            self._turned,
            self._cast,
            self._bias,
            self._residual,
            self._activation,
            self._gradient,
            self._result_sum,
        )
        for first in (p for p in products if p is not None):
            node: ir.Node | None = first
            while node is not None:
                last, node = node, next((new for rule in rules if (new := rule(node)) is not None), None)
            last = self._moved(last) or last
            self._operand_sum(last)
        sweep(self.graph)
        self.graph.sort()

    # Products ---------------------------------------------------------------------------------------------------------

    def _product(self, node: ir.Node) -> ir.Node | None:
        """Replace the node by a product, followed by an Add if a Gemm has a third operand."""
        turned = [bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB")]  # a MatMul has no attributes
        x, y, out = input_of(node, 0), input_of(node, 1), node.outputs[0]
        a, b = (matrices(v, turned=t, left=v is x) for v, t in zip((x, y), turned, strict=True))
        if x is y:
            b = matrices(y, turned=turned[1], left=False)
        shape = list(shape_of(out))
        if len(shape_of(x)) == 1:
            shape.insert(len(shape) - (len(shape_of(y)) > 1), 1)
        if len(shape_of(y)) == 1:
            shape.append(1)
        found = fitted(a, b, Strided.contiguous(shape), dtype_of(out))
        if found is None:
            return None
        self.op.before, self.op.scope = node, node.name or node.op_type
        alpha = node.attributes.get_float("alpha", 1.0)
        product = replace(found.product, alpha=found.product.alpha * alpha)
        addend = node.inputs[2] if len(node.inputs) > 2 else None
        beta = node.attributes.get_float("beta", 1.0)
        made = self._node(product, found, found.operands, [out], node)
        self.order[made] = self.order[node]
        result = made.outputs[0]
        if addend is not None and beta:
            total = self.op.Add(result, addend if beta == 1.0 else self.op.Mul(addend, beta))
            stand_in(out, total)
        else:
            stand_in(out, result)
        self.graph.remove(node, safe=True)
        return made

    def _node(
        self, p: Product, origin: Fitted, inputs: Sequence[ir.Value | None], like: Sequence[ir.Value], at: ir.Node
    ) -> ir.Node:
        """Insert a product's node before ``at``; its outputs take types and shapes from ``like``."""
        values = list(inputs)
        while values[-1] is None:
            values.pop()
        name = self.op.unique(f"{at.name or at.op_type}/Product")
        node = ir.Node(DOMAIN, "Product", values, num_outputs=len(like), name=name)
        for k, (out, old) in enumerate(zip(node.outputs, like, strict=True)):
            out.type, out.shape = old.type, old.shape
            out.name = self.op.unique(f"{name}.{k}", value=True)
        node.meta[PRODUCT], node.meta[FITTED] = p, origin
        self.graph.insert_before(at, [node])
        return node

    def _grown(
        self,
        node: ir.Node,
        p: Product,
        results: Sequence[ir.Value],
        gone: Sequence[ir.Node],
        *,
        origin: Fitted | None = None,
        **given: ir.Value | None,
    ) -> ir.Node:
        """``node`` extended by the nodes ``gone``, the last one first; its outputs replace ``results``."""
        before: Fitted = node.meta[FITTED]
        origin = origin or before
        inputs: list[ir.Value | None] = [*node.inputs, *[None] * (5 - len(node.inputs))]
        if origin.exchanged != before.exchanged:
            inputs[A], inputs[B] = inputs[B], inputs[A]
        for key, value in given.items():
            inputs[{"c": C, "bias": BIAS, "aux": AUX}[key]] = value
        made = self._node(p, origin, inputs, results, gone[0] if gone else node)
        self.order[made] = self.order[node]
        for old, new in zip(results, made.outputs, strict=True):
            stand_in(old, new)
        self.graph.remove(gone, safe=True)
        drop(self.graph, node)
        return made

    # Rules: ops after a product become part of it -----------------------------------------------------------------------

    def _scale(self, node: ir.Node) -> ir.Node | None:
        """Absorb a constant factor as alpha."""
        p, user = product_of(node), only_user(node.outputs[0])
        if user is None or not p.plain:
            return None
        scaled = scalar_factor(user[0])
        if scaled is None:
            return None
        return self._grown(node, replace(p, alpha=p.alpha * scaled[1]), [user[0].outputs[0]], [user[0]])

    def _turned(self, node: ir.Node) -> ir.Node | None:
        """Write the result transposed, before an addition in that order."""
        return self._moved(node) if product_of(node).plain and leads_to_transpose(node.outputs[0]) else None

    def _cast(self, node: ir.Node) -> ir.Node | None:
        """Write a float32 result of half-precision operands, together with the sum that reads it."""
        p, user = product_of(node), only_user(node.outputs[0])
        if user is None or p.dtype not in HALVES or p.result != p.dtype or p.c is not None or p.epilogue:
            return None
        cast, out = user[0], user[0].outputs[0]
        if not is_cast(cast) or out.dtype != ir.DataType.FLOAT:
            return None
        bias = before_cast(node.inputs[BIAS]) if p.bias else None
        if p.bias and bias is None:
            return None
        wide = replace(p, result=ir.DataType.FLOAT)
        if ends(out):
            if self.choose([wide], [p], 6 * size_of(out)):
                return self._grown(node, wide, [out], [cast], bias=bias)
            return None
        add = only_user(out)
        addend = None if add is None else self._addend(node, add[0], add[1], out)
        if add is None or addend is None:
            return None
        both = replace(wide, c=_rows(p))
        if not self.choose([both], [p], 6 * size_of(out)):
            return None
        return self._grown(node, both, [add[0].outputs[0]], [add[0]], c=addend, bias=bias)

    def _bias(self, node: ir.Node) -> ir.Node | None:
        p, user = product_of(node), only_user(node.outputs[0])
        if user is None or p.bias or p.epilogue or p.rounds > 1 or user[0].op_type != "Add" or user[0].domain:
            return None
        add, index, seen = user
        vector = add.inputs[1 - index]
        if vector is None or vector is seen or vector.dtype != p.result or p.dtype == ir.DataType.DOUBLE:
            return None
        if shape_of(vector)[-1:] != (p.n,) or size_of(vector) != p.n or shape_of(seen)[-1:] != (p.n,) or p.d.row_step != p.n:
            return None
        fused, out = replace(p, bias=True), add.outputs[0]
        saved = (self._is_aux(out) if _joins_a_kernel(out) else 2) * nbytes_of(out)
        return self._grown(node, fused, [out], [add], bias=vector) if self._pays(fused, p, saved) else None

    def _is_aux(self, value: ir.Value) -> bool:
        """Whether the gradient of an activation, as the epilogue of a later product, will read the value from memory."""
        found = ((self._epilogue(user), index) for user, index, _ in users(value))
        return any(epilogue is not None and epilogue.gradient and not epilogue.signs and k == 1 for epilogue, k in found)

    def _residual(self, node: ir.Node) -> ir.Node | None:
        p, user = product_of(node), only_user(node.outputs[0])
        if user is None or p.c is not None or p.epilogue or _rows(p) is None or p.dtype == ir.DataType.DOUBLE:
            return None
        add, index, seen = user
        addend = self._addend(node, add, index, seen)
        if addend is None:
            return None
        fused = replace(p, c=_rows(p))
        if not self._pays(fused, p, 2 * nbytes_of(seen)):
            return None
        return self._grown(node, fused, [add.outputs[0]], [add], c=addend)

    def _activation(self, node: ir.Node) -> ir.Node | None:
        p, out = product_of(node), node.outputs[0]
        if p.epilogue or p.dtype == ir.DataType.DOUBLE or p.result != p.dtype or p.rounds > 1:
            return None
        readers = list(users(out))
        found = [(u, e) for u, _, _ in readers if (e := self._epilogue(u)) is not None and not e.gradient]
        if len(found) != 1:
            return None
        ((activation, epilogue),) = found
        alone = len(readers) == 1 and not is_kept(out)
        saved = 2 * nbytes_of(out)
        if alone:
            fused = replace(p, epilogue=epilogue.name)
            if not self._pays(fused, p, saved):
                return None
            made = self._grown(node, fused, [activation.outputs[0]], [activation])
        else:
            aux = _rows(p)
            if epilogue.signs or aux is None or p.n % AUX_ELEMENTS:
                return None
            fused = replace(p, epilogue=epilogue.name, aux=aux)
            if not self._pays(fused, p, saved):
                return None
            made = self._grown(node, fused, [activation.outputs[0], out], [activation])
        if epilogue.signs:
            self.masks[made.outputs[0]] = made
        return made

    def _gradient(self, node: ir.Node) -> ir.Node | None:
        """Absorb a multiplication by the slope of an activation."""
        p, user = product_of(node), only_user(node.outputs[0])
        if user is None or not p.plain or p.result != p.dtype or p.dtype == ir.DataType.DOUBLE or _rows(p) is None:
            return None
        gradient, index, seen = user
        epilogue = self._epilogue(gradient)
        if epilogue is None or not epilogue.gradient or index != 0:
            return None
        saved, out, at = 3 * nbytes_of(seen), gradient.outputs[0], input_of(gradient, 1)
        if epilogue.signs:
            return self._signed_gradient(node, gradient, epilogue.name, at, saved)
        if p.n % AUX_ELEMENTS or at.dtype != p.result:
            return None
        fused = replace(p, epilogue=epilogue.name, aux=_rows(p))
        return self._grown(node, fused, [out], [gradient], aux=at) if self._pays(fused, p, saved) else None

    def _signed_gradient(self, node: ir.Node, gradient: ir.Node, name: str, at: ir.Value, saved: int) -> ir.Node | None:
        """Use a mask that the forward product now writes; both products must be in this segment."""
        forward = self.masks.get(in_memory(at))
        if forward is None:
            return None
        p, before = product_of(node), product_of(forward)
        if _rows(before) is None or (before.m, before.n) != (p.m, p.n):
            return None
        mask = Matrix(p.m, p.n, mask_row(p.n), 1)
        fused, masked = replace(p, epilogue=name, aux=mask), replace(before, aux=mask)
        if not self.choose([fused, masked], [p, before], saved):
            return None
        if before.aux is None:
            result = forward.outputs[0]
            bits = ir.Value(type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([p.m, mask.row_step // 8]))
            forward = self._grown(forward, masked, [result, bits], [])
            self.masks[forward.outputs[0]] = forward
        return self._grown(node, fused, [gradient.outputs[0]], [gradient], aux=forward.outputs[1])

    def _result_sum(self, node: ir.Node) -> ir.Node | None:
        """The bias gradient: the row sum of the result of a gradient epilogue."""
        p, out = product_of(node), node.outputs[0]
        if p.epilogue not in BACKWARD or p.bias_gradient:
            return None
        for total in row_sums(out, p.n):
            fused = replace(p, bias_gradient="d")
            if total.outputs[0].dtype == p.result and self._pays(fused, p, nbytes_of(out)):
                return self._grown(node, fused, [out, total.outputs[0]], [total])
        return None

    def _operand_sum(self, node: ir.Node) -> ir.Node | None:
        """The bias gradient beside a weight gradient: the sum over k of an operand that the product reads anyway."""
        p = product_of(node)
        if not p.plain or p.batch * p.rounds > 1 or p.dtype == ir.DataType.DOUBLE:
            return None
        for side, matrix, length in (("a", p.a.turned(), p.m), ("b", p.b, p.n)):
            value = node.inputs[A if side == "a" else B]
            if value is None or matrix.column_step != 1 or matrix.row_step != length or size_of(value) != length * p.k:
                continue
            for total in row_sums(value, length):
                result, gone = total.outputs[0], [total]
                if result.dtype != p.result:
                    cast = only_user(result)
                    if cast is None or not is_cast(cast[0]) or cast[0].outputs[0].dtype != p.result:
                        continue
                    result, gone = cast[0].outputs[0], [cast[0]]
                fused = replace(p, bias_gradient=side)
                if self._pays(fused, p, nbytes_of(value)):
                    return self._grown(node, fused, [node.outputs[0], result], gone)
        return None

    def _moved(self, node: ir.Node) -> ir.Node | None:
        """Write the result where a chain of transposes and reshapes would move it."""
        p, origin = product_of(node), node.meta[FITTED]
        chain: list[ir.Node] = []
        value = node.outputs[0]
        while (user := direct_user(value)) is not None and op_kernel(user).same_elements:
            chain.append(user)
            value = user.outputs[0]
        if all(op_kernel(move).same_memory for move in chain):
            keeps = chain and value.is_graph_output()
            return self._grown(node, p, [value, *node.outputs[1:]], [chain[-1]]) if keeps else None
        place = placed(origin.shape, chain)
        if place is None or p.epilogue or p.c is not None:
            return None
        found = fitted([origin.a], [origin.b], place, p.result)
        if found is None or (found.product.rounds > 1 and _joins_a_kernel(value)):
            return None
        moved = replace(found.product, alpha=p.alpha, bias=p.bias)
        if (p.bias and (moved.n != p.n or moved.rounds > 1)) or not self._pays(moved, p, 2 * nbytes_of(value)):
            return None
        return self._grown(node, moved, [value], [chain[-1]], origin=found)

    # Helpers ------------------------------------------------------------------------------------------------------------

    def _addend(self, node: ir.Node, add: ir.Node, index: int, seen: ir.Value) -> ir.Value | None:
        """The value that an Add adds to ``node``'s product, if it is computed earlier and in memory: waiting extends
        operand lifetimes.
        """
        if add.op_type != "Add" or add.domain:
            return None
        other = add.inputs[1 - index]
        if other is None or other is seen or other.dtype != seen.dtype or shape_of(other) != shape_of(seen):
            return None
        base = in_memory(other)
        producer = base.producer()
        if producer is None:
            return other if constant(other) is None else None
        lies = producer.domain == DOMAIN or len(list(users(base))) > 1 or registry.special(producer) is not None
        return other if lies and self.order.get(producer, len(self.order)) < self.order[node] else None

    def _pays(self, fused: Product, plain: Product, saved: int) -> bool:
        return self.choose([fused], [plain], saved)

    def _epilogue(self, node: ir.Node) -> Epilogue | None:
        """The epilogue that computes the node exactly, or closely enough if the user permits that."""
        found = op_kernel(node).epilogue
        return found if found is not None and (self.loose or found.exact(node)) else None


def _rows(p: Product) -> Matrix | None:
    """A contiguous matrix of d's size; None if d is not contiguous."""
    if p.batch * p.rounds > 1 or p.d.row_step != p.n or p.d.column_step != 1:
        return None
    return Matrix(p.m, p.n, p.n, 1)


def _joins_a_kernel(value: ir.Value) -> bool:
    """Whether a generated kernel reads the value, so that one more op on it costs no pass over memory."""
    readers = [user for user, _, _ in users(value)]
    return not is_kept(value) and bool(readers) and all(not is_product(u) and registry.special(u) is None for u in readers)
