"""A kernel for products that cuBLASLt has no algorithm for: any steps, alignment and epilogue, at a fraction of its speed.

A thread computes 8 neighbouring columns of a row, because their signs are one byte of a ReLU mask. Sums are taken in float32,
those of float64 in float64. A bias gradient is a second launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.codegen.whole_blocks import THREADS, named
from graphc.backends.cupy.device.protocol import Device
from graphc.backends.cupy.libraries.gemm import BACKWARD, Matrix, Product
from graphc.backends.fusion import expressions
from graphc.device import Array, Run, in_order

COLUMNS = 8
"""Columns that one thread computes."""

GELU = """
static DEVICE inline float gelu_inner(float x) { return tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)); }
static DEVICE inline float gelu_tanh(float x) { return 0.5f * x * (1.0f + gelu_inner(x)); }
static DEVICE inline float gelu_slope(float x) {
const float t = gelu_inner(x);
return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608028654f * (1.0f + 0.134145f * x * x);
}
"""


def bind_product(device: Device, p: Product, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
    """Bind the product to generated kernels; operands and results as for :func:`.cublaslt.bind_product`."""
    given = [*inputs, *[None] * (5 - len(inputs))]
    results = list(outputs)
    d = results.pop(0)
    aux = results.pop(0) if p.keeps_aux else given[4]
    sums = results.pop(0) if p.bias_gradient else None
    groups = p.rounds * p.batch * p.m * -(-p.n // COLUMNS)
    named_arrays = {"a": given[0], "b": given[1], "d": d, "c": given[2], "bias": given[3], "aux": aux}
    used = {name: array for name, array in named_arrays.items() if array is not None}
    runs = [_launch(device, _product_text(p, list(used), groups), list(used.values()), groups)]
    if sums is not None:
        source = {"d": d, "a": given[0], "b": given[1]}[p.bias_gradient]
        length = p.m if p.bias_gradient == "a" else p.n
        runs.append(_launch(device, _sum_text(p, length), [source, sums], length))
    return in_order(runs)


def _launch(device: Device, body: str, arrays: Sequence[Array | None], count: int) -> Run:
    """Launch ``body`` with one thread for each of ``count`` pieces of work."""
    name, text = named(body, device.writes_cuda)
    threads = THREADS if device.writes_cuda else 1
    flat = [array.reshape(-1) for array in arrays if array is not None]
    return device.launch(device.compile({name: text})[name], flat, Shape(threads, 1, 1, 1, -(-count // threads)))


def _product_text(p: Product, names: Sequence[str], groups: int) -> str:
    kind, read, made = expressions.compute_type(p.dtype), expressions.STORAGE[p.dtype], expressions.STORAGE[p.result]
    mask = p.epilogue in ("relu", "relu_grad") and p.aux is not None
    types = {"a": f"const {read}*", "b": f"const {read}*", "c": f"const {made}*", "bias": f"const {made}*", "d": f"{made}*"}
    types["aux"] = ("" if p.keeps_aux else "const ") + ("unsigned char*" if mask else f"{made}*")
    steps = [f"v *= ({kind}){p.alpha!r};"] if p.alpha != 1.0 else []
    if p.c is not None:
        addend = expressions.load(p.result, f"c[{_place(p.c, 'row', 'n')}]")
        steps.append(f"v += {addend};")
    if "bias" in names and not p.bias_gradient:
        steps.append(f"v += {expressions.load(p.result, 'bias[n]')};")
    steps += _epilogue(p)
    sizes = f"""const long long column = group % {-(-p.n // COLUMNS)} * {COLUMNS}, line = group / {-(-p.n // COLUMNS)};
const long long row = line % {p.m}, batch = line / {p.m} % {p.batch}, turn = line / {p.m * p.batch};"""
    last = f"lesser(column + {COLUMNS}, {p.n})"
    body = f"""{sizes}
{"unsigned int bits = 0;" if mask and p.keeps_aux else ""}
for (INDEX n = column; n < {last}; ++n) {{
{kind} v = 0;
for (INDEX k = 0; k < {p.k}; ++k)
v += {expressions.load(p.dtype, f"a[{_place(p.a, 'row', 'k')}]")} * {expressions.load(p.dtype, f"b[{_place(p.b, 'k', 'n')}]")};
{" ".join(steps)}
{expressions.store(p.result, f"d[{_place(p.d, 'row', 'n')}]", "v")}
}}
{f"aux[{_mask_byte(p)}] = (unsigned char)bits;" if mask and p.keeps_aux else ""}"""
    parameters = ", ".join(f"{types[name]} {name}" for name in names)
    return f"""{GELU if "gelu" in p.epilogue else ""}
KERNEL $name({parameters}) {{
const INDEX group = BLOCK * THREADS + THREAD;
if (group < {groups}) {{
{body}
}}
}}"""


def _epilogue(p: Product) -> list[str]:
    """Statements that apply the epilogue to ``v``, element ``n`` of ``row``."""
    if not p.epilogue:
        return []
    at = None if p.aux is None else f"aux[row * {p.aux.row_step} + n]"
    if p.epilogue == "relu":
        keep = "bits |= (unsigned int)(v > 0) << (n - column);" if p.aux is not None else ""
        return [keep, "v = v < 0 ? 0 : v;"]
    if p.epilogue == "relu_grad":
        return [f"v = aux[{_mask_byte(p)}] >> (n - column) & 1 ? v : 0;"]
    assert p.epilogue == "gelu" or p.epilogue in BACKWARD
    if p.epilogue == "gelu":
        return [*([expressions.store(p.result, at, "v")] if at is not None else []), "v = gelu_tanh(v);"]
    return [f"v *= gelu_slope({expressions.load(p.result, str(at))});"]


def _mask_byte(p: Product) -> str:
    """The byte of the mask that holds the signs of the thread's columns."""
    assert p.aux is not None
    return f"row * {p.aux.row_step // 8} + column / 8"


def _place(m: Matrix, row: str, column: str) -> str:
    """Index of an element, in the batch and round of the thread."""
    batch, turn = ((f" + {step} * {name}" if step else "") for step, name in ((m.batch_step, "batch"), (m.round_step, "turn")))
    return f"{m.offset} + {row} * {m.row_step} + {column} * {m.column_step}{batch}{turn}"


def _sum_text(p: Product, length: int) -> str:
    """The sum over the rows of d or b, or over the columns of a."""
    m, dtype = {"a": (p.a, p.dtype), "b": (p.b, p.dtype), "d": (p.d, p.result)}[p.bias_gradient]
    count = m.columns if p.bias_gradient == "a" else m.rows
    one = replace(m, batch_step=0, round_step=0)
    place = _place(one, "at", "k") if p.bias_gradient == "a" else _place(one, "k", "at")
    return f"""KERNEL $name(const {expressions.STORAGE[dtype]}* x, {expressions.STORAGE[p.result]}* sums) {{
const INDEX at = BLOCK * THREADS + THREAD;
if (at < {length}) {{
{expressions.compute_type(dtype)} v = 0;
for (INDEX k = 0; k < {count}; ++k) v += {expressions.load(dtype, f"x[{place}]")};
{expressions.store(p.result, "sums[at]", "v")}
}}
}}"""
