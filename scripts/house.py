"""Measures the tree: `python scripts/house.py [--json]`. Guides, never gates: they fail nothing.

Files and code lines by folder, class names that several modules share, modules with one importer,
import cycles (type-checking imports counted), long files and functions, many parameters.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "coterie"
FILES_PER_FOLDER, FILE_LINES, FUNCTION_LINES, PARAMETERS, SMALL_MODULE_LINES = 15, 400, 60, 6, 90


@dataclass
class Module:
    name: str
    path: Path
    tree: ast.Module
    lines: int
    imports: set[str] = field(default_factory=set)

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines without blanks, comments and docstrings."""
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def modules() -> dict[str, Module]:
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        if path.name.endswith("_pb2.py"):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found[name] = Module(name, path, tree, code_lines(text, tree))
    for module in found.values():
        module.imports = {name for name in _imported(module, found) if name != module.name}
    return found


def _imported(module: Module, known: dict[str, Module]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


def cycles(found: dict[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(found[name].imports):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in found:
        if name not in number:
            visit(name)
    return groups


def shared_class_names(found: dict[str, Module]) -> dict[str, list[str]]:
    """Public classes only; a Protocol and a ctypes structure may name what they stand for."""
    where: dict[str, list[str]] = defaultdict(list)
    for module in found.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                if not bases & {"Protocol", "Structure"}:
                    where[node.name].append(module.name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def one_importer(found: dict[str, Module]) -> list[tuple[str, str, int]]:
    """Small modules that one module of their own package imports, and nothing else."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in found.values():
        for name in module.imports:
            importers[name].add(module.name)
    return [
        (name, next(iter(importers[name])), module.lines)
        for name, module in found.items()
        if len(importers[name]) == 1
        and module.lines <= SMALL_MODULE_LINES
        and found[next(iter(importers[name]))].package == module.package
        and module.path.name != "__init__.py"
    ]


def long_functions(found: dict[str, Module]) -> Iterator[tuple[str, str, int, int]]:
    for module in found.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                given = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                if node.args.args and node.args.args[0].arg in ("self", "cls"):
                    given -= 1
                yield module.name, node.name, size, given


def measure() -> dict[str, object]:
    found = modules()
    functions = list(long_functions(found))
    folders = Counter(str(module.path.parent.relative_to(ROOT)) for module in found.values())
    return {
        "files": len(found),
        "code lines": sum(module.lines for module in found.values()),
        "folders over the guide": {f: n for f, n in folders.items() if n > FILES_PER_FOLDER},
        "files over the guide": {m.name: m.lines for m in found.values() if m.lines > FILE_LINES},
        "class names shared": shared_class_names(found),
        "small modules with one importer": one_importer(found),
        "import cycles": cycles(found),
        "functions over the guide": [f for f in functions if f[2] > FUNCTION_LINES],
        "functions with many parameters": [
            f for f in functions if f[3] > PARAMETERS and not f[0].startswith("coterie.kernels")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    arguments = parser.parse_args()
    found = measure()
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        print(f"{name:34} {value if isinstance(value, int) else len(value)}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
