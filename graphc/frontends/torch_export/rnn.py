"""Keeps ``torch.nn.RNN`` as one ONNX node a layer, where PyTorch's exporter unrolls it into nodes of every step.

    rnn_tanh(x, h, params)  →  RNN(x, W, R, B, initial_h=h, direction, activations=[Tanh])

The exporter translates LSTM and GRU in this way by itself. It runs every step of all of them to learn the shape of the result,
twice, which takes 50 to 90 ms for a step of a layer and direction; :func:`without_steps` tells the shape at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` of ``torch.onnx.export`` for RNNs of both activations."""
    import torch

    return {torch.ops.aten.rnn_tanh.input: _translation("Tanh"), torch.ops.aten.rnn_relu.input: _translation("Relu")}


def _translation(activation: str) -> Callable[..., Any]:
    from onnxscript import FLOAT, opset20

    op: Any = opset20  # its annotations allow no lists, which the exporter turns into constants

    def rnn(  # type: ignore[no-untyped-def]
        x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    ):
        """The operands of ``aten::rnn_tanh.input``; returns the outputs of the last layer and the final states of all."""
        count = 2 if bidirectional else 1
        size = len(params) // (num_layers * count)  # the parameters of one direction of a layer: W, R and perhaps two biases
        x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        finals = []
        for layer in range(num_layers):
            held = [params[(layer * count + d) * size : (layer * count + d + 1) * size] for d in range(count)]

            def stacked(parts: Sequence[Any]) -> Any:
                rows = [op.Unsqueeze(part, [0]) for part in parts]
                return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)

            y, final = op.RNN(
                x,
                stacked([p[0] for p in held]),
                stacked([p[1] for p in held]),
                stacked([op.Concat(*p[2:4], axis=0) for p in held]) if has_biases else None,
                None,
                op.Slice(hx, [layer * count], [(layer + 1) * count], [0]),
                activations=[activation] * count,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=hx.shape[2],
            )
            x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1]) if bidirectional else op.Squeeze(y, [1])
            if dropout > 0 and train and layer + 1 < num_layers:
                x, _ = op.Dropout(x, dropout, train)
            finals.append(final)
        states = finals[0] if len(finals) == 1 else op.Concat(*finals, axis=0)
        return (op.Transpose(x, perm=[1, 0, 2]) if batch_first else x), states

    # the exporter reads the kinds of the operands from their annotations, which must be types and not text
    rnn.__annotations__ = {
        "x": FLOAT,
        "hx": FLOAT,
        "params": Sequence[FLOAT],
        "has_biases": bool,
        "num_layers": int,
        "dropout": float,
        "train": bool,
        "bidirectional": bool,
        "batch_first": bool,
        "return": tuple[FLOAT, FLOAT],
    }
    return rnn


@contextlib.contextmanager
def without_steps() -> Iterator[None]:
    """While the exporter captures a module, results of recurrent layers are told by their shapes alone.

    Replaces PyTorch's decompositions of these operators (as of 2.13) for tensors without values; where it registers none,
    nothing changes. One thread exports at a time.
    """
    import torch
    from torch._C import DispatchKey
    from torch._decomp import decomposition_table

    operators = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    places: list[tuple[dict[Any, Any], Any]] = [(decomposition_table, operator) for operator in operators]
    for operator in operators:
        kernels = getattr(operator, "py_kernels", {})
        places += [(kernels, key) for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)]
    kept = [(table, key, table[key]) for table, key in places if key in table]
    try:
        for table, key, decomposition in kept:
            table[key] = _shapes(decomposition)
        for operator in operators:
            getattr(operator, "_dispatch_cache", {}).clear()
        yield
    finally:
        for table, key, decomposition in kept:
            table[key] = decomposition
        for operator in operators:
            getattr(operator, "_dispatch_cache", {}).clear()


def _shapes(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Results without values for operands without; for others, what the decomposition computes."""

    def layers(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
        from torch._subclasses.fake_tensor import is_fake

        if not is_fake(x):
            return decomposition(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        states = hx if isinstance(hx, (list, tuple)) else [hx]
        width = states[0].shape[2] * (2 if bidirectional else 1)
        return (x.new_empty((*x.shape[:2], width)), *(state.new_empty(state.shape) for state in states))

    return layers
