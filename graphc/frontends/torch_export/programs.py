"""Writes what ``torch.export`` captures of a module as an ONNX model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch._library.custom_ops import OPDEFS
from torch.export.graph_signature import InputKind

from graphc.frontends.torch_export import batches, buffers, experts, linalg, losses, marks, operators, rnn, special
from graphc.frontends.torch_export import complex as complex_numbers
from graphc.frontends.torch_export.notes import Notes


def translate(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], axes: batches.Axes, opset: int
) -> tuple[ir.Model, Notes]:
    """Capture ``module`` called with ``tensors``, and write what was captured as a model.

    Args:
        axes: those of any size.

    Raises:
        FixedBatchError: it can be exported for batches of the size of ``tensors`` only.
    """
    settings: dict[str, Any] = {
        "dynamo": True,
        "optimize": False,
        "opset_version": opset,
        "custom_translation_table": {
            operator: form
            for forms in (operators, special, losses, linalg, rnn, experts)
            for operator, form in forms.translations().items()
        },
        "verbose": False,
        "dynamic_shapes": batches.shapes_of(module, axes),
    }
    failures = []
    with rnn.without_steps(), experts.of_any_type():
        for strict in (False, True):  # the second reads bytecode: it is slow, and knows what ``len(x)`` is
            try:
                captured = batches.capture(module, tensors, axes, strict=strict)
                _refuse_lost_gradients(captured.program)
                _read_parameters(captured.program, module)
                trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
                written = buffers.changed(captured.program, module)
                changed, assigned = ([name for name in written if (name in trained) is of_it] for of_it in (False, True))
                if assigned:
                    buffers.pass_through(captured.program, assigned)
                if changed:
                    buffers.expose(captured.program, changed, _changed_in_evaluation(module, tensors, axes, strict))
                program = _translated(captured.program, settings)
                _refuse_without_values(program.model)
                break
            except Exception as error:  # of the module, of the capture or of the translation
                # a symbol where ONNX has an attribute
                number = batches.only_batches(axes) and "Unsupported attribute type" in str(error)
                failures.append(batches.FixedBatchError(" (an attribute of an operator)") if number else error)
        else:
            raise next((error for error in failures if isinstance(error, batches.FixedBatchError)), failures[0])
    model: ir.Model = program.model
    still = buffers.collect(model, module, changed)
    marks.define(model)
    return model, Notes(captured.assumed, captured.hooked, still, assigned, captured.padded, captured.checks, captured.least)


def _refuse_lost_gradients(captured: torch.export.ExportedProgram) -> None:
    """Refuse operators with a gradient of their own: what is written of them, if anything, is what they compute.

    The products of experts have a translation, whose gradient is theirs.
    """
    known = experts.translations()
    for part in captured.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims") and target not in known:
                name = str(target._schema.name)
                found = OPDEFS.get(name)
                if found is not None and found._backward_fn is not None:
                    raise TypeError(
                        f"the operator {name} defines its gradient with torch.library.register_autograd, which "
                        "a capture does not keep: call a torch.autograd.Function with the same forward and backward instead"
                    )


def _read_parameters(captured: torch.export.ExportedProgram, module: torch.nn.Module) -> None:
    """Read a parameter that ``forward`` takes from a list or dictionary by its name: the capture made a constant of each use.

    self.weights = {"scale": self.scale}        y = x * self.weights["scale"]
    """
    places = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    specs = captured.graph_signature.input_specs
    named = {spec.target: places[spec.arg.name] for spec in specs if spec.kind is InputKind.PARAMETER}
    parameters = {
        (p.data_ptr(), p.shape, p.stride()): named[name]
        for name, p in module.named_parameters(remove_duplicate=False)
        if name in named and p.numel()
    }
    for spec in specs:
        held = captured.constants.get(spec.target or "") if spec.kind is InputKind.CONSTANT_TENSOR else None
        if isinstance(held, torch.Tensor):
            parameter = parameters.get((held.data_ptr(), held.shape, held.stride()))
            if parameter is not None:
                places[spec.arg.name].replace_all_uses_with(parameter)


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
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], axes: batches.Axes, strict: bool
) -> list[str]:
    """The buffers that the module changes in evaluation too: a state that it hands from batch to batch."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        return buffers.changed(batches.capture(module, tensors, axes, strict=strict).program, module)
    except Exception:  # of code that can be captured in training only
        return []
    finally:
        for part, training in modes.items():
            part.training = training


def _translated(captured: torch.export.ExportedProgram, settings: Mapping[str, Any]) -> Any:
    """The ``ONNXProgram`` of a captured module."""
    _detach_without_gradients(captured)
    if not complex_numbers.holds_complex(captured):
        return torch.onnx.export(captured, (), **settings)
    complex_numbers.register()
    table = settings["custom_translation_table"] | complex_numbers.translations()
    with torch.no_grad():  # some of what takes an assignment apart refuses gradients of complex numbers
        return torch.onnx.export(captured, (), **{**settings, "custom_translation_table": table})


def _detach_without_gradients(captured: torch.export.ExportedProgram) -> None:
    """Detach what is computed under ``torch.no_grad()`` and what follows a ``detach_``: ONNX has neither, but ``detach``."""
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
    made: torch.fx.Node = graph.call_function(torch.ops.aten.detach.default, (value,))
    made.meta = dict(value.meta)
    return made
