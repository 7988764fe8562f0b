"""Other forms of PyTorch's functions, for captures: those of PyTorch would lose a symbol, a gradient or a type.

``chunk``, ``split``, ``cdist`` and others ask for the value of a size, which then is a number for all batches; losses ask for
values, which a capture has not; a few are written down by the exporter with another meaning (seen in 2.13). A form returns None
where PyTorch's own does as well.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols, statically_known_true
from torch.overrides import TorchFunctionMode

from graphc.frontends.torch_export import packed, signals
from graphc.frontends.torch_export.checks import Checks

if TYPE_CHECKING:
    Parts = tuple[torch.Tensor, ...] | None


def _equal_parts(x: torch.Tensor, count: int, dim: int) -> Parts:
    """``count`` parts of one size along ``dim``; None where that size is known, or may not be whole."""
    size: Any = x.shape[dim]
    if isinstance(size, int) or not statically_known_true(size % count == 0):
        return None
    each = size // count
    return tuple(x.narrow(dim, k * each, each) for k in range(count))


def _chunk(input: torch.Tensor, chunks: int, dim: int = 0) -> Parts:
    size: Any = input.shape[dim]
    if chunks == 2 and not isinstance(size, int):
        half = (size + 1) // 2  # of an odd number, the first part is longer
        return input.narrow(dim, 0, half), input.narrow(dim, half, size - half)
    return _equal_parts(input, chunks, dim)


def _split(tensor: torch.Tensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Parts:
    each = split_size if split_size_or_sections is None else split_size_or_sections
    if not isinstance(each, torch.SymInt):
        return None
    count: Any = tensor.shape[dim] // each
    known = count if isinstance(count, int) else count.node.maybe_as_int()
    if known is None or not statically_known_true(known * each == tensor.shape[dim]):
        return None
    return _equal_parts(tensor, known, dim)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None) -> torch.Tensor:
    """Asks not whether there are more than 25 rows, from where on PyTorch computes the same with a product of matrices."""
    return torch.cdist(x1, x2, p, "donot_use_mm_for_euclid_dist")


def _loss_of_each_sample(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor | None]:
    """``cross_entropy`` or ``nll_loss`` without a reduction, whose result the exporter takes for a scalar in 2.13, so that it
    drops the sum that follows; it knows the shape of losses of positions.
    """

    def form(input: torch.Tensor, target: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor | None:
        if input.dim() != 2 or "none" not in (options.get("reduction"), *args[4:5]):
            return None
        return function(input.unsqueeze(2), target.unsqueeze(target.dim()), *args, **options).squeeze(-1)

    return form


def _gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor | None:
    """Asks not whether a variance is negative. One below ``eps`` counts as ``eps``, and has the gradient all the same: PyTorch
    raises it outside of the recorded operations.
    """
    if not isinstance(var, torch.Tensor):
        return None
    var = var.unsqueeze(-1) if var.dim() == input.dim() - 1 else var
    if not (_alike(input, target) and (_alike(input, var) or _alike(input[..., :1], var))):
        return None
    var = var + (var.clamp(min=eps) - var).detach()
    loss: torch.Tensor = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return _reduced(loss, reduction)


def _binary_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> torch.Tensor | None:
    """Where a probability is exactly 0 or 1, as a sigmoid of 17 is, PyTorch takes -100 for the logarithm and knows a slope. In
    the form of the exporter the slope of a logarithm of zero is no number.
    """
    if size_average is not None or reduce is not None or not _alike(input, target):
        return None

    def logarithm(chance: torch.Tensor) -> torch.Tensor:
        possible = chance > 0
        return torch.where(possible, torch.where(possible, chance, 1.0).log().clamp(min=-100.0), -100.0)

    loss = -(target * logarithm(input) + (1 - target) * logarithm(1 - input))
    return _reduced(loss if weight is None else loss * weight, reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor | None:
    if reduction == "mean":
        return loss.mean()
    return {"none": loss, "sum": loss.sum()}.get(reduction)


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two shapes are known to be equal. PyTorch says what is wrong with others, or broadcasts them with a warning."""
    return _same(x.shape, y.shape)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes are known to be equal."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def _arange(*bounds: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor | None:
    """Bounds of which some are whole and others are not: the exporter writes a Range of several types.

    Of known bounds, code may ask for the elements, as in ``x.mean(torch.arange(1, x.dim()).tolist())``.
    """
    if dtype is None and all(type(b) is int for b in bounds):
        found: torch.Tensor = torch.arange(*bounds, **options)
        ask, before = found.tolist, found._version
        found.tolist = lambda: list(range(*bounds)) if found._version == before else ask()  # type: ignore[method-assign]
        return found
    if dtype is not None or not any(isinstance(b, float) for b in bounds) or all(isinstance(b, float) for b in bounds):
        return None
    return torch.arange(*map(float, bounds), **options) if all(isinstance(b, (int, float)) for b in bounds) else None


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor | None:
    if not isinstance(steps, torch.SymInt) or not all(isinstance(v, (int, float)) for v in (start, end)) or "out" in options:
        return None
    count: Any = steps
    places: torch.Tensor = torch.arange(count, dtype=dtype or torch.get_default_dtype(), **options)
    return places.mul((end - start) / places[-1:].clamp(min=1)).add(start)


def _roll(input: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor | None:
    """A shift that data choose, for whose value PyTorch asks, moves by indices."""
    each, along = (tuple(v) if isinstance(v, (tuple, list)) else (v,) for v in (shifts, dims))
    chosen = any(isinstance(shift, torch.SymInt) and has_free_unbacked_symbols(shift) for shift in each)
    if not chosen or len(each) != len(along):
        return None
    for shift, dim in zip(each, along, strict=True):
        size = input.shape[dim]
        places = torch.arange(size, device=input.device) - torch.scalar_tensor(shift, dtype=torch.int64, device=input.device)
        input = input.index_select(dim, places.remainder(size))
    return input


def _frequencies(count: Callable[[Any], Any], turned: bool) -> Callable[..., torch.Tensor]:
    """``fftfreq`` and ``rfftfreq``, which the exporter does not know."""

    def frequencies(n: Any, d: float = 1.0, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
        places = torch.arange(count(n), device=device)
        if turned:
            places = torch.where(places >= (n + 1) // 2, places - n, places)
        found: torch.Tensor = places.to(dtype or torch.get_default_dtype()) * (1 / (n * d))
        return found

    return frequencies


def _take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor | None:
    if dim is None or input.dim() != indices.dim():
        return None
    others = [k for k in range(input.dim()) if k != dim % input.dim()]
    alike = all(statically_known_true(input.shape[k] == indices.shape[k]) for k in others)
    return input.gather(dim, indices) if alike else None


def _cov(input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> torch.Tensor | None:
    if input.dim() != 2 or fweights is not None or aweights is not None:
        return None
    centred = input - input.mean(1, keepdim=True)
    return centred @ centred.T / (input.shape[1] - correction)


def _corrcoef(input: torch.Tensor) -> torch.Tensor | None:
    found = _cov(input)
    if found is None:
        return None
    spread = found.diagonal().sqrt()
    return (found / spread[:, None] / spread[None]).clamp(-1, 1)


def _batch_norm(input: torch.Tensor, running_mean: Any, running_var: Any, *args: Any, **options: Any) -> torch.Tensor | None:
    """Asks not whether there is one value of a channel: a number of samples that data choose has no answer."""
    if not has_free_unbacked_symbols(tuple(input.shape)):
        return None
    values = dict(zip(("weight", "bias", "training", "momentum", "eps"), args, strict=False)) | options
    weight, bias, training = values.get("weight"), values.get("bias"), values.get("training", False)
    momentum, eps = values.get("momentum", 0.1), values.get("eps", 1e-5)
    return torch.native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _convolution_of_samples(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> torch.Tensor | None:
    """One group a sample, each with filters of its own, as in dynamic convolutions: products of their windows. ONNX has groups
    of a known number only.
    """
    one = isinstance(input.shape[0], int) and input.shape[0] == 1
    if not isinstance(groups, torch.SymInt) or isinstance(padding, str) or not one:
        return None
    pairs = [
        (*value, *value)[:2] if isinstance(value, (tuple, list)) else (value, value) for value in (stride, padding, dilation)
    ]
    (stride, padding, dilation), kernel = pairs, weight.shape[2:]
    sizes = [
        (size + 2 * padding[k] - dilation[k] * (kernel[k] - 1) - 1) // stride[k] + 1 for k, size in enumerate(input.shape[2:])
    ]
    samples = input.reshape(groups, weight.shape[1], *input.shape[2:])
    windows = torch.nn.functional.unfold(samples, kernel, dilation, padding, stride)
    filters = weight.reshape(groups, weight.shape[0] // groups, windows.shape[1])
    result = torch.bmm(filters, windows).reshape(1, weight.shape[0], *sizes)
    return result if bias is None else result + bias[:, None, None]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **options: Any,
) -> torch.Tensor | None:
    """The exporter knows attention of four dimensions with one key for each query's head; PyTorch takes any that broadcast."""
    sizes = [t.shape[:-2] for t in (query, key, value)]
    alike = _same(sizes[0], sizes[1]) and _same(sizes[0], sizes[2])
    if options.get("enable_gqa") or (alike and query.dim() == 4):
        return None
    lead: Any = sizes[0] if alike else torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]

    def of_four_dimensions(x: torch.Tensor) -> torch.Tensor:
        x = x if _same(x.shape[:-2], lead) else x.expand(*lead, *x.shape[-2:])
        return x[None, None] if not lead else x.unsqueeze(1) if len(lead) == 1 else x.flatten(0, -4)

    mask = attn_mask if attn_mask is None or attn_mask.dim() <= 2 else of_four_dimensions(attn_mask)
    query, key, value = (of_four_dimensions(t) for t in (query, key, value))
    attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
    result = attend(query, key, value, mask, *args, **options)
    return result.reshape(*lead, *result.shape[-2:])


def _set_data(x: torch.Tensor, value: torch.Tensor) -> bool:
    """Assigns in place, which a capture sees: of what is put in a tensor's place it keeps memory that is gone (2.13)."""
    with torch.no_grad():
        x.copy_(value)
    return True  # anything but None: it is done


def _einsum(equation: Any, *operands: Any) -> torch.Tensor | None:
    """Letters in place of ellipses that stand for unequal numbers of axes, which ONNX refuses and PyTorch broadcasts."""
    tensors = operands[0] if len(operands) == 1 and not isinstance(operands[0], torch.Tensor) else operands
    left, _, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    terms = left.split(",")
    if "..." not in result or len(terms) != len(tensors):
        return None
    widths = [x.dim() - len(term) + 3 for term, x in zip(terms, tensors, strict=True) if "..." in term]
    if len(set(widths)) < 2:
        return None
    free = "".join(letter for letter in string.ascii_letters if letter not in equation)[: max(widths)]
    named = [term.replace("...", free[len(free) + len(term) - 3 - x.dim() :]) for term, x in zip(terms, tensors, strict=True)]
    return torch.einsum(f"{','.join(named)}->{result.replace('...', free)}", *tensors)


class _ByFrequency(torch.autograd.Function):
    """The rows of an embedding with ``scale_grad_by_freq``: each one's gradient counts once, however often it is taken."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
        ctx.ids, ctx.count = ids, count
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        flat = ctx.ids.reshape(-1)
        taken = torch.zeros(ctx.count, dtype=drows.dtype).scatter_add(0, flat, torch.ones_like(flat, dtype=drows.dtype))
        return drows / taken[ctx.ids].unsqueeze(-1), None, None


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor | None:
    if not scale_grad_by_freq:
        return None
    rows = torch.nn.functional.embedding(input, weight, padding_idx, max_norm, norm_type, False, sparse)
    result: torch.Tensor = _ByFrequency.apply(rows, input, weight.shape[0])  # type: ignore[no-untyped-call]
    return result


_FORMS: dict[Any, Callable[..., Any]] = {
    **packed.FORMS,
    **signals.FORMS,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch.nn.functional.batch_norm: _batch_norm,
    torch.nn.functional.embedding: _embedding,
    torch.conv2d: _convolution_of_samples,
    torch.nn.functional.cross_entropy: _loss_of_each_sample(torch.nn.functional.cross_entropy),
    torch.nn.functional.binary_cross_entropy: _binary_cross_entropy,
    torch.nn.functional.gaussian_nll_loss: _gaussian_nll_loss,
    torch.nn.functional.nll_loss: _loss_of_each_sample(torch.nn.functional.nll_loss),
    torch.arange: _arange,
    torch.cdist: _cdist,
    torch.corrcoef: _corrcoef,
    torch.einsum: _einsum,
    torch.Tensor.corrcoef: _corrcoef,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.fft.fftfreq: _frequencies(lambda n: n, turned=True),
    torch.fft.rfftfreq: _frequencies(lambda n: n // 2 + 1, turned=False),
    torch.linspace: _linspace,
    torch.roll: _roll,
    torch.Tensor.roll: _roll,
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.Tensor.data.__get__: torch.Tensor.detach,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}


class OtherForms(TorchFunctionMode):
    """Mode in which the functions of ``_FORMS`` are called in their other forms, where these return a result.

    Attributes:
        hooked: whether a tensor got a hook on its gradient, which nothing of the capture tells.
        padded: whether a packed sequence was padded to its longest sample.
        checks: of data, which were passed.
    """

    hooked = False
    padded = False

    def __init__(self) -> None:
        super().__init__()
        self.checks = Checks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hooked |= func is torch.Tensor.register_hook
        self.padded |= any(isinstance(argument, packed.Longest) for argument in args)
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ and (value := self.checks.of_tensor()) is not None:
            return value
        if func is torch._assert and isinstance(args[0], torch.Tensor):
            return self.checks.note()
        form = _FORMS.get(func)
        result = form(*args, **kwargs) if form is not None else None
        result = func(*args, **kwargs) if result is None else result
        if func not in packed.FORMS and (rows := packed.rows_among(args, kwargs)) is not None:
            packed.follow(func, args, kwargs, result, rows)
        return result
