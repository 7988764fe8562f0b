"""Builds an environment where real CuPy, nvmath and NCCL bindings run on an emulated CUDA, and runs tests in it.

The packages are installed without the libraries they drive (cuBLAS, cuDNN, NCCL and NVRTC take several gigabytes), on top of
the current environment's packages. CuPy's wheel links the CUDA runtime into one of its modules, so that module is rebuilt from
CuPy's source with the emulated runtime. Everything lies in ``build/hostcuda``; files newer than their source are kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent
MADE = ROOT / "build" / "hostcuda"
CUPY = "14.2.0"
PACKAGES = (
    f"cupy-cuda13x=={CUPY}",
    "nvmath-python==1.0.0",
    "nccl4py==0.6.0",
    "nvidia-cudnn-frontend==1.32.0",
    "cuda-bindings==13.5.0",
    "cuda-core==1.2.2",
    "cuda-pathfinder==1.9.0",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-profiler-api==13.*",
    "cython==3.2.4",
)
HIDDEN = {"nvidia/cu13/lib": ("libcudart.so.13", "libnvrtc.so.13", "libcublasLt.so.13"), "nvidia/nccl/lib": ("libnccl.so.2",)}
"""Where the packages look for libraries first → the emulated libraries placed there."""

KERNELS = ("-std=c++17", "-O1", "-w", "-fPIC", "-ffp-contract=off", "-fsanitize=alignment,bounds", "-fno-strict-aliasing")
"""Compiler flags for kernels: round as written, and check the alignment that a GPU requires."""

CONSTANTS = {
    "CUPY_CUDA_VERSION": 13000,
    "CUPY_HIP_VERSION": 0,
    "CUPY_USE_CUDA_PYTHON": False,
    "CUPY_CUFFT_STATIC": False,
    "CUPY_CYTHON_VERSION": "3.2.4",
}
"""Constants that CuPy's own build passes to Cython."""


def run(*command: str | Path, **options: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:300]}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def install() -> Path:
    """Create the environment; returns its package folder."""
    packages = MADE / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    stamp = MADE / "installed"
    if stamp.exists() and stamp.read_text() == repr(PACKAGES):
        return packages
    shutil.rmtree(MADE / "env", ignore_errors=True)
    venv.create(MADE / "env", with_pip=False)
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, *PACKAGES)
    (packages / "zz_base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (packages / "zz_dnn.pth").write_text(f"import sys; sys.path.append({str(SOURCES)!r}); import host_dnn\n")
    stamp.write_text(repr(PACKAGES))
    return packages


def source_of_cupy() -> Path:
    """CuPy's unpacked source, which pip leaves behind when preparing the build fails for lack of CUDA."""
    folder = MADE / "source"
    if not list(folder.glob("*/*/cupy_backends/cuda/api/runtime.pyx")):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-clean",
            "--no-binary",
            "cupy",
            f"cupy=={CUPY}",
            "-d",
            str(folder),
        ]
        subprocess.run(
            [sys.executable, "-m", *command], env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, check=False
        )
    found = list(folder.glob("*/*/cupy_backends/cuda/api/runtime.pyx"))
    if not found:
        sys.exit(f"pip could not download the source of cupy {CUPY}")
    return found[0].parents[3]


def compile_runtime(packages: Path, include: Path) -> Path:
    """Compile CuPy's CUDA runtime module, without linking it."""
    made = MADE / "runtime.o"
    if not made.exists():
        source = source_of_cupy()
        text = f"""
import os, sys
sys.path.insert(0, {str(packages)!r})
os.chdir({str(source)!r})
from Cython.Compiler.Main import CompilationOptions, compile
directives = dict(binding=False, embedsignature=True, c_api_binop_methods=True, freethreading_compatible=True)
options = CompilationOptions(cplus=True, language_level=3, compile_time_env={CONSTANTS!r}, compiler_directives=directives)
sys.exit(compile("cupy_backends/cuda/api/runtime.pyx", options).num_errors)
"""
        run(sys.executable, "-c", text)
        python = sysconfig.get_path("include")
        where = source / "cupy_backends" / "cuda" / "api"
        flags = ("-std=c++17", "-O1", "-fPIC", "-w", f"-I{include}", f"-I{python}", f"-I{source}")
        run("g++", *flags, "-c", "-o", made, where / "runtime.cpp")
    return made


def build(packages: Path) -> None:
    """Build the libraries, and link CuPy's module with them."""
    include, library = packages / "nvidia" / "cu13" / "include", MADE / "lib" / "libhostcuda.so"
    runtime = compile_runtime(packages, include)
    sources = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), SOURCES / "missing.c"]
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return
    shutil.rmtree(library.parent, ignore_errors=True)
    library.parent.mkdir(parents=True)
    objects = []
    for path in (p for p in sources if p.suffix != ".h"):
        objects.append(MADE / f"{path.stem}.o")
        compiler = ("gcc",) if path.suffix == ".c" else ("g++", "-std=c++17")
        fast = ("-O3", "-ffast-math", "-march=native") if path.stem == "cublaslt" else ("-O1", "-g")
        run(*compiler, *fast, "-fPIC", "-w", f"-I{include}", "-c", "-o", objects[-1], path)
    run("g++", "-shared", "-o", library, *objects, "-lpthread", "-ldl", "-lrt")
    (module,) = (packages / "cupy_backends" / "cuda" / "api").glob("runtime.*.so")
    module.unlink()
    run("g++", "-shared", "-o", module, runtime, library, f"-Wl,-rpath,{library.parent}")
    for name in ("libcuda.so.1", "libnccl.so.2"):
        (library.parent / name).symlink_to(library)
    for folder, names in HIDDEN.items():
        (packages / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (packages / folder / name).unlink(missing_ok=True)
            (packages / folder / name).symlink_to(library)


def digest_of(texts: Iterable[str]) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:12]


def kernel_header(include: Path) -> tuple[str, Path]:
    """The compiler's flags for kernels with a precompiled header, and the folder that caches both."""
    texts = [(ROOT / "tests" / "backends" / "cuda_emulator.h").read_text(), (SOURCES / "kernel.h").read_text()]
    folder = MADE / "cache" / digest_of((*KERNELS, *texts))
    flags = (*KERNELS, f"-I{folder}", f"-I{include}")
    if not (folder / "kernel.h.gch").exists():
        shutil.rmtree(folder.parent, ignore_errors=True)
        (folder / "kernels").mkdir(parents=True)
        for name, text in zip(("cuda_emulator.h", "kernel.h"), texts, strict=True):
            (folder / name).write_text(text)
        run("g++", *flags, "-x", "c++-header", "-o", folder / "kernel.h.gch", folder / "kernel.h")
    return " ".join(flags), folder


def main() -> None:
    """Build whatever is missing, then run pytest on the GPU tests with the arguments; after ``run``, Python with them."""
    MADE.mkdir(parents=True, exist_ok=True)
    with (MADE / "lock").open("w") as lock:  # one build at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = install()
        build(packages)
        flags, folder = kernel_header(packages / "nvidia" / "cu13" / "include")
    if len(sys.argv) == 1:
        return
    changes = {
        "LD_LIBRARY_PATH": f"{MADE / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "HOSTCUDA_FLAGS": flags,
        "HOSTCUDA_KERNELS": str(folder / "kernels"),
        "CUPY_CACHE_DIR": str(folder / "cupy"),
        "GRAPHC_CACHE_DIR": str(MADE / "cache" / f"measured-{digest_of(p.read_text() for p in sorted(SOURCES.glob('*.cpp')))}"),
        "HOSTCUDA_DEVICES": os.environ.get("HOSTCUDA_DEVICES", "2"),
        "OMP_NUM_THREADS": "1",
    }
    python = str(MADE / "env" / "bin" / "python")
    if sys.argv[1] == "run":
        command = [python, *sys.argv[2:]]
    else:
        command = [python, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", "tests.hostcuda.tier", *sys.argv[1:]]
    os.execve(python, command, {**os.environ, **changes})


if __name__ == "__main__":
    main()
