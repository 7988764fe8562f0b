"""Recognises files whose exporter dropped BatchNormalization or Dropout, as PyTorch does in evaluation mode."""

from __future__ import annotations

import re

import onnx_ir as ir

from graphc.errors import counted

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


def lost_dropout(model: ir.Model) -> str | None:
    """A warning for a file whose names tell that modules computed nothing when it was exported; None for any other.

    PyTorch numbers the modules of a Sequential, and nodes carry the numbers: where 0, 1 and 3 have nodes, 2 had none.
    Classes that have Dropout unless one says otherwise are known by name, which only the newer exporter records.
    """
    graph = model.graph
    if model.producer_name != "pytorch" or any(node.op_type == "Dropout" for node in graph.all_nodes()):
        return None
    nodes = list(graph.all_nodes())
    gaps = _missing_modules([_modules(node) for node in nodes])
    if gaps:
        found = f"{counted(len(gaps), 'module')} left no node in the file (first: {gaps[0]!r}): probably Dropout"
        return f"{found}, which an export in evaluation mode drops; {_ADVICE}"
    classes = {name for node in nodes for name in re.findall(r"'([^']+)'", node.metadata_props.get(_CLASSES, ""))}
    known = sorted(name for name in classes if name.startswith(_WITH_DROPOUT))
    if known:
        return f"{known[0].rpartition('.')[2]} has Dropout by default, and an export in evaluation mode drops it; {_ADVICE}"
    return None


_NUMBERED = re.compile(r"(|.*\.)(\d+)(?:_\d+)?")  # a second call of a module has a suffix
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_SCOPES = "pkg.torch.onnx.name_scopes"
_WITH_DROPOUT = (
    "torch.nn.modules.transformer.Transformer",
    *(f"transformers.models.{name}." for name in ("albert", "bart", "bert", "camembert", "deberta", "distilbert", "electra")),
    *(f"transformers.models.{name}." for name in ("gpt2", "mbart", "mpnet", "roberta", "t5", "wav2vec2", "xlm_roberta")),
)
"""Modules whose default configuration drops out."""


def _modules(node: ir.Node) -> list[str]:
    """The nested modules in which a node was made, as the exporters name them: ``/net/net.0/Gemm``, or a record."""
    if _SCOPES in node.metadata_props:
        return re.findall(r"'([^']*)'", node.metadata_props[_SCOPES])[1:-1]
    return (node.name or "").split("/")[1:-1]


def _missing_modules(made: list[list[str]]) -> list[str]:
    """Numbers that no node carries below the largest one of their parent.

    Args:
        made: the modules of each node, in the order of execution.
    """
    order: dict[str, list[int]] = {}
    shared: set[str] = set()  # parents with a module that also has a name elsewhere, where a number says nothing
    for modules in made:
        for k, name in enumerate(modules):
            if (found := _NUMBERED.fullmatch(name)) is None:
                continue
            inside = "/".join(modules[:k])
            order.setdefault("/".join([*modules[:k], found[1]]), []).append(int(found[2]))
            above = _NUMBERED.fullmatch(modules[k - 1]) if k else None
            if above is not None and name.split(".")[0] == above[0].split(".")[0] and not name.startswith(f"{above[0]}."):
                shared.add(inside)
    return [
        f"{parent}{k}"
        for parent, numbers in sorted(order.items())
        if numbers == sorted(numbers) and len(set(numbers)) > 1 and not any(parent.startswith(f"{p}/") for p in shared)
        for k in sorted(set(range(max(numbers))) - set(numbers))
    ]


_ADVICE = f"to keep both, export with {EXPORT_LINE}, or give the module itself to graphc.compile"


def _all_biased(graph: ir.Graph, convolutions: list[ir.Node]) -> bool:
    if len(convolutions) < _FEWEST or any(node.op_type.endswith("Normalization") for node in graph.all_nodes()):
        return False
    biased = all(len(node.inputs) > 2 and node.inputs[2] is not None for node in convolutions)
    followed = [node for node in convolutions if any(_activates(user) for user in node.outputs[0].consumers())]
    return biased and 2 * len(followed) > len(convolutions)


def _activates(node: ir.Node) -> bool:
    return node.op_type in ("Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSwish", "HardSigmoid", "Mul", "Elu", "Add", "PRelu")
