"""Held-out questions: other tables, other sentences, and rows to run the query on."""

from __future__ import annotations

import random
from collections.abc import Callable

from examples.expert_data.base import Item, pick
from examples.expert_data.sql import Table

_TABLES = (
    Table("books", "title", {"genre": ("poetry", "crime", "travel"),
                             "language": ("French", "Polish", "Dutch")}, ("pages", "year")),
    Table("films", "title", {"studio": ("Pathe", "Nordisk", "Mosfilm")}, ("duration", "budget")),
    Table("bridges", "name", {"material": ("steel", "stone", "timber")}, ("span", "lanes")),
    Table("wines", "label", {"grape": ("Merlot", "Syrah", "Riesling"),
                             "origin": ("Chile", "France", "Spain")}, ("vintage", "rating")),
    Table("flights", "code", {"carrier": ("KLM", "Finnair", "Qantas")}, ("distance", "seats")),
    Table("museums", "name", {"district": ("Mitte", "Soho", "Gracia")}, ("visitors", "fee")),
    Table("laptops", "model", {"vendor": ("Lenovo", "Asus", "Dell")}, ("memory", "cost")),
)  # fmt: skip
_ASKS = (
    "There is a table called {name} with the columns {columns}. {question} "
    "Respond with a single SQL query.",
    "My SQLite database holds {name} ({columns}). Please translate into one SELECT statement: "
    "{question}",
)
Question = tuple[str, str]


def items(seed: int = 1910) -> list[Item]:
    draw = random.Random(seed)
    unique: dict[str, Item] = {}
    while len(unique) < 180:
        table = pick(draw, _TABLES)
        question, query = pick(draw, _SHAPES)(draw, table)
        prompt = pick(draw, _ASKS).format(
            name=table.name, columns=", ".join(table.columns()), question=question
        )
        unique.setdefault(question, Item(prompt, {"sql": query, "setup": _setup(draw, table)}, 48))
    return list(unique.values())


def _setup(draw: random.Random, table: Table) -> str:
    kinds = [f"{table.key} TEXT", *(f"{c} TEXT" for c in table.texts)]
    kinds += [f"{c} INTEGER" for c in table.numbers]
    statements = f"CREATE TABLE {table.name} ({', '.join(kinds)});"
    rows = []
    # numbers are distinct, so that every comparison and every order has one answer
    spread = [draw.sample(range(5, 100), 9) for _ in table.numbers]
    for row in range(9):
        texts = [f"{table.key} {row}", *(pick(draw, v) for v in table.texts.values())]
        numbers = [str(column[row] * 10) for column in spread]
        rows.append("(" + ", ".join([f"'{text}'" for text in texts] + numbers) + ")")
    return f"{statements} INSERT INTO {table.name} VALUES {', '.join(rows)};"


def _by_value(draw: random.Random, t: Table) -> Question:
    column = pick(draw, tuple(t.texts))
    value = pick(draw, t.texts[column])
    text = pick(
        draw,
        (
            f"I want the {t.key} of each of the {t.name} that has the {column} {value}.",
            f"Which {t.name} have {value} as their {column}? Return the {t.key}.",
        ),
    )
    return text, f"SELECT {t.key} FROM {t.name} WHERE {column} = '{value}'"


def _by_number(draw: random.Random, t: Table) -> Question:
    column, number = pick(draw, t.numbers), draw.randint(20, 80) * 10 + 5
    word, sign = pick(
        draw, (("exceeds", ">"), ("is more than", ">"), ("is less than", "<"), ("is below", "<"))
    )
    text = pick(
        draw,
        (
            f"Find the {t.key} for those {t.name} whose {column} {word} {number}.",
            f"Get me the {t.key} of {t.name} if the {column} {word} {number}.",
        ),
    )
    return text, f"SELECT {t.key} FROM {t.name} WHERE {column} {sign} {number}"


def _count(draw: random.Random, t: Table) -> Question:
    column = pick(draw, tuple(t.texts))
    value = pick(draw, t.texts[column])
    text = pick(
        draw,
        (
            f"Tell me how many {t.name} have the {column} {value}.",
            f"I need the count of {t.name} in which {column} is {value}.",
        ),
    )
    return text, f"SELECT COUNT(*) FROM {t.name} WHERE {column} = '{value}'"


def _total(draw: random.Random, t: Table) -> Question:
    word, function = pick(
        draw, (("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM"))
    )
    column = pick(draw, t.numbers)
    text = pick(
        draw,
        (
            f"Compute the {word} {column} across the {t.name}.",
            f"Across all rows of {t.name}, what is the {word} {column}?",
        ),
    )
    return text, f"SELECT {function}({column}) FROM {t.name}"


def _top(draw: random.Random, t: Table) -> Question:
    column, n = pick(draw, t.numbers), draw.randint(2, 6)
    word, direction = pick(draw, (("highest", "DESC"), ("lowest", "ASC")))
    text = pick(
        draw,
        (
            f"Return the {t.key} for the {n} {t.name} having the {word} {column}.",
            f"By {column}, name the {n} {word} {t.name} ({t.key} only).",
        ),
    )
    return text, f"SELECT {t.key} FROM {t.name} ORDER BY {column} {direction} LIMIT {n}"


def _group(draw: random.Random, t: Table) -> Question:
    column, number = pick(draw, tuple(t.texts)), pick(draw, t.numbers)
    if draw.random() < 0.5:
        text = f"For every {column}, show it with the number of {t.name} it has."
        return text, f"SELECT {column}, COUNT(*) FROM {t.name} GROUP BY {column}"
    text = f"For every {column} in {t.name}, show it with its average {number}."
    return text, f"SELECT {column}, AVG({number}) FROM {t.name} GROUP BY {column}"


_SHAPES: tuple[Callable[[random.Random, Table], Question], ...] = (
    _by_value, _by_number, _count, _total, _top, _group,
)  # fmt: skip
