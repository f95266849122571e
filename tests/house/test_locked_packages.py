"""requirements/ lists everything that an installation gets, by digest."""

from __future__ import annotations

import re
import sys
import sysconfig
import tomllib
from importlib import metadata
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
