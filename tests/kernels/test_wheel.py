"""A wheel that carries the native kernels: for each class of CPUs, used without a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from coterie.kernels.cpu.compile import (
    CPU_CLASSES,
    CpuClass,
    best_class,
    cpu_features,
    find_compiler,
)
from coterie.packages import shipped

ROOT = Path(__file__).resolve().parents[2]
HERE = CPU_CLASSES.get(platform.machine(), ())

# as /proc/cpuinfo of such a machine spells them; what none of the classes asks for is left out
HASWELL = "avx avx2 bmi1 bmi2 f16c fma abm movbe sse4_2 popcnt"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
ZEN4 = f"{SKYLAKE} avx512_vnni avx512_bf16 avx512_vbmi"
SAPPHIRE_RAPIDS = f"{ZEN4} avx_vnni amx_tile amx_int8 amx_bf16"
CORTEX_A72 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
NEOVERSE_N1 = f"{CORTEX_A72} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"


@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", "sse4_2 popcnt avx", None),
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", f"{HASWELL} avx_vnni", "avx2-vnni"),
        ("x86_64", SKYLAKE, "avx512"),
        # a hypervisor may hide any one of them
        ("x86_64", SKYLAKE.replace(" avx512dq", ""), "avx2"),
        ("x86_64", ZEN4, "avx512-vnni"),
        ("x86_64", SAPPHIRE_RAPIDS, "amx"),
        ("x86_64", SAPPHIRE_RAPIDS.replace(" amx_bf16", ""), "avx512-vnni"),
        ("aarch64", CORTEX_A72, "neon"),
        ("aarch64", NEOVERSE_N1, "dotprod"),
        ("x86_64", "", None),
        ("riscv64", "", None),
    ],
)
def test_a_cpu_gets_the_best_module_that_it_can_run(
    machine: str, features: str, name: str | None
) -> None:
    found = best_class(machine, features.split())
    assert (found and found.name) == name


# the compiler's macro for each feature that is not simply its name
MACROS = {
    "bmi1": "__BMI__",
    "abm": "__LZCNT__",
    "avx512_vnni": "__AVX512VNNI__",
    "avx_vnni": "__AVXVNNI__",
    "asimddp": "__ARM_FEATURE_DOTPROD",
    "asimdrdm": "__ARM_FEATURE_QRDMX",
    "atomics": "__ARM_FEATURE_ATOMICS",
    "crc32": "__ARM_FEATURE_CRC32",
}
# every CPU with AVX2 has these too
WITH_AVX2 = {
    *("__SSE3__", "__SSSE3__", "__SSE4_1__", "__SSE4_2__", "__POPCNT__", "__CRC32__", "__XSAVE__"),
    *("__LAHF_SAHF__", "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16", "__EVEX256__", "__EVEX512__"),
}


def instructions(compiler: str, march: str) -> set[str]:
    """The macros of a compiler that name instructions which it may use."""
    done = subprocess.run(
        [compiler, *march.split(), "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.split()[1] for line in done.stdout.splitlines()}
    if platform.machine() == "aarch64":
        return {name for name in names if name.startswith("__ARM_FEATURE_")}
    return {name for name in names if not name.startswith(("__FP_FAST", "__BIGGEST"))}


@pytest.mark.skipif(find_compiler() is None or not HERE, reason="no compiler, or no classes")
@pytest.mark.parametrize("one", HERE, ids=lambda one: one.name)
def test_a_class_needs_all_that_its_compiler_may_use(one: CpuClass) -> None:
    """An instruction that a CPU lacks ends the process."""
    compiler = find_compiler()
    assert compiler is not None
    base = "-march=x86-64" if platform.machine() == "x86_64" else "-march=armv8-a"
    enabled = instructions(compiler, one.march) - instructions(compiler, base) - WITH_AVX2
    assert enabled <= {MACROS.get(name, f"__{name.upper()}__") for name in one.needs}


INSTALLED = """
from coterie.kernels.cpu.build import native
import coterie
found = native()
print(coterie.__file__)
print(found and found.path)
print(found and found.isa)
"""


@pytest.mark.full
@pytest.mark.timeout(1800)  # five modules
@pytest.mark.skipif(find_compiler() is None or not HERE, reason="no compiler, or no classes")
def test_nothing_is_compiled_where_the_wheel_is_installed(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    shutil.copytree(
        ROOT / "coterie", source / "coterie", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*build, "-w", str(wheels), str(source)],
        env={**os.environ, "COTERIE_WHEEL_KERNELS": "1"},
        check=True,
    )
    [wheel] = wheels.iterdir()
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    carried = [name for name in names if name.startswith("coterie/kernels/cpu/modules/")]
    assert len(carried) == len(HERE)
    assert {f"coterie/packages/shipped/{path.name}" for path in shipped.files()} <= set(names)

    # beside the packages of this environment, but not its coterie
    python = tmp_path / "venv/bin/python"
    venv.create(tmp_path / "venv", symlinks=True)
    site = tmp_path / f"venv/lib/python{sysconfig.get_python_version()}/site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def probe() -> tuple[list[str], str]:
        done = subprocess.run(
            [python, "-c", INSTALLED],
            env={"PATH": str(tmp_path), "COTERIE_HOME": str(tmp_path / "home")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split(), done.stderr

    (package, module, isa), said = probe()
    assert Path(package).is_relative_to(site) and Path(module).is_relative_to(site)
    mine = best_class(platform.machine(), cpu_features())
    assert mine is not None and Path(module).name.startswith(f"{mine.name}-")
    # "avx512-vnni" and "avx512+vnni": a virtual machine may refuse the tiles that its CPU has
    assert isa.split("+")[0] == ("neon" if mine.name == "dotprod" else mine.name.split("-")[0])
    assert said == "" and not (tmp_path / "home").exists()

    # cut short, it is not loaded: loading it would end the process
    os.truncate(module, Path(module).stat().st_size // 3)
    (_, module, _), said = probe()
    assert module == "None" and "no C++ compiler" in said
