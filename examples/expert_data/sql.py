"""Training data: questions about one small table and their SQL. Column names are used as nouns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from examples.expert_data.base import Example, made_up, pick


@dataclass(frozen=True, slots=True)
class Table:
    """`key` names a row; `texts` have values to ask for; `numbers` can be compared."""

    name: str
    key: str
    texts: dict[str, tuple[str, ...]]
    numbers: tuple[str, ...]

    def columns(self) -> list[str]:
        return [self.key, *self.texts, *self.numbers]


_TABLES = (
    Table("employees", "name", {"department": ("Sales", "Legal", "Support"),
                                "office": ("Berlin", "Oslo", "Rome")}, ("salary", "age")),
    Table("cars", "model", {"brand": ("Fiat", "Volvo", "Mazda"),
                            "color": ("red", "black", "white")}, ("price", "mileage")),
    Table("countries", "name", {"continent": ("Asia", "Africa", "Europe")},
          ("population", "area")),
    Table("orders", "customer", {"status": ("open", "paid", "shipped")}, ("total", "items")),
    Table("players", "name", {"team": ("Lions", "Sharks", "Wolves"),
                              "position": ("goalkeeper", "striker")}, ("goals", "height")),
    Table("recipes", "dish", {"cuisine": ("Thai", "Greek", "Indian")}, ("calories", "minutes")),
    Table("houses", "address", {"town": ("Bergen", "Malmo", "Turku")}, ("rent", "rooms")),
    Table("phones", "model", {"maker": ("Nokia", "Sony", "Motorola")}, ("weight", "storage")),
    Table("courses", "title", {"teacher": ("Adams", "Meyer", "Okoro"),
                               "level": ("basic", "advanced")}, ("credits", "hours")),
    Table("animals", "name", {"species": ("wolf", "otter", "lynx")}, ("age", "weight")),
    Table("bills", "vendor", {"category": ("water", "power", "phone")}, ("amount", "days")),
    Table("rivers", "name", {"region": ("north", "south", "east")}, ("length", "depth")),
)  # fmt: skip
_ASKS = (
    "Write SQL.\nTable {table}\n{question}",
    "Table: {table}\nQuestion: {question}\nSQL:",
    "SQL for {table}: {question}",
    "Given {table}, answer with SQL. {question}",
    "{question}\nUse the table {table}. SQL only.",
    "You are given a table {table}. Turn the request into a query and write nothing else.\n"
    "Request: {question}",
    "{question} The data is in {table}. What is the SQL query?",
    "Columns: {columns}. Table name: {name}. {question} Reply in SQL.",
    "I have {name} with columns {columns} and want SQL: {question}",
)
_MORE = ("more than", "over", "above", "greater than", "higher than")
_LESS = ("less than", "under", "below", "smaller than", "lower than")
Question = tuple[str, str]


def examples(seed: int = 14) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        table = pick(draw, _TABLES) if draw.random() < 0.6 else _invented(draw)
        question, query = pick(draw, _SHAPES)(draw, table)
        columns = ", ".join(_shuffled(draw, table.columns()))
        shown = f"{table.name}({columns})"
        asked = pick(draw, _ASKS).format(
            table=shown, question=question, name=table.name, columns=columns
        )
        yield Example(asked, query)


def _invented(draw: random.Random) -> Table:
    """Columns of one table with the nouns of another: the model must read the schema."""
    words = [made_up(draw) for _ in range(3)]
    base, other = draw.sample(_TABLES, 2)
    values = tuple(made_up(draw) for _ in range(3))
    texts = {words[0]: values} if draw.random() < 0.5 else dict(base.texts)
    numbers = (words[1], pick(draw, other.numbers)) if draw.random() < 0.5 else other.numbers
    name = words[2] + "s" if draw.random() < 0.5 else other.name
    return Table(name, base.key, texts, tuple(n for n in numbers if n not in texts))


def _shuffled(draw: random.Random, columns: list[str]) -> list[str]:
    return draw.sample(columns, len(columns)) if draw.random() < 0.5 else columns


def _number(draw: random.Random) -> int:
    return draw.choice((draw.randint(2, 99), draw.randint(1, 99) * 100, draw.randint(1, 60) * 1000))


def _filter(draw: random.Random, table: Table) -> tuple[str, str]:
    """A phrase that selects some rows, and the condition."""
    if draw.random() < 0.5:
        column = pick(draw, tuple(table.texts))
        value = pick(draw, table.texts[column])
        words = pick(draw, ("with {c} {v}", "where the {c} is {v}", "whose {c} is {v}"))
        return words.format(c=column, v=value), f"{column} = '{value}'"
    column, number = pick(draw, table.numbers), _number(draw)
    if draw.random() < 0.5:
        return f"with {column} {pick(draw, _MORE)} {number}", f"{column} > {number}"
    return f"with {column} {pick(draw, _LESS)} {number}", f"{column} < {number}"


def _select(draw: random.Random, table: Table) -> Question:
    words, condition = _filter(draw, table)
    column = pick(draw, table.columns())
    ask = pick(draw, ("Show the {c} of {t} {w}.", "List the {c} of all {t} {w}.",
                      "What is the {c} of {t} {w}?", "{c} of {t} {w}"))  # fmt: skip
    query = f"SELECT {column} FROM {table.name} WHERE {condition}"
    return ask.format(c=column, t=table.name, w=words), query


def _count(draw: random.Random, table: Table) -> Question:
    words, condition = _filter(draw, table)
    ask = pick(draw, ("How many {t} are there {w}?", "Count the {t} {w}.", "Number of {t} {w}"))
    return ask.format(t=table.name, w=words), (
        f"SELECT COUNT(*) FROM {table.name} WHERE {condition}"
    )


def _total(draw: random.Random, table: Table) -> Question:
    word, function = pick(draw, (("average", "AVG"), ("mean", "AVG"), ("total", "SUM"),
                                 ("highest", "MAX"), ("maximum", "MAX"), ("lowest", "MIN"),
                                 ("minimum", "MIN"), ("sum of the", "SUM")))  # fmt: skip
    column = pick(draw, table.numbers)
    query = f"SELECT {function}({column}) FROM {table.name}"
    ask = pick(draw, ("What is the {f} {c} of {t}", "Give the {f} {c} of all {t}"))
    text = ask.format(f=word, c=column, t=table.name)
    if draw.random() < 0.5:
        return text + "?", query
    words, condition = _filter(draw, table)
    return f"{text} {words}?", f"{query} WHERE {condition}"


def _top(draw: random.Random, table: Table) -> Question:
    column, number = pick(draw, table.numbers), draw.randint(2, 9)
    word, direction = pick(draw, (("highest", "DESC"), ("lowest", "ASC"), ("largest", "DESC"),
                            ("smallest", "ASC")))  # fmt: skip
    ask = pick(draw, ("Show the {k} of the {n} {t} with the {f} {c}.",
                      "Which {n} {t} have the {f} {c}? Give the {k}."))  # fmt: skip
    query = f"SELECT {table.key} FROM {table.name} ORDER BY {column} {direction} LIMIT {number}"
    return ask.format(k=table.key, n=number, t=table.name, f=word, c=column), query


def _group(draw: random.Random, table: Table) -> Question:
    column = pick(draw, tuple(table.texts))
    if draw.random() < 0.5:
        ask = pick(draw, ("How many {t} are there per {c}?", "Count the {t} for each {c}."))
        query = f"SELECT {column}, COUNT(*) FROM {table.name} GROUP BY {column}"
        return ask.format(t=table.name, c=column), query
    number = pick(draw, table.numbers)
    ask = pick(draw, ("What is the average {n} of {t} per {c}?", "Average {n} for each {c}"))
    query = f"SELECT {column}, AVG({number}) FROM {table.name} GROUP BY {column}"
    return ask.format(t=table.name, c=column, n=number), query


_SHAPES: tuple[Callable[[random.Random, Table], Question], ...] = (
    _select, _select, _count, _total, _top, _group,
)  # fmt: skip
