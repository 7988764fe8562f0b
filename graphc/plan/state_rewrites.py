"""Runs the passes by which a backend changes which state a training graph keeps.

    program.model ─► Capabilities.state_rewrites ─► the graph whose state is allocated, and whose plans are made

Code that makes state, plans or predictions of a training graph calls this first; a second call changes nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.backend import Capabilities
from graphc.ir.declare import is_update
from graphc.pipeline import PASSES, Context, parse


def adapted(model: ir.Model, capabilities: Capabilities) -> ir.Model:
    """Rewrite ``model`` for the backend: returns a changed copy, or ``model`` itself where nothing changes.

    Checkpoints and results of training are the same for both.
    """
    if not capabilities.state_rewrites or not any(is_update(node) for node in model.graph):
        return model
    copy, ctx = model.clone(), Context()
    changed = [PASSES[s.name].function(copy, ctx, **PASSES[s.name].bind(s.options)) for s in parse(capabilities.state_rewrites)]
    return copy if any(changed) else model
