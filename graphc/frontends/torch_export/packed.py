"""Packed sequences, whose rows only the data count, as padded ones: every sample keeps all of its steps.

    p = pack_padded_sequence(x, lengths)      p.data: the rows of all steps of x; p.batch_sizes: the lengths
    y, h = lstm(p)                            y, h = LSTM(x, W, R, B, sequence_lens=lengths)
    y, n = pad_packed_sequence(y)             y = where(step < lengths, y, padding_value)

What a module does to ``p.data`` between a pack and its padding must leave rows apart, as a Linear and Dropout do: a row behind
the end of a sample is then cut off again. Anything else would count rows that a packed sequence has not, and is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

_MARK = "_graphc_lengths"
"""Attribute of a tensor that holds the rows of a packed sequence: its :class:`Lengths`."""

_ADVICE = "pad the sequence first (torch.nn.utils.rnn.pad_packed_sequence), and mask what lies behind the lengths"

_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""The gates of a layer in ONNX's order, by their places in PyTorch's."""


class Longest(int):
    """The steps of the longest sample, where a module has not told another number: here those of the padded batch."""


class Lengths:
    """What stands for the ``batch_sizes`` of a packed sequence while a module is captured.

    Attributes:
        values: the length of each sample, int64 of shape [batch].
        steps: how many steps every sample has in the rows; the batch is ``values.shape[0]``.
    """

    device = torch.device("cpu")

    def __init__(self, values: torch.Tensor, steps: int) -> None:
        self.values, self.steps = values, steps

    def __getitem__(self, step: Any) -> int:
        if step != 0:
            _refuse("batch_sizes")
        return self.values.shape[0]  # no sample is empty

    def size(self, dim: int = 0) -> int:
        """The number of steps, that of a packed sequence if its longest sample has all of them."""
        return Longest(self.steps) if isinstance(self.steps, int) else self.steps

    def valid(self) -> torch.Tensor:
        """Which rows lie before the end of their sample: bool [steps, batch]."""
        return torch.arange(self.steps).unsqueeze(1) < self.values

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"batch_sizes.{name} of a packed sequence cannot be captured: {_ADVICE}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes PyTorch take this for a tensor where it asks for one; the forms below are asked before."""
        _refuse(f"{_name(func)} of batch_sizes")


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"{what} of a packed sequence cannot be captured: {_ADVICE}")


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _marked(rows: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    setattr(rows, _MARK, lengths)
    return rows


def _pack(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, Lengths]:
    """``torch._VF._pack_padded_sequence``. The samples may come in any order."""
    x = input.transpose(0, 1) if batch_first else input
    held = Lengths(lengths, x.shape[0])
    return _marked(x.reshape(-1, *x.shape[2:]), held), held


def _pad(
    rows: torch.Tensor, lengths: Lengths, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch._VF._pad_packed_sequence``: padded to the steps of the batch, where PyTorch ends with the longest sample."""
    x = rows.reshape(lengths.steps, lengths.values.shape[0], *rows.shape[1:])
    valid = lengths.valid().reshape(lengths.steps, -1, *[1] * (rows.dim() - 1))
    x = torch.where(valid, x, padding_value)
    more = total_length - lengths.steps
    if more > 0:
        x = torch.cat([x, x.new_full((more, *x.shape[1:]), padding_value)])
    return (x.transpose(0, 1) if batch_first else x), lengths.values


def _recurrent(kind: str, activation: str = "") -> Callable[..., tuple[torch.Tensor, ...] | None]:
    """The packed form of ``torch._VF.lstm`` and its like: one node of ONNX a layer."""

    def layers(
        rows: torch.Tensor,
        lengths: Any,
        states: Any,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
    ) -> tuple[torch.Tensor, ...] | None:
        if not isinstance(lengths, Lengths):
            return None  # a padded sequence, whose operands come in another order
        starts = list(states) if isinstance(states, (list, tuple)) else [states]
        count = 2 if bidirectional else 1
        each = 4 if has_biases else 2
        ends = []
        for layer in range(num_layers):
            places = range(layer * count, (layer + 1) * count)
            held = [params[place * each : (place + 1) * each] for place in places]
            rows, *final = _layer(kind, activation, rows, lengths, [s[places.start : places.stop] for s in starts], held)
            ends.append(final)
            if dropout > 0 and train and layer + 1 < num_layers:
                rows = torch.nn.functional.dropout(rows, dropout)
        return (_marked(rows, lengths), *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    return layers


def _layer(
    kind: str,
    activation: str,
    rows: torch.Tensor,
    lengths: Lengths,
    starts: Sequence[torch.Tensor],
    params: Sequence[Sequence[torch.Tensor]],
) -> tuple[torch.Tensor, ...]:
    """One layer: its rows, and the last states of its directions."""
    steps, batch, directions = lengths.steps, lengths.values.shape[0], len(params)
    hidden = params[0][1].shape[1]

    def gates(parameter: torch.Tensor) -> torch.Tensor:
        parts: Sequence[torch.Tensor] = parameter.split(hidden)  # type: ignore[no-untyped-call]
        return parameter if len(parts) == 1 else torch.cat([parts[k] for k in _GATES[kind]])

    weights = [torch.stack([gates(p[k]) for p in params]) for k in (0, 1)]
    biases = torch.stack([torch.cat([gates(p[2]), gates(p[3])]) for p in params]) if len(params[0]) == 4 else None
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": "bidirectional" if directions == 2 else "forward"}
    if activation:
        attributes["activations"] = [activation] * directions
    if kind == "GRU":
        attributes["linear_before_reset"] = 1
    x = rows.reshape(steps, batch, rows.shape[-1])
    y, *final = torch.onnx.ops.symbolic_multi_out(
        kind,
        [x, *weights, biases, lengths.values.to(torch.int32), *starts],
        attributes,
        dtypes=[x.dtype] * (1 + len(starts)),
        shapes=[(steps, directions, batch, hidden), *[(directions, batch, hidden)] * len(starts)],
    )
    return (y.transpose(1, 2).reshape(-1, directions * hidden), *final)


@contextlib.contextmanager
def of_any_batch() -> Iterator[None]:
    """While the block runs, recurrent layers do not take the batch of a packed sequence for a number (``int``, as of 2.13)."""
    before = torch.nn.RNNBase.get_expected_hidden_size

    def expected(self: torch.nn.RNNBase, input: torch.Tensor, batch_sizes: Any) -> tuple[int, int, int]:
        if not isinstance(batch_sizes, Lengths):
            return before(self, input, batch_sizes)
        return self.num_layers * (2 if self.bidirectional else 1), batch_sizes[0], self.hidden_size

    torch.nn.RNNBase.get_expected_hidden_size = expected  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.RNNBase.get_expected_hidden_size = before  # type: ignore[method-assign]


FORMS: dict[Any, Callable[..., Any]] = {
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _pad,
    torch._VF.lstm: _recurrent("LSTM"),
    torch._VF.gru: _recurrent("GRU"),
    torch._VF.rnn_tanh: _recurrent("RNN", "Tanh"),
    torch._VF.rnn_relu: _recurrent("RNN", "Relu"),
}
"""Functions of PyTorch that take or make packed sequences, in other forms; None where there is none among their operands."""

_TOLD = tuple(getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "is_cuda", "requires_grad", "ndim"))
"""What may be asked of rows: it does not tell how many they are."""

_ROWWISE = frozenset(
    " ".join(
        (
            "abs add clamp clone contiguous cos detach div erf exp float log1p mul neg radd rmul rsub rtruediv sin sqrt sub to",
            "true_divide truediv type_as",
            "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu relu relu6 selu sigmoid silu",
            "softplus softsign tanh",
            "alpha_dropout dropout embedding feature_alpha_dropout",
        )
    ).split()
)
"""Functions whose result has the rows of their operand, each computed of that row alone."""

_OF_FEATURES = ("layer_norm", "linear", "rms_norm")
"""The same, of rows that have elements."""

_OF_AN_AXIS = ("softmax", "log_softmax", "cat", "concat", "concatenate")
"""The same, if that is not the axis of the rows."""


def rows_among(args: Any, kwargs: Any) -> torch.Tensor | None:
    """The operand that holds the rows of a packed sequence."""
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and hasattr(leaf, _MARK)), None)


def follow(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, rows: torch.Tensor) -> None:
    """Mark the result of a function of ``rows`` as rows.

    Raises:
        TypeError: it may depend on how many rows there are.
    """
    name, features = _name(func), rows.dim() > 1
    if func in _TOLD or name == "dim" or (name == "size" and args[1:] == (-1,) and features):
        return
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    apart = name in _ROWWISE or (features and (name in _OF_FEATURES or (name in _OF_AN_AXIS and axis in (1, -1))))
    if not apart or not isinstance(result, torch.Tensor) or not statically_known_true(result.shape[0] == rows.shape[0]):
        _refuse(f"{name} of the rows")
    _marked(result, getattr(rows, _MARK))
