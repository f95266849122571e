"""Finds the native module and loads it: one that the wheel carries, else one compiled here once.

A compiled module is stored in home()/kernels under a key of sources, compiler and CPU. The name of
every module ends with its own digest: one that is truncated, changed or written by somebody else is
not loaded. Without a compiler, or with COTERIE_NATIVE=0, the result is None, and callers use torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from coterie.kernels.cpu import abi
from coterie.kernels.cpu.compile import (
    CARRIED,
    FLAGS,
    BuildFailed,
    best_class,
    compile_module,
    cpu_features,
    digest_of_sources,
    find_compiler,
    module_of,
)
from coterie.weights.files import file_lock
from coterie.weights.home import kernels_dir


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded module. `isa` names its instruction set: neon+dotprod, avx2, avx512+amx ..."""

    path: Path
    isa: str
    call: ctypes.CDLL


@cache
def native() -> NativeLibrary | None:
    """The native kernels of this machine, compiled if necessary; None when that is impossible."""
    if os.environ.get("COTERIE_NATIVE", "1") == "0":
        return None
    return _carried() or _compiled_here()


def _carried() -> NativeLibrary | None:
    """The module of the wheel for CPUs like this one, if there is one and this system can load
    it."""
    # flags of an experiment want a module of their own
    if os.environ.get("COTERIE_CXXFLAGS") or not CARRIED.is_dir():
        return None
    cpu_class = best_class(platform.machine(), cpu_features())
    if cpu_class is None:
        return None
    for path in CARRIED.glob(f"{module_of(cpu_class)}-*.so"):
        try:
            return _load(path) if _is_itself(path) else None
        except OSError as error:  # a C library that is too old, for example
            _say(f"{path.name} cannot be loaded here ({error})")
    return None


def _compiled_here() -> NativeLibrary | None:
    compiler = find_compiler()
    if compiler is None:
        _say("no C++ compiler found: using the slower torch kernels (install g++ to speed up)")
        return None
    try:
        return _load(_compiled(compiler))
    except (BuildFailed, OSError) as error:
        _say(f"native kernels are not available, using torch: {error}")
        return None


def _compiled(compiler: str) -> Path:
    """The path of the module for these sources, this compiler and this CPU."""
    stem = f"coterie-{_key(compiler)}"
    found = _sound(stem)
    if found is not None:
        return found
    with file_lock(kernels_dir() / "build.lock"):
        found = _sound(stem, clear=True)  # another process may have built it while we waited
        if found is not None:
            return found
        _say("compiling native kernels, once, about 20 s ...")
        return compile_module(compiler, _target_flags(), kernels_dir(), stem)


def _sound(stem: str, *, clear: bool = False) -> Path | None:
    """The module that was built here, if it is complete and ours. `clear`: delete bad ones."""
    for path in sorted(kernels_dir().glob(f"{stem}-*.so")):
        fault = _fault(path)
        if fault is None:
            return path
        if clear:
            _say(f"{path}: {fault}; building it again")
            with suppress(OSError):
                path.unlink()
    return None


def _fault(path: Path) -> str | None:
    """Why a module must not be loaded. Loading a truncated one would end the process."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            return "not a plain file"
        if hasattr(os, "geteuid") and facts.st_uid not in (os.geteuid(), 0):
            return f"belongs to another user ({facts.st_uid})"
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "others may write to it"
        return None if _is_itself(path) else "not what was built"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _is_itself(path: Path) -> bool:
    """Whether a module has the digest that its name ends with."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return path.stem.endswith(f"-{digest[:32]}")


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(version)
    digest.update(repr((FLAGS, _target_flags(), platform.machine(), _cpu_facts())).encode())
    digest.update(digest_of_sources().encode())
    return digest.hexdigest()[:20]


def _cpu_facts() -> str:
    """The CPU's feature list: a module built for one CPU must not be loaded on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "CPU part", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _target_flags() -> tuple[str, ...]:
    """Flags for this CPU, and those in $COTERIE_CXXFLAGS (for experiments and tests)."""
    # clang has no -march=native on ARM, gcc accepts both
    native_flag = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return native_flag, *shlex.split(os.environ.get("COTERIE_CXXFLAGS", ""))


def _load(path: Path) -> NativeLibrary:
    ctypes.CDLL(openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    abi.declare(library)
    return NativeLibrary(path, library.ct_isa().decode(), library)


def openmp_runtime() -> str:
    """The OpenMP library that torch uses, so that both share one pool of threads."""
    import torch  # noqa: F401  (loads the library we look for)

    names = ("libgomp", "libiomp5", "libomp")
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        mapped = set()
    # other packages have runtimes too: torch's is the one in its own folder
    for path in sorted(mapped, key=lambda path: ("torch" not in path, path)):
        if Path(path).name.startswith(names):
            return path
    return "libgomp.so.1"


def _say(message: str) -> None:
    print(f"coterie: {message}", file=sys.stderr, flush=True)


def use_threads_here(count: int) -> None:
    """Set the threads of torch's operators and native calls that the calling thread starts from now
    on. Has no effect where torch runs without OpenMP."""
    # torch sets a new thread's number when it is first read
    torch.get_num_threads()
    try:
        ctypes.CDLL(openmp_runtime()).omp_set_num_threads(ctypes.c_int(count))
    except (OSError, AttributeError):
        return
