"""Fails where the tree breaks a rule that a reader relies on; `make check` runs it.

- no module imports one that imports it, not even for its types;
- one public class name, one class (a Protocol and a ctypes structure may repeat the name of what
  they stand for);
- a public class name of one word stands in docs/glossary.md;
- the types that every request travels in keep to a number of fields;
- a file has a name that says what it owns.

Layers are import-linter's (pyproject.toml). Sizes are guides: scripts/house.py prints them.
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
# a feature that needs more fields brings a small type of its own
FIELD_BUDGETS = {
    "InferenceRequest": 12,
    "RoutePlan": 12,
    "Assignment": 12,
    "Sequence": 18,
    "StepPlan": 10,
}
EMPTY_NAMES = ("utils", "helpers", "misc", "common")


def cycle_problems(found: dict[str, Module]) -> Iterator[str]:
    for group in cycles(found):
        path = " -> ".join(shortest_cycle(found, group))
        yield (
            f"import cycle: {path}. Move what both sides need into a module that imports neither, "
            "or make one module of them; TYPE_CHECKING imports count."
        )


def shortest_cycle(found: dict[str, Module], group: list[str]) -> list[str]:
    """The shortest way from a module of the group back to itself."""
    best: list[str] = []
    for start in group:
        waiting, seen = deque([[start]]), {start}
        while waiting:
            path = waiting.popleft()
            reached = found[path[-1]].imports
            if start in reached:
                if not best or len(path) < len(best) - 1:
                    best = [*path, start]
                break
            for name in sorted(reached & set(group) - seen):
                seen.add(name)
                waiting.append([*path, name])
    return best


def shared_name_problems(found: dict[str, Module]) -> Iterator[str]:
    for name, places in shared_class_names(found).items():
        yield (
            f"class name {name} is in {', '.join(places)}. Name each by what it holds, "
            "or put a leading underscore where no other module uses it."
        )


def glossary_names(text: str) -> set[str]:
    """The words in bold in the first column, and every `name` in backticks; lower case."""
    bold = re.findall(r"^\|\s*\*\*(.+?)\*\*", text, re.M)
    words = {word.strip() for entry in bold for word in entry.split(",")}
    return {word.lower() for word in words | set(re.findall(r"`(\w+)`", text))}


def is_one_word(name: str) -> bool:
    """`Reader` and `LLM` are, `TokenReader` and `KvPool` are not."""
    return len(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)) == 1


def one_word_problems(found: dict[str, Module], glossary: set[str]) -> Iterator[str]:
    for module in found.values():
        for node in module.public_classes():
            known = node.name.lower() in glossary or "Structure" in base_names(node)
            if is_one_word(node.name) and not known:
                yield (
                    f"class {node.name} in {module.name}: add what it is of or for, or explain "
                    f"the word in {GLOSSARY.as_posix()} if it is a term of this system"
                )


def field_problems(found: dict[str, Module]) -> Iterator[str]:
    classes = {node.name: (m, node) for m in found.values() for node in m.public_classes()}
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


def file_name_problems(found: dict[str, Module]) -> Iterator[str]:
    for module in found.values():
        if module.name.rpartition(".")[2] in EMPTY_NAMES:
            yield f"{module.name}: the file's name says nothing. Name it by what it owns."


def problems(root: Path) -> list[str]:
    found = read_modules(root)
    glossary = glossary_names((root / GLOSSARY).read_text(encoding="utf-8"))
    return [
        *cycle_problems(found),
        *shared_name_problems(found),
        *one_word_problems(found, glossary),
        *field_problems(found),
        *file_name_problems(found),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree; this one by default")
    found = problems(parser.parse_args().root.resolve())
    for problem in found:
        print(problem)
    if found:
        print(f"{len(found)} broken rules in {PACKAGE}/")
    else:
        print("no import cycle, class names are unique and explained, field budgets hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
