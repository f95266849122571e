"""Time that grammars take: single calls of the parser stay short, and slow requests hold nobody
up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from coterie.core.errors import InvalidRequest
from coterie.core.events import Finished
from coterie.core.plan import Admitted
from coterie.core.request import ResponseFormat
from coterie.engine import grammar, grammar_time
from coterie.engine.grammar import NEAR_END, GrammarTask, GrammarWork
from coterie.engine.grammar_ending import MANY, EndingFinder, hints_of
from coterie.engine.grammar_time import (
    CLOCK,
    MAX_CALL_TOKENS,
    MAX_SLOW_S,
    QUICK_CALL_S,
    SLOW_CALL_S,
    RequestTime,
    TimeIsUp,
    consumed,
    follows,
)
from coterie.models.grammar.grammar import GrammarVocabulary
from tests.helpers.models.toy_grammars import REGEX, constrained
from tests.helpers.models.toy_model import EOS, VOCAB, ToyTokenizer, drain, make_engine


def ambiguous(num_rules: int) -> str:
    """The rule `s`: the number of readings of a text grows with its length."""
    names = [f"r{number}" for number in range(num_rules)]
    choices = " | ".join(f"{name} s" for name in names)
    return "\n".join([f"s ::= {choices} | [a-z]", *(f"{name} ::= s s | [a-z]" for name in names)])


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(ToyTokenizer(), VOCAB, [EOS])


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Slow:
    """A matcher each call of which takes `seconds` of processor time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # tokens of each call
        self.sizes: list[int] = []

    def _call(self, tokens: Sequence[int]) -> int:
        self.sizes.append(len(tokens))
        burn(self.seconds)
        return len(tokens)

    consume_tokens = try_consume_tokens = validate_tokens = _call

    def rollback(self, count: int) -> None:
        """It has no state."""


@pytest.mark.parametrize("call", [consumed, partial(follows, in_steps=True)])
def test_calls_of_a_matcher_that_is_slow_get_one_token(call: Any) -> None:
    quick, slow = Slow(0.0), Slow(2 * QUICK_CALL_S)
    for matcher in (quick, slow):
        CLOCK.begin(10.0, 0.0)
        assert call(matcher, range(20))
    assert max(quick.sizes) <= MAX_CALL_TOKENS + 1 and len(quick.sizes) <= 12
    assert slow.sizes[0] == MAX_CALL_TOKENS and set(slow.sizes[1:-1]) == {1}
    assert sum(slow.sizes) == 20


def test_slow_calls_have_a_limit_and_pauses() -> None:
    matcher, began = Slow(2 * SLOW_CALL_S), time.monotonic()
    CLOCK.begin(10.0, 10.0)
    with pytest.raises(TimeIsUp):
        consumed(matcher, range(100))  # type: ignore[arg-type]
    num_calls = len(matcher.sizes)
    # a call may take a little more than it is to take
    assert 2 <= num_calls <= MAX_SLOW_S / (2 * SLOW_CALL_S) + 1
    assert CLOCK.slow_s > MAX_SLOW_S
    # behind each but the last
    assert time.monotonic() - began > 2 * SLOW_CALL_S * (3 * num_calls - 2)


def test_a_request_with_slow_calls_is_refused_though_its_time_is_free() -> None:
    account, matcher = RequestTime("slow calls"), Slow(2 * SLOW_CALL_S)
    job = GrammarTask(account, lambda: consumed(matcher, range(100)), free_s=60.0)  # type: ignore[arg-type]
    work = GrammarWork()
    work.do([job])
    while not job.done:
        work.wait_for_any([job])
    with pytest.raises(InvalidRequest, match="too much time"):
        job.result()
    assert account.over_s > MAX_SLOW_S


def test_no_request_is_charged_for_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes longer to build than a request's grammar may take, on a slow machine."""

    class Large(GrammarVocabulary):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            burn(grammar_time.FREE_START_S + grammar_time.REQUEST_S + 0.2)

    monkeypatch.setattr(grammar, "GrammarVocabulary", Large)
    engine = make_engine()
    assert isinstance(engine.add(constrained("r", REGEX)), Admitted)
    assert isinstance(drain(engine)[-1], Finished)


def test_no_step_waits_for_a_request_whose_tasks_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    # longer than the test may take
    monkeypatch.setattr(grammar, "STEP_BUDGET_S", 1000.0)
    opened, work = threading.Event(), GrammarWork()
    slow = GrammarTask(RequestTime("slow", last_s=1001.0), lambda: int(opened.wait()))
    quick = GrammarTask(RequestTime("quick"), lambda: 2)
    work.begin_step()
    work.do([slow])
    assert not slow.done
    # nor where it waits for others
    again = GrammarTask(slow.time, lambda: int(opened.wait()))
    work.do([again, quick])
    assert quick.result() == 2 and not slow.done and not again.done
    assert work.num_late == 2
    opened.set()
    for job in (slow, again):
        while not job.done:
            work.wait_for_any([job])
    # they were quick this time, so that the next step waits again
    last = GrammarTask(slow.time, lambda: 3)
    work.do([last])
    assert last.done and last.result() == 3


class Timed:
    """A matcher that notes the longest processor time of a call that holds the interpreter."""

    longest_s = 0.0

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        whole = getattr(self._matcher, name)

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            value = whole(*args)
            if name != "unsafe_compute_mask_ptr":
                self.longest_s = max(self.longest_s, time.thread_time() - began)
            return value

        return timed


def test_no_call_takes_long_whatever_text_is_tried(vocabulary: GrammarVocabulary) -> None:
    """A text that the grammar names begins plainly, so that each call is quick, and goes on in a
    part with many readings. One call took seconds."""
    plain = "".join(chr(66 + number % 20) for number in range(90))
    text = plain + "abcde" * 12
    rules = f'root ::= ("{plain}" | "X") s "!"\nunused ::= "{text}"\n'
    wanted = ResponseFormat("gbnf", rules + ambiguous(20))
    matcher = Timed(vocabulary.compile_letters(wanted))
    CLOCK.begin(0.5, 0.5)
    with pytest.raises(TimeIsUp):
        EndingFinder(vocabulary).find(matcher, NEAR_END * 8, hints_of(wanted), MANY)  # type: ignore[arg-type]
    assert matcher.longest_s < 0.5


GRAMMARS = [
    ResponseFormat("gbnf", 'root ::= "C" s "D"\n' + ambiguous(4)),
    ResponseFormat("gbnf", 'root ::= ("CUB" | [D-H] [D-H]+ "k") ("_" [a-e])* [XY]'),
    ResponseFormat("lark", 'start: "[" (start | WORD)* "]"\nWORD: /[a-e]+_/'),
    ResponseFormat("regex", "(CUB|[D-H]{2,5}k)(_[a-e]{1,3}){0,4}[XY]"),
]


@pytest.mark.parametrize("wanted", GRAMMARS, ids=["ambiguous", "rules", "nested", "pattern"])
@pytest.mark.parametrize("quick_s", [grammar_time.QUICK_CALL_S, 0.0], ids=["four", "one"])
def test_steps_find_what_one_call_finds(
    vocabulary: GrammarVocabulary,
    wanted: ResponseFormat,
    quick_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_time, "QUICK_CALL_S", quick_s)
    start, dice = vocabulary.compile(wanted), random.Random(1)
    found = {True: 0, False: 0}
    for _ in range(40):
        matcher = start.deep_copy()
        walked(vocabulary, matcher, dice.randrange(4), dice)
        text = walked(vocabulary, matcher.deep_copy(), dice.randrange(1, 12), dice)
        for tokens in (text, [*text, EOS], [*text[:-1], dice.randrange(VOCAB)]):
            before = mask(vocabulary, matcher)
            whole = matcher.validate_tokens(tokens) == len(tokens)
            for in_steps in (True, False):
                CLOCK.begin(10.0, 0.0)
                assert follows(matcher, tokens, in_steps) == whole
                assert not matcher.is_error() and mask(vocabulary, matcher) == before
            found[whole] += 1
    assert min(found.values()) > 10


def mask(vocabulary: GrammarVocabulary, matcher: Any) -> bytes:
    words = np.zeros(vocabulary.num_words, dtype=np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return words.tobytes()


def walked(
    vocabulary: GrammarVocabulary, matcher: Any, count: int, dice: random.Random
) -> list[int]:
    """Let the matcher consume random tokens that it allows, until it needs none."""
    tokens: list[int] = []
    while len(tokens) < count and not matcher.is_stopped():
        bits = np.frombuffer(mask(vocabulary, matcher), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token = int(dice.choice([int(one) for one in allowed if one != EOS] or [EOS]))
        tokens.append(token)
        assert matcher.consume_token(token)
    return tokens
