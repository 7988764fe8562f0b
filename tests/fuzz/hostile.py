"""Hostile changes of models: sizes, depth, names, functions, external data and types that no exporter writes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.checker import ValidationError

DATA = "weights.bin"
"""A file beside the mutant, for external data."""

DATA_BYTES = 256

_HUGE = (2**31 - 1, 2**31, 2**33, 2**40, 2**62, 2**63 - 1)
_DIM_NAMES = (
    *("9**9**9**9", "((((((", "1/0", "n-n", "n+1", "2*" * 500 + "n", "9" * 5000, "__import__('os').getcwd()", "floor(n/2)"),
    *("n*n*n*n*n*n*n*n*n*n", "-n", "n.n", "Max(n,m)", "0x10", "n" * 100_000, "é", "\n", "1e999", "n*-1", "oo", "zoo", "I"),
)
_NAMES = (
    *("n" * 1_000_000, "\U0001f600", "a\nb", "a\x00b", "graphc.seed", "graphc.step", "w::grad", "loss", "constant", " "),
    *("../../x", "a,b", "a=b", "*", "[0]", "{", "\u202e", "'", '"', "%s", "$HOME", "a" * 300, "0", "-", "--loss", "é\u0301"),
)


def _graphs(graph: GraphProto) -> list[GraphProto]:
    inner = [a.g for n in graph.node for a in n.attribute if a.HasField("g")]
    return [graph, *(g for body in inner for g in _graphs(body))]


def _some(model: onnx.ModelProto, rng: random.Random) -> onnx.NodeProto | None:
    graph = rng.choice(_graphs(model.graph))
    return rng.choice(graph.node) if graph.node else None


def _int64(*values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64))


def swap_initializers(model: onnx.ModelProto, rng: random.Random) -> None:
    held = model.graph.initializer
    if len(held) > 1:
        one, two = rng.sample(range(len(held)), 2)
        held[one].name, held[two].name = held[two].name, held[one].name


def change_rank(model: onnx.ModelProto, rng: random.Random) -> None:
    """An initializer or a feed gets an axis more, an axis less, or no element."""
    held = model.graph.initializer
    if not held:
        return
    tensor, kind = rng.choice(held), rng.randrange(4)
    if kind == 0:
        tensor.dims.insert(rng.randint(0, len(tensor.dims)), 1)
    elif kind == 1 and tensor.dims:
        del tensor.dims[rng.randrange(len(tensor.dims))]
    elif kind == 2:
        empty = np.zeros([0, *(size % 8 for size in tensor.dims[1:])], np.float32)
        tensor.CopyFrom(numpy_helper.from_array(empty, tensor.name))
    else:
        del tensor.dims[:]
        tensor.dims.extend(rng.choice(([-1, -1], [2**32, 2**32], [-(2**62), 4], [0, 2**62], [1] * 70)))


def retype_initializer(model: onnx.ModelProto, rng: random.Random) -> None:
    held = model.graph.initializer
    if not held:
        return
    tensor = rng.choice(held)
    if rng.random() < 0.3:
        text = helper.make_tensor(tensor.name, TensorProto.STRING, [1], [b"text"])
        tensor.CopyFrom(text)
        return
    try:
        array = numpy_helper.to_array(tensor)
        kind = rng.choice([k for k in TensorProto.DataType.values() if k not in (0, TensorProto.STRING)])
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        with np.errstate(all="ignore"):
            tensor.CopyFrom(numpy_helper.from_array(array.astype(dtype), tensor.name))
    except (ValueError, TypeError, KeyError, ValidationError):
        tensor.data_type = rng.randint(0, 40)


def retype_value(model: onnx.ModelProto, rng: random.Random) -> None:
    """An input, output or inner value becomes a sequence, an optional, a map, a sparse tensor, or deeply nested."""
    graph = rng.choice(_graphs(model.graph))
    values = [*graph.input, *graph.output, *graph.value_info]
    if not values:
        return
    value, kind = rng.choice(values), rng.randrange(5)
    inner = TypeProto()
    inner.CopyFrom(value.type)
    if kind == 0:
        value.type.sequence_type.elem_type.CopyFrom(inner)
    elif kind == 1:
        value.type.optional_type.elem_type.CopyFrom(inner)
    elif kind == 2:
        value.type.map_type.key_type = rng.randint(0, 20)
        value.type.map_type.value_type.CopyFrom(inner)
    elif kind == 3:
        value.type.sparse_tensor_type.elem_type = 1
    else:
        value.type.Clear()
        nested = value.type
        for _ in range(rng.choice((3, 40, 90))):
            nested = nested.sequence_type.elem_type


def sparse(model: onnx.ModelProto, rng: random.Random) -> None:
    made = onnx.SparseTensorProto()
    made.values.CopyFrom(numpy_helper.from_array(np.ones(2, np.float32), "sparse"))
    made.indices.CopyFrom(_int64(*rng.choice(((0, 1), (-1, 2**40), (5,)))))
    made.dims.extend(rng.choice(([4], [2**40], [-1], [2, 2])))
    if rng.random() < 0.5:
        model.graph.sparse_initializer.append(made)
    else:
        node = helper.make_node("Constant", [], ["sparse_out"])
        node.attribute.append(helper.make_attribute("sparse_value", made))
        _insert(model, node, "sparse_out", rng)


def _insert(model: onnx.ModelProto, node: onnx.NodeProto, name: str, rng: random.Random) -> None:
    """Put ``node`` first and let some node read it."""
    reader = _some(model, rng)
    if reader is not None and reader.input:
        reader.input[rng.randrange(len(reader.input))] = name
    rest = [onnx.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([node, *rest])


def functions(model: onnx.ModelProto, rng: random.Random) -> None:
    """Local functions that call themselves or each other, lack imports, or are called in the wrong way."""
    kind = rng.randrange(6)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]

    def call(op: str, domain: str = "own") -> onnx.NodeProto:
        return helper.make_node(op, ["a"], ["b"], domain=domain)

    bodies = {
        0: [("f", [call("f")])],
        1: [("f", [call("g")]), ("g", [call("f")])],
        2: [("f", [helper.make_node("Relu", ["nowhere"], ["b"])])],
        3: [("f", []), ("f", [call("Relu", "")])],
        4: [("f", [call(f"f{k}")]) if k == 0 else (f"f{k - 1}", [call(f"f{k}")]) for k in range(300)],
        5: [("f", [helper.make_node("Relu", ["a"], ["b"], alpha=1.0)])],
    }[kind]
    for name, nodes in bodies:
        model.functions.append(helper.make_function("own", name, ["a"], ["b"], nodes, imports if kind != 5 else []))
    if rng.random() < 0.8:
        model.opset_import.append(helper.make_opsetid("own", 1))
    node = _some(model, rng)
    if node is not None:
        node.op_type, node.domain = "f", "own"
        if rng.random() < 0.5:
            del node.attribute[:]
            del node.input[1:]
            del node.output[1:]


def imports(model: onnx.ModelProto, rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0 and model.opset_import:
        model.opset_import[0].version = rng.choice((2**31, 2**62, -(2**63), -1, 0, 1000))
    elif kind == 1:
        model.opset_import.append(helper.make_opsetid("", rng.choice((6, 13, 21, 2**40))))
    elif kind == 2:
        node = _some(model, rng)
        if node is not None:
            node.domain = rng.choice(("unknown.domain", "ai.onnx.ml", "com.microsoft", "d" * 10_000, "\x00"))
    else:
        model.ir_version = rng.choice((2**31, 2**62, -1, 0, 2))


def extras(model: onnx.ModelProto, rng: random.Random) -> None:
    """Parts of the format that are seldom used."""
    kind = rng.randrange(6)
    if kind == 0:
        part = model.training_info.add()
        part.algorithm.CopyFrom(model.graph)
        entry = part.update_binding.add()
        entry.key, entry.value = "nowhere", "neither"
    elif kind == 1:
        for key in ("a", "a", "", "graphc.mesh", "graphc.deterministic", "k" * 10_000):
            entry = model.metadata_props.add()
            entry.key, entry.value = key, rng.choice(("", "data=0", "\x00", "x" * 100_000))
    elif kind == 2:
        note = model.graph.quantization_annotation.add()
        note.tensor_name = "nowhere"
        entry = note.quant_parameter_tensor_names.add()
        entry.key, entry.value = "SCALE_TENSOR", "missing"
    elif kind == 3:
        node = _some(model, rng)
        if node is not None:
            for key in ("graphc.gradient_of", "graphc.loss_total", "namespace", "pkg.torch.onnx.name_scopes"):
                entry = node.metadata_props.add()
                entry.key, entry.value = key, rng.choice(("", "x", "['a'", "[", "1"))
    elif kind == 4:
        for value in [*model.graph.input, *model.graph.value_info]:
            entry = value.metadata_props.add()
            entry.key, entry.value = rng.choice(("graphc.gradient_of", "graphc.held")), "x"
    else:
        model.graph.doc_string = "d" * 1_000_000
        model.producer_name = rng.choice(("pytorch", "tf2onnx", "\x00"))


def external(model: onnx.ModelProto, rng: random.Random) -> None:
    """Data beside the file, with a forged offset, length or place."""
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    odd = ("-1", "0", "8", "255", "256", "4096", "99999999999999999999", "abc", "", "1e3", "0x10", " 4", "\x00")
    places = (DATA, DATA, DATA, f"./{DATA}", f"../{DATA}", f"/proc/self/{DATA}", "/dev/zero", ".", "", "x" * 5000, "model.onnx")
    pairs = [("location", rng.choice(places)), ("offset", rng.choice(odd)), ("length", rng.choice(odd)), ("checksum", "x")]
    for key, value in rng.sample(pairs, rng.randint(1, 4)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def cycle(model: onnx.ModelProto, rng: random.Random) -> None:
    graph = model.graph
    if graph.node:
        first, last = rng.choice(graph.node), rng.choice(graph.node)
        if first.input and last.output:
            first.input[rng.randrange(len(first.input))] = last.output[0]


def deep(model: onnx.ModelProto, rng: random.Random) -> None:
    """Branches inside branches, or a chain of very many nodes, behind the output."""
    graph = model.graph
    if not graph.output or not graph.node or not graph.node[-1].output:
        return
    name = graph.node[-1].output[0]
    graph.node[-1].output[0] = "inner_end"
    if rng.random() < 0.5:
        graph.initializer.append(numpy_helper.from_array(np.array(rng.random() < 0.5), "truth"))
        body = helper.make_graph([helper.make_node("Neg", ["inner_end"], ["out"])], "leaf", [], [_untyped("out")])
        for level in range(rng.choice((5, 20, 28))):  # protobuf refuses more than about 32
            branch = helper.make_node("If", ["truth"], [f"out{level}"], then_branch=body, else_branch=_leaf())
            body = helper.make_graph([branch], f"level{level}", [], [_untyped(f"out{level}")])
        graph.node.append(helper.make_node("If", ["truth"], [name], then_branch=body, else_branch=_leaf()))
        return
    names = ["inner_end", *(f"chain{k}" for k in range(rng.choice((50, 1200)))), name]
    op = rng.choice(("Relu", "Neg", "Identity", "Softplus"))
    graph.node.extend(helper.make_node(op, [a], [b]) for a, b in itertools.pairwise(names))


def _untyped(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _leaf() -> GraphProto:
    return helper.make_graph([helper.make_node("Identity", ["inner_end"], ["other"])], "leaf", [], [_untyped("other")])


def capture(model: onnx.ModelProto, rng: random.Random) -> None:
    """Names of a body that hide those around it, or that a body reads but nothing there makes."""
    bodies = _graphs(model.graph)[1:]
    if not bodies:
        return
    body, kind = rng.choice(bodies), rng.randrange(4)
    outer = [v.name for v in (*model.graph.input, *model.graph.initializer)] + [o for n in model.graph.node for o in n.output]
    if kind == 0 and body.node and body.node[0].output and outer:
        body.node[0].output[0] = rng.choice(outer)
    elif kind == 1 and body.node and body.node[0].input:
        body.node[0].input[0] = rng.choice([*outer, "nowhere"])
    elif kind == 2:
        other = rng.choice(bodies)
        body.CopyFrom(onnx.GraphProto.FromString(other.SerializeToString()))
    elif outer:
        body.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), rng.choice(outer)))


def rename(model: onnx.ModelProto, rng: random.Random) -> None:
    """One value gets a hostile name everywhere."""
    names = [v.name for v in (*model.graph.input, *model.graph.initializer, *model.graph.output)]
    names += [name for node in model.graph.node for name in node.output]
    if not names:
        return
    old, new = rng.choice(names), rng.choice(_NAMES)
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            value.name = new if value.name == old else value.name
        for node in graph.node:
            for list_ in (node.input, node.output):
                for k, name in enumerate(list_):
                    list_[k] = new if name == old else name
            node.name = new if rng.random() < 0.2 else node.name


def name_dimension(model: onnx.ModelProto, rng: random.Random) -> None:
    values = [v for g in _graphs(model.graph) for v in (*g.input, *g.output, *g.value_info)]
    dims = [d for v in values for d in v.type.tensor_type.shape.dim]
    if dims:
        rng.choice(dims).dim_param = rng.choice(_DIM_NAMES)


def expand(model: onnx.ModelProto, rng: random.Random) -> None:
    """A node whose operands of a few bytes make a huge constant, which the model reads."""
    size, op = (
        rng.choice(_HUGE),
        rng.choice(("ConstantOfShape", "Range", "Expand", "Tile", "OneHot", "EyeLike", "Pad", "Resize")),
    )
    one = helper.make_node("Constant", [], ["huge_one"], value=numpy_helper.from_array(np.ones(1, np.float32)))
    to = helper.make_node("Constant", [], ["huge_to"], value=_int64(size))
    scalar = [helper.make_node("Constant", [], [f"huge_{k}"], value=numpy_helper.from_array(np.array(v, np.int64)))
              for k, v in {"zero": 0, "size": size, "step": 1}.items()]  # fmt: skip
    node = {
        "ConstantOfShape": helper.make_node(op, ["huge_to"], ["huge"]),
        "Range": helper.make_node(op, ["huge_zero", "huge_size", "huge_step"], ["huge"]),
        "Expand": helper.make_node(op, ["huge_one", "huge_to"], ["huge"]),
        "Tile": helper.make_node(op, ["huge_one", "huge_to"], ["huge"]),
        "OneHot": helper.make_node(op, ["huge_to", "huge_size", "huge_pair"], ["huge"]),
        "EyeLike": helper.make_node(op, ["huge_square"], ["huge"]),
        "Pad": helper.make_node(op, ["huge_one", "huge_pads"], ["huge"]),
        "Resize": helper.make_node(op, ["huge_one", "", "", "huge_to"], ["huge"]),
    }[op]
    more = {
        "OneHot": ("huge_pair", numpy_helper.from_array(np.array([0, 1], np.float32))),
        "Pad": ("huge_pads", _int64(0, size)),
    }
    made = [one, to, *scalar]
    if op in more:
        made.append(helper.make_node("Constant", [], [more[op][0]], value=more[op][1]))
    if op == "EyeLike":
        made.append(helper.make_node("Constant", [], ["square_to"], value=_int64(size, size)))
        made.append(helper.make_node("ConstantOfShape", ["square_to"], ["huge_square"]))
    _insert(model, node, "huge", rng)
    for before in reversed(made):
        rest = [onnx.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend([before, *rest])


def widen(model: onnx.ModelProto, rng: random.Random) -> None:
    """Very many operands, attributes or numbers in an attribute."""
    node = _some(model, rng)
    if node is None:
        return
    kind = rng.randrange(3)
    if kind == 0 and node.input:
        node.input.extend([node.input[0]] * rng.choice((70, 5000)))
    elif kind == 1:
        lists = [a for a in node.attribute if a.type == AttributeProto.INTS]
        if lists:
            rng.choice(lists).ints.extend([1] * rng.choice((65, 100_000)))
    else:
        node.attribute.extend(helper.make_attribute(f"extra{k}", k) for k in range(200))


def repeat_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    """An attribute twice, of no type, of two types, or a reference outside of a function."""
    node = _some(model, rng)
    if node is None or not node.attribute:
        return
    attribute, kind = rng.choice(node.attribute), rng.randrange(4)
    if kind == 0:
        node.attribute.add().CopyFrom(attribute)
    elif kind == 1:
        attribute.type = AttributeProto.UNDEFINED
    elif kind == 2:
        attribute.s, attribute.f = b"\xff\xfe", float("nan")
    else:
        attribute.ref_attr_name = "alpha"


def ends(model: onnx.ModelProto, rng: random.Random) -> None:
    """Inputs and outputs of the graph that are absent, repeated, or the same."""
    graph, kind = model.graph, rng.randrange(6)
    if kind == 0:
        del graph.output[:]
    elif kind == 1 and graph.output:
        graph.output.append(graph.output[0])
    elif kind == 2 and graph.input:
        graph.output.append(graph.input[0])
    elif kind == 3 and graph.initializer:
        graph.output.append(_untyped(graph.initializer[0].name))
    elif kind == 4:
        del graph.node[:]
    elif graph.input:
        graph.input.append(graph.input[0])


def trip(model: onnx.ModelProto, rng: random.Random) -> None:
    """Another number of turns, or another condition, for a loop."""
    for tensor in model.graph.initializer:
        if tensor.name == "count":
            tensor.CopyFrom(numpy_helper.from_array(np.array(rng.choice((0, -1, 1, 40, 2**31)), np.int64), "count"))
        elif tensor.name == "go" and rng.random() < 0.3:
            tensor.CopyFrom(numpy_helper.from_array(np.array(rng.choice((0, 1)), bool), "go"))


HOSTILE: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    swap_initializers,
    change_rank,
    change_rank,
    retype_initializer,
    retype_value,
    sparse,
    functions,
    imports,
    extras,
    external,
    cycle,
    deep,
    capture,
    rename,
    name_dimension,
    expand,
    expand,
    widen,
    repeat_attribute,
    ends,
    trip,
)


def damage(data: bytearray, rng: random.Random) -> None:
    """Change the bytes of a file in place: bits, a cut, a piece repeated or taken out, a number made huge."""
    for _ in range(rng.randint(1, 4)):
        if not data:
            return
        at, kind = rng.randrange(len(data)), rng.randrange(6)
        if kind <= 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        elif kind == 3:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 4:
            data[at : at + 1] = rng.choice((b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x80\x08", b"\0"))
        elif rng.random() < 0.3:
            del data[at:]
