"""What of a training graph depends on the backend that keeps its state: passes that the backend asks for.

    program.model ─► Abilities.state_rewrites ─► the graph whose state is allocated, and whose plans are made

Whoever makes state, plans or predictions of a training graph does it first; a second time changes nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.backend import Capabilities
from graphc.ir.declare import is_update
from graphc.pipeline import PASSES, Context, parse


def adapted(model: ir.Model, abilities: Capabilities) -> ir.Model:
    """``model`` as the backend wants to keep its state: a changed copy, or itself where that changes nothing.

    A checkpoint and the results of training are the same for either.
    """
    if not abilities.state_rewrites or not any(is_update(node) for node in model.graph):
        return model
    copy, ctx = model.clone(), Context()
    changed = [PASSES[s.name].function(copy, ctx, **PASSES[s.name].bind(s.options)) for s in parse(abilities.state_rewrites)]
    return copy if any(changed) else model
