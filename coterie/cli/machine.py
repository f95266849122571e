"""What `doctor` and `bench` can measure on this machine. Changes nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

# flag in /proc/cpuinfo -> its name here; in the order that kernels prefer
_FLAGS = {
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "avx512_vnni": "avx512-vnni",
    "avx512_bf16": "avx512-bf16",
    "avx512f": "avx512",
    "avx_vnni": "avx-vnni",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "sve": "sve",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "asimddp": "dotprod",
    "asimdhp": "fp16",
    "asimd": "neon",
}
_KERNELS = (
    ("amx-int8", "native, AMX"),
    ("avx512", "native, AVX-512"),
    ("avx2", "native, AVX2"),
    ("dotprod", "native, NEON with dot products"),
    ("neon", "native, NEON"),
)


def cpu() -> Facts:
    from coterie.workers.memory import cores

    text = _read("/proc/cpuinfo")
    flags_found: set[str] = set()
    name = platform.processor() or platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            flags_found = set(value.split())
        elif key.strip() == "model name":
            name = value.strip()
    flags = [label for flag, label in _FLAGS.items() if flag in flags_found]
    return {"name": name, "cores": cores(), "flags": flags, "kernels": _kernels(flags)}


def _kernels(flags: list[str]) -> str:
    if os.environ.get("COTERIE_NATIVE") == "0":
        return "torch (COTERIE_NATIVE=0)"
    if compiler() is None:
        return "torch, because there is no C++ compiler"
    for flag, words in _KERNELS:
        if flag in flags:
            return words
    return "native, plain C++"


def memory() -> Facts:
    from coterie.workers.memory import available_bytes

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total_bytes": total, "free_bytes": available_bytes()}


def compiler() -> str | None:
    """The first line of the C++ compiler's version text."""
    from coterie.kernels.cpu.compile import find_compiler

    path = find_compiler()
    if path is None:
        return None
    process = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return process.stdout.splitlines()[0] if process.stdout else path


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def package_version(module: str, package: str) -> str | None:
    """The version of the package that provides the module, usually `package`."""
    if not is_installed(module):
        return None
    # this import takes longer than the whole command line
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    try:
        return version(package)
    except PackageNotFoundError:
        # a fork with another name; this reads the metadata of every installed package
        names = packages_distributions().get(module)
        return version(names[0]) if names else "unknown"


def torch_facts() -> Facts:
    """Imports torch: only this shows a driver that does not fit."""
    if not is_installed("torch"):
        return {"version": None, "cuda": None, "triton": None}
    import torch

    cuda = None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        cuda = f"{torch.cuda.get_device_name()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    return {
        "version": torch.__version__,
        "cuda": cuda,
        "triton": package_version("triton", "triton"),
    }


def home_facts() -> Facts:
    from coterie.weights.home import home

    path = home()
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return {"path": str(path), "writable": os.access(nearest, os.W_OK)}


def cached_models() -> list[Facts]:
    from coterie.weights.sources.source import list_cached

    return [
        {"source": model.source, "path": str(model.path), "nbytes": model.nbytes}
        for model in list_cached()
    ]


def specialist_facts(config: Path) -> list[Facts]:
    """The specialists of a file of settings: what answers for each, and whether it is here."""
    from coterie.core.config import file_faults, load
    from coterie.core.errors import WeightsError
    from coterie.service.config_check import expected_names
    from coterie.weights.sources.source import DEFAULT_MODEL, find_here

    if file_faults(config):
        return []
    settings = load(config)

    def is_here(model: str) -> bool:
        try:
            return find_here(model) is not None
        except WeightsError:
            return False

    found = []
    for name, item in zip(expected_names(settings), settings.specialists, strict=True):
        model = item.model or DEFAULT_MODEL
        found.append(
            {
                "name": name,
                "model": item.remote.url or model,
                "here": None if item.remote.url else is_here(model),
                "experts": list(item.adapters),
            }
        )
    return found


def used(torch: Facts, models: list[Facts]) -> Facts:
    """What `coterie serve` without arguments uses. `dtype` is None until the model is fetched."""
    from coterie.weights.sources.source import DEFAULT_MODEL
    from coterie.workers.memory import auto_kv_bytes, cores

    device = "cuda" if torch["cuda"] else "cpu"
    # a cached source also names its version
    paths = [m["path"] for m in models if m["source"].partition("==")[0] == DEFAULT_MODEL]
    return {
        "device": device,
        "threads": cores(),
        "max_kv_bytes": auto_kv_bytes(device),
        "model": DEFAULT_MODEL,
        "dtype": _stored_dtype(Path(paths[0])) if paths and torch["version"] else None,
    }


def gpu_sizes(torch: Facts, models: list[Facts]) -> Facts | None:
    """The table of sizes of this machine's GPU, and by model the shapes that it lacks. None without
    a GPU or triton."""
    if not (torch["cuda"] and torch["triton"]):
        return None
    from coterie.core.errors import CoterieError
    from coterie.kernels.size_table import device_name, read_table
    from coterie.kernels.triton.tune import tune_cases
    from coterie.models.gpu_shapes import model_shapes

    known = read_table(device_name())
    missing = {}
    for model in models:
        try:
            cases = tune_cases(model_shapes(Path(model["path"])), "cuda")
        except CoterieError:
            continue
        missing[model["source"]] = known.missing(case.shape for case in cases)
    return {
        "device": known.device,
        "files": [str(file) for file in known.files],
        "entries": len(known.entries),
        "missing": missing,
    }


def _stored_dtype(path: Path) -> str | None:
    from coterie.core.errors import CoterieError
    from coterie.models.base import stored_dtype
    from coterie.weights.checkpoint import open_checkpoint

    try:
        return stored_dtype(open_checkpoint(path))
    except (CoterieError, ImportError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
