"""Fails when a source file passes 300 lines, a function 60, or a hot type its field budget.

A file or function that must be longer is listed in EXCEPTIONS with its reason.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
EXCEPTIONS: dict[str, str] = {}
# design: a feature that needs more brings its own small type
FIELD_BUDGETS = {
    ("coterie/core/request.py", "InferenceRequest"): 12,
    ("coterie/core/plan.py", "RoutePlan"): 12,
    ("coterie/core/plan.py", "Assignment"): 12,
    ("coterie/engine/sequence.py", "Sequence"): 18,
    ("coterie/engine/step.py", "StepPlan"): 10,
}
SUFFIXES = {".py", ".cpp", ".h"}


def tracked_sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "coterie", "scripts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:  # an unpacked source archive has no git
        return [p for d in ("coterie", "scripts") for p in (ROOT / d).rglob("*")]
    return [ROOT / line for line in listed.stdout.splitlines()]


def fields(node: ast.ClassDef) -> int:
    return sum(isinstance(item, ast.AnnAssign) for item in node.body)


def problems_in(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    found = []
    lines = text.count("\n")
    if lines > MAX_FILE_LINES and name not in EXCEPTIONS:
        found.append(f"{name}: {lines} lines, the ceiling is {MAX_FILE_LINES}")
    if path.suffix != ".py":
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > MAX_FUNCTION_LINES and f"{name}:{node.name}" not in EXCEPTIONS:
                found.append(f"{name}:{node.lineno} {node.name}: {size} lines, the ceiling is 60")
        if isinstance(node, ast.ClassDef):
            budget = FIELD_BUDGETS.get((name, node.name))
            if budget is not None and fields(node) > budget:
                found.append(f"{name} {node.name}: {fields(node)} fields, the budget is {budget}")
    return found


def missing_types() -> list[str]:
    found = []
    for (name, cls), _ in FIELD_BUDGETS.items():
        path = ROOT / name
        if not path.exists() or f"class {cls}" not in path.read_text(encoding="utf-8"):
            found.append(f"{name}: no class {cls}, but it has a field budget")
    return found


def main() -> int:
    found = missing_types()
    for path in tracked_sources():
        if path.suffix in SUFFIXES and path.exists():
            found.extend(problems_in(path))
            if path.stem in ("utils", "helpers", "misc"):
                found.append(
                    f"{path.relative_to(ROOT)}: a file needs a name that says what it owns"
                )
    print("\n".join(found) or "sizes and field budgets hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
