"""Eighty shapes of varied kinds, as real callers write them, and a task for each: JSON schemas, and
patterns that the whole answer matches.

Some strings and arrays are without bounds on purpose: a small model at temperature 1 does not end
them by itself.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
SHORT: Schema = {"type": "string", "maxLength": 24}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{2,12}$"}
INT: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def record(_optional: str = "", /, **fields: Schema) -> Schema:
    """A closed object; `_optional` names the fields that may be left out."""
    required = [name for name in fields if name not in _optional.split()]
    return {
        "type": "object",
        "properties": fields,
        "required": required,
        "additionalProperties": False,
    }


def listed(items: Schema, least: int | None = None, most: int | None = None) -> Schema:
    bounds = {"minItems": least, "maxItems": most}
    given = {key: value for key, value in bounds.items() if value is not None}
    return {"type": "array", "items": items, **given}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def ranged(kind: str, **bounds: float) -> Schema:
    return {"type": kind, **bounds}


def matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def any_of(*choices: Schema) -> Schema:
    return {"anyOf": list(choices)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


ADDRESS = record("zip", street=SHORT, city=SHORT, zip=matching("^[0-9]{5}$"))
POINT = record(x=ranged("number", minimum=-1, maximum=1), y=ranged("number", minimum=-1, maximum=1))
TREE = {
    "$defs": {"node": record("children", name=WORD, children=listed(ref("node"), most=3))},
    "$ref": "#/$defs/node",
}
CHAIN = {
    "$defs": {"link": record(value=INT, next=any_of(ref("link"), NULL))},
    "$ref": "#/$defs/link",
}
SHAPES = any_of(
    record(kind={"const": "circle"}, radius=ranged("number", exclusiveMinimum=0, maximum=100)),
    record(kind={"const": "square"}, side=ranged("number", exclusiveMinimum=0, maximum=100)),
    record(kind={"const": "text"}, text=SHORT),
)

# the sample of vLLM's own tests
EMPLOYEE: Schema = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": INT,
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 3},
        "work_history": listed(
            {
                "type": "object",
                "properties": {"company": TEXT, "duration": NUMBER, "position": TEXT},
                "required": ["company", "position"],
            }
        ),
    },
    "required": ["name", "age", "skills", "work_history"],
}
MAIL = r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}"
NAMES = [f"{kind}-{number * 7919 % 10007}" for number in range(1000) for kind in ("ab", "x", "zed")]
EXPRESSION = {
    "$defs": {
        "term": any_of(
            NUMBER,
            record(op=one_of("+", "-", "*"), left=ref("term"), right=ref("term")),
            record(call=WORD, arguments=listed(ref("term"), 1)),
        )
    },
    "$ref": "#/$defs/term",
}


def formatted(name: str) -> Schema:
    return {"type": "string", "format": name}


# a text is a pattern for the whole answer
SCHEMAS: dict[str, tuple[str, Schema | str]] = {
    # objects with plain fields
    "person": (
        "Describe a person.",
        record(name=SHORT, age=ranged("integer", minimum=0, maximum=130)),
    ),
    "book": ("Name a book.", record(title=SHORT, author=SHORT, year=INT, pages=INT)),
    "weather": ("Report the weather.", record(city=SHORT, celsius=NUMBER, raining=BOOL)),
    "open text": ("Write a note.", record(note=TEXT)),
    "two open texts": ("Ask and answer.", record(question=TEXT, answer=TEXT)),
    "empty object": ("Say nothing.", record()),
    "free object": ("Invent settings.", {"type": "object"}),
    "free values": ("Rate films.", {"type": "object", "additionalProperties": INT}),
    # optional fields
    "optional": ("Describe a car.", record("color doors", maker=SHORT, color=SHORT, doors=INT)),
    "all optional": ("Set a filter.", record("low high exact", low=INT, high=INT, exact=BOOL)),
    "nullable": ("Describe a pet.", record(name=SHORT, owner={"type": ["string", "null"]})),
    "open object": ("Tag it.", {"type": "object", "properties": {"id": INT}, "required": ["id"]}),
    # nested objects
    "address": ("Give an address.", ADDRESS),
    "customer": ("Describe a customer.", record(name=SHORT, address=ADDRESS, active=BOOL)),
    "company": (
        "Describe a company.",
        record(name=SHORT, seat=ADDRESS, head=record(name=SHORT, since=INT)),
    ),
    "deep": ("Nest it.", record(a=record(b=record(c=record(d=record(e=BOOL)))))),
    "wide": ("Fill in the form.", record(**{f"field_{i}": WORD for i in range(12)})),
    # arrays
    "tags": ("List tags.", record(tags=listed(WORD, 1, 6))),
    "open list": ("List words.", listed(TEXT)),
    "open numbers": ("List primes.", record(primes=listed(INT))),
    "matrix": (
        "Write a matrix.",
        listed(listed(ranged("integer", minimum=0, maximum=9), 3, 3), 3, 3),
    ),
    "points": ("Draw a line.", record(points=listed(POINT, 2, 4))),
    "pair": (
        "Pair a word and a number.",
        {"type": "array", "prefixItems": [WORD, INT], "items": False, "minItems": 2},
    ),
    "orders": (
        "List orders.",
        listed(record(sku=matching("^[A-Z]{3}-[0-9]{4}$"), count=INT), 1, 3),
    ),
    # enumerations and constants
    "mood": ("Judge the mood.", record(mood=one_of("good", "bad", "neutral"))),
    "mixed enum": ("Pick one.", record(pick=one_of("a", 1, None, True, 2.5))),
    "bare enum": ("Yes or no?", one_of("yes", "no", "it depends")),
    "versioned": (
        "Make a header.",
        record(version={"const": 2}, kind={"const": "header"}, size=INT),
    ),
    "labels": ("Label it.", record(labels=listed(one_of("red", "green", "blue"), 1, 3))),
    # numbers
    "percent": ("Guess a share.", record(share=ranged("number", minimum=0, maximum=100))),
    "tight range": ("Guess.", record(guess=ranged("integer", minimum=17, maximum=23))),
    "negative": (
        "How cold?",
        record(kelvin=ranged("number", minimum=0), c=ranged("integer", maximum=-1)),
    ),
    "steps": (
        "Choose a step.",
        record(step=ranged("integer", multipleOf=5, minimum=0, maximum=95)),
    ),
    "bare number": ("A number.", NUMBER),
    # strings with patterns, formats and lengths
    "phone": ("Give a number.", record(phone=matching(r"^\+[1-9][0-9]{6,12}$"))),
    "color": ("Name a color.", record(hex=matching("^#[0-9a-f]{6}$"))),
    "version": ("Name a version.", record(version=matching(r"^v?[0-9]+\.[0-9]+\.[0-9]+$"))),
    "date": ("When?", record(day={"type": "string", "format": "date"})),
    "moment": ("When exactly?", record(at={"type": "string", "format": "date-time"})),
    "ids": ("Make an id.", record(id={"type": "string", "format": "uuid"})),
    "mail": ("Whom to write to?", record(mail={"type": "string", "format": "email"})),
    "lengths": (
        "Fill it.",
        record(code={"type": "string", "minLength": 4, "maxLength": 8}, note=SHORT),
    ),
    "haiku": (
        "Write three lines.",
        listed({"type": "string", "minLength": 5, "maxLength": 60}, 3, 3),
    ),
    # unions
    "shape": ("Draw a shape.", SHAPES),
    "shapes": ("Draw shapes.", listed(SHAPES, 1, 3)),
    "text or number": ("Answer.", record(answer=any_of(SHORT, NUMBER, BOOL))),
    "maybe error": ("Try it.", any_of(record(ok=SHORT), record(error=SHORT, code=INT))),
    # references
    "tree": ("Draw a tree.", TREE),
    "chain": ("Count down.", CHAIN),
    "team": (
        "Name a team.",
        {
            "$defs": {"member": record(name=SHORT, role=one_of("lead", "maker", "tester"))},
            **record(lead=ref("member"), members=listed(ref("member"), 1, 4)),
        },
    ),
    # patterns: anywhere in a text, at its begin, at its end, of the whole of it
    "a digit": ("Name a code.", matching("[0-9]")),
    "a digit within": ("Name a code.", record(code=matching("[0-9]"), note=TEXT)),
    "begins": ("Name a ticket.", record(ticket=matching("^[A-Z]{2,4}-"))),
    "ends": ("Name a file.", record(file=matching(r"\.(txt|json)$"))),
    "two marks": ("Write a line.", record(line=matching("begin.*finish"))),
    "mail pattern": ("Whom to write to?", record(mail=matching(f"^{MAIL}$"))),
    "mail within": ("Whom to write to?", record(text=matching(MAIL))),
    "grade": ("Judge it.", record(grade=matching("^[A-D]$"), mail=matching(r"^\w+@\w+\.\w+$"))),
    "many patterns": (
        "Fill in the form.",
        record(**{f"part_{i}": matching("^[a-z]+[0-9]{2}$") for i in range(8)}),
    ),
    "named by pattern": (
        "Set it.",
        {"type": "object", "patternProperties": {"^x_[a-z]+$": INT}, "additionalProperties": False},
    ),
    # formats
    "time": ("When?", record(at=formatted("time"))),
    "address of a host": ("Which host?", record(ip=formatted("ipv4"), six=formatted("ipv6"))),
    "link": ("Where is it?", record(link=formatted("uri"), host=formatted("hostname"))),
    "lasting": ("How long?", record(span=formatted("duration"))),
    "four ids": ("Make ids.", listed(formatted("uuid"), 2, 4)),
    # lengths and counts
    "long text": ("Write much.", record(text={"type": "string", "minLength": 120})),
    "many words": ("List words.", listed(WORD, 10)),
    "many records": ("List orders.", listed(record(id=INT, name=SHORT), 5)),
    # enumerations of thousands, unions, recursion
    "thousands": ("Pick one.", record(name=one_of(*NAMES))),
    "list of thousands": ("Pick some.", listed(one_of(*NAMES), 2)),
    "one of": (
        "Name it.",
        {"oneOf": [record(id=INT), record(mail=matching(f"^{MAIL}$")), {"type": "null"}]},
    ),
    "nested unions": (
        "Answer.",
        listed(any_of(INT, listed(any_of(SHORT, NULL), 1), record(x=any_of(BOOL, NUMBER))), 1),
    ),
    "expression": ("Write a formula.", EXPRESSION),
    "employee": ("Describe an employee.", EMPLOYEE),
    # patterns for the whole answer
    "regex mail": ("Whom to write to?", MAIL),
    "regex rating": ("Rate it.", "[1-5]/5: [a-z ]{3,40}"),
    "regex address": ("Which host?", r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}[0-9]{1,2}"),
    "regex either": ("Which number?", "([0-9]{3}-[0-9]{2}-[0-9]{4}|N/A)"),
    "regex far end": ("Write a word.", "(a|b)*abb(a|b){6}c"),
    "regex lines": ("Write lines.", r"(- [a-z]+\n){3,}done\."),
}
