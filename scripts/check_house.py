"""Fails if the tree breaks a rule that readers rely on; `make check` runs it.

- no import cycles, not even for types;
- one public class name, one class (a Protocol and a ctypes structure may have the name of the
  class they describe);
- a public class name of one word is in docs/glossary.md;
- the types that every request uses have a limited number of fields;
- a file has a name that says what it contains.

Layers are checked by import-linter (pyproject.toml). Sizes are guides: scripts/house.py prints
them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from house import PACKAGE, ROOT, Module, base_names, cycles, read_modules, shared_class_names

GLOSSARY = Path("docs") / "glossary.md"
# a feature that needs more fields adds its own small type
FIELD_BUDGETS = {
    "InferenceRequest": 12,
    "RoutePlan": 12,
    "Assignment": 12,
    "Sequence": 18,
    "StepPlan": 10,
}
EMPTY_NAMES = ("utils", "helpers", "misc", "common")


def cycle_problems(modules: dict[str, Module]) -> Iterator[str]:
    for group in cycles(modules):
        path = " -> ".join(shortest_cycle(modules, group))
        yield (
            f"import cycle: {path}. Move what both sides need into a module that imports neither, "
            "or make one module of them; TYPE_CHECKING imports count."
        )


def shortest_cycle(modules: dict[str, Module], group: list[str]) -> list[str]:
    """The shortest path from a module of the group back to itself."""
    best: list[str] = []
    for start in group:
        waiting, seen = deque([[start]]), {start}
        while waiting:
            path = waiting.popleft()
            reached = modules[path[-1]].imports
            if start in reached:
                if not best or len(path) < len(best) - 1:
                    best = [*path, start]
                break
            for name in sorted(reached & set(group) - seen):
                seen.add(name)
                waiting.append([*path, name])
    return best


def shared_name_problems(modules: dict[str, Module]) -> Iterator[str]:
    for name, places in shared_class_names(modules).items():
        yield (
            f"class name {name} is in {', '.join(places)}. Name each by what it holds, "
            "or put a leading underscore where no other module uses it."
        )


def glossary_names(text: str) -> set[str]:
    """The words in bold in the first column, and every `name` in backticks; in lower case."""
    bold = re.findall(r"^\|\s*\*\*(.+?)\*\*", text, re.M)
    words = {word.strip() for entry in bold for word in entry.split(",")}
    return {word.lower() for word in words | set(re.findall(r"`(\w+)`", text))}


def is_one_word(name: str) -> bool:
    """`Reader` and `LLM` are one word, `TokenReader` and `KvPool` are not."""
    return len(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)) == 1


def one_word_problems(modules: dict[str, Module], glossary: set[str]) -> Iterator[str]:
    for module in modules.values():
        for node in module.public_classes():
            known = node.name.lower() in glossary or "Structure" in base_names(node)
            if is_one_word(node.name) and not known:
                yield (
                    f"class {node.name} in {module.name}: add what it is of or for, or explain "
                    f"the word in {GLOSSARY.as_posix()} if it is a term of this system"
                )


def field_problems(modules: dict[str, Module]) -> Iterator[str]:
    classes = {node.name: (m, node) for m in modules.values() for node in m.public_classes()}
    for name, budget in FIELD_BUDGETS.items():
        if name not in classes:
            yield (
                f"no class {name}, but it has a field budget. Follow the new name in "
                "FIELD_BUDGETS of scripts/check_house.py."
            )
            continue
        module, node = classes[name]
        if (count := field_count(node)) > budget:
            yield (
                f"{module.name} {name}: {count} fields, the budget is {budget}. Put what belongs "
                "together into a small type of its own."
            )


def field_count(node: ast.ClassDef) -> int:
    return sum(
        isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
        for item in node.body
    )


def file_name_problems(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if module.name.rpartition(".")[2] in EMPTY_NAMES:
            yield f"{module.name}: the file's name says nothing. Name it by what it owns."


def problems(root: Path) -> list[str]:
    modules = read_modules(root)
    glossary = glossary_names((root / GLOSSARY).read_text(encoding="utf-8"))
    return [
        *cycle_problems(modules),
        *shared_name_problems(modules),
        *one_word_problems(modules, glossary),
        *field_problems(modules),
        *file_name_problems(modules),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree; this one by default")
    messages = problems(parser.parse_args().root.resolve())
    for problem in messages:
        print(problem)
    if messages:
        print(f"{len(messages)} broken rules in {PACKAGE}/")
    else:
        print("no import cycle, class names are unique and explained, field budgets hold")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
