"""A text that keeps to a grammar can be ended in the tokens that are left, whatever was drawn."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from benchmarks.serving.structured import response_format
from benchmarks.serving.structured_schemas import EMPLOYEE, MAIL, SCHEMAS
from coterie.core.request import ResponseFormat
from coterie.engine.grammar import CompiledGrammar, Constraint, GrammarCache, allowed_tokens
from coterie.engine.grammar_ending import FEW, EndingFinder, hints_of
from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.models.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def grammars() -> GrammarCache:
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    return GrammarCache(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def drawn(start: CompiledGrammar, max_tokens: int, seed: int) -> str:
    """Tokens at random among those allowed: no model knows less about ending a text."""
    noise = random.Random(seed)
    constraint = Constraint(max_tokens)
    constraint.begin(start, ())
    output = list[int]()
    size = start.vocabulary.num_ids
    while len(output) < max_tokens and not constraint.is_complete:
        allowed = np.flatnonzero(allowed_tokens([constraint], [()], size)[0])
        token = constraint.take(int(noise.choice(allowed)))
        assert constraint.error is None
        if token == start.vocabulary.end:
            break
        output.append(token)
    return b"".join(start.vocabulary.words[token] for token in output).decode()


def fault(wanted: dict[str, object] | str, text: str) -> str | None:
    if isinstance(wanted, str):
        return None if re.fullmatch(wanted, text) else "does not match"
    try:
        jsonschema.Draft202012Validator(wanted).validate(json.loads(text))
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return str(error)[:200]
    return None


@pytest.mark.parametrize("name", list(SCHEMAS)[::2])
def test_every_shape_ends_in_time(grammars: GrammarCache, name: str) -> None:
    _, wanted = SCHEMAS[name]
    start = grammars._compile(response_format(wanted))
    assert start.shortest is not None
    spare = (0, 2, 25)[list(SCHEMAS).index(name) % 3]
    text = drawn(start, len(start.shortest) + spare, seed=spare)
    assert fault(wanted, text) is None, text


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_shape_ends_in_time_for_many_seeds(grammars: GrammarCache, name: str) -> None:
    _, wanted = SCHEMAS[name]
    start = grammars._compile(response_format(wanted))
    assert start.shortest is not None
    for seed, spare in enumerate((0, 1, 2, 9, 18, 25, 36, 45, 54, 63, 81, 99)):
        text = drawn(start, len(start.shortest) + spare, seed)
        assert fault(wanted, text) is None, text


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "wanted",
    [{"type": "string", "pattern": "[0-9]"}, {"type": "string", "pattern": f"^{MAIL}$"}, EMPLOYEE,
     MAIL],
    ids=["digit", "mail", "employee", "regex"],
)  # fmt: skip
def test_what_used_to_be_cut_ends(
    grammars: GrammarCache, wanted: dict[str, object] | str, seed: int
) -> None:
    text = drawn(grammars._compile(response_format(wanted)), 64, seed)
    assert fault(wanted, text) is None, text


@pytest.mark.parametrize(
    ("pattern", "least"),
    [("[ab]{3}", 3), ("(a[0-9]{3}b|c[0-9]{9}d)", 5), ("[0-9]{3}-[0-9]{4}|N/A", 3), ("a*b*", 0)],
)
def test_the_way_is_short(grammars: GrammarCache, pattern: str, least: int) -> None:
    start = grammars._compile(ResponseFormat("regex", pattern))
    assert start.shortest is not None and len(start.shortest) <= least


def test_a_search_ends_by_its_own_count(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a clock: the same state has the same way on any machine."""
    looks = 0
    sign = EndingFinder.sign

    def counted(self: EndingFinder, *args: object) -> bytes:
        nonlocal looks
        looks += 1
        return sign(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EndingFinder, "sign", counted)
    # no end within the limit: all of the effort is spent
    wanted = ResponseFormat("regex", "([a-y]{2}-){400}z")
    start = grammars._compile(wanted)
    looks = 0
    assert start.finder.find(start.letters.deep_copy(), 5, hints_of(wanted), FEW) is None
    assert looks <= FEW + 64


def test_where_nothing_fits_the_text_is_cut(grammars: GrammarCache) -> None:
    start = grammars._compile(ResponseFormat("regex", "[a-e]{50}X"))
    assert start.shortest is not None and len(start.shortest) > 9
    assert re.fullmatch("[a-e]+", drawn(start, 9, 0))
