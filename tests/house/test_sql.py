"""SQL is written as every supported Python takes it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def numbered(source: str) -> Iterator[int]:
    """Lines with a placeholder such as ?1 in a text."""
    if not re.search(r"\?\d", source):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if re.search(r"[\s(,=]\?\d", node.value):
            yield node.lineno


def test_no_placeholder_is_numbered() -> None:
    """From Python 3.14 on sqlite3 refuses ?1 with a sequence, and 3.12 warns: ? or :name."""
    assert list(numbered('"a = ?1"')) and not list(numbered('"a = ? AND b = :b"'))
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "coterie").rglob("*.py"))
        for line in numbered(path.read_text(encoding="utf-8"))
    ]
    assert not found
