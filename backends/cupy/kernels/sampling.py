"""Samples images at computed places: grids, regions of interest, deformable convolutions; Col2Im."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.backends.cupy.kernels.text import (
    attributes_of,
    computed,
    flattened,
    given,
    indices,
    load,
    over_windows,
    store,
    unflattened,
    window_of,
)
from graphc.backends.cupy.libraries.registry import FLOATS, Launch, node_kernel
from graphc.backends.fusion.views import integers
from graphc.ir.facts import shape_of, size_of
from graphc.ir.ops.convolution import Window

GRID = """
// Folds x back at the borders until it lies between them.
static DEVICE inline double reflected(double x, double low, double high) {
  const double range = high - low;
  if (range <= 0) return low;
  const double far = x < low ? low - x : x > high ? x - high : -1;
  if (far < 0) return x;
  const long long turns = (long long)(far / range);
  const double rest = far - (double)turns * range;
  return (x < low) == (turns % 2 == 0) ? low + rest : high - rest;
}
// Weight of tap k of 4 at distance t behind the second (R. Keys, 1981, with a = -0.75).
static DEVICE inline double cubic_weight(int k, double t) {
  const double a = -0.75, d = k == 0 ? t + 1 : k == 1 ? t : k == 2 ? 1 - t : 2 - t;
  return k == 0 || k == 3 ? ((a * d - 5 * a) * d + 8 * a) * d - 4 * a : ((a + 2) * d - (a + 3)) * d * d + 1;
}"""

BILINEAR = """
// The value at (y, x) between four pixels; zero further out than one pixel.
#define BILINEAR(AT, y0, x0, HEIGHT, WIDTH, USE) { \\
  double yy = (y0), xx = (x0); \\
  if (yy >= -1.0 && yy <= HEIGHT && xx >= -1.0 && xx <= WIDTH) { \\
    yy = yy > 0 ? yy : 0; xx = xx > 0 ? xx : 0; \\
    int top = (int)yy, left = (int)xx, bottom, right; \\
    if (top >= HEIGHT - 1) { top = bottom = HEIGHT - 1; yy = top; } else bottom = top + 1; \\
    if (left >= WIDTH - 1) { left = right = WIDTH - 1; xx = left; } else right = left + 1; \\
    const double ly = yy - top, lx = xx - left; \\
    const double p1 = (1 - ly) * (1 - lx) * AT(top, left), p2 = (1 - ly) * lx * AT(top, right); \\
    const double p3 = ly * (1 - lx) * AT(bottom, left), p4 = ly * lx * AT(bottom, right); \\
    USE } else { const double p1 = 0, p2 = 0, p3 = 0, p4 = 0; USE } }"""


GREATEST = """const double a = p1 > p2 ? p1 : p2; const double b = p3 > p4 ? p3 : p4; const double c = a > b ? a : b;
total = any && total > c ? total : c; any = true;"""


@node_kernel("GridSample", dtypes=FLOATS)
def grid_sample(node: ir.Node) -> Sequence[Launch]:
    """Sample X at the grid's coordinates, which run from −1 to 1, last axis first."""
    x, grid, y = node.inputs[0], node.inputs[1], node.outputs[0]
    size, out = shape_of(x)[2:], shape_of(y)[2:]
    n, channels = len(size), shape_of(x)[1]
    mode, padding = node.attributes.get_string("mode", "linear"), node.attributes.get_string("padding_mode", "zeros")
    corners = node.attributes.get_int("align_corners", 0)
    lines = [unflattened("row", [0, channels, *out], ["b", "c", *indices("o", n)])]
    for k, length in enumerate(size):
        place = flattened(["b", *indices("o", n), str(n - 1 - k)], [0, *out, n])
        g = f"(double){load(grid, 'grid', place)}"
        where = f"({g} + 1) / 2.0 * {length - 1}" if corners else f"(({g} + 1) * {length} - 1) / 2.0"
        low, high = ("0.0", f"{length - 1}.0") if corners else ("-0.5", f"{length - 0.5}")
        lines.append(f"double x{k} = (double)(float)({where});")
        lines += [f"x{k} = rint(x{k});"] if mode == "nearest" else []
        if padding == "border":
            lines.append(f"if (x{k} < {low} || x{k} > {high}) x{k} = x{k} < 0 ? 0 : x{k} > {length - 1} ? {length - 1} : x{k};")
        elif padding == "reflection":
            lines.append(f"x{k} = reflected(x{k}, {low}, {high});")
        lines.append(f"const double f{k} = floor(x{k});")
    inside = f"total += weight * (double){load(x, 'x', flattened(['b', 'c', *indices('i', n)], [0, channels, *size]))};"
    taps, first = {"nearest": (1, 0), "linear": (2, 0), "cubic": (4, -1)}[mode]
    for k in reversed(range(n)):
        length = size[k]
        low, high = ("0.0", f"{length - 1}.0") if corners else ("-0.5", f"{length - 0.5}")
        bounded = {
            "zeros": f"if (i{k} < 0 || i{k} >= {length}) continue;",
            "border": f"i{k} = i{k} < 0 ? 0 : i{k} >= {length} ? {length - 1} : i{k};",
            "reflection": f"i{k} = (int)reflected((double)i{k}, {low}, {high});",
        }[padding]
        weight = {
            "nearest": "1.0",
            "linear": f"(t{k} ? x{k} - f{k} : 1 - (x{k} - f{k}))",
            "cubic": f"cubic_weight(t{k}, x{k} - f{k})",
        }[mode]
        outer = f"w{k - 1}" if k else "1.0"
        inside = f"""for (int t{k} = 0; t{k} < {taps}; ++t{k}) {{
int i{k} = (int)f{k} + t{k} + {first};
{bounded}
const double w{k} = {outer} * {weight};
{inside.replace("weight", f"w{k}") if k == n - 1 else inside}
}}"""
    lines += ["double total = 0;", inside, store(y, "y", "row", f"({computed(y)})total")]
    return [Launch("\n".join(lines), given(x=x, grid=grid), {"y": y}, size_of(y), head=GRID)]


@node_kernel("RoiAlign", dtypes=FLOATS)
def roi_align(node: ir.Node) -> Sequence[Launch]:
    """RoiAlign: mean or maximum of samples in each bin of each region."""
    x, rois, batches = node.inputs
    y = node.outputs[0]
    (channels, height, width), (rows, columns) = shape_of(x)[1:], shape_of(y)[2:]
    scale, ratio = node.attributes.get_float("spatial_scale", 1.0), node.attributes.get_int("sampling_ratio", 0)
    half = node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    mean = node.attributes.get_string("mode", "avg") == "avg"
    use = "total += p1 + p2 + p3 + p4;" if mean else GREATEST
    corner = [f"(double){load(rois, 'rois', f'n * 4 + {k}')} * {scale!r} - {0.5 if half else 0.0}" for k in range(4)]
    least = "" if half else "w = w > 1 ? w : 1; h = h > 1 ? h : 1;"
    at = load(x, "x", f"((b * {channels} + c) * {height} + (i)) * {width} + (j)")
    body = f"""{unflattened("row", [0, channels, rows, columns], ["n", "c", "o0", "o1"])}
const INDEX b = (INDEX)batches[n];
const double left = {corner[0]}, top = {corner[1]};
double w = {corner[2]} - left, h = {corner[3]} - top;
{least}
const double bin_h = h / {rows}, bin_w = w / {columns};
const int grid_h = {ratio} > 0 ? {ratio} : (int)ceil(bin_h), grid_w = {ratio} > 0 ? {ratio} : (int)ceil(bin_w);
double total = 0;
bool any = false;
#define AT(i, j) (double){at}
for (int k = 0; k < grid_h; ++k)
for (int l = 0; l < grid_w; ++l) {{
const double sy = top + o0 * bin_h + (k + 0.5) * bin_h / grid_h, sx = left + o1 * bin_w + (l + 0.5) * bin_w / grid_w;
BILINEAR(AT, sy, sx, {height}, {width}, {use})
}}
const int count = grid_h * grid_w > 1 ? grid_h * grid_w : 1;
{store(y, "y", "row", f"({computed(y)})(total / {'count' if mean else '1'})")}
#undef AT"""
    return [Launch(body, given(x=x, rois=rois, batches=batches), {"y": y}, size_of(y), head=BILINEAR)]


@node_kernel("MaxRoiPool", dtypes=FLOATS)
def max_roi_pool(node: ir.Node) -> Sequence[Launch]:
    """MaxRoiPool: the maximum of each bin of each region, whose corners are rounded to pixels; 0 for an empty bin."""
    x, rois, y = node.inputs[0], node.inputs[1], node.outputs[0]
    (channels, height, width), (rows, columns) = shape_of(x)[1:], shape_of(y)[2:]
    scale, kind = node.attributes.get_float("spatial_scale", 1.0), computed(x)
    corner = [f"(int)round((double){load(rois, 'rois', f'n * 5 + {k + 1}')} * {scale!r})" for k in range(4)]
    at = load(x, "x", f"((b * {channels} + c) * {height} + i) * {width} + j")
    body = f"""{unflattened("row", [0, channels, rows, columns], ["n", "c", "o0", "o1"])}
const INDEX b = (INDEX){load(rois, "rois", "n * 5")};
const int left = {corner[0]}, top = {corner[1]};
const int far_x = {corner[2]} - left + 1, far_y = {corner[3]} - top + 1, w = far_x > 1 ? far_x : 1, h = far_y > 1 ? far_y : 1;
int i0 = (int)floor((double)o0 * h / {rows}) + top, i1 = (int)ceil((double)(o0 + 1) * h / {rows}) + top;
int j0 = (int)floor((double)o1 * w / {columns}) + left, j1 = (int)ceil((double)(o1 + 1) * w / {columns}) + left;
i0 = i0 < 0 ? 0 : i0; j0 = j0 < 0 ? 0 : j0; i1 = i1 > {height} ? {height} : i1; j1 = j1 > {width} ? {width} : j1;
{kind} best = 0;
bool any = false;
for (int i = i0; i < i1; ++i)
for (int j = j0; j < j1; ++j) {{ const {kind} v = {at}; if (!any || v > best) best = v; any = true; }}
{store(y, "y", "row", "best")}"""
    return [Launch(body, given(x=x, rois=rois), {"y": y}, size_of(y))]


@node_kernel("DeformConv", dtypes=FLOATS, when=lambda node: len(shape_of(node.inputs[0])) == 4)
def deform_conv(node: ir.Node) -> Sequence[Launch]:
    """A convolution whose taps are shifted by offsets, in pixels, and weighted by a mask."""
    x, w, offset = node.inputs[:3]
    bias, mask = (node.inputs[k] if k < len(node.inputs) else None for k in (3, 4))
    y = node.outputs[0]
    window, attributes = window_of(node, x, w), attributes_of(node)
    (top, left), _ = window.padding
    groups, moved = attributes.get("group", 1) or 1, attributes.get("offset_group", 1) or 1
    (inputs, height, width), (filters, channels) = shape_of(x)[1:], shape_of(w)[:2]
    rows, columns = shape_of(y)[2:]
    taps = window.kernel[0] * window.kernel[1]
    shift = [load(offset, "offset", f"(((b * {moved} + g) * {taps} + t) * 2 + {k}) * {rows * columns} + o0 * {columns} + o1")
             for k in range(2)]  # fmt: skip
    factor = load(mask, "mask", f"((b * {moved} + g) * {taps} + t) * {rows * columns} + o0 * {columns} + o1") if mask else "1"
    at = load(x, "x", f"((b * {inputs} + c) * {height} + (i)) * {width} + (j)")
    body = f"""{unflattened("row", [0, filters, rows, columns], ["b", "m", "o0", "o1"])}
double total = {load(bias, "bias", "m") if bias is not None else "0"};
#define AT(i, j) ((i) < 0 || (j) < 0 || (i) >= {height} || (j) >= {width} ? 0.0 : (double){at})
for (INDEX k = 0; k < {channels}; ++k) {{
const INDEX c = m / {filters // groups} * {channels} + k, g = c / {inputs // moved};
for (int t = 0; t < {taps}; ++t) {{
const int t0 = t / {window.kernel[1]}, t1 = t % {window.kernel[1]};
const double yy = (double)(o0 * {window.strides[0]} + t0 * {window.dilations[0]} - {top}) + (double){shift[0]};
const double xx = (double)(o1 * {window.strides[1]} + t1 * {window.dilations[1]} - {left}) + (double){shift[1]};
const int top = (int)floor(yy), left = (int)floor(xx);
const double ly = yy - top, lx = xx - left;
const double value = (1 - ly) * ((1 - lx) * AT(top, left) + lx * AT(top, left + 1))
  + ly * ((1 - lx) * AT(top + 1, left) + lx * AT(top + 1, left + 1));
total += value * (double){factor} * (double){load(w, "w", f"(m * {channels} + k) * {taps} + t")};
}}
}}
{store(y, "y", "row", f"({computed(y)})total")}
#undef AT"""
    return [Launch(body, given(x=x, w=w, offset=offset, bias=bias, mask=mask), {"y": y}, size_of(y))]


@node_kernel("Col2Im", dtypes=FLOATS, when=lambda node: integers(node, 1) is not None and integers(node, 2) is not None)
def col2im(node: ir.Node) -> Sequence[Launch]:
    """Col2Im: each pixel is the sum of its elements in the columns."""
    x, y = node.inputs[0], node.outputs[0]
    kernel, size = tuple(integers(node, 2) or ()), shape_of(y)[2:]
    window = Window.of(attributes_of(node), size, kernel)
    reach = zip(size, *window.padding, window.span, window.strides, strict=True)
    out = [(i + b + e - s) // step + 1 for i, b, e, s, step in reach]
    n, channels, taps = len(size), shape_of(y)[1], shape_of(x)[1] // shape_of(y)[1]
    tap, place = flattened(indices("t", n), kernel), flattened(indices("o", n), out)
    inside = f"total += {load(x, 'x', f'((b * {channels} + c) * {taps} + {tap}) * {shape_of(x)[2]} + {place}')};"
    body = f"""{unflattened("row", [0, channels, *size], ["b", "c", *indices("i", n)])}
{computed(y)} total = 0;
{over_windows(window, out, inside)}
{store(y, "y", "row", "total")}"""
    return [Launch(body, given(x=x), {"y": y}, size_of(y))]
