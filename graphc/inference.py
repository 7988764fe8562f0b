"""Running a model through graphc's own plan and backend, without training anything."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graphc import frontends
from graphc.backend import Array
from graphc.compiler import ModelSource
from graphc.errors import FeedError, nearest
from graphc.pipeline import Step, run
from graphc.plan import make_plan
from graphc.runtime.executor import Executor
from graphc.runtime.state import State
from graphc.runtime.world import available_cores
from graphc.trainer import make_backend


def run_model(
    model: ModelSource, feeds: Mapping[str, Array], backend: str = "auto", *, threads: int | None = None
) -> dict[str, Array]:
    """The outputs of ``model`` for ``feeds``, in the mode in which the file was saved.

    Args:
        model: path, ``onnx.ModelProto`` or ``onnx_ir.Model``.
        feeds: one array per graph input, of its element type.
        backend: ``"auto"``, or a name that ``graphc backends`` lists.
        threads: of the backend; None takes all cores this process may use.

    Raises:
        FeedError: a feed with a wrong name, shape or dtype.
        ModelError: an output whose shape depends on data.
    """
    legal = frontends.load(model).clone()
    run(legal, [Step("legalize"), Step("simplify")])
    wanted = {value.name or "": value for value in legal.graph.inputs}
    for name in feeds:
        if name not in wanted:
            raise FeedError(f"there is no input {name!r}{nearest(name, wanted)}; the inputs are {', '.join(wanted)}")
    for name, value in wanted.items():
        if name not in feeds:
            raise FeedError(f"the feed {name!r} is missing; the inputs are {', '.join(wanted)}")
        if value.dtype is not None and feeds[name].dtype != value.dtype.numpy():
            raise FeedError(f"feed {name!r} is {feeds[name].dtype}, the model wants {value.dtype.numpy()}")
    engine = make_backend(backend, threads=threads or available_cores())
    try:
        plan = make_plan(legal, {name: np.shape(feeds[name]) for name in wanted}, native=engine.prefers_native, world_size=1)
        executor = Executor(plan, State(legal), engine)
        executor.run({name: np.asarray(feeds[name]) for name in wanted})
        return {name: array.copy() for name, array in executor.outputs.items()}
    finally:
        engine.close()
