"""onnxruntime on a GPU: segments run in its CUDA provider, with every buffer in GPU memory.

CuPy owns the memory and the stream, and onnxruntime is bound to both, so that segments, collectives and copies are queued in
one order without a wait on the host. This was read against onnxruntime-gpu 1.31.1 (CUDA 13.0): its Python API, and the options
that its provider knows. (onnxruntime's own allocator would do without CuPy, but its memory can be neither sliced
nor filled, and no communicator takes it.) graphc has no kernels of its own here: its ops are decomposed, and ops that the
provider lacks run on the host, at the price of a wait and two copies.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort

from graphc.backend import BACKENDS, Backend, Whole
from graphc.backends.onnxruntime import OnnxRuntimeBackend, element_type, make_session, session_options
from graphc.backends.onnxruntime.packing import is_packed
from graphc.device import Array, Arrays, Memory, Run
from graphc.errors import GraphcError, MissingExtraError, UnsupportedOpError

PROVIDER = "CUDAExecutionProvider"
INSTALL = "pip uninstall -y onnxruntime && pip install 'graphc[onnxruntime-cuda]'"
"""onnxruntime and onnxruntime-gpu install into the same folder, so only one of them can be installed."""

LIBRARIES = ("cudart", "nvrtc", "cublasLt", "cublas", "curand", "cufft", "cudnn")
"""Libraries that the provider links or loads; CuPy depends on the package that finds them."""


class DeviceBackend(Backend):
    """Runs segments in a provider of onnxruntime whose arrays are not in host memory.

    Nothing is recorded: onnxruntime allocates while it runs, which a CUDA graph does not allow.

    Args:
        memory: of the arrays that segments are bound to.
        providers: of onnxruntime, with their options, in order of preference.
        device: onnxruntime's name of the device, and its number.
        queued: turns a closure that runs a session into one that queues it, where the provider itself does not queue.
    """

    name = "onnxruntime-cuda"
    alignment = 256

    def __init__(
        self,
        memory: Memory,
        providers: Sequence[tuple[str, dict[str, str]]],
        device: tuple[str, int],
        *,
        threads: int = 1,
        queued: Callable[[Run], Run] = lambda run: run,
    ) -> None:
        self.memory = memory
        self._providers, self._device, self._queued = providers, device, queued
        self._options = session_options(threads, spin=False)
        self._run_options = ort.RunOptions()
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def computes_halves(self, node: ir.Node) -> bool:
        """float16 where the provider has a kernel (onnxruntime casts elsewhere); it has too few for bfloat16."""
        values = (*node.inputs, *node.outputs)
        return all(v is None or v.dtype != ir.DataType.BFLOAT16 for v in values)

    def bind_segment(
        self, model: onnx.ModelProto, inputs: Arrays, outputs: Arrays, *, reusable_buffers: Sequence[Array] = ()
    ) -> Run:
        for name, array in (*inputs.items(), *outputs.items()):
            if is_packed(array.dtype):
                raise UnsupportedOpError(f"the {self.name} backend cannot hand on {name!r}: {array.dtype} between segments")
        session = make_session(model, self._options, self._providers)
        binding = session.io_binding()
        for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in arrays.items():
                bind(name, *self._device, element_type(array), array.shape, address(array))
        held = (dict(inputs), dict(outputs))
        run = functools.partial(session.run_with_iobinding, binding, self._run_options)

        def launch() -> None:
            if held:  # the closure keeps the memory alive
                run()

        return self._queued(launch)

    def bind_whole(self, model: onnx.ModelProto) -> Whole:
        """Models that no plan can hold run on the host."""

        def run(feeds: Mapping[str, Any]) -> dict[str, Any]:
            engine = OnnxRuntimeBackend(threads=1, spin=False)
            try:
                return engine.bind_whole(model)(feeds)
            finally:
                engine.close()

        return run


class OnnxRuntimeCudaBackend(DeviceBackend):
    """Make the backend of onnxruntime's CUDA provider.

    Args:
        threads: for ops that the provider leaves to the host.
        index: of the GPU; None: the local rank of this worker.
        tf32: whether float32 products and convolutions may round their operands to TF32; onnxruntime's own default is to do so.

    Raises:
        MissingExtraError: onnxruntime without the provider, or no CuPy.
        GraphcError: no GPU, or libraries of another CUDA than onnxruntime's.
    """

    def __init__(self, *, threads: int = 1, spin: bool = False, index: int | None = None, tf32: bool = False) -> None:
        del spin
        check_provider()
        from graphc.backends.cupy.device.cuda_memory import CudaMemory

        memory = CudaMemory(index, self.name, self.name)
        index = int(memory.device.id)
        check_major(memory.cupy.cuda.runtime.runtimeGetVersion() // 1000)
        load_libraries()
        options = provider_options(index, memory.stream.ptr, tf32=tf32)
        providers = [(PROVIDER, options), ("CPUExecutionProvider", {})]
        check_loads(providers)
        super().__init__(memory, providers, ("cuda", index), threads=threads)


def address(array: Any) -> int:
    """The address of the first element of a device array."""
    return int(array.data.ptr)


def provider_options(index: int, stream: int, *, tf32: bool) -> dict[str, str]:
    """Options of the CUDA provider: it works on ``stream``, and takes no more memory than it needs."""
    return {
        "device_id": str(index),
        "user_compute_stream": str(stream),
        "use_tf32": "1" if tf32 else "0",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_use_max_workspace": "1",
        "do_copy_in_default_stream": "1",
    }


def check_provider() -> None:
    """Check that this onnxruntime has the CUDA provider.

    Raises:
        MissingExtraError: it is the package for CPUs.
    """
    if PROVIDER not in ort.get_available_providers():
        raise MissingExtraError(
            f"this onnxruntime ({ort.__version__}) has no CUDA provider: it is the one for CPUs; run: {INSTALL}"
        )


def check_major(major: int) -> None:
    """Check that CuPy and onnxruntime use the same CUDA.

    Raises:
        MissingExtraError: they were built for different ones.
    """
    own = str(getattr(ort, "cuda_version", "") or "").partition(".")[0]
    if own and own != str(major):
        raise MissingExtraError(
            f"onnxruntime {ort.__version__} was built for CUDA {own}, CuPy for CUDA {major}; install the two for one CUDA,"
            f" such as: pip install cupy-cuda{own}x"
        )


def load_libraries() -> None:
    """Load CUDA's libraries and cuDNN from pip's packages or the system; :func:`check_loads` reports what is missing.

    onnxruntime's own ``preload_dlls`` searches its own site-packages folder only, and prints to stdout.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    for name in LIBRARIES:
        with contextlib.suppress(DynamicLibNotFoundError):
            load_nvidia_dynamic_lib(name)


def check_loads(providers: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Check that the provider loads and takes its options; without this, onnxruntime would silently use the CPU.

    Raises:
        GraphcError: it does not load, with the provider's reason.
    """
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = onnx.helper.make_graph([node], "probe", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    reason = ""
    ort.set_default_logger_severity(4)  # the error below contains the reason that the log would show
    try:
        with warnings.catch_warnings(action="ignore"):
            used = make_session(model, session_options(1, spin=False), providers).get_providers()
    except UnsupportedOpError as error:
        used, text = [], str(error)
        found = re.search(r"CUDA failure \d+: [^;]*|(Unknown|Failed to parse) provider option[^;]*", text)
        reason = f"; it says: {(found[0] if found else text[-200:]).strip()}"
    finally:
        ort.set_default_logger_severity(2)
    wanted, cuda = providers[0][0], getattr(ort, "cuda_version", "") or 13
    if wanted not in used:
        raise GraphcError(
            f"onnxruntime {ort.__version__} cannot load its {wanted}: it needs CUDA {cuda} with cuDNN 9"
            f" (run: pip install 'onnxruntime-gpu[cuda,cudnn]') and a driver for it (nvidia-smi shows yours){reason}"
        )


BACKENDS.register("onnxruntime-cuda", OnnxRuntimeCudaBackend, origin=__name__)
