"""Makes object files of LLVM modules, in this process and in others beside it.

LLVM's bindings take one call at a time in a process. A model with many new kernels therefore starts processes that do nothing
else; each ends with its pipe, at the latest when the last kernel is done. As a program this module is such a process.
"""

from __future__ import annotations

import contextlib
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

import llvmlite.binding as llvm

from graphc.backends.host.processor import processor

FEW = 4
"""Kernels that wait for this process: so many take no longer than another needs to start."""

MOST = 8
"""Kernels that are compiled at a time; each other process takes 100 MB."""

LIMIT = 60.0
"""Seconds for a kernel in another process, which takes a tenth of one; a process that is stopped would keep all waiting."""

_HEAD = struct.Struct("<8sq")
_MARK = b"graphc.o"
"""In front of each length: what a site prints when Python starts is no answer."""


def target_machine() -> llvm.TargetMachine:
    """LLVM's description of :func:`.processor.processor`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    wanted = processor()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=wanted.name, features=wanted.features, opt=3, jit=True)


def object_file(machine: llvm.TargetMachine, module: str) -> bytes:
    """The object file of a module."""
    parsed = llvm.parse_assembly(module)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = True
    options.loop_unrolling = False  # a third of the time to compile, and loops that are vectors gain nothing by it
    builder = llvm.create_pass_builder(machine, options)
    parsed.triple, parsed.data_layout = machine.triple, str(machine.target_data)
    parsed.verify()
    passes = builder.getModulePassManager()
    passes.run(parsed, builder)
    return bytes(machine.emit_object(parsed))


class MachineCode:
    """Compiles modules behind its caller's back.

    Args:
        cores: that may be used at a time.
    """

    def __init__(self, cores: int) -> None:
        self._machine = target_machine()
        self._threads = min(cores, MOST)
        self.begin()

    def begin(self) -> None:
        """Start afresh: a forked process has none of its parent's threads, and the processes are its parent's."""
        self._behind = ThreadPoolExecutor(self._threads, "graphc-compiler")
        self._here, self._counting = threading.Lock(), threading.Lock()
        self._waiting = 0
        self._idle: list[_Process] = []
        self._alone = False

    def submit(self, module: str, keep: Callable[[bytes], None]) -> Future[bytes]:
        """Begin to compile ``module``; ``keep`` gets the object file in the same thread."""
        with self._counting:
            self._waiting += 1

        def work() -> bytes:
            try:
                code = self._made(module)
            finally:
                self._one_less()
            keep(code)
            return code

        return self._behind.submit(work)

    def now(self, module: str) -> bytes:
        """The object file of ``module``, made in this process."""
        with self._here:
            return object_file(self._machine, module)

    def _made(self, module: str) -> bytes:
        if not self._here.acquire(blocking=self._alone or self._waiting <= FEW):
            code = self._beside(module)
            if code is not None:
                return code
            self._here.acquire()
        try:
            return object_file(self._machine, module)
        finally:
            self._here.release()

    def _beside(self, module: str) -> bytes | None:
        """What another process makes of ``module``; None: none can be started, or it came to an end."""
        with self._counting:
            process = self._idle.pop() if self._idle else None
        try:
            process = process or _Process()
            code = process.made(module)
        except (OSError, EOFError):  # no room for another process, or somebody has ended it
            self._alone = True
            if process is not None:
                process.end()
            return None
        with self._counting:
            self._idle.append(process)
        return code

    def _one_less(self) -> None:
        with self._counting:
            self._waiting -= 1
            done = self._idle if self._waiting == 0 else []
            if done:
                self._idle = []
        for process in done:
            process.end()


class _Process:
    """Another process of this module."""

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("Python does not know its own program")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # an end is told by its pipe, and LLVM's remarks are not the user's
        )

    def made(self, module: str) -> bytes:
        """The object file; OSError or EOFError: the process has ended."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        limit = threading.Timer(LIMIT, self._process.kill)
        limit.start()
        try:
            _write(to, module.encode())
            return _read(back)
        finally:
            limit.cancel()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate()


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_HEAD.pack(_MARK, len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(_HEAD.size)
    mark, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0)
    data = pipe.read(length) if mark == _MARK else b""
    if not data or len(data) < length:
        raise EOFError
    return data


def _serve() -> None:
    """Answer each module with its object file until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end hears it, and closes the pipe
    machine = target_machine()
    with contextlib.suppress(EOFError):
        while True:
            _write(sys.stdout.buffer, object_file(machine, _read(sys.stdin.buffer).decode()))


if __name__ == "__main__":
    _serve()
