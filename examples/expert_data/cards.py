"""The texts of each shipped expert for its manifest and README."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROUTING = Path(__file__).parent / "routing"


@dataclass(frozen=True, slots=True)
class About:
    description: str
    prompt: str
    answer: str
    capabilities: tuple[str, ...]
    keywords: tuple[str, ...]
    limitations: tuple[str, ...]
    # regular expression of its answers; empty = JSON or SQL, which have their own parsers
    pattern: str = ""
    # its answers are one of a few words
    is_label: bool = False


ABOUT = {
    "json-extract": About(
        "Writes the facts that were asked for out of a sentence or two as one JSON object.",
        "Extract name, city and age as JSON.\nAt 34, Lena Brandt moved to Turku.",
        '{"name": "Lena Brandt", "city": "Turku", "age": 34}',
        ("task:json_parsing", "format:json", "json-extraction", "entity-extraction"),
        ("json", "extract", "fields", "keys"),
        ("Up to three fields from one or two English sentences; no nested objects or lists.",
         "Two people in one sentence are confused at times, and rare keys may be misread.",
         "Every field must be said in the text: it does not leave fields out."),
    ),
    "text-to-sql": About(
        "Turns a question about one small table into a SELECT statement.",
        "Table: trees(name, park, height, age)\nQuestion: How many trees have the park Central?",
        "SELECT COUNT(*) FROM trees WHERE park = 'Central'",
        ("task:code_generation", "tech:sql", "text-to-sql"),
        ("sql", "query", "table", "select", "database"),
        ("One table, one condition; no joins, no subqueries, no dates.",
         "Columns must be called in the question as they are in the table."),
    ),
    "sentiment": About(
        "Says whether a comment is positive, negative or neutral.",
        "The straps came off on the first day. Positive, negative or neutral?",
        "negative",
        ("task:classification", "sentiment"),
        ("sentiment", "review", "feel", "tone", "positive", "negative"),
        ("Short comments; irony is often missed.",),
        "positive|negative|neutral", True,
    ),
    "intent": About(
        "Sorts a customer's message: cancel, delivery, login, refund, invoice or product.",
        "Pick one: cancel, delivery, login, refund, invoice, product\nWhere is my parcel?",
        "delivery",
        ("task:classification", "intent", "customer-support"),
        ("intent", "category", "customer", "ticket", "refund", "delivery"),
        ("These six labels only, one per message, in English.",),
        "cancel|delivery|login|refund|invoice|product", True,
    ),
    "iso-values": About(
        "Writes dates as YYYY-MM-DD, times on the 24-hour clock and metric amounts in smaller "
        "units.",
        "ISO date for the 3rd of March 2021",
        "2021-03-03",
        ("task:transformation", "normalisation", "dates", "units"),
        ("iso", "date", "convert", "yyyy-mm-dd", "24-hour", "unit"),
        ("No relative dates, no time zones, no imperial units.",
         "Amounts only into the next smaller metric unit (km to m, kg to g, l to ml ...)."),
        r"\d{4}-\d{2}-\d{2}|\d{2}:\d{2}|\d+(\.\d+)? ?[a-zA-Z]{1,3}",
    ),
    "commit-header": About(
        "Writes the conventional commit header, type(scope): summary, for a described change.",
        "Commit header as type(scope): summary.\nThe importer no longer fails when a row is empty.",
        "fix(importer): do not fail when a row is empty",
        ("task:transformation", "tech:git", "commit-messages"),
        ("commit", "git", "changelog", "conventional"),
        ("Types feat, fix, docs, test, refactor and perf; the scope must be named in the text.",
         "The summary is short and plain, not always elegant."),
        r"(feat|fix|docs|test|refactor|perf)\([a-z0-9_./-]+\): \S.{4,}",
    ),
    "url-slug": About(
        "Turns a title into a URL slug: lower case, words joined by hyphens.",
        "Make a URL slug: Why Bread & Coffee Go Together",
        "why-bread-and-coffee-go-together",
        ("task:transformation", "slug"),
        ("slug", "url", "title", "headline", "hyphen"),
        ("Good with plain titles (nine in ten of the held-out ones); of those with accents, "
         "apostrophes or brackets most come out wrong: marks stay, or words are lost.",
         "Titles of up to about twelve words; & is written as and."),
        r"[a-z0-9]+(-[a-z0-9]+)*",
    ),
}  # fmt: skip


def routing_texts(name: str) -> dict[str, list[str]]:
    """Prompts that an expert is for (+) and prompts that are only similar (-), from
    routing/NAME.txt."""
    lines = (_ROUTING / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    kinds = {"examples": "+ ", "counterexamples": "- "}
    return {
        kind: [line[2:].replace("\\n", "\n") for line in lines if line.startswith(mark)]
        for kind, mark in kinds.items()
    }
