"""Whether a text holds code or names a language. Patterns only: nothing is run or parsed."""

from __future__ import annotations

import re
from collections.abc import Collection

# words that name a language -> its name here; tree-sitter's names where it has one
_NAMED = {
    "python": "python", "py": "python", "python3": "python", "pandas": "python", "numpy": "python",
    "django": "python", "pytest": "python", "javascript": "javascript", "js": "javascript",
    "node": "javascript", "nodejs": "javascript", "node.js": "javascript", "react": "javascript",
    "typescript": "typescript", "ts": "typescript", "sql": "sql", "postgres": "sql",
    "postgresql": "sql", "mysql": "sql", "sqlite": "sql", "rust": "rust", "golang": "go",
    "java": "java", "kotlin": "kotlin", "swift": "swift", "c++": "cpp", "cpp": "cpp",
    "c#": "c_sharp", "csharp": "c_sharp", "ruby": "ruby", "rails": "ruby", "php": "php",
    "bash": "bash", "shell": "bash", "zsh": "bash", "html": "html", "css": "css",
    "haskell": "haskell", "scala": "scala", "perl": "perl", "lua": "lua", "regex": "regex",
    "yaml": "yaml", "dockerfile": "dockerfile", "cypher": "cypher", "powershell": "powershell",
}  # fmt: skip
# short or common words that name a language only in company
_IN_COMPANY = re.compile(
    r"\b(?:in|using|with|a|an)\s+(go|c|r)\b(?=\s*(?:[,.:;?!)]|$|program|func|code|script))"
)
_COMPANY = {"go": "go", "c": "c", "r": "r"}
_FENCE = re.compile(r"```[ \t]*([\w+#.-]{0,20})")
# (language, what only its sources look like), tried in order
_LOOKS = (
    ("python", re.compile(r"^\s*(?:def \w+\(|class \w+.*:|import \w+$|from [\w.]+ import )", re.M)),
    ("rust", re.compile(r"\bfn \w+\s*[<(]|\blet mut \w+|\bimpl(?:<.*>)? \w+")),
    ("go", re.compile(r"^func (?:\(\w+ \*?\w+\) )?\w+\(|^package \w+$", re.M)),
    ("cpp", re.compile(r"^\s*#include\s*<\w+>|std::\w+", re.M)),
    ("c", re.compile(r"^\s*#include\s*[<\"]\w+\.h[>\"]|\bint main\(", re.M)),
    ("java", re.compile(r"\bpublic (?:static |final )*(?:class|void|int|String) \w+")),
    ("typescript", re.compile(r"\binterface \w+ \{|:\s*(?:string|number|boolean)\s*[;,)=]")),
    ("javascript", re.compile(r"\bfunction \w*\(|\b(?:const|let|var) \w+\s*=|=>\s*[{(]")),
    ("sql", re.compile(r"\b(?:SELECT\s[^;]{1,200}?\sFROM|INSERT INTO|CREATE TABLE)\s", re.I)),
    ("html", re.compile(r"</(?:div|html|body|p|span|a|table)>|<!DOCTYPE", re.I)),
    ("bash", re.compile(r"^#!/bin/(?:ba)?sh|^\s*\$ \w+", re.M)),
)  # fmt: skip
# without one of these no pattern above can hold
_MARKS = re.compile(r"[(<{=$#]|\bSELECT\b|\bINSERT\b|\bUPDATE\b|\bimport\b|\bpackage\b", re.I)


def code_in(text: str) -> tuple[bool, str]:
    """(whether there is code, its language or "")."""
    fence = _FENCE.search(text)
    if fence is not None:
        said = fence.group(1).lower()
        return said not in ("text", "txt", "json", "md", "markdown"), _NAMED.get(said, said)
    if _MARKS.search(text) is None:
        return False, ""
    for name, look in _LOOKS:
        if look.search(text) is not None:
            return True, name
    return False, ""


def language_named(words: Collection[str], text: str) -> str:
    """The programming language that a text speaks of, the first one it names."""
    for word in words:
        if word in _NAMED:
            return _NAMED[word]
    found = _IN_COMPANY.search(text)
    return "" if found is None else _COMPANY[found.group(1)]
