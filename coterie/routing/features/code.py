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
LANGUAGES = frozenset(_NAMED.values())
# short or common words that name a language only in company
_IN_COMPANY = re.compile(
    r"\b(?:in|using|with|a|an)\s+(go|c|r)\b(?=\s*(?:[,.:;?!)]|$|program|func|code|script))"
)
_FENCE = re.compile(r"```[ \t]*([\w+#.-]{0,20})")
# (language, words without which its pattern cannot hold, what only its sources look like)
_LOOKS = (
    ("python", ("def ", "class ", "import "),
     re.compile(r"^[ \t]*(?:def \w+\(|class \w+[^\n]*:|import \w+$|from [\w.]+ import )", re.M)),
    ("rust", ("fn ", "let mut ", "impl"),
     re.compile(r"\bfn \w+\s*[<(]|\blet mut \w+|\bimpl(?:<[^>\n]*>)? \w+[^\n]*\{")),
    ("go", ("func ", "package "),
     re.compile(r"^func (?:\(\w+ \*?\w+\) )?\w+\(|^package \w+$", re.M)),
    ("cpp", ("#include", "std::"), re.compile(r"^[ \t]*#include\s*<\w+>|std::\w+", re.M)),
    ("c", ("#include", "int main("),
     re.compile(r"^[ \t]*#include\s*[<\"]\w+\.h[>\"]|\bint main\(", re.M)),
    ("java", ("public ",),
     re.compile(r"\bpublic (?:static |final )*(?:class|void|int|String) \w+")),
    ("typescript", ("interface ", ": string", ": number", ": boolean"),
     re.compile(r"\binterface \w+ \{|:\s*(?:string|number|boolean)\s*[;,)=]")),
    ("javascript", ("function ", "function(", "const ", "let ", "var ", "=>"),
     re.compile(r"\bfunction \w*\(|\bfunction\(|\b(?:const|let|var) \w+\s*=|=>\s*[{(]")),
    ("html", ("</", "<!"),
     re.compile(r"</(?:div|html|body|p|span|a|table|ul|h1)>|<!DOCTYPE", re.I)),
    ("bash", ("#!/bin/",), re.compile(r"^#!/bin/(?:ba)?sh", re.M)),
)  # fmt: skip
# of the text in lower case: people write it in both
_SQL = re.compile(
    r"\bselect\s[^;]{1,200}?\sfrom\s+\w+\s*(?:;|$|where|join|group|order|limit|inner|left)"
    r"|\binsert into \w+\s*(?:\(|values|select)|\bcreate table \w+\s*\(|\bupdate \w+ set \w+\s*="
)
_PLAIN_FENCES = ("text", "txt", "json", "md", "markdown", "csv")


def code_in(text: str, lowered: str) -> tuple[bool, str]:
    """(whether there is code, its language or "")."""
    fence = _FENCE.search(text) if "```" in text else None
    if fence is not None:
        said = fence.group(1).lower()
        return said not in _PLAIN_FENCES, "" if said in _PLAIN_FENCES else _NAMED.get(said, said)
    for name, needed, look in _LOOKS:
        if any(word in text for word in needed) and look.search(text) is not None:
            return True, name
    found = any(w in lowered for w in ("select", "insert", "create table", "update"))
    return (True, "sql") if found and _SQL.search(lowered) is not None else (False, "")


def language_named(words: Collection[str], text: str) -> str:
    """The programming language that a text speaks of, the first one it names."""
    for word in words:
        if word in _NAMED:
            return _NAMED[word]
    found = _IN_COMPANY.search(text)
    return "" if found is None else found.group(1)
