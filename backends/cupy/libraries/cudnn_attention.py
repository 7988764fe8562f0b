"""Scaled dot-product attention and its gradient through cuDNN, without storing scores or probabilities.

The library takes batch, heads, length and head size, each with a stride. A layout of the op gives exactly these, and the parts
of a packed projection begin at an offset. So cuDNN reads operands where the projection wrote them, and writes gradients where
the next product reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.libraries.cudnn import WORKSPACE, Dnn, Tensor
from graphc.backends.cupy.libraries.registry import library
from graphc.device import Array, Run
from graphc.errors import GraphcError
from graphc.ir.facts import describe, dtype_of, shape_of
from graphc.ir.ops.attention import HEADS, drawn_mask, operand_axes, packed, written

LENGTHS = ("seq_len_q", "seq_len_kv")
"""Operands with the lengths of each sample, by the library's names."""

LARGEST_HEAD = 256
"""Largest head size for which the library has plans."""

TILE, HALF = 128, 64
"""Keys of a tile of the library's gradient, and of its last tile where :attr:`Attention.counted` helps."""

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operand lies: its form as batch, heads, length, size, and its first element."""

    form: Tensor
    offset: int = 0

    @staticmethod
    def of(shape: Sequence[int], axes: str, dtype: ir.DataType) -> Place:
        """The place of a dense tensor of ``shape``; ``axes`` names its axes, as in a layout of the op."""
        dense = Tensor.dense(shape, dtype)
        steps = dict(zip(axes, zip(dense.dims, dense.strides, strict=True), strict=True))
        whole = dense.dims[0] * dense.strides[0]
        dims, strides = zip(*(steps.get(letter, (1, whole)) for letter in HEADS), strict=True)
        part = packed(axes)
        return Place(Tensor(dims, strides, dtype), 0 if part is None else int(axes[part]) * dense.strides[part])

    def within(self, array: Any) -> Any:
        return array.reshape(-1)[self.offset :]


@dataclass(frozen=True, slots=True)
class Attention:
    """y = softmax(scale · q·kᵀ + mask)·v with one saved number per row, or the gradients of q, k and v.

    Attributes:
        y: form of the result (forward) and of its adjoint (backward).
        mask: form of the numbers added to the scores; None: no mask.
        keep: form of the dropout mask of zeros and ones that multiplies the probabilities; None: no dropout. cuDNN is given
            no factor: 9.19 multiplies Σ dy·y by it, whatever it is told of its inverse (seen on an H100).
        deterministic: whether the gradient sums in a fixed order.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    mask: Tensor | None
    scale: float
    causal: bool
    backward: bool = False
    deterministic: bool = False
    keep: Tensor | None = None

    @property
    def repeatable(self) -> bool:
        return False

    @property
    def variants(self) -> Sequence[Attention]:
        """A gradient in a fixed order of sums: on an H100 10 % faster than the other for 128 queries, 15 % slower for 1024."""
        return [replace(self, deterministic=True)] if self.backward and not self.deterministic else []

    @property
    def counted(self) -> bool:
        """Whether the library is told the lengths, which are those of the operands.

        Otherwise it takes keys beyond the last for keys with a score of 0 if they fill half a tile. Of a row whose scores are
        all below -88, as where an additive mask hides every key, the gradient would be NaN (cuDNN 9.19, seen on an H100).
        """
        return self.backward and self.mask is not None and self.k.dims[2] % TILE == HALF

    @property
    def operands(self) -> tuple[str, ...]:
        names = ("dy", "q", "k", "v", "y", "saved") if self.backward else ("q", "k", "v")
        return *names, *self._optional, *(LENGTHS if self.counted else ())

    @property
    def _optional(self) -> dict[str, Tensor]:
        return {name: form for name, form in (("mask", self.mask), ("keep", self.keep)) if form is not None}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        saved = Tensor.dense((*self.q.dims[:3], 1), ir.DataType.FLOAT)
        own = {"q": self.q, "k": self.k, "v": self.v, "y": self.y, "saved": saved}
        if self.backward:
            own |= {"dy": self.y, "dq": self.q, "dk": self.k, "dv": self.v}
        if self.counted:
            own |= {name: Tensor.dense((self.q.dims[0], 1, 1, 1), ir.DataType.INT32) for name in LENGTHS}
        return own | self._optional

    def emit(self, cudnn: Any, graph: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        options: dict[str, Any] = {"attn_scale": self.scale, "use_causal_mask": self.causal}
        if self.mask is not None:
            options["bias"] = tensors["mask"]
        if self.keep is not None:
            ones = (graph.tensor_scalar(1.0, cudnn.scalar_type.RUNTIME_PARAM) for _ in range(2 if self.backward else 1))
            options["dropout"] = (tensors["keep"], *ones)
        if self.counted:
            options |= {"use_padding_mask": True, **{name: tensors[name] for name in LENGTHS}}
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        if not self.backward:
            y, saved = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
            return {"y": y, "saved": saved}
        found = graph.sdpa_backward(
            q=q, k=k, v=v, o=tensors["y"], dO=tensors["dy"], stats=tensors["saved"],
            use_deterministic_algorithm=self.deterministic, **options,
        )  # fmt: skip
        return dict(zip(("dq", "dk", "dv"), found, strict=True))


@dataclass(frozen=True, slots=True)
class Placed:
    """An attention node as a call, with the node's operand index and place of each tensor."""

    call: Attention
    inputs: Mapping[str, tuple[int, Place]]
    outputs: Mapping[str, tuple[int, Place]]


def attention_of(node: ir.Node, *, deterministic: bool = False) -> Placed:
    """Describe an attention node as a cuDNN call."""
    backward = node.op_type.endswith("Grad")
    layout = node.attributes["layout"].as_string()
    axes = dict(zip(("q", "k", "v", "y"), operand_axes(layout), strict=True))
    shift = 1 if backward else 0
    dtype = dtype_of(node.inputs[shift])
    places = {name: Place.of(shape_of(node.inputs[shift + k]), axes[name], dtype) for k, name in enumerate("qkv")}
    places["y"] = Place.of(shape_of(node.inputs[5] if backward else node.outputs[0]), axes["y"], dtype)
    mask = node.inputs[shift + 3] if len(node.inputs) > shift + 3 else None
    of_q, of_k, of_v, of_y = (places[name].form for name in ("q", "k", "v", "y"))
    form = None if mask is None else _mask_form(mask, of_q.dims[2])
    keep = _keep(node)
    bits = None if keep is None else _mask_form(keep, of_q.dims[2])
    numbers = node.attributes["scale"].as_float(), bool(node.attributes.get_int("causal", 0))
    call = Attention(of_q, of_k, of_v, of_y, form, *numbers, backward, backward and deterministic, bits)
    inputs = {name: (shift + k, places[name]) for k, name in enumerate("qkv")}
    saved = Place(call.tensors["saved"])
    if form is not None:
        inputs["mask"] = (shift + 3, Place(form))
    if bits is not None:
        inputs["keep"] = (7 if backward else 4, Place(bits))
    if not backward:
        return Placed(call, inputs, {"y": (0, places["y"]), "saved": (1, saved)})
    inputs |= {"dy": (0, places["y"]), "y": (5, places["y"]), "saved": (6, saved)}
    return Placed(call, inputs, _gradients(layout, axes, places))


def _gradients(layout: str, axes: Mapping[str, str], places: Mapping[str, Place]) -> dict[str, tuple[int, Place]]:
    """For each gradient, the output that holds it (alone, or packed with others)."""
    index = {"qkv"[operand]: output for output, operand in enumerate(written(layout))}
    whole = next((index[name] for name in "qkv" if name in index and packed(axes[name]) is not None), 0)
    return {f"d{name}": (index[name] if packed(axes[name]) is None else whole, places[name]) for name in "qkv"}


def _mask_form(mask: ir.Value, queries: int) -> Tensor:
    """A mask of one row for all queries has a stride of 0: the gradient of cuDNN 9.19 reads beyond a row that is alone."""
    shape = shape_of(mask)
    dense = Tensor.dense((*[1] * (4 - len(shape)), *shape), dtype_of(mask))
    if dense.dims[2] != 1:
        return dense
    return replace(dense, dims=(*dense.dims[:2], queries, dense.dims[3]), strides=(*dense.strides[:2], 0, dense.strides[3]))


def _takes(node: ir.Node) -> bool:
    """Whether cuDNN has a plan for the node.

    Head sizes must be multiples of 16 bytes, head elements contiguous, and each row saves one number. There is no plan for
    the gradient of one query and one key. A dropout mask must have zeros and ones in q's type, or
    be drawn by the graph, so that the ``flash_attention`` pass can draw it so. A node that saves the probabilities is accepted
    if only its gradient reads them: the same pass changes what it saves.
    """
    shift, saved = int(node.op_type.endswith("Grad")), _saved(node)
    lengths = set()
    for value, axes in zip(node.inputs[shift : shift + 3], operand_axes(node.attributes["layout"].as_string()), strict=False):
        size = shape_of(value)[-1]
        lengths.add(shape_of(value)[axes.index("t")] if "t" in axes else 1)
        if not axes.endswith("d") or size % 8 or size > LARGEST_HEAD or 0 in shape_of(value):
            return False
    keep, q = _keep(node), node.inputs[shift]
    bits = keep is None or (q is not None and keep.dtype == q.dtype and node.attributes.get_float("factor", 1.0) == 1.0)
    if lengths == {1} or not (bits or drawn_mask(keep) is not None):
        return False
    if node.attributes.get_string("saves", "probabilities") == "logsumexp":
        return True
    own = saved is not None and not saved.is_graph_output()
    return own and all(reader.op_type.endswith("AttentionGrad") for reader in saved.consumers())  # type: ignore[union-attr]


def _keep(node: ir.Node) -> ir.Value | None:
    """The dropout mask."""
    return (*node.inputs, None)[7] if node.op_type.endswith("Grad") else (*node.inputs, None, None)[4]


def _saved(node: ir.Node) -> ir.Value | None:
    return node.inputs[6] if node.op_type.endswith("Grad") else node.outputs[1]


@library(
    "graphc::ScaledDotProductAttention",
    "graphc::ScaledDotProductAttentionGrad",
    dtypes=HALVES,
    when=_takes,
    workspace=("cuDNN", WORKSPACE),
    cost="attention",
)
def attention(device: Any, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
    """Bind the node on a GPU.

    Raises:
        GraphcError: the node has not gone through the ``flash_attention`` pass.
    """
    masked = (node.inputs[4] if node.op_type.endswith("Grad") else (*node.inputs, None)[3]) is not None
    keep, q = _keep(node), node.inputs[1 if node.op_type.endswith("Grad") else 0]
    bare = node.attributes.get_float("factor", 1.0) == 1.0
    rewritten = keep is None or (bare and q is not None and keep.dtype == q.dtype)  # the mask is drawn as float32
    plain = masked and not node.attributes.get_int("finite", 0)
    if node.attributes.get_string("saves", "") != "logsumexp" or plain or not rewritten:
        raise GraphcError(f"{describe(node)} is not in the form that cuDNN takes: run the pass flash_attention")
    dnn = device.library(Dnn)
    placed = attention_of(node, deterministic=dnn.deterministic)
    arrays = {name: place.within(inputs[k]) for name, (k, place) in placed.inputs.items()}
    arrays |= {name: place.within(outputs[k]) for name, (k, place) in placed.outputs.items()}
    lengths = {}
    if placed.call.counted:
        sizes, batch = (placed.call.q.dims[2], placed.call.k.dims[2]), placed.call.q.dims[0]
        lengths = {n: device.put(np.full((batch, 1, 1, 1), size, np.int32)) for n, size in zip(LENGTHS, sizes, strict=True)}
    run: Run = dnn.bind(placed.call, arrays | lengths)

    def counted(held: Mapping[str, Array] = lengths) -> None:  # the closure keeps the lengths alive
        run()

    return counted if lengths else run
