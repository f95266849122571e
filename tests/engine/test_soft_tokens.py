"""Soft tokens in front of a prompt: they count in KV and context and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.core.events import Delta, Finished, Started
from coterie.core.plan import AdapterChoice, Admitted, Assignment
from tests.helpers.models.toy_model import (
    VOCAB,
    ToyAdapters,
    chain_logits,
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    taken_over,
    texts,
    toy_mark,
    toy_soft,
    true_output,
)

SOFT = (AdapterChoice("soft", "soft:5"), AdapterChoice("more", "more:2", 0.5))


def run(assignment: Assignment, **lane: Any) -> list[Any]:
    engine = make_engine(make_lane(**lane), adapters=ToyAdapters(2))
    assert isinstance(engine.add(assignment), Admitted)
    return drain(engine)


def logits_behind(tokens: list[int]) -> np.ndarray:
    """Of text tokens behind the soft ones."""
    chain, mark = [*toy_soft(SOFT), *tokens], toy_mark(SOFT)
    return chain_logits(chain, range(mark, mark + len(chain)))


@pytest.mark.parametrize("step_tokens", [8, 10, 64])
def test_they_are_computed_and_not_counted(step_tokens: int) -> None:
    assignment = make_assignment("a", [3, 4, 5], adapters=SOFT, max_tokens=9)
    engine = make_engine(make_lane(max_step_tokens=step_tokens), adapters=ToyAdapters(1))
    engine.add(assignment)
    events = drain(engine)
    assert outputs(events)["a", 0] == true_output(assignment)
    # seven soft tokens and three make two full blocks of four: one token of the text is kept
    assert events[0] == Started("a", "r0", 3, 0, stored_tokens=1, at=100.0)
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 9, 0)
    assert engine.stats()["prefill_tokens"] == 7 + 3


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 1), (5, 1), (7, 5), (30, 29)])
def test_reused_soft_tokens_are_no_cached_prompt_tokens(length: int, cached: int) -> None:
    """Blocks of four, seven of them soft: the first block of text begins in the second."""
    engine = make_engine(adapters=ToyAdapters(1))
    prompt = [1 + i % 40 for i in range(length)]
    for name in "ab":
        engine.add(make_assignment(name, prompt, adapters=SOFT))
        events = drain(engine)
    assert events[0] == Started("b", "r0", length, cached, at=100.0)
    assert isinstance(events[-1], Finished) and events[-1].usage.cached_tokens == cached


@pytest.mark.parametrize("prompt_length", [1, 2, 17, 150])
def test_prompt_logprobs_are_of_the_text_alone(prompt_length: int) -> None:
    prompt = [1 + i % 40 for i in range(prompt_length)]
    assignment = make_assignment("a", prompt, max_tokens=2, prompt_logprobs=1, adapters=SOFT)
    events = run(assignment, max_step_tokens=9)
    scores = events[0].prompt_logprobs
    assert len(scores) == prompt_length and scores[0] is None
    for position, one in enumerate(scores[1:], 1):
        wide = logits_behind(prompt[:position]).astype(np.float64)
        expected = wide - np.log(np.exp(wide).sum())
        assert one.token_id == prompt[position]
        assert one.logprob == pytest.approx(expected[prompt[position]], abs=1e-5)
        assert one.top[0][0] == int(expected.argmax())
    assert outputs(events)["a", 0] == true_output(assignment)


def test_penalties_do_not_see_them() -> None:
    assignment = make_assignment("a", [3, 4], max_tokens=8, repetition_penalty=2.0, adapters=SOFT)
    seen, tokens = {3, 4}, [3, 4]
    for token in outputs(run(assignment))["a", 0]:
        logits = logits_behind(tokens)
        for other in seen:
            logits[other] *= 2.0 if logits[other] < 0 else 0.5
        assert token == int(logits.argmax())
        seen.add(token)
        tokens.append(token)
    assert len(tokens) == 2 + 8


def test_they_take_room_in_the_context() -> None:
    assignment = make_assignment("a", [1] * 8, max_tokens=None, adapters=SOFT)
    events = run(assignment, context=20)
    assert outputs(events)["a", 0] == true_output(assignment, count=5)
    assert events[-1].choices == ("length",)
    short = replace(assignment, limits=replace(assignment.limits, context_size=17))
    assert len(outputs(run(short))["a", 0]) == 2


@pytest.mark.parametrize("shape", [{}, {"n": 3, "temperature": 1.0}, {"num_beams": 3, "n": 2}])
def test_takeover_is_invisible(shape: dict[str, Any]) -> None:
    """A crash is answered with the text's tokens: soft ones are put in front anew."""
    assignment = make_assignment("a", range(1, 7), max_tokens=9, adapters=SOFT, **shape)
    whole = [e for e in run(assignment) if isinstance(e, Delta)]
    for cut in range(0, len(whole) + 1, 4):
        seen = whole[:cut]
        rest = [e for e in run(taken_over(assignment, seen)) if isinstance(e, Delta)]
        assert outputs(seen + rest) == outputs(whole)
        assert texts(seen + rest) == texts(whole)


def test_a_session_goes_on_behind_them() -> None:
    engine = make_engine(adapters=ToyAdapters(1))
    first = make_assignment("a", range(1, 10), max_tokens=12, adapters=SOFT, session="s")
    engine.add(first)
    drain(engine)
    history = [*range(1, 10), *true_output(first)]
    second = make_assignment("b", [*history, 5, 5], max_tokens=3, adapters=SOFT, session="s")
    engine.add(second)
    events = drain(engine)
    # whole blocks of soft tokens and text, less the seven soft ones
    assert events[0].cached_tokens == (7 + len(history) - 1) // 4 * 4 - 7
    assert outputs(events)["b", 0] == true_output(second)


def test_no_token_behind_the_vocabulary_is_drawn() -> None:
    assignment = make_assignment("a", [1], max_tokens=40, n=4, temperature=3.0, adapters=SOFT)
    found = outputs(run(assignment))
    assert all(token < VOCAB for tokens in found.values() for token in tokens)
    assert all(found["a", choice] == true_output(assignment, choice) for choice in range(4))
