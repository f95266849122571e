"""Fails when a hot type passes its field budget or a file has no name of its own.

Sizes are guides: files over 400 code lines and functions over 60 lines are printed, and pass.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE_FILE_LINES = 400
GUIDE_FUNCTION_LINES = 60
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


def code_lines(text: str, tree: ast.Module | None) -> int:
    """Lines without blanks, comments and docstrings."""
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith(("#", "//"))
    }
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def problems_in(path: Path) -> list[str]:
    """Prints what passes a guide, returns what breaks a rule."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text) if path.suffix == ".py" else None
    if (lines := code_lines(text, tree)) > GUIDE_FILE_LINES:
        print(f"guide: {name} has {lines} code lines (about {GUIDE_FILE_LINES} is right)")
    found = []
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > GUIDE_FUNCTION_LINES:
                print(f"guide: {name}:{node.lineno} {node.name} has {size} lines")
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
    print("\n".join(found) or "field budgets hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
