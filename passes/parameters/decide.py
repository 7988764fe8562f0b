"""Decides for every float constant of a model whether it trains.

    Conv(x, w)                         w trains: the weight of a Conv
    Add(Mul(norm, g), b)               g and b train: they scale and shift a normalisation
    InstanceNormalization(x, 1, 0)     its ones and zeros do not: an exporter filled the inputs of a norm without parameters
    Div(x, 255); Add(h, sinusoids)     neither trains: a number in a formula, a table that a formula made

Four things tell, in this order: what the exporter recorded, the inputs that read the constant (:mod:`.uses`), its elements
(:mod:`.values`), and its name (:mod:`.names`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.exporter_records import folded_from, recorded_kinds
from graphc.ir.names import BUFFER, PARAMETER
from graphc.ir.parameters import Decision, matches
from graphc.passes.parameters.names import Told, is_dotted, told_by
from graphc.passes.parameters.uses import (
    Use,
    before_weights,
    behind_views,
    comes_from,
    other_operand,
    reparametrises,
    use_of,
    uses_of,
)
from graphc.passes.parameters.values import COMPUTED, Look, look

_NORMS = ("Normalization", "LayerNorm")
_PRODUCTS = ("MatMul", "Conv", "ConvTranspose", "Gemm", "Einsum")

Verdict = tuple[bool, str]
"""Whether the constant trains, and by which rule."""


class Constant:
    """A float constant, with what is known of it.

    Args:
        value: an initializer, or the output of a node that holds a constant.
        tensor: its elements.
    """

    def __init__(self, value: ir.Value, tensor: ir.TensorProtocol) -> None:
        self.value, self.tensor, self.name = value, tensor, value.name or ""
        producer = value.producer()
        self.filled = producer is not None and producer.op_type == "ConstantOfShape"
        self.told = told_by(self.name)
        self.uses = uses_of(value)
        # what exporters write as a node, without the name of a parameter, is a number of a formula more often than a weight
        self.made = self.told is Told.MADE or (producer is not None and not self.filled and self.told is not Told.PARAMETER)

    @functools.cached_property
    def look(self) -> Look:
        return look(self.tensor)

    @property
    def rank(self) -> int:
        return len(self.tensor.shape)

    @property
    def is_number(self) -> bool:
        return self.tensor.size == 1

    @property
    def uniform(self) -> bool:
        return self.look is Look.UNIFORM

    def fill(self) -> float:
        """The element of a uniform tensor."""
        return float(self.tensor.numpy().reshape(-1)[0])


class Rules:
    """Decides about the constants of one model.

    Args:
        train: globs of constants that train whatever the rules say.
    """

    def __init__(self, model: ir.Model, train: Sequence[str] | None = None) -> None:
        self._graph, self._train = model.graph, train
        self._recorded = recorded_kinds(model.graph)
        self._from_torch = model.producer_name == "pytorch"

    @functools.cached_property
    def _raw(self) -> set[ir.Value]:
        return before_weights(self._graph)

    def decide(self, value: ir.Value, tensor: ir.TensorProtocol) -> Decision:
        """Whether a float constant trains."""
        constant = Constant(value, tensor)
        trains, rule = self._verdict(constant)
        named = matches(constant.name, self._train)
        asked = named and not trains
        trains, rule = (True, "named by --train") if named else (trains, rule)
        shape = tuple(tensor.shape.numpy())
        doubtful = not trains and constant.told is not Told.BUFFER and not constant.made and bool(constant.uses)
        doubtful = doubtful and not any(word in rule for word in ("statistic", "buffer", "setting", "not read"))
        return Decision(constant.name, shape, tensor.dtype.name.lower(), trains, rule, doubtful, asked)

    def _verdict(self, c: Constant) -> Verdict:
        if BUFFER in c.value.metadata_props:
            return False, "buffer of the PyTorch module"
        if PARAMETER in c.value.metadata_props:
            return True, "parameter of the PyTorch module"
        roles = {use_of(node, index) for node, index in c.uses}
        if not roles:
            return False, "not read"
        if roles == {Use.STATISTIC}:
            return False, Use.STATISTIC.value
        if roles <= {Use.SETTING, Use.STATISTIC}:
            return False, f"setting of {c.uses[0][0].op_type}"
        recorded = self._by_record(c)
        if recorded is not None:
            return recorded
        verdicts = [self._by_use(c, node, index) for node, index in c.uses]
        return next((v for v in verdicts if v[0]), verdicts[0])

    def _by_record(self, c: Constant) -> Verdict | None:
        """What PyTorch's exporter recorded; None: nothing."""
        kind = self._recorded.get(c.name)
        if kind == "PARAMETER":
            fixed = c.look in COMPUTED and any(use_of(n, k) is Use.WEIGHT for n, k in c.uses)
            return (False, f"fixed weight: {c.look.value}") if fixed else (True, "parameter, as its exporter recorded")
        if kind is not None:
            return False, "buffer, as its exporter recorded"
        sources = folded_from(c.value)
        if sources is None:
            return None
        parameters = [name for name in sources if self._recorded.get(name) == "PARAMETER"]
        if not parameters:
            return False, "computed from constants by its exporter"
        if c.is_number and c.rank == 0:
            return False, f"arithmetic with {parameters[0]}, folded by its exporter"
        return True, f"folded from {', '.join(parameters)} by its exporter"

    def _by_use(self, c: Constant, node: ir.Node, index: int) -> Verdict:
        use = use_of(node, index)
        op = node.op_type
        if use in (Use.SETTING, Use.STATISTIC):
            return False, Use.STATISTIC.value if use is Use.STATISTIC else f"{use.value} of {op}"
        if c.rank == 0:
            return self._number(c, op)
        if use is Use.WEIGHT:
            return _weight(c, node)
        if use in (Use.BIAS, Use.AFFINE):
            filler = use is Use.AFFINE and c.made and c.uniform and c.fill() in (0.0, 1.0) and c.tensor.size > 1
            return (False, f"fills an input of a {op} without parameters") if filler else (True, f"{use.value} of {op}")
        if use is Use.TABLE:
            return self._table(c, op)
        if use is Use.STATE:
            return (not c.uniform or c.told is Told.PARAMETER), f"initial state of {op}"
        if c.told is Told.BUFFER:
            return False, Told.BUFFER.value
        if use is Use.MODULATION:
            return self._modulation(c, node, index)
        if reparametrises(node) and not c.made:
            return True, f"operand of {op} in each run"
        return self._operand(c, op)

    def _number(self, c: Constant, op: str) -> Verdict:
        """A tensor of rank 0."""
        if c.made or c.filled or c.value.producer() is not None or c.told is Told.BUFFER:
            return False, "a number in a formula"
        if c.told is Told.PARAMETER or self._from_torch or (is_dotted(c.name) and not _usual(op, c.fill())):
            return True, "a scalar named like a parameter"
        return False, "a single number"

    def _table(self, c: Constant, op: str) -> Verdict:
        if c.told is Told.BUFFER:
            return False, Told.BUFFER.value
        if c.look in COMPUTED:
            return False, f"table of {op}: {c.look.value}"
        if c.made and c.look in (Look.UNIFORM, Look.WHOLE, Look.TWO_VALUES) and not c.filled:
            return False, f"made by an exporter: {c.look.value}"
        return True, f"table of {op}"

    def _modulation(self, c: Constant, node: ir.Node, index: int) -> Verdict:
        """An operand of Add, Sub, Mul, Div."""
        op, other = node.op_type, other_operand(node, index)
        if c.made and c.is_number:
            return False, "a number in a formula"
        if c.look in COMPUTED or (c.look is Look.TWO_VALUES and c.told is not Told.PARAMETER):
            return False, c.look.value
        if op in ("Add", "Sub") and comes_from(other, _PRODUCTS) and not c.is_number:
            return True, "bias of a product"
        if comes_from(other, _NORMS) and not c.is_number:
            return True, "scale or shift of a normalisation"
        if (c.made or (op in ("Sub", "Div") and index == 1)) and behind_views(other) in self._raw:
            return False, "standardises an input"
        if c.filled:
            return not c.made, f"{Use.MODULATION.value} ({op})"
        if c.made and c.uniform:
            return False, f"in a formula: {c.look.value}"
        if (c.made or is_dotted(c.name)) and c.look is Look.WHOLE and c.told is not Told.PARAMETER:
            return False, c.look.value
        if c.made and c.value.producer() is not None:
            return False, "a constant of a formula"
        return True, f"{Use.MODULATION.value} ({op})"

    def _operand(self, c: Constant, op: str) -> Verdict:
        """An operand of an op that says little: Concat, Expand, Where."""
        if c.told is not Told.PARAMETER and c.look in (*COMPUTED, Look.TWO_VALUES):
            return False, c.look.value
        if c.made and (c.value.producer() is not None or c.look in (Look.UNIFORM, Look.WHOLE)):
            return False, f"a constant of {op}"
        return True, f"operand of {op}"


def _weight(c: Constant, node: ir.Node) -> Verdict:
    """The weight of a product, or a slope of PRelu."""
    op = node.op_type
    if c.told is Told.BUFFER:
        return False, Told.BUFFER.value
    if c.look in COMPUTED:
        return False, f"fixed weight: {c.look.value}"
    if c.look is Look.REPEATED and c.told is not Told.PARAMETER:
        return False, f"fixed weight: {c.look.value}"
    if c.made and c.value.producer() is not None and c.rank < 2 and op in ("MatMul", "Einsum"):
        return False, "a constant of a formula"
    if c.made and op != "PRelu" and not c.filled:
        if c.look is Look.TWO_VALUES:
            return False, f"fixed weight: {c.look.value}"
        if c.uniform and op.startswith("Conv") and c.fill() != 0.0 and c.tensor.size > 1:
            return False, f"fixed weight: {c.look.value}"
    return True, f"{'slope' if op == 'PRelu' else 'weight'} of {op}"


def _usual(op: str, number: float) -> bool:
    """Whether formulas hold such a number: an exponent such as 2 or 0.5, an epsilon that keeps a root or a quotient finite."""
    return (op == "Pow" and (2 * number).is_integer()) or (op in ("Add", "Max") and 0 < number <= 1e-3)
