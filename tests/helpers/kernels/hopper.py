"""Compiles Triton kernels for sm_90 (Hopper) without a GPU, and tells what they use."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

# shared memory that one block may use
LIMIT_BYTES = 227 * 1024


def some_every_time(names: Iterable[str], chosen: Collection[str]) -> list[Any]:
    """Parameters of a test: to compile takes seconds, so `make test` compiles the chosen ones."""
    full = pytest.mark.full
    return [name if name in chosen else pytest.param(name, marks=full) for name in names]


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
    aligned: Collection[str] | None = (),
    other: str = "",
    **options: Any,
) -> Any:
    """`aligned`: names of integers that 16 divides; all pointers are at such addresses, unless it
    is None. `other`: the type of what `types` does not have."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = [parameter.name for parameter in kernel.params]
    signature = {n: "constexpr" if n in constants else types.get(n, other) for n in names}
    missing = [n for n, kind in signature.items() if not kind]
    assert not missing, missing
    fixed = {(names.index(n),): value for n, value in constants.items() if n in names}
    divided = {
        (place,): [["tt.divisibility", 16]]
        for place, n in enumerate(names)
        if aligned is not None and (signature[n].startswith("*") or n in aligned)
    }
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    built = compile(
        source(kernel, signature, fixed, divided),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, **options},
    )
    assert built.metadata.shared <= LIMIT_BYTES
    return built


def usage(cubin: bytes, folder: Path) -> tuple[int, int]:
    """The registers of a thread, and the bytes of its stack."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _told("cuobjdump", "-res-usage", cubin, folder))
    assert found is not None
    return int(found[1]), int(found[2])


def instructions(cubin: bytes, folder: Path) -> Counter[str]:
    """How often each is in a kernel."""
    text = _told("nvdisasm", "-c", cubin, folder)
    return Counter(re.findall(r"\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", text))


def _told(tool: str, option: str, cubin: bytes, folder: Path) -> str:
    triton = pytest.importorskip("triton")
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    if not os.access(program, os.X_OK):
        pytest.skip(f"triton without {tool}")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [str(program), option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
