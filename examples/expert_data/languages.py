"""Held-out items in eleven languages, by an author who only knew what the experts are for.

`languages.jsonl` has them as written; here each becomes an item for its expert's metric.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from examples.expert_data.base import Item, pick

LANGUAGES = ("en", "de", "fr", "es", "pt", "it", "nl", "pl", "tr", "ja", "zh")
_FILE = Path(__file__).with_name("languages.jsonl")
_LABELS = {
    "intent": ["cancel", "delivery", "login", "refund", "invoice", "product"],
    "sentiment": ["positive", "negative", "neutral"],
}
_TABLE = re.compile(r"(\w+)\s?\(([^)]*)\)")
_MAX_TOKENS = {"label": 16, "sql_text": 64, "json": 96, "commit_form": 48, "equal": 40}
_ROWS = 9


def lines(expert: str) -> bytes:
    """tests/languages.jsonl of an expert's package."""
    records = [
        json.dumps({"language": written["language"], **_item(written).record()}, ensure_ascii=False)
        for written in map(json.loads, _FILE.read_text(encoding="utf-8").splitlines())
        if written["expert"] == expert
    ]
    return ("\n".join(records) + "\n").encode()


def _item(written: dict[str, Any]) -> Item:
    body = written.get("body")
    prompt = f"{written['prompt']}\n\n{body}" if body else written["prompt"]
    return Item(prompt, _expected(written, prompt), _MAX_TOKENS[written["check"]])


def _expected(written: dict[str, Any], prompt: str) -> Any:
    text = written["expected"]
    match written["check"]:
        case "label":
            return {"label": text, "among": _LABELS[written["expert"]]}
        case "json":
            return json.loads(text)
        case "commit_form":
            kind, scope = re.fullmatch(r"(\w+)\((\w+)\): .*", text).groups()  # type: ignore[union-attr]
            return {"type": kind, "scope": scope}
        case "sql_text":
            return {"sql": text, "setup": _setup(prompt, text)}
    return [text, *written["also"]] if "also" in written else text


def _setup(prompt: str, query: str) -> str:
    """The table of a prompt, with rows that distinguish correct queries from wrong ones."""
    name, listed = _TABLE.search(prompt).groups()  # type: ignore[union-attr]
    columns = [column.strip() for column in listed.split(",")]
    draw = random.Random(prompt)
    texts = dict(re.findall(r"(\w+) = \'([^\']*)\'", query))
    numbers = {column: int(value) for column, value in re.findall(r"(\w+) [<>]=? (\d+)", query)}
    rows = []
    for number in range(_ROWS):
        values = []
        for at, column in enumerate(columns):
            if column in texts:
                values.append(f"'{pick(draw, (texts[column], 'Uri', 'Ona'))}'")
            elif column in numbers:
                values.append(str(numbers[column] + pick(draw, (-7, -3, 0, 4, 9)) * 2))
            elif at == len(columns) - 1 or column in re.findall(r"(?:BY |\()(\w+)", query):
                values.append(str(draw.randrange(10, 990)))
            else:
                values.append(f"'{column} {number if at == 0 else draw.randrange(3)}'")
        rows.append(f"({', '.join(values)})")
    return f"CREATE TABLE {name} ({listed}); INSERT INTO {name} VALUES {', '.join(rows)};"
