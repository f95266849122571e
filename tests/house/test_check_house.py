"""The gates of scripts/check_house.py tell each fault in a made-up tree, and pass a clean one; the
guides of scripts/house.py fail nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

GLOSSARY = """# Glossary

| word | meaning |
|---|---|
| **sequence** | a request that runs |
| **assignment** | what one replica is asked to run |
| **hit, miss** | how a demand was met |
| **Event** | what leaves the system: `Started` |
"""
# a clean package: imports run one way
CLEAN = {
    "coterie/__init__.py": "",
    "coterie/core/__init__.py": "",
    "coterie/core/request.py": "class InferenceRequest:\n    prompt: str\n",
    "coterie/core/plan.py": """
from __future__ import annotations

from typing import Protocol

from coterie.core.request import InferenceRequest


class RoutePlan:
    request: InferenceRequest


class Assignment:
    plan: RoutePlan


class TokenReader(Protocol): ...
""",
    "coterie/engine/__init__.py": "",
    "coterie/engine/step.py": """
import ctypes

from ..core import plan


class Sequence:
    assignment: plan.Assignment


class StepPlan: ...


class TokenReader: ...


class Started: ...


class Miss: ...


class _Private: ...


class Rows(ctypes.Structure): ...
""",
}


def tree(root: Path, **changed: str) -> Path:
    """The clean tree; `changed` by module, `core__sums="..."` writes coterie/core/sums.py."""
    files = CLEAN | {
        f"coterie/{name.replace('__', '/')}.py": text for name, text in changed.items()
    }
    for name, text in (files | {"docs/glossary.md": GLOSSARY}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def run(script: str, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), "--root", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    done = run("check_house.py", tree(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no import cycle" in done.stdout


TYPES_ONLY = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.core.plan import RoutePlan
"""


@pytest.mark.parametrize(
    ("module", "text", "told", "advice"),
    [
        pytest.param(
            "core__request",
            CLEAN["coterie/core/request.py"] + TYPES_ONLY,
            "import cycle: coterie.core.plan -> coterie.core.request -> coterie.core.plan",
            "Move what both sides need",
            id="cycle-of-types",
        ),
        pytest.param(
            "core__request",
            "from .plan import RoutePlan\n" + CLEAN["coterie/core/request.py"],
            "import cycle: coterie.core.plan -> coterie.core.request -> coterie.core.plan",
            "Move what both sides need",
            id="relative-cycle",
        ),
        pytest.param(
            "engine__other",
            "class RoutePlan: ...\n",
            "class name RoutePlan is in coterie.core.plan, coterie.engine.other",
            "Name each by what it holds",
            id="shared-name",
        ),
        pytest.param(
            "engine__other",
            "class Thing: ...\n",
            "class Thing in coterie.engine.other: add what it is of or for",
            "docs/glossary.md",
            id="one-word",
        ),
        pytest.param(
            "core__request",
            "class InferenceRequest:\n" + "".join(f"    field_{n}: int\n" for n in range(13)),
            "coterie.core.request InferenceRequest: 13 fields, the budget is 12",
            "a small type of its own",
            id="field-budget",
        ),
        pytest.param(
            "core__request",
            "class ChatRequest: ...\n",
            "no class InferenceRequest, but it has a field budget",
            "FIELD_BUDGETS",
            id="budget-of-nobody",
        ),
        pytest.param(
            "core__utils", "", "coterie.core.utils", "Name it by what it owns", id="file-name"
        ),
    ],
)
def test_a_fault_is_told_with_what_to_do(
    tmp_path: Path, module: str, text: str, told: str, advice: str
) -> None:
    done = run("check_house.py", tree(tmp_path, **{module: text}))
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if told in line]
    assert advice in line
    assert done.stdout.splitlines()[-1].startswith("1 broken rules")


def test_guides_are_printed_and_fail_nothing(tmp_path: Path) -> None:
    names = ", ".join(f"name_{n}" for n in range(7))
    tests = "".join(f"    if name_0 == {n}:\n        return {n}\n" for n in range(31))
    long = "".join(f"LINE_{n} = {n}\n" for n in range(401))
    root = tree(tmp_path, engine__wide=f"def wide({names}):\n{tests}\n{long}", core__utils="")
    done = run("house.py", root)
    assert done.returncode == 0, done.stderr
    found = json.loads(run("house.py", root, "--json").stdout)
    assert found["files"] == len(CLEAN) + 2
    assert found["folders"]["coterie/engine"]["files"] == 3
    assert list(found["files over the guide"]) == ["coterie/engine/wide.py"]
    assert found["functions over the guide"] == {"coterie.engine.wide:1 wide": 63}
    assert found["functions with many parameters"] == {"coterie.engine.wide:1 wide": 7}
    assert found["functions with many branches"] == {"coterie.engine.wide:1 wide": 32}
    assert "coterie.core.request" in found["small modules with one importer"]
    assert found["import cycles"] == [] and found["class names shared"] == {}
    assert "coterie.engine.wide:1 wide" in done.stdout
