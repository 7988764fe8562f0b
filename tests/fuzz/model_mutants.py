"""Mutants of models: damaged, ill-typed, cyclic, contradicting and hostile forms of small valid models."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.checker import ValidationError

from tests.fuzz.hostile import HOSTILE, damage
from tests.fuzz.seeds import seeds

_ODD_INTS = (0, -1, 1, 2, -3, 7, 2**31, -(2**31), 2**40, 2**62, -(2**63))
_ODD_FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
_ODD_TEXTS = ("", "x", "NOTSET", "\x00", "ü" * 40, "../../etc", "a,b->c", "bilinear")


def mutate(model: onnx.ModelProto, number: int, keep: Collection[int] | None = None) -> bytes:
    """Mutant ``number`` of ``model``, as the bytes of a file: one to three changes, of which ``keep`` lists those to make."""
    rng = random.Random(number)
    mutant = onnx.ModelProto()
    mutant.CopyFrom(model)
    changes = [
        (rng.choice(_CHANGES if rng.random() < 0.5 else HOSTILE), rng.getrandbits(32))
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]
    spoil = rng.random() < 0.08
    for k, (change, own) in enumerate(changes):
        if keep is None or k in keep:
            change(mutant, random.Random(own))
    data = bytearray(mutant.SerializeToString())
    if spoil:
        damage(data, rng)
    return bytes(data)


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    inner = [a.g for n in graph.node for a in n.attribute if a.HasField("g")]
    return [graph, *(g for body in inner for g in _graphs(body))]


def _graph(model: onnx.ModelProto, rng: random.Random) -> onnx.GraphProto:
    return rng.choice(_graphs(model.graph))


def _node(model: onnx.ModelProto, rng: random.Random) -> onnx.NodeProto | None:
    graph = _graph(model, rng)
    return rng.choice(graph.node) if graph.node else None


def _attribute(model: onnx.ModelProto, rng: random.Random) -> AttributeProto | None:
    node = _node(model, rng)
    return rng.choice(node.attribute) if node is not None and node.attribute else None


def _names(model: onnx.ModelProto) -> list[str]:
    graph = model.graph
    values = [*graph.input, *graph.output, *graph.initializer]
    return [v.name for v in values] + [name for n in graph.node for name in (*n.input, *n.output)]


def _drop_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(model, rng)
    if node is not None and node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]


def _change_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    attribute = _attribute(model, rng)
    if attribute is None:
        return
    if attribute.type == AttributeProto.INT:
        attribute.i = rng.choice(_ODD_INTS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = rng.choice(_ODD_FLOATS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = rng.choice(_ODD_TEXTS).encode()
    elif attribute.type == AttributeProto.INTS:
        kind = rng.randrange(3)
        if kind == 0 and attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(_ODD_INTS)
        elif kind == 1:
            attribute.ints.append(rng.choice(_ODD_INTS))
        elif attribute.ints:
            del attribute.ints[-1]
    elif attribute.type == AttributeProto.TENSOR:
        _damage(attribute.t, rng)
    else:
        attribute.type = rng.randint(0, 14)


def _retype_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    attribute = _attribute(model, rng)
    if attribute is not None:
        name = attribute.name
        wrong: Sequence[Any] = (1, 1.5, "text", [1, 2], [0.5], ["a"], numpy_helper.from_array(np.ones(2, np.float32)))
        attribute.CopyFrom(helper.make_attribute(name, rng.choice(wrong)))


def _add_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(model, rng)
    if node is not None:
        name = rng.choice(("axis", "axes", "to", "pads", "perm", "mode", "body", "group", "nonsense", "keepdims", "batch_dims"))
        if all(a.name != name for a in node.attribute):
            node.attribute.append(helper.make_attribute(name, rng.choice((rng.choice(_ODD_INTS), [0, 1], "text", 0.5))))


def _drop_input(model: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(model, rng)
    if node is not None and node.input:
        k = rng.randrange(len(node.input))
        if rng.random() < 0.5:
            node.input[k] = ""
        else:
            del node.input[k]


def _rewire_input(model: onnx.ModelProto, rng: random.Random) -> None:
    node, names = _node(model, rng), _names(model)
    if node is not None and node.input and names:
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, "nowhere"])


def _add_input(model: onnx.ModelProto, rng: random.Random) -> None:
    node, names = _node(model, rng), _names(model)
    if node is not None and names:
        node.input.append(rng.choice(names))


def _change_outputs(model: onnx.ModelProto, rng: random.Random) -> None:
    node, names = _node(model, rng), _names(model)
    if node is None:
        return
    kind = rng.randrange(3)
    if kind == 0 and node.output:
        del node.output[rng.randrange(len(node.output))]
    elif kind == 1:
        node.output.append("extra")
    elif node.output and names:
        node.output[rng.randrange(len(node.output))] = rng.choice(names)


def _rename_op(model: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(model, rng)
    if node is not None:
        if rng.random() < 0.7:
            node.op_type = rng.choice(sorted({s.model.graph.node[0].op_type for s in seeds()}))
        else:
            node.domain = rng.choice(("com.microsoft", "graphc", "ai.onnx.ml", "nowhere", "ai.onnx.preview.training"))


def _drop_node(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = _graph(model, rng)
    if graph.node:
        del graph.node[rng.randrange(len(graph.node))]


def _repeat_node(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = _graph(model, rng)
    if graph.node:
        graph.node.append(rng.choice(graph.node))


def _chain_node(model: onnx.ModelProto, rng: random.Random) -> None:
    """Put another op behind the output, as a real graph has."""
    graph = model.graph
    if graph.node and graph.node[-1].output and graph.output:
        op = rng.choice(("Relu", "Shape", "Softmax", "Transpose", "Identity", "ReduceSum", "Neg", "Cast", "Flatten", "Squeeze"))
        source = graph.node[-1].output[0]
        graph.node[-1].output[0] = "behind"
        graph.node.append(
            helper.make_node(op, ["behind"], [source], **({"to": rng.choice((1, 7, 10))} if op == "Cast" else {}))
        )


def _damage(tensor: TensorProto, rng: random.Random) -> None:
    kind = rng.randrange(6)
    if kind == 0 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(_ODD_INTS)
    elif kind == 1:
        tensor.dims.append(rng.choice((0, 1, 2, 2**40, -1)))
    elif kind == 2:
        tensor.data_type = rng.randint(0, 30)
    elif kind == 3:
        tensor.ClearField("raw_data")
    elif kind == 4:
        try:
            array = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, ValidationError):
            return
        if array.dtype.kind in "if" and array.size:
            odd = np.array(rng.choice(_ODD_INTS if array.dtype.kind == "i" else _ODD_FLOATS))
            changed = array.copy().reshape(-1)
            with np.errstate(all="ignore"):
                changed[rng.randrange(changed.size)] = odd.astype(array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(changed.reshape(array.shape), tensor.name))
    else:
        tensor.data_location = TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", rng.choice(("../secret", "/etc/passwd", "missing.bin", "", "\x00"))


def _damage_initializer(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = _graph(model, rng)
    if graph.initializer:
        _damage(rng.choice(graph.initializer), rng)


def _feed_becomes_initializer(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.input:
        value = rng.choice(model.graph.input)
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if all(0 <= d < 100 for d in dims) and value.type.tensor_type.elem_type in (1, 6, 7, 11):
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            model.graph.initializer.append(
                numpy_helper.from_array(np.full(dims, rng.choice((-1, 0, 1, 2**30)), dtype), value.name)
            )


def _change_type(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = _graph(model, rng)
    values = [*graph.input, *graph.output, *graph.value_info]
    if values:
        value = rng.choice(values)
        kind = rng.randrange(5)
        if kind == 0:
            value.type.tensor_type.elem_type = rng.randint(0, 30)
        elif kind == 1:
            value.type.tensor_type.ClearField("shape")
        elif kind == 2:
            value.ClearField("type")
        elif kind == 3 and value.type.tensor_type.shape.dim:
            dim = rng.choice(value.type.tensor_type.shape.dim)
            if rng.random() < 0.5:
                dim.dim_value = rng.choice((0, 1, 3, -5, 2**40))
            else:
                dim.dim_param = rng.choice(("n", "?", "", "2*n", "n n", "None", "label"))
        else:
            value.type.tensor_type.shape.dim.add().dim_value = rng.choice((1, 2, 2**40))


def _rename_value(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = _graph(model, rng)
    values = [*graph.input, *graph.output, *graph.initializer]
    if values:
        rng.choice(values).name = rng.choice([*_names(model), "", "label", "loss", "a b", "x/../y", "learning_rate"])


def _change_imports(model: onnx.ModelProto, rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0 and model.opset_import:
        model.opset_import[0].version = rng.choice((0, 1, 6, 7, 9, 11, 13, 18, 21, 24, 99, -1))
    elif kind == 1:
        del model.opset_import[:]
    elif kind == 2:
        model.ir_version = rng.choice((0, 1, 3, 4, 7, 10, 99))
    else:
        model.opset_import.append(helper.make_opsetid(rng.choice(("", "com.microsoft", "graphc")), rng.choice((1, 5, 22))))


def _change_body(model: onnx.ModelProto, rng: random.Random) -> None:
    graphs = _graphs(model.graph)[1:]
    if graphs:
        body = rng.choice(graphs)
        part = rng.choice((body.input, body.output, body.node, body.initializer))
        if part and rng.random() < 0.7:
            del part[rng.randrange(len(part))]
        elif part:
            part.append(rng.choice(part))


_CHANGES: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    _drop_attribute,
    _change_attribute,
    _change_attribute,
    _retype_attribute,
    _add_attribute,
    _drop_input,
    _rewire_input,
    _add_input,
    _change_outputs,
    _rename_op,
    _drop_node,
    _repeat_node,
    _chain_node,
    _damage_initializer,
    _damage_initializer,
    _feed_becomes_initializer,
    _change_type,
    _change_type,
    _rename_value,
    _change_imports,
    _change_body,
)
