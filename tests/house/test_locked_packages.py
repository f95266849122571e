"""requirements/ lists everything that an installation gets, by digest."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(name: str) -> list[tuple[Requirement, str]]:
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    found = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]
    return [(Requirement(entry.partition(" \\")[0]), entry) for entry in found]


def versions_here(*names: str) -> dict[str, str]:
    """Package -> version, of the entries for this platform."""
    here: dict[str, str] = {}
    for name in names:
        for pin, _ in entries(name):
            if pin.marker is None or pin.marker.evaluate():
                here[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return here


@pytest.mark.parametrize("name", ["torch-cpu", "torch-pypi", "runtime", "dev", "node"])
def test_each_package_has_one_version_and_digests(name: str) -> None:
    assert entries(name)
    for pin, entry in entries(name):
        assert str(pin.specifier).startswith("=="), f"{pin} is not one version"
        assert HASH.search(entry), f"{pin} has no digest"


@pytest.mark.parametrize(
    ("lock", "extras"), [("runtime", ["grpc"]), ("dev", ["dev"])], ids=["runtime", "dev"]
)
def test_what_the_project_asks_for_is_listed(lock: str, extras: list[str]) -> None:
    listed = versions_here("torch-pypi", lock)
    asked = [*PROJECT["dependencies"]]
    for extra in extras:
        asked += PROJECT["optional-dependencies"][extra]
    for text in asked:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            version = listed.get(canonicalize_name(requirement.name))
            assert version, f"{text} is not in requirements/{lock}.txt: scripts/lock_packages.py"
            assert requirement.specifier.contains(version), f"{text}, but {version} is listed"


def test_the_builds_of_torch_are_of_one_version() -> None:
    cpu = versions_here("torch-cpu")["torch"]
    assert cpu.removesuffix("+cpu") == versions_here("torch-pypi")["torch"]


def test_the_server_runs_what_was_tested() -> None:
    tested = versions_here("dev")
    assert {name: tested.get(name) for name in versions_here("runtime")} == versions_here("runtime")


def test_the_constraints_are_the_same_versions() -> None:
    lines = (LOCKS / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:]
    listed = [pin for name in ("runtime", "torch-pypi") for pin, _ in entries(name)]
    assert sorted(str(Requirement(line)) for line in lines) == sorted(map(str, listed))


def test_this_environment_is_what_is_listed() -> None:
    if not Path(sys.prefix).is_relative_to(ROOT):
        pytest.skip("not the environment that `make setup` makes")
    listed = versions_here("torch-pypi", "node", "dev")
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {canonicalize_name(one.name): one.version for one in found}
    wrong = {
        name: version
        for name, version in installed.items()
        if name in listed and listed[name] != version.removesuffix("+cpu")
    }
    assert not wrong, f"not as listed in requirements/: {wrong}"


# what pip says; "from versions" names those that an index has
NO_CPU_BUILD = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu "
    "(from versions: 2.12.0, 2.13.0)"
)
ERRORS = {
    "no index has it": (NO_CPU_BUILD, "", True),
    "the index that was named does not have it": (NO_CPU_BUILD, "https://index", False),
    "no index answers": (NO_CPU_BUILD.replace("2.12.0, 2.13.0", "none"), "", False),
    "another digest": ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "", False),
    "the disk is full": ("ERROR: Could not install packages: No space left on device", "", False),
}


@pytest.mark.parametrize("name", ERRORS)
def test_setup_downloads_cuda_only_where_no_index_has_the_build_without(
    name: str, tmp_path: Path
) -> None:
    error, index, is_fallback = ERRORS[name]
    for file in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$*" >>calls\n'
        f'case "$*" in *torch-cpu.txt*) echo "{error}" >&2; exit 1;; esac\n'
    )
    python.chmod(0o755)
    # a machine without the driver
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "make", "grep", "cat", "touch", "echo"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    done = subprocess.run(
        ["make", "setup", f"TORCH_INDEX={index}"],
        cwd=tmp_path,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    calls = (tmp_path / "calls").read_text()
    assert "requirements/torch-cpu.txt" in calls and (index in calls)
    assert ("requirements/torch-pypi.txt" in calls) == is_fallback, done.stdout + done.stderr
    assert (done.returncode == 0) == is_fallback
    # what tests need comes after what serving needs
    assert ("requirements/dev.txt" in calls) == is_fallback
    # the reason is shown
    assert ("no index has" in done.stdout) if is_fallback else (error in done.stderr)


def test_other_cpu_builds_than_locked_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    lock_packages = import_module("lock_packages")
    for name in ("torch-cpu", "torch-pypi", "dev"):
        shutil.copy(LOCKS / f"{name}.txt", tmp_path)
    monkeypatch.setattr(lock_packages, "ROOT", tmp_path)
    monkeypatch.setattr(lock_packages, "LOCKS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["lock_packages.py"])
    locked = lock_packages.entries_of(lock_packages.pins_of("dev"))
    locked |= lock_packages.entries_of(lock_packages.pins_of("torch-pypi"))
    monkeypatch.setattr(lock_packages, "resolve", lambda *_: dict(locked))
    assert lock_packages.main() == 0
    version = locked["torch"].partition("==")[2].split()[0]
    locked["torch"] = locked["torch"].replace(version, "99.0.0")
    assert lock_packages.main() == 1
    assert "replace the version and the digests in torch-cpu.txt" in capsys.readouterr().out
