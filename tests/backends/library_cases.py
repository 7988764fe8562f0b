"""Convolutions and attentions whose library calls are checked: on the host, on a GPU, and by asking the library for plans."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder


def empty_model() -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="test")
    return ir.Model(graph, ir_version=IR_VERSION)


def new_input(model: ir.Model, name: str, shape: tuple[int, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    """An input that the model did not have."""
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
    model.graph.inputs.append(value)
    return value


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"x": (2, 6, 9, 8), "w": (4, 6, 3, 3), "pads": [1, 1, 1, 1]},
    "one by one": {"x": (2, 6, 5, 4), "w": (3, 6, 1, 1)},
    "strided": {"x": (2, 3, 11, 9), "w": (4, 3, 3, 3), "pads": [1, 1, 1, 1], "strides": [2, 2]},
    "left over": {"x": (1, 3, 10, 9), "w": (4, 3, 3, 2), "strides": [3, 2]},
    "asymmetric": {"x": (2, 3, 8, 7), "w": (5, 3, 3, 3), "pads": [0, 1, 2, 0], "strides": [1, 2]},
    "dilated": {"x": (1, 2, 11, 12), "w": (3, 2, 3, 2), "dilations": [2, 3], "pads": [2, 1, 2, 1]},
    "grouped": {"x": (2, 6, 6, 5), "w": (9, 2, 3, 3), "group": 3, "pads": [1, 1, 1, 1]},
    "depthwise": {"x": (2, 5, 6, 6), "w": (10, 1, 3, 3), "group": 5, "strides": [2, 1]},
    "same upper": {"x": (2, 3, 8, 7), "w": (4, 3, 3, 4), "auto_pad": "SAME_UPPER", "strides": [2, 2]},
    "same lower": {"x": (2, 3, 8, 7), "w": (4, 3, 3, 4), "auto_pad": "SAME_LOWER", "strides": [1, 2]},
    "image in blocks": {"x": (2, 16, 9, 10), "w": (8, 16, 4, 4)},
    "one axis": {"x": (2, 4, 13), "w": (6, 4, 4), "pads": [2, 1], "strides": [2], "dilations": [2]},
    "three axes": {"x": (2, 3, 5, 6, 4), "w": (4, 3, 3, 2, 3), "pads": [1, 0, 1, 1, 1, 0], "strides": [1, 2, 1]},
}


def convolutions(name: str, last: bool, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """y, dx and dw of one convolution as graph outputs."""
    case = dict(CONVOLUTIONS[name])
    x_shape, w_shape = case.pop("x"), case.pop("w")
    model = empty_model()
    op = Builder(model.graph)

    given = functools.partial(new_input, model, dtype=dtype)
    turn = (lambda s: (s[0], *s[2:], s[1])) if last else (lambda s: s)
    x, w, b = given("x", turn(x_shape)), given("w", turn(w_shape)), given("b", (w_shape[0],))
    domain, prefix = (op.graphc, "ChannelsLast") if last else (op.graphc, "")
    if last:
        y = domain.ChannelsLastConv(x, w, b, **case, activation="relu")
    else:
        y = op.Conv(x, w, b, **case)
    dy = given("dy", tuple(int(d) for d in y.shape.dims))
    dx = getattr(domain, f"{prefix}ConvGradInput")(dy, w, list(turn(x_shape)), **case)
    dw = getattr(domain, f"{prefix}ConvGradWeight")(x, dy, list(turn(w_shape)), **case)
    for value, name in ((y, "y"), (dx, "dx"), (dw, "dw")):
        value.name = name
        model.graph.outputs.append(value)
    return model


B, H, T, S, D = 2, 4, 6, 5, 8

ATTENTIONS: dict[str, dict[str, Any]] = {
    "standard": {"layout": "bhtd,bhtd,bhtd->bhtd"},
    "batch length heads": {"layout": "bthd,bthd,bthd->bthd", "causal": 1},
    "packed": {"layout": "bt0hd,bt1hd,bt2hd->bthd", "causal": 1},
    "packed in front": {"layout": "0bhtd,1bhtd,2bhtd->tbhd"},
    "keys and values packed": {"layout": "bthd,tb0hd,tb1hd->bthd", "parts": 2},
    "grouped": {"layout": "bthd,bthd,bthd->bhtd", "groups": 2, "causal": 1},
    "one head": {"layout": "btd,btd,btd->btd"},
    "numbers": {"layout": "bthd,bthd,bthd->bthd", "mask": "numbers"},
    "hidden": {"layout": "bthd,bthd,bthd->tbhd", "mask": "hidden"},
    "hidden and causal": {"layout": "bt0hd,bt1hd,bt2hd->bthd", "mask": "hidden", "causal": 1},
    "infinite": {"layout": "bhtd,bhtd,bhtd->bthd", "mask": "infinite"},
    "dropped": {"layout": "bt0hd,bt1hd,bt2hd->bthd", "causal": 1, "ratio": 0.3},
    "dropped and added to": {"layout": "bhtd,bhtd,bhtd->bthd", "mask": "numbers", "ratio": 0.1},
    "dropped and grouped": {"layout": "bthd,bthd,bthd->bhtd", "groups": 2, "mask": "hidden", "ratio": 0.5},
    "half a tile of keys": {"layout": "bhtd,bhtd,bhtd->bthd", "mask": "low", "keys": 64},
    "probabilities": {"layout": "bthd,bthd,bthd->bthd", "saves": "probabilities", "causal": 1},
}


def attention_feeds(case: dict[str, Any], dtype: Any) -> tuple[dict[str, Any], list[str]]:
    """The operands by name, and the name of each of q, k, v."""
    rng = np.random.default_rng(0)
    axes = case["layout"].partition("->")[0].split(",")
    packed = any(c.isdigit() for c in axes[0])
    lengths = {"b": B, "h": H, "d": D}
    feeds, names = {}, []
    for name, order in zip("qkv", axes, strict=True):
        sizes = {
            **lengths,
            "t": T if packed or name == "q" else case.get("keys", S),
            **{str(k): case.get("parts", 3) for k in range(3)},
        }
        if name != "q" and "groups" in case:
            sizes["h"] = H // case["groups"]
        pattern = "".join("#" if c.isdigit() else c for c in order)
        key = pattern if "#" in pattern else name
        if key not in feeds:
            feeds[key] = rng.standard_normal([sizes[c] for c in order]).astype(dtype)
        names.append(key)
    keys = T if packed else case.get("keys", S)
    if case.get("mask") == "numbers":
        feeds["mask"] = rng.standard_normal((B, 1, T, keys)).astype(np.float32)
    elif case.get("mask") == "low":  # of sample 1 every key, by a number that is no infinity
        feeds["mask"] = np.where(rng.random((B, 1, 1, keys)) < 0.6, np.float32(0), np.float32(-1e4))
        feeds["mask"][1] = -1e4
    elif case.get("mask") == "hidden":
        seen = rng.random((B, 1, 1, keys)) < 0.6
        seen[0, ..., 0], seen[1] = False, False  # the first query of sample 0 in a causal mask, and all of sample 1
        feeds["mask"] = seen
    elif case.get("mask") == "infinite":
        numbers = np.where(rng.random((H, T, keys)) < 0.5, -np.inf, 1.0)
        numbers[1, 2], numbers[0, 0, 1:] = -np.inf, np.finfo(np.float32).min
        numbers[0, 0, 0] = 1.0
        feeds["mask"] = numbers.astype(np.float32)
    return feeds, names


def drawn(op: Builder, keys: int, ratio: float) -> ir.Value:
    """The mask of a dropout of the probabilities, as ``train_mode`` puts it: of step 5 and seed 3."""
    where = op.const([B, H, T, keys]), np.int64(3), np.int64(5), np.int64(0)
    mask: ir.Value = op.graphc.DropoutMask(*where, ratio=ratio, tag="drop", dtype=int(ir.DataType.FLOAT))
    return mask


def attention(case: dict[str, Any], feeds: dict[str, Any], names: list[str]) -> ir.Model:
    """The attention and its gradient for an adjoint that depends on y."""
    model = empty_model()
    op, held = Builder(model.graph), {}
    for name, array in feeds.items():
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        held[name] = ir.Value(name=name, type=kind, shape=ir.Shape(list(array.shape)))
        model.graph.inputs.append(held[name])
    options = {"scale": 0.3, "causal": case.get("causal", 0), "layout": case["layout"], "saves": case.get("saves", "logsumexp")}
    q, k, v = (held[name] for name in names)
    keep = [drawn(op, T if names[0] == names[1] else S, case["ratio"])] if "ratio" in case else []
    y, saved = op.graphc.ScaledDotProductAttention(q, k, v, held.get("mask"), *keep, **options)
    dy = op.Mul(y, op.cast_like(op.const(np.linspace(-1, 1, D, dtype=np.float32)), y))
    found = op.graphc.ScaledDotProductAttentionGrad(
        dy, q, k, v, held.get("mask"), y, saved, *keep, **options, _outputs=len(set(names)) if len(set(names)) > 1 else 1
    )
    for name, value in (("y", y), *((f"d{k}", g) for k, g in enumerate(found if isinstance(found, tuple) else (found,)))):
        out = op.Identity(value)
        out.name = name
        model.graph.outputs.append(out)
    return model
