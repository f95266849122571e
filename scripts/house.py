"""Prints how the tree is built: `make house`, or `python scripts/house.py [--json] [--root DIR]`.

Guides, not gates: nothing here fails a build (scripts/check_house.py does). Files and code lines
by folder, long files and functions, many parameters, branches, small modules with one importer,
class names that several modules share, import cycles (type-checking imports counted).
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "coterie"
FILES_PER_FOLDER, FILE_LINES, FUNCTION_LINES, PARAMETERS = 15, 400, 60, 6
SMALL_MODULE_LINES, BRANCHES = 90, 10
# the parameters of a kernel are the tensors and sizes that it reads
MANY_PARAMETERS_ALLOWED = f"{PACKAGE}.kernels"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


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

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def public_classes(self) -> Iterator[ast.ClassDef]:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node


@dataclass(frozen=True)
class Function:
    place: str
    name: str
    lines: int
    parameters: int
    branches: int


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of the package under `root` by dotted name; files written by protoc are left
    out."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if path.name.endswith("_pb2.py"):
            continue
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
        modules[name] = Module(name, path, tree, code_lines(text, tree))
    for module in modules.values():
        module.imports = {name for name in _imported(module, modules) if name != module.name}
    return modules


def code_lines(text: str, tree: ast.Module | None = None) -> int:
    """Lines without blanks, comments and docstrings."""
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("//" if tree is None else "#")
    }
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _imported(module: Module, known: dict[str, Module]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            source = _source(module, node)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in known:
                    yield inner
                elif source in known:
                    yield source


def _source(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name that a `from ... import` reads, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def cycles(modules: dict[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(modules[name].imports):
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

    for name in modules:
        if name not in number:
            visit(name)
    return groups


def base_names(node: ast.ClassDef) -> set[str]:
    """The last part of each base class: `ctypes.Structure` is `Structure`."""
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}


def shared_class_names(modules: dict[str, Module]) -> dict[str, list[str]]:
    """Public classes only; a Protocol and a ctypes structure may have the name of what they
    describe."""
    where: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in module.public_classes():
            if not base_names(node) & {"Protocol", "Structure"}:
                where[node.name].append(module.name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def one_importer(modules: dict[str, Module]) -> list[tuple[str, str, int]]:
    """Small modules that only one module of their own package imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name in module.imports:
            importers[name].add(module.name)
    return [
        (name, next(iter(importers[name])), module.lines)
        for name, module in modules.items()
        if len(importers[name]) == 1
        and module.lines <= SMALL_MODULE_LINES
        and modules[next(iter(importers[name]))].package == module.package
        and not module.is_package
    ]


def functions(modules: dict[str, Module]) -> Iterator[Function]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, FUNCTION):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                of_object = bool(given) and given[0].arg in ("self", "cls")
                place = f"{module.name}:{node.lineno}"
                yield Function(place, node.name, size, len(given) - of_object, branches(node))


def branches(function: FUNCTION) -> int:
    """Number of paths through a function: one, plus one for each branch. A function inside it is
    counted separately."""
    count, waiting = 1, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, FUNCTION | ast.Lambda):
            continue
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.Match):
            count += len(node.cases)
        else:
            turns = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler
            count += isinstance(node, turns)
        waiting.extend(ast.iter_child_nodes(node))
    return count


def folders(modules: dict[str, Module], root: Path) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "code lines": 0})
    for module in modules.values():
        folder = sizes[module.path.parent.relative_to(root).as_posix()]
        folder["files"] += 1
        folder["code lines"] += module.lines
    return dict(sorted(sizes.items()))


def long_files(modules: dict[str, Module], root: Path) -> dict[str, int]:
    sizes = {m.path.relative_to(root).as_posix(): m.lines for m in modules.values()}
    for path in sorted((root / PACKAGE).rglob("*")):
        if path.suffix in (".cpp", ".h", ".cu"):
            text = path.read_text(encoding="utf-8")
            sizes[path.relative_to(root).as_posix()] = code_lines(text)
    return {name: lines for name, lines in sizes.items() if lines > FILE_LINES}


def measure(root: Path) -> dict[str, object]:
    modules = read_modules(root)
    all_functions = list(functions(modules))
    by_folder = folders(modules, root)
    return {
        "files": len(modules),
        "code lines": sum(module.lines for module in modules.values()),
        "folders": by_folder,
        "folders over the guide": {
            name: sizes["files"]
            for name, sizes in by_folder.items()
            if sizes["files"] > FILES_PER_FOLDER
        },
        "files over the guide": long_files(modules, root),
        "functions over the guide": {
            f"{f.place} {f.name}": f.lines for f in all_functions if f.lines > FUNCTION_LINES
        },
        "functions with many parameters": {
            f"{f.place} {f.name}": f.parameters
            for f in all_functions
            if f.parameters > PARAMETERS and not f.place.startswith(MANY_PARAMETERS_ALLOWED)
        },
        "functions with many branches": {
            f"{f.place} {f.name}": f.branches for f in all_functions if f.branches > BRANCHES
        },
        "small modules with one importer": {
            name: f"{lines} lines, for {importer}"
            for name, importer, lines in one_importer(modules)
        },
        "class names shared": shared_class_names(modules),
        "import cycles": cycles(modules),
    }


# the guide for each figure, printed with it
ADVICE = {
    "folders": "files and code lines in each",
    "folders over the guide": f"files; about {FILES_PER_FOLDER} is right, then a subfolder",
    "files over the guide": f"code lines; about {FILE_LINES}, more where it is one thought",
    "functions over the guide": f"lines; about {FUNCTION_LINES}",
    "functions with many parameters": f"about {PARAMETERS} outside kernels, then a type",
    "functions with many branches": f"about {BRANCHES}, then a function for a case",
    "small modules with one importer": f"under {SMALL_MODULE_LINES} lines: join the importer, "
    "unless it is a row of a table (strategy, adapter kind, architecture, command, validator)",
    "class names shared": "one name, one class: `make check` fails",
    "import cycles": "none: `make check` fails",
}


def show(value: object) -> Iterator[str]:
    """One line for each item, the largest first."""
    if isinstance(value, dict):
        ordered = list(value.items())
        if all(isinstance(size, int) for _, size in ordered):
            ordered.sort(key=lambda row: -row[1])
        for name, what in ordered:
            if isinstance(what, dict):
                what = "  ".join(f"{number:6,}" for number in what.values())
            yield f"  {name:64} {', '.join(what) if isinstance(what, list) else what}"
    elif isinstance(value, list):
        yield from (f"  {' <-> '.join(group)}" for group in value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree; this one by default")
    arguments = parser.parse_args()
    figures = measure(arguments.root.resolve())
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for name, advice in ADVICE.items():
        print(f"\n{name} ({advice})")
        print("\n".join(show(figures[name])) or "  none")
    print("\ntotals")
    for name, value in figures.items():
        print(f"  {name:34} {len(value) if isinstance(value, dict | list) else value:8}")


if __name__ == "__main__":
    main()
