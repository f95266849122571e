"""Compiling on first use: with and without a compiler, twice at once, for other CPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import (
    CPU_CLASSES,
    SOURCES,
    CpuClass,
    cpu_features,
    find_compiler,
)

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PROBE = "from coterie.kernels.cpu.build import native; found = native(); print(found and found.isa)"
# [[the module's instruction set, what was written to standard error], ...], one for each home
PROBE_HOMES = """
import contextlib, io, json, os, sys
from coterie.kernels.cpu.build import native
answers = []
for home in sys.argv[1:]:
    os.environ["COTERIE_HOME"] = home
    native.cache_clear()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        found = native()
    answers.append([found and found.isa, said.getvalue()])
print(json.dumps(answers))
"""
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_without_a_compiler_torch_serves(tmp_path: Path) -> None:
    code = (
        "import torch; from coterie.kernels.backend import best_backend, make_linear;"
        "from coterie.weights.quantize import DenseWeight; backend = best_backend('cpu');"
        "product = make_linear([DenseWeight(torch.eye(4))], backend);"
        "print(backend, product(torch.ones(1, 4)).sum())"
    )
    done = run(code, PATH=str(tmp_path), CXX="", COTERIE_HOME=str(tmp_path))
    assert done.stdout.split() == ["reference", "tensor(4.)"]
    assert "no C++ compiler" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.full
def test_switched_off_by_environment(tmp_path: Path) -> None:
    done = run(PROBE, COTERIE_NATIVE="0", COTERIE_HOME=str(tmp_path))
    assert done.stdout.strip() == "None"
    assert done.stderr == ""


@needs_compiler
@pytest.mark.full
def test_broken_compiler_is_explained(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'this compiler is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run(PROBE, CXX=str(broken), COTERIE_HOME=str(tmp_path))
    assert done.stdout.strip() == "None"
    assert "this compiler is broken" in done.stderr


@needs_compiler
@pytest.mark.full
def test_two_processes_compile_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROBE]
    environment = {**os.environ, "COTERIE_HOME": str(tmp_path), "COTERIE_CXXFLAGS": "-O0"}
    both = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=240) for process in both]
    assert all(out.strip() not in ("", "None") for out, _ in results)
    assert sum("compiling native kernels" in errors for _, errors in results) == 1
    assert len(list(tmp_path.rglob("*.so"))) == 1
    assert run(PROBE, COTERIE_HOME=str(tmp_path), COTERIE_CXXFLAGS="-O0").stderr == ""


@needs_compiler
@pytest.mark.full
@pytest.mark.timeout(1200)  # vectors that the compiler makes itself take minutes
@pytest.mark.parametrize("layer", ["bytes", "words", "amx"])
def test_other_layers_agree(layer: str, tmp_path: Path) -> None:
    """The portable vectors, with integers of one byte or two, and the AMX code over emulated tiles
    pass the same self-check."""
    flags = "-DCT_GENERIC -U__AMX_TILE__"  # nor the tiles of a CPU that has them
    if layer == "words":
        flags += " -DCT_WORDS=1"
    if layer == "amx":
        header = HERE / "amx_emulation.h"
        flags += f" -DCT_W_OFFSET=128 '-DCT_AMX_EMULATION=\"{header}\"'"
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.kernels.selfcheck", "--no-speed"],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "2",
            "COTERIE_HOME": str(tmp_path),
            "COTERIE_CXXFLAGS": flags,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("amx" if layer == "amx" else "generic") in done.stdout


# what a module says of itself, by the class of CPUs it is for; tiles have tests of their own
NAMES = {
    "avx512-vnni": "avx512+vnni",
    "avx512": "avx512",
    "avx2-vnni": "avx2+vnni",
    "avx2": "avx2",
    "dotprod": "neon+dotprod",
    "neon": "neon",
}
# qemu's AVX ends at AVX2
EMULATED = ("avx2", "dotprod", "neon")


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("machine", "one"),
    [
        pytest.param(machine, one, id=one.name)
        for machine, classes in CPU_CLASSES.items()
        for one in classes
        if one.name in NAMES
    ],
)
def test_instruction_sets(machine: str, one: CpuClass, tmp_path: Path) -> None:
    """On this CPU where it has the instructions, otherwise under an emulator that has them."""
    emulator = shutil.which(f"qemu-{machine}")
    if one.needs <= cpu_features():
        compiler, runner = find_compiler(), []
    else:
        compiler = shutil.which(f"{machine.replace('_', '-')}-linux-gnu-g++")
        runner = [str(emulator), "-cpu", "max", "-L", f"/usr/{machine}-linux-gnu"]
        if compiler is None or emulator is None or one.name not in EMULATED:
            pytest.skip("needs such a CPU, or g++ for it and qemu-user (but for AVX-512 and VNNI)")
    assert compiler is not None
    program = tmp_path / "check"
    sources = [str(HERE / "cross_check.cpp"), *map(str, SOURCES.glob("*.cpp"))]
    flags = ["-std=c++17", "-O2", *one.march.split(), "-w", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, "-o", str(program), *sources, "-fopenmp"], check=True)
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{NAMES[one.name]}: 0 failures\n")


class Built:
    """A home with a module that a compiler of its own made: as quick as a copy."""

    def __init__(self, folder: Path) -> None:
        found = native()
        assert found is not None
        self.isa, self.folder = found.isa, folder
        self.compiler = folder / "quick-c++"
        self.compiler.write_text(
            "#!/bin/sh\n"
            'case "$*" in *--version*) echo quick; exit;; esac\n'
            'while [ "$1" != -o ]; do last=$1; shift; done\n'
            f'cp "{found.path}" "$2"\n'
        )
        self.compiler.chmod(0o755)

    def probe(self, *homes: Path) -> list[str]:
        """What is said on the way to the module, in one process for all homes."""
        done = run(PROBE_HOMES, *map(str, homes), CXX=str(self.compiler))
        answers = json.loads(done.stdout)
        assert [isa for isa, _ in answers] == [self.isa] * len(homes)
        return [said for _, said in answers]


def cut(module: Path) -> None:
    os.truncate(module, module.stat().st_size // 3)


def replace_by_foreign(module: Path) -> None:
    module.write_bytes(module.read_bytes().replace(b"ct_isa", b"xx_isa"))


def make_writable(module: Path) -> None:
    module.chmod(0o777)


def replace_by_link(module: Path) -> None:
    elsewhere = module.parent.parent / "elsewhere.so"
    module.rename(elsewhere)
    module.symlink_to(elsewhere)


@pytest.mark.full
@needs_compiler
def test_a_harmed_module_is_built_again(tmp_path: Path) -> None:
    """A module that is cut short ends the process that loads it; one of others runs their code."""
    built = Built(tmp_path)
    first = tmp_path / "first"
    # the second time it is there
    said, again = built.probe(first, first)
    assert said != "" and again == ""
    [module] = (first / "kernels").glob("coterie-*.so")
    good, mode = module.read_bytes(), module.stat().st_mode
    harms = [cut, replace_by_foreign, make_writable, replace_by_link]
    homes = [tmp_path / harm.__name__ for harm in harms]
    modules = [home / "kernels" / module.name for home in homes]
    for home, harm, harmed in zip(homes, harms, modules, strict=True):
        shutil.copytree(first / "kernels", home / "kernels")
        harm(harmed)
    for harm, said in zip(harms, built.probe(*homes), strict=True):
        assert "building it again" in said, harm.__name__
    # as it was when it was built first, which the next process takes without a word
    for harmed in modules:
        assert harmed.read_bytes() == good and harmed.lstat().st_mode == mode
