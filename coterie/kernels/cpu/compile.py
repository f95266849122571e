"""Compiles csrc/ to one module: for this CPU on first use, or for a class of CPUs into a wheel.

Imports no torch, because setup.py uses it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# where a wheel carries its modules: setup.py writes them, and a checkout has none
CARRIED = Path(__file__).parent / "modules"

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fasynchronous-unwind-tables",  # for what csrc/memory.cpp catches
    "-ffp-contract=off",  # no fused multiply-add except where the source has one
    "-fno-schedule-insns",  # the order in the source keeps values in registers
    "-Wall",
)


class BuildFailed(Exception):
    """The compiler's own words."""


@dataclass(frozen=True, slots=True)
class CpuClass:
    """CPUs that can run one and the same module.

    `march` may enable no more than `needs` names (as /proc/cpuinfo spells it): the compiler uses
    whatever it was allowed to.
    """

    name: str
    march: str
    needs: frozenset[str]


_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_VNNI = _AVX512 | {"avx512_vnni"}

# by platform.machine(), the best first
CPU_CLASSES = {
    "x86_64": (
        CpuClass(
            "amx",
            "-march=x86-64-v4 -mavx512vnni -mamx-tile -mamx-int8 -mamx-bf16",
            _VNNI | {"amx_tile", "amx_int8", "amx_bf16"},
        ),
        CpuClass("avx512-vnni", "-march=x86-64-v4 -mavx512vnni", _VNNI),
        CpuClass("avx512", "-march=x86-64-v4", _AVX512),
        CpuClass("avx2-vnni", "-march=x86-64-v3 -mavxvnni", _AVX2 | {"avx_vnni"}),
        CpuClass("avx2", "-march=x86-64-v3", _AVX2),
    ),
    "aarch64": (
        CpuClass(
            "dotprod",
            "-march=armv8.2-a+dotprod",
            frozenset(["asimd", "asimddp", "asimdrdm", "atomics", "crc32", "dcpop"]),
        ),
        CpuClass("neon", "-march=armv8-a", frozenset({"asimd"})),
    ),
}


def best_class(machine: str, features: Collection[str]) -> CpuClass | None:
    """The best class that a CPU with these features belongs to."""
    classes = CPU_CLASSES.get(machine, ())
    return next((one for one in classes if one.needs <= set(features)), None)


def cpu_features() -> set[str]:
    """What this CPU has, as /proc/cpuinfo spells it; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    named = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return set(named[0].split()) if named else set()


def find_compiler() -> str | None:
    """$CXX, else the first of g++, clang++ and c++ on PATH."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def digest_of_sources() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def module_of(cpu_class: CpuClass) -> str:
    """How the name of its module in a wheel begins; a digest of the module follows."""
    return f"{cpu_class.name}-{digest_of_sources()[:20]}"


def compile_module(compiler: str, target: Sequence[str], folder: Path, stem: str) -> Path:
    """Makes `folder/STEM-DIGEST.so`, whole or not at all. `target`: flags for the CPU."""
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        objects = {source: Path(draft) / f"{source.stem}.o" for source in SOURCES.glob("*.cpp")}
        commands = [
            [compiler, *_flags(source), *target, "-c", str(source), "-o", str(built)]
            for source, built in objects.items()
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        module = Path(draft) / "module.so"
        # OpenMP's functions stay undefined: the runtime that torch loaded provides them
        _run([compiler, "-shared", "-o", str(module), *map(str, objects.values())])
        digest = hashlib.sha256(module.read_bytes()).hexdigest()
        path = folder / f"{stem}-{digest[:32]}.so"
        module.chmod(0o755)
        os.replace(module, path)
        return path


def compile_for_wheel(folder: Path) -> list[Path]:
    """A module for each class of CPUs of this machine's family."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler found: install g++, or build the wheel without kernels")
    folder.mkdir(parents=True, exist_ok=True)
    classes = CPU_CLASSES.get(platform.machine(), ())
    return [compile_module(compiler, one.march.split(), folder, module_of(one)) for one in classes]


def _flags(source: Path) -> list[str]:
    exceptions = [] if source.name == "memory.cpp" else ["-fno-exceptions"]
    return [*FLAGS, *exceptions]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-2000:]}")
