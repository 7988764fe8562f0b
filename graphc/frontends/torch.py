"""Exports PyTorch modules as ONNX models that train as the module does.

    model = export(module, (x,))        # an onnx_ir.Model with the module's parameter names and a batch of any size

The module is exported in training mode, because exporters otherwise drop Dropout and may fold BatchNormalization. The result
is nevertheless an ordinary model file in inference mode; the ``train_mode`` pass finds all it needs in it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphc.errors import MissingExtraError, ModelError, UsageError
from graphc.frontends.exporter_merging import drop_biases_of_volumes
from graphc.frontends.onnx import to_inference
from graphc.ir.builder import Builder
from graphc.ir.exporter_records import padding_row
from graphc.ir.facts import FLOATS
from graphc.ir.names import BATCHNORM, BUFFER, PARAMETER
from graphc.ir.toposort import silent_reader

if TYPE_CHECKING:
    import torch

    from graphc.frontends.torch_export.batches import Axes
    from graphc.frontends.torch_export.notes import Notes

DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int]]
"""Input → its axes of any size, with a symbol each or as a list."""

Inputs = Any
"""One tensor, a sequence of tensors, or a mapping from the names of ``forward``'s parameters to tensors."""

_OPSET = 20
"""Opset requested from the exporters: the newest that both write without converting their own output."""

_STATISTICS = ("running_mean", "running_var")

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_EXPORTING = threading.Lock()
"""Held during an export, which changes PyTorch's tables, and for a while the parameters of the module.

A second thread would put back what the first one has put there, or read a parameter that has no values.
"""


def export(
    module: torch.nn.Module,
    example_inputs: Inputs,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    dynamic_axes: DynamicAxes | None = None,
    exporter: str = "auto",
) -> ir.Model:
    """Export ``module`` as it trains.

    Args:
        example_inputs: tensors (or numpy arrays) that ``forward`` accepts: one, a sequence, or a mapping by parameter name.
        input_names: names of the graph inputs; default: the parameter names of ``forward``.
        output_names: names of the graph outputs; default ``output``, or ``output_0``, ``output_1`` …
        dynamic_batch: make the first dimension of every input that has the size of the first input's the symbol ``batch``.
        dynamic_axes: further axes of any size, such as ``{"tokens": {1: "sequence"}, "mask": {1: "sequence"}}``: by the name of
            the input the axes, with a symbol each or as a list. Axes with one symbol have one size.
        exporter: ``"dynamo"`` (``torch.export``), ``"torchscript"``, or ``"auto"``: the first of them that succeeds, with
            ``dynamic_axes`` the first alone: a trace may hold a length of the example as a number.

    Parameters keep their names; shared parameters are one initializer. Buffers become ``Constant`` nodes, so that they do not
    train; those that the module changes while it trains are initializers, and ``train_mode`` keeps what a step leaves in them.
    The module itself is left as it was, and the tensors are copies.

    A BatchNormalization that is in evaluation mode while the module trains stays in inference mode, as it does in PyTorch; one
    whose parameters have ``requires_grad=False`` normalises with the statistics of the batch all the same. What ONNX cannot say
    is warned of: where the older exporter is used, the row of ``padding_idx`` trains.

    Raises:
        MissingExtraError: PyTorch is not installed.
        ModelError: no exporter could export the module; their messages are given.
        UsageError: what is not a module, inputs that its ``forward`` does not take, or axes that these inputs do not have.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("a torch.nn.Module needs PyTorch; install it with: pip install 'graphc[torch]'") from None
    exporters: dict[str, Callable[..., tuple[ir.Model, Notes]]] = {"dynamo": _with_dynamo, "torchscript": _with_torchscript}
    if exporter not in ("auto", *exporters):
        raise UsageError(f"exporter={exporter!r} is none of auto, {', '.join(exporters)}")
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a torch.nn.Module is expected, not {type(module).__name__}")
    with _EXPORTING:
        wanted = ("dynamo",) if dynamic_axes and exporter == "auto" else exporters if exporter == "auto" else (exporter,)
        chosen = {name: exporters[name] for name in wanted}
        return _exported(module, example_inputs, input_names, output_names, dynamic_batch, dynamic_axes or {}, chosen)


def _exported(
    module: torch.nn.Module,
    example_inputs: Inputs,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_batch: bool,
    dynamic_axes: DynamicAxes,
    exporters: Mapping[str, Callable[..., tuple[ir.Model, Notes]]],
) -> ir.Model:
    """What :func:`export` returns; no other thread may export, or change the module, meanwhile."""
    from graphc.frontends.torch_export import own_gradients
    from graphc.frontends.torch_export.batches import BATCH, FixedBatchError, enlarged
    from graphc.frontends.torch_export.notes import warn

    _refuse_projections(module)
    names, tensors = _bind(module, example_inputs)
    batched = _batched(tensors) if dynamic_batch else []
    size = tensors[0].shape[0] if batched else None
    if size == 1:  # torch.export takes a size of 1 for a constant, and BatchNorm needs more than one sample to train
        tensors = enlarged(tensors, batched)
    axes = _axes_of(dynamic_axes, names, tensors)
    for k in batched:
        axes[k].setdefault(0, BATCH)
    failures = []
    for name, function in exporters.items():
        try:
            with _training(module), _quiet():
                model, notes = function(module, names, tensors, axes)
            break
        except FixedBatchError as error:  # the other exporter would write the size down, and let the batch have any other
            model = _exported(module, example_inputs, input_names, output_names, False, dynamic_axes, exporters)
            warnings.warn(
                f"{type(module).__name__} trains with batches of {size} only, as in its example: it takes the batch's size for "
                f"a number{error}",
                stacklevel=4,
            )
            return model
        except Exception as error:  # exporters raise any error of the module, or their own
            failures.append(f"{name}: {_reason(error)}")
    else:
        if batched:
            with contextlib.suppress(ModelError):
                _exported(module, example_inputs, None, None, False, dynamic_axes, exporters)
                failures.append(
                    "an op depends on the batch's size, as a convolution with a group for each sample does; it can be exported "
                    f"for batches of {size} only: graphc.frontends.export(module, inputs, dynamic_batch=False)"
                )
        if dynamic_axes:
            failures.append("it may take the size of an axis in dynamic_axes for a number: leave that out, and pad to one size")
        if any("ctc_loss" in failure for failure in failures):
            failures.append("end the module in its scores, and train it with the loss graphc.losses.CTC")
        raise ModelError(f"{type(module).__name__} cannot be exported to ONNX\n  " + "\n  ".join(failures))
    _finish(model, module)
    warn(module, {padding_row(node) for node in model.graph.all_nodes()}, notes)
    _rename(model.graph, model.graph.inputs, input_names or names)
    count = len(model.graph.outputs)
    _rename(
        model.graph, model.graph.outputs, output_names or (["output"] if count == 1 else [f"output_{k}" for k in range(count)])
    )
    own_gradients.name_derivatives(model)
    return model


def _reason(error: BaseException) -> str:
    """What an exporter failed of: its own errors only say in which of its steps, coloured for a terminal."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = _COLOURS.sub("", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _refuse_projections(module: torch.nn.Module) -> None:
    """Refuse what the newer exporter writes as an LSTM of another hidden size, which no runtime takes."""
    for name, part in module.named_modules():
        if getattr(part, "proj_size", 0):
            raise ModelError(
                f"{name!r} has proj_size={part.proj_size}, and ONNX has no LSTM with projections: use proj_size=0, or write "
                "the layer as torch.nn.LSTMCell and torch.nn.Linear in a loop over the steps"
            )


def frozen(module: torch.nn.Module) -> list[str]:
    """Names of the parameters that do not train in PyTorch either (``requires_grad=False``)."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def _bind(module: torch.nn.Module, example_inputs: Inputs) -> tuple[list[str], list[torch.Tensor]]:
    """The names of ``forward``'s parameters that get an input, and the inputs as tensors."""
    import torch

    signature = inspect.signature(module.forward)
    if isinstance(example_inputs, (torch.Tensor, np.ndarray)):
        example_inputs = (example_inputs,)
    try:
        if isinstance(example_inputs, Mapping):
            bound = signature.bind(**example_inputs)
        else:
            bound = signature.bind(*example_inputs)
    except TypeError as error:
        raise UsageError(f"example_inputs do not fit {type(module).__name__}.forward{signature}: {error}") from None
    names: list[str] = []
    values: list[Any] = []
    for name, value in bound.arguments.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{k}" for k in range(len(value))] if several else [name]
        values += value if several else [value]
    tensors = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"example input {name!r} is a {type(tensor).__name__}; only tensors can be graph inputs")
    if not tensors:
        raise UsageError("example_inputs is empty")
    return names, tensors


def _batched(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the inputs whose first dimension is the batch."""
    size = tensors[0].shape[0] if tensors[0].dim() else None
    return [k for k, t in enumerate(tensors) if size is not None and t.dim() and t.shape[0] == size]


def _axes_of(asked: DynamicAxes, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[dict[int, str]]:
    """The axes of any size of each input, counted from the first axis."""
    if not isinstance(asked, Mapping):
        raise UsageError(f"dynamic_axes={asked!r} is no mapping such as {{{names[0]!r}: {{1: 'sequence'}}}}")
    unknown = asked.keys() - set(names)
    if unknown:
        raise UsageError(f"dynamic_axes names {', '.join(sorted(unknown))}; the inputs are {', '.join(names)}")
    found: list[dict[int, str]] = []
    for name, tensor in zip(names, tensors, strict=True):
        symbols, rank = asked.get(name, {}), tensor.dim()
        pairs = symbols.items() if isinstance(symbols, Mapping) else ((axis, "") for axis in symbols)
        found.append({})
        for axis, symbol in pairs:
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise UsageError(f"dynamic_axes names axis {axis!r} of {name!r}, which has {rank} axes in example_inputs")
            place = axis % rank
            if tensor.shape[place] < 2:
                raise UsageError(
                    f"axis {axis} of {name!r} is to have any size, and its size in example_inputs is {tensor.shape[place]}: "
                    "give an example with 2 or more, of which exporters do not take the size for a number"
                )
            if not isinstance(symbol, str) or (symbol and not symbol.isidentifier()):
                raise UsageError(f"dynamic_axes calls axis {axis} of {name!r} {symbol!r}, which is no name")
            found[-1][place] = symbol or f"{name}_{place}"
    return found


@contextlib.contextmanager
def _training(module: torch.nn.Module) -> Iterator[None]:
    """Training mode for the duration of the block. Modes, attributes and buffers are put back: tracing updates running
    statistics, and what a module keeps for its next call (masks, biases of places) is made up while it is captured.
    """
    import torch

    tables = ("_parameters", "_buffers", "_modules")
    held = {m: (dict(vars(m)), {name: dict(vars(m).get(name, ())) for name in tables}) for m in module.modules()}
    buffers = {b: b.detach().clone() for b in module.buffers()}
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for part, (attributes, members) in held.items():
            vars(part).clear()
            vars(part).update(attributes)
            for name in tables:
                vars(part).get(name, {}).clear()
                vars(part).get(name, {}).update(members[name])
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters: they warn of their own options and missing packages, and print a whole graph where one fails."""
    import torch

    unread = io.StringIO()
    log = getattr(torch._C, "_jit_onnx_log", None)
    with contextlib.ExitStack() as stack:
        if log is not None:  # writes to the descriptor of standard output, whatever the settings
            stack.callback(setattr, torch._C, "_jit_onnx_log", log)
            torch._C._jit_onnx_log = lambda *_: None
        for name in ("torch.onnx", "torch.fx.experimental.symbolic_shapes"):
            stack.enter_context(silent_reader(name))
        for name in ("torch._guards", "torch.export"):
            stack.enter_context(silent_reader(name, logging.CRITICAL))  # what is raised is logged as well
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(contextlib.redirect_stdout(unread))
        stack.enter_context(contextlib.redirect_stderr(unread))
        yield


def _with_dynamo(
    module: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor], axes: Axes
) -> tuple[ir.Model, Notes]:
    from graphc.frontends.torch_export import programs

    model, notes = programs.translate(module, tensors, axes, _OPSET)
    drop_biases_of_volumes(model.graph)
    return model, notes


def _with_torchscript(
    module: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor], axes: Axes
) -> tuple[ir.Model, Notes]:
    from graphc.frontends.torch_export import traces

    return traces.trace(module, names, tensors, dict(zip(names, axes, strict=True)), _OPSET)


def _finish(model: ir.Model, module: torch.nn.Module) -> None:
    """Inference mode, one initializer per parameter, copies instead of the module's own memory, buffers as constants."""
    graph = model.graph
    for nodes in (graph.all_nodes(), *(f.all_nodes() for f in model.functions.values())):
        for node in nodes:
            to_inference(node)
    _share(graph, module)
    buffers = dict(module.named_buffers())
    for name, value in graph.initializers.items():
        if value.const_value is not None:
            # take the statistics from the module: the exporter's forward pass changed them before it read them
            source = buffers[name].detach().cpu() if name.endswith(_STATISTICS) and name in buffers else value.const_value
            array = np.array(source.numpy(), copy=True)
            value.const_value = ir.Tensor(array, dtype=value.const_value.dtype, name=value.name)
            value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
            if name.endswith(_STATISTICS[0]):
                part = module.get_submodule(name.rpartition(".")[0])
                value.metadata_props[BATCHNORM] = "inference" if module.training and not part.training else "train"
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in parameters & set(graph.initializers):
        if BUFFER not in graph.initializers[name].metadata_props:
            graph.initializers[name].metadata_props[PARAMETER] = "true"
    constants = {name for name in buffers if not name.endswith(_STATISTICS)}
    held = [v for v in graph.initializers.values() if v.name in constants and BUFFER not in v.metadata_props]
    found = [v for v in held if v.dtype in FLOATS]
    for value in found:
        del graph.initializers[value.name or ""]
    op = Builder(graph, before=next(iter(graph), None))
    for value in found:
        (out,) = op.emit("Constant", [], {"value": value.const_value}, outputs=[value.name or ""], name=value.name)
        out.metadata_props[BUFFER] = "true"
        value.replace_all_uses_with(out)


def _share(graph: ir.Graph, module: torch.nn.Module) -> None:
    """Merge a parameter that the module uses under several names into one initializer."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    computed = {v.name: v for node in graph for v in node.outputs}
    for names in groups.values():
        first = next((n for n in names if n in graph.initializers), None)
        for name in names:
            if first is None or name == first:
                continue
            other = graph.initializers.pop(name, None) or computed.get(name)
            if other is not None:
                other.replace_all_uses_with(graph.initializers[first])
                other.name = f"{name}.shared"
        if first is not None and first != names[0]:
            graph.initializers[first].name = names[0]  # the name that named_parameters() uses


def _rename(graph: ir.Graph, values: Sequence[ir.Value], names: Sequence[str]) -> None:
    if len(names) != len(values):
        found = ", ".join(v.name or "" for v in values)
        raise UsageError(f"{len(names)} names ({', '.join(names)}) for {len(values)} values ({found})")
    taken = {v.name: v for v in [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]}
    for value, name in zip(values, names, strict=True):
        other = taken.get(name)
        if other is not None and other is not value:
            other.name = f"{name}.inner"
        value.name = name
