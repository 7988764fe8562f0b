"""Exports PyTorch modules as ONNX models that train as the module does.

    model = export(module, (x,))        # an onnx_ir.Model with the module's parameter names and a batch of any size

The module is exported in training mode, because exporters otherwise drop Dropout and may fold BatchNormalization. The result
is nevertheless an ordinary model file in inference mode; the ``train_mode`` pass finds all it needs in it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import logging
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphc.errors import MissingExtraError, ModelError, UsageError
from graphc.frontends.exporter_merging import drop_biases_of_volumes
from graphc.frontends.onnx import to_inference
from graphc.frontends.torch_export import complex as complex_numbers
from graphc.frontends.torch_export import experts, linalg, losses, operators, rnn, special
from graphc.ir.builder import Builder
from graphc.ir.exporter_records import padding_row
from graphc.ir.facts import FLOATS
from graphc.ir.names import BATCHNORM, BUFFER, PARAMETER
from graphc.ir.toposort import silent_reader

if TYPE_CHECKING:
    import torch

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

_CHANGED = "graphc.changed"
"""Key in ``model.meta``: names of the buffers that a step of PyTorch's changes, and one of graphc's does not."""

_ASSIGNED = "graphc.assigned"
"""Key in ``model.meta``: names of the parameters that the module's code assigns to."""

_ASKED = "graphc.asked"
"""Key in ``model.meta``: what the module's code found out about the batch, and which is not so for every batch."""

_HOOKED = "graphc.hooked"
"""Key in ``model.meta``: whether the module's code puts a hook on the gradient of a tensor."""


def export(
    module: torch.nn.Module,
    example_inputs: Inputs,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    exporter: str = "auto",
) -> ir.Model:
    """Export ``module`` as it trains.

    Args:
        example_inputs: tensors (or numpy arrays) that ``forward`` accepts: one, a sequence, or a mapping by parameter name.
        input_names: names of the graph inputs; default: the parameter names of ``forward``.
        output_names: names of the graph outputs; default ``output``, or ``output_0``, ``output_1`` …
        dynamic_batch: make the first dimension of every input that has the size of the first input's the symbol ``batch``.
        exporter: ``"dynamo"`` (``torch.export``), ``"torchscript"``, or ``"auto"``: the first of them that succeeds.

    Parameters keep their names; shared parameters are one initializer. Buffers become ``Constant`` nodes, so that they do not
    train; those that the module changes while it trains are initializers, and ``train_mode`` keeps what a step leaves in them.
    The module itself is left as it was, and the tensors are copies.

    A BatchNormalization that is in evaluation mode while the module trains stays in inference mode, as it does in PyTorch; one
    whose parameters have ``requires_grad=False`` normalises with the statistics of the batch all the same. What ONNX cannot say
    is warned of: where the older exporter is used, the row of ``padding_idx`` trains.

    Raises:
        MissingExtraError: PyTorch is not installed.
        ModelError: no exporter could export the module; their messages are given.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("a torch.nn.Module needs PyTorch; install it with: pip install 'graphc[torch]'") from None
    exporters: dict[str, Callable[..., ir.Model]] = {"dynamo": _with_dynamo, "torchscript": _with_torchscript}
    if exporter not in ("auto", *exporters):
        raise UsageError(f"exporter={exporter!r} is none of auto, {', '.join(exporters)}")
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a torch.nn.Module is expected, not {type(module).__name__}")
    with _EXPORTING:
        chosen = {name: function for name, function in exporters.items() if exporter in ("auto", name)}
        return _exported(module, example_inputs, input_names, output_names, dynamic_batch, chosen)


def _exported(
    module: torch.nn.Module,
    example_inputs: Inputs,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_batch: bool,
    exporters: Mapping[str, Callable[..., ir.Model]],
) -> ir.Model:
    """What :func:`export` returns; no other thread may export, or change the module, meanwhile."""
    from graphc.frontends.torch_export import own_gradients
    from graphc.frontends.torch_export.batches import FixedBatchError, enlarged

    _refuse_projections(module)
    names, tensors = _bind(module, example_inputs)
    batched = _batched(tensors) if dynamic_batch else []
    size = tensors[0].shape[0] if batched else None
    if size == 1:  # torch.export takes a size of 1 for a constant, and BatchNorm needs more than one sample to train
        tensors = enlarged(tensors, batched)
    failures = []
    for name, function in exporters.items():
        try:
            with _training(module), _quiet():
                model = function(module, names, tensors, batched)
            break
        except FixedBatchError as error:  # the other exporter would write the size down, and let the batch have any other
            model = _exported(module, example_inputs, input_names, output_names, False, exporters)
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
                _exported(module, example_inputs, None, None, False, exporters)
                failures.append(
                    "an op depends on the batch's size, as a convolution with a group for each sample does; it can be exported "
                    f"for batches of {size} only: graphc.frontends.export(module, inputs, dynamic_batch=False)"
                )
        if any("ctc_loss" in failure for failure in failures):
            failures.append("end the module in its scores, and train it with the loss graphc.losses.CTC")
        raise ModelError(f"{type(module).__name__} cannot be exported to ONNX\n  " + "\n  ".join(failures))
    _finish(model, module)
    _warn(module, {padding_row(node) for node in model.graph.all_nodes()}, model.meta)
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


def _warn(module: torch.nn.Module, recorded: Collection[int | None], notes: Mapping[str, Any]) -> None:
    """Warns of what trains differently than in PyTorch.

    Args:
        recorded: the rows for padding that the file tells.
        notes: what the exporter left in ``model.meta``.
    """
    import torch

    if asked := notes.get(_ASKED):
        warnings.warn(f"the batch's size decides what {type(module).__name__} computes; here {asked} always", stacklevel=5)
    if changed := notes.get(_CHANGED):
        names = ", ".join(map(repr, changed))
        warnings.warn(f"PyTorch changes {names} with every step of training; here each stays as it is now", stacklevel=5)
    if assigned := notes.get(_ASSIGNED):
        names = ", ".join(map(repr, assigned))
        warnings.warn(
            f"forward assigns to {names}: it computes with what it assigns, but the optimizer goes on from what was there"
            " before, and in PyTorch from what was assigned",
            stacklevel=5,
        )
    for hooked in _hooked(module, bool(notes.get(_HOOKED))):
        warnings.warn(f"the hook on the gradient of {hooked} does not run in graphc", stacklevel=5)
    for name, part in module.named_modules():
        if getattr(part, "running_mean", None) is not None and getattr(part, "momentum", 0) is None:
            warnings.warn(f"ONNX has no average over all batches: {name!r} with momentum=None averages otherwise", stacklevel=5)
        row = part.padding_idx if isinstance(part, torch.nn.Embedding) else None
        if row is not None and row not in recorded and part.weight.requires_grad:
            warnings.warn(
                f"this file tells no padding_idx: row {row} of '{name}.weight' trains here, which it does not in PyTorch; the"
                " exporter of torch.export programs records it",
                stacklevel=5,
            )


def _hooked(module: torch.nn.Module, inside: bool) -> Iterator[str]:
    """What has a hook on its gradient."""
    if inside:
        yield "a tensor that forward computes"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"the parameter {name!r}"
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            yield f"the module {name!r}"


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
    module: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor], batched: Sequence[int]
) -> ir.Model:
    import torch

    from graphc.frontends.torch_export import batches, buffers, marks

    settings: dict[str, Any] = {
        "dynamo": True,
        "optimize": False,
        "opset_version": _OPSET,
        "custom_translation_table": {
            operator: form
            for forms in (operators, special, losses, linalg, rnn, experts)
            for operator, form in forms.translations().items()
        },
        "verbose": False,
        "dynamic_shapes": batches.shapes_of(module, len(tensors), batched, torch.export.Dim("batch")),
    }
    failures = []
    with rnn.without_steps(), experts.of_any_type():
        for strict in (False, True):  # the second reads bytecode: it is slow, and knows what ``len(x)`` is
            try:
                captured = batches.capture(module, tensors, batched, strict=strict)
                trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
                written = buffers.changed(captured.program, module)
                changed, assigned = ([name for name in written if (name in trained) is of_it] for of_it in (False, True))
                if assigned:
                    buffers.pass_through(captured.program, assigned)
                if changed:
                    buffers.expose(captured.program, changed, _changed_in_evaluation(module, tensors, batched, strict))
                program = _translated(captured.program, settings)
                _refuse_without_values(program.model)
                break
            except Exception as error:  # of the module, of the capture or of the translation
                number = batched and "Unsupported attribute type" in str(error)  # a symbol where ONNX has an attribute
                failures.append(batches.FixedBatchError(" (an attribute of an operator)") if number else error)
        else:
            raise next((error for error in failures if isinstance(error, batches.FixedBatchError)), failures[0])
    model: ir.Model = program.model
    model.meta[_ASKED], model.meta[_HOOKED] = captured.assumed, captured.hooked
    model.meta[_CHANGED], model.meta[_ASSIGNED] = buffers.collect(model, module, changed), assigned
    marks.define(model)
    drop_biases_of_volumes(model.graph)
    return model


def _refuse_without_values(model: ir.Model) -> None:
    """Refuse what ``torch.func`` leaves of a tensor of the capture: a constant that cannot be read."""
    for name, value in model.graph.initializers.items():
        tensor = getattr(value.const_value, "raw", None)
        try:
            if tensor is not None:
                tensor.data_ptr()
        except RuntimeError:
            raise TypeError(
                f"the capture made a constant without values of {name!r}, as it does of what torch.func makes"
            ) from None


def _changed_in_evaluation(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], batched: Sequence[int], strict: bool
) -> list[str]:
    """The buffers that the module changes in evaluation too: a state that it hands from batch to batch."""
    from graphc.frontends.torch_export import batches, buffers

    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        return buffers.changed(batches.capture(module, tensors, batched, strict=strict).program, module)
    except Exception:  # of code that can be captured in training only
        return []
    finally:
        for part, training in modes.items():
            part.training = training


def _translated(captured: torch.export.ExportedProgram, settings: Mapping[str, Any]) -> Any:
    """The ``ONNXProgram`` of a captured module."""
    import torch

    _detach_without_gradients(captured)
    if not complex_numbers.holds_complex(captured):
        return torch.onnx.export(captured, (), **settings)
    complex_numbers.register()
    table = settings["custom_translation_table"] | complex_numbers.translations()
    with torch.no_grad():  # some of what takes an assignment apart refuses gradients of complex numbers
        return torch.onnx.export(captured, (), **{**settings, "custom_translation_table": table})


def _detach_without_gradients(captured: torch.export.ExportedProgram) -> None:
    """Detach what is computed under ``torch.no_grad()`` and what follows a ``detach_``: ONNX has neither, but ``detach``."""
    import torch

    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    for module in captured.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.target is torch.ops.aten.detach_.default:
                _detach_what_follows(module.graph, node)
            if node.target is region and node.args[0] is False:
                body = getattr(module, node.args[1].target)
                result = body.graph.output_node()

                with body.graph.inserting_before(result):
                    result.args = torch.fx.map_arg(result.args, functools.partial(_detached, body.graph))
                body.recompile()
        module.recompile()


def _detach_what_follows(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Replace a ``detach_`` by a ``detach`` that all later nodes read."""
    (value,) = node.all_input_nodes
    before = set(itertools.takewhile(lambda other: other is not node, graph.nodes))
    with graph.inserting_after(node):
        made = _detached(graph, value)
    value.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made and user not in before)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _detached(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    import torch

    made: torch.fx.Node = graph.call_function(torch.ops.aten.detach.default, (value,))
    made.meta = dict(value.meta)
    return made


def _with_torchscript(
    module: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor], batched: Sequence[int]
) -> ir.Model:
    from graphc.frontends.torch_export import traces

    model, changed, hooked = traces.trace(module, names, tensors, {names[k]: {0: "batch"} for k in batched}, _OPSET)
    counted = (*_STATISTICS, "num_batches_tracked")  # of BatchNormalization, which ONNX has
    model.meta[_CHANGED], model.meta[_HOOKED] = [name for name in changed if not name.endswith(counted)], hooked
    return model


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
