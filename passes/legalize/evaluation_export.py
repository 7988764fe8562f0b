"""Recognises files whose exporter folded BatchNormalization away, as PyTorch does in evaluation mode."""

from __future__ import annotations

import re

import onnx_ir as ir

_FOLDED = re.compile(r"onnx::Conv(Transpose)?_\d+")
"""Names that PyTorch's exporter gives to a convolution's weight after it has multiplied a BatchNormalization into it."""

_FEWEST = 3
"""Convolutions that a network needs before it says anything that all of them have a bias."""

EXPORT_LINE = 'torch.onnx.export(model.train(), args, "model.onnx", dynamo=True, optimize=False)'
"""Keeps BatchNormalization and Dropout."""


def lost_normalization(model: ir.Model) -> str | None:
    """A warning for a file that had BatchNormalization before its export; None for any other.

    PyTorch's exporter renames a convolution's weight only when it folds a BatchNormalization into it. In files that other
    tools rewrote, it is probable where every convolution has a bias, an activation follows it, and nothing is normalised.
    """
    graph = model.graph
    convolutions = [n for n in graph.all_nodes() if n.op_type in ("Conv", "ConvTranspose") and n.domain in ("", "ai.onnx")]
    weights = [node.inputs[1].name or "" for node in convolutions if len(node.inputs) > 1 and node.inputs[1] is not None]
    folded = [name for name in weights if _FOLDED.fullmatch(name)]
    if folded:
        found = f"{len(folded)} of {len(weights)} convolutions hold a BatchNormalization that the exporter folded into them"
    elif _all_biased(graph, convolutions):
        found = f"all {len(convolutions)} convolutions have a bias and nothing is normalised: probably the exporter folded"
        found += " BatchNormalization into them"
    else:
        return None
    return f"{found}; an export in evaluation mode also drops Dropout. Neither trains here as in its framework; {_ADVICE}"


_ADVICE = f"to keep both, export with {EXPORT_LINE}, or give the module itself to graphc.compile"


def _all_biased(graph: ir.Graph, convolutions: list[ir.Node]) -> bool:
    if len(convolutions) < _FEWEST or any(node.op_type.endswith("Normalization") for node in graph.all_nodes()):
        return False
    biased = all(len(node.inputs) > 2 and node.inputs[2] is not None for node in convolutions)
    followed = [node for node in convolutions if any(_activates(user) for user in node.outputs[0].consumers())]
    return biased and 2 * len(followed) > len(convolutions)


def _activates(node: ir.Node) -> bool:
    return node.op_type in ("Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSwish", "HardSigmoid", "Mul", "Elu", "Add", "PRelu")
