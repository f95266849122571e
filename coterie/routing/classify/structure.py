"""Finds structures in a text that show what it is about: stack traces, diffs, build files, C++
templates, SQL, logs, JSON.

Each is a name that specialists may list in `intents`. The text has a limited length, and no pattern
takes more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# least lines that look like those of a log, least keys of JSON, least marks of C++ templates
_LOG_LINES, _JSON_KEYS, _TEMPLATE_MARKS = 2, 2, 3

_STACK_TRACE = re.compile(
    r"^Traceback \(most recent call last\)|^ *File \"[^\"\n]{1,200}\", line \d+, in "
    r"|^[ \t]+at [\w$.<>]{1,200}\([\w.]{0,80}(?::\d+)?\)|^Exception in thread \""
    r"|^[ \t]+at (?:async )?[\w$.<>\[\] ]{0,80}\(?[^()\n]{1,200}:\d+:\d+\)?$"
    r"|^goroutine \d+ \[|^thread '[^'\n]{1,80}' panicked at |^Caused by: [\w.]+"
    r"|^#\d+ +0x[0-9a-f]+ in |^[ \t]+from [^\s:]{1,200}:\d+:in |^[ \t]+at .{1,200}:line \d+$",
    re.M,
)
_DIFF = re.compile(
    r"^diff --git |^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@|^--- [^\n]{1,200}\n\+\+\+ ", re.M
)
_DOCKER_FROM = re.compile(r"^FROM [\w./:-]+", re.M)
_DOCKER_STEP = re.compile(r"^(?:RUN|CMD|COPY|ENTRYPOINT|WORKDIR|ADD) ", re.M)
_MAKE = re.compile(r"^[\w.%$()/-]{1,60}(?: [\w.%$()/-]{1,60})* ?:[^=\n]{0,200}\n\t\S", re.M)
_BUILD = re.compile(
    r"^ *(?:cmake_minimum_required|add_executable|add_library|target_link_libraries) ?\("
    r"|^\[(?:build-system|tool\.[\w.-]{1,40}|dependencies|dev-dependencies|workspace)\]"
    r"|^ *(?:cc_library|cc_binary|py_library|py_binary|java_library|go_library)\("
    r"|\"(?:devDependencies|peerDependencies|dependencies)\" ?: ?\{|<dependency>|</project>"
    r"|^ *(?:implementation|testImplementation|compileOnly) ?[('\"]|^plugins \{"
    r"|^ *apply plugin: ",
    re.M,
)
_BUILD_WORDS = (
    "(", "[build-system]", "[tool.", "ependencies", "[workspace]", "<dependency>", "</project>",
    "plugin",
)  # fmt: skip
_TEMPLATE = re.compile(
    r"\btemplate ?<|\btypename \w|\bstd::\w{1,40}<|\bdecltype ?\(|\benable_if|::(?:value|type)\b"
    r"|\bconcept \w+ ?=|\brequires [\w(]|\b(?:static_assert|constexpr)\b|\w<\w{1,60}\.\.\.>"
)
_SQL = re.compile(
    r"\bselect\s[^;]{1,300}?\sfrom\s+[\w.\"`]+\s*(?:;|\)|$|as\b|where|join|group|order|limit|inner|left|having)"
    r"|\binsert\s+into\s+[\w.\"`]+\s*(?:\(|values|select)|\bcreate\s+(?:table|view|index)\s[^\n]{1,80}\("
    r"|\bupdate\s+[\w.\"`]+\s+set\s+\w+\s*=|\bdelete\s+from\s+[\w.\"`]+|\balter\s+table\s+\w+",
    re.I,
)
_SQL_WORDS = ("select", "insert", "create", "update", "delete", "alter")
_LOG = re.compile(
    r"^\W{0,2}\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?|^\W?\d\d:\d\d:\d\d[.,]?\d*\W? "
    r"|^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d "
    r"|^\W?(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL)\b[\]:| ]"
    r"|^\d{1,3}(?:\.\d{1,3}){3} \S+ \S+ \[",
    re.M,
)
_JSON_KEY = re.compile(r"\"[^\"\n]{1,80}\"\s*:")
_TEMPLATE_SIGNS = ("template", "typename", "std::", "decltype")


def _contains(text: str, words: Sequence[str]) -> bool:
    # a loop, because `any` takes several times as long
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


def _has_build_file(text: str) -> bool:
    if "FROM " in text and _DOCKER_FROM.search(text) and _DOCKER_STEP.search(text):
        return True
    if _contains(text, _BUILD_WORDS) and _BUILD.search(text) is not None:
        return True
    return "\n\t" in text and _MAKE.search(text) is not None


def _has_templates(text: str) -> bool:
    if not _contains(text, _TEMPLATE_SIGNS):
        return False
    return len(_TEMPLATE.findall(text)) >= _TEMPLATE_MARKS


def _has_sql(text: str) -> bool:
    lowered = text.lower()
    return _contains(lowered, _SQL_WORDS) and _SQL.search(lowered) is not None


def _has_json(text: str) -> bool:
    opens = text.find("{")
    return opens >= 0 and len(_JSON_KEY.findall(text, opens)) >= _JSON_KEYS


# name -> whether a text has it; the most specific first
STRUCTURES: dict[str, Callable[[str], bool]] = {
    "stack-trace": lambda text: _STACK_TRACE.search(text) is not None,
    "diff": lambda text: _DIFF.search(text) is not None,
    "build-file": _has_build_file,
    "cpp-templates": _has_templates,
    "sql": _has_sql,
    "log": lambda text: len(_LOG.findall(text)) >= _LOG_LINES,
    "json": _has_json,
}


def structures(text: str) -> tuple[str, ...]:
    """The structures in a text of limited length."""
    return tuple([name for name, found in STRUCTURES.items() if found(text)])
