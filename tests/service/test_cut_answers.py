"""Answers that their callers cut: what they could still become, and what they say about who wrote
them. A tenant with low limits moves neither a breaker nor a canary."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.config import SpecialistSettings
from coterie.core.events import Delta, Finished, Timings, Usage
from coterie.core.request import Limits, ResponseFormat
from coterie.core.snapshot import EnsembleConfig
from coterie.routing.router import Router, Specialist
from coterie.service.breaker.correctness import (
    CLOSED,
    SHADOW_ONLY,
    BreakerSettings,
    CorrectnessBreaker,
)
from coterie.service.canary import PROMOTED, ROLLED_BACK, RUNNING, CanarySpec, CanaryTest
from coterie.service.finish import Finisher, outcome_of
from coterie.service.plan import RequestRun
from coterie.service.slo.evidence import (
    BROKEN,
    INVALID,
    OPEN,
    UNFORMED,
    VALID,
    JudgedAnswer,
    JudgedShare,
    WholeLengths,
)
from coterie.service.snapshot import ServingSnapshot
from coterie.service.validate.base import AnswerContext
from coterie.service.validate.command import ValidatorCommands
from coterie.service.validate.prefix import prefix_kind
from coterie.service.validate.table import VALIDATORS
from coterie.service.validate.validators import AnswerValidators
from tests.helpers.adapters.profiles import BASE, Answers, Fleet, asking

SPEC = CanarySpec("adapter", "sql", "new", "old", 0.5, "sql@2")
SETTINGS = BreakerSettings(0.8, min_judged=20, breach_s=0.0, recovery_s=0.0)
# a whole answer of 20 tokens under a high limit
GOOD = JudgedAnswer(VALID, "honest", 20, 400)
SQL = "SELECT u.name, COUNT(*) FROM users u WHERE u.age > 18 GROUP BY u.name"

KINDS = [
    # (validator, argument, the text so far, what it could become)
    ("json", "", '{"a": [1, 2, -', OPEN),
    ("json", "", '{"a": tru', OPEN),
    ("json", "", '{"a": 1}, ', UNFORMED),
    ("json", "", "Here is the object you", UNFORMED),
    ("json", "", 'Here it is:\n```json\n{"a": ', OPEN),
    ("json", "", "Here it is:\n```json\n{a: ", BROKEN),
    ("json", "", "```json\n{a: 1}\n```\nThat is", BROKEN),
    ("json", "object", "Here is the object", BROKEN),
    ("json", "object", "[1, 2", BROKEN),
    ("json", "object", '{"name": "Ann', OPEN),
    ("json_schema", '{"type": "integer"}', "12", OPEN),
    ("json_schema", '{"type": "integer"}', "1 2", BROKEN),
    ("json", "", "-" * 40, BROKEN),
    ("json", "", "\n \n" * 20, BROKEN),
    ("code", "sql", "-" * 40, BROKEN),
    ("code", "sql", SQL[:40], OPEN),
    ("code", "sql", "-- all of the users who", UNFORMED),
    ("code", "sql", "the river flows of and to the of the", UNFORMED),
    ("code", "sql", "Sure:\n```sql\nSELECT name FROM", OPEN),
    ("code", "sql", "Sure:\n```sql\nSELEC name FROM t;\n```\nIt", BROKEN),
    ("code", "cpp", "int main() {\n  std::vector<int> v{1", OPEN),
    ("python", "", "def f(x):\n    return x +", OPEN),
    ("python", "", "def f(x)\n    return x\nprint(", UNFORMED),
    ("python", "", "```python\ndef f(x)\n    return x\nprint(", BROKEN),
    ("python", "", "```python\nfor x in y z: pri", BROKEN),
    ("python", "", "```python\nx = 'it is", OPEN),
    ("python", "", "```python\n# pip install ada\n```\nThen", OPEN),
    ("code", "sql", "```sql\n-- all\n```\n```sql\nSELECT", OPEN),
    # the mark that ends a block was cut
    ("python", "", "```python\nx = 1\n``", OPEN),
    ("python", "", "````python\nx = 1\n```", OPEN),
    ("json", "", '`````json\n{"a": 1}\n````', OPEN),
    ("json", "", '~~~~json\n{"a": 1}\n~~~', OPEN),
    ("python", "", "```python\ndef f(\n```", BROKEN),
    # a later block that names the language takes the place of one that names none
    ("json", "", "```\n$ ls -l\n```\nprints", UNFORMED),
    ("code", "sql", "```\n$ ls -l (\n```\nThen", UNFORMED),
    ("python", "", "```\nfor x in y z: pri", UNFORMED),
    # python judges no other language
    ("python", "", "```bash\nif (\n```\nThen", OPEN),
    ("python", "", "```json\n{a: 1}\n```\n```python\nprint(", OPEN),
    ("pattern", "a+", "bbbb", OPEN),
    ("grammar", "length", "a", OPEN),
]


@pytest.mark.parametrize(("validator", "argument", "text", "kind"), KINDS)
def test_what_a_cut_answer_could_become(
    validator: str, argument: str, text: str, kind: str
) -> None:
    assert prefix_kind(validator, argument, text) == kind


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(values, st.booleans())
def test_every_beginning_of_json_is_open(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    for end in range(len(text)):
        # 16 marks without a letter or digit are no answer
        if any(char.isalnum() for char in text[:end]) or end < 16:
            assert prefix_kind("json_schema", "{}", text[:end]) == OPEN, text[:end]


PYTHON = '''@cache
def area(shape: dict[str, float], *, scale: float = 1.5e-3) -> float:
    """The area."""
    total, text = 0, f"{shape!r:>10} 'of' \\
{scale}"
    for name, value in sorted(shape.items(), key=lambda item: item[1]):
        if name == "hole" and not value: continue
        total += value * (scale if value else 0x1F)
    try:
        assert total >= 0, ("negative", text)
    except AssertionError as error:
        raise ValueError(text) from error
    return [x ** 2 for x in range(3) if x][0] + total

class Shape:
    def __init__(self):
        self.parts = {"a": [1, 2], **{}}
'''


def test_every_beginning_of_a_program_is_open() -> None:
    for end in range(len(PYTHON)):
        if any(char.isalnum() for char in PYTHON[:end]) or end < 16:
            assert prefix_kind("python", "", PYTHON[:end]) == OPEN, PYTHON[:end]
            assert prefix_kind("python", "", f"So:\n```python\n{PYTHON[:end]}") == OPEN


PIECES = [
    "Sure:\n",
    "Done.\n",
    "```\n$ ls -l\n```\n",
    "```\n[1, 2]\n```\n",
    "```\n  a table?\n```\n",
    "```text\nout (\n```\n",
    "```bash\npip install x\n```\n",
    "```js\nlet x = {\n```\n",
    '```json\n{"a": [1]}\n```\n',
    "```python\n# of all\n```\n",
    "```python\nx = [1,\n 2]\n```\n",
    "```sql\nSELECT a FROM t;\n```\n",
    "````sql\nSELECT a FROM t;\n````\n",
    "`````python\nx = [1]\n`````\n",
]


@pytest.mark.parametrize(
    ("validator", "argument"), [("json", ""), ("python", ""), ("code", "sql"), ("code", "python")]
)
def test_no_beginning_of_a_valid_answer_is_broken(validator: str, argument: str) -> None:
    rng, found = random.Random(1), 0
    for _ in range(400):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 5)))
        if VALIDATORS[validator](argument).check(text).valid:
            found += 1
            for end in rng.sample(range(1, len(text)), min(12, len(text) - 1)):
                assert prefix_kind(validator, argument, text[:end]) != BROKEN, (text, text[:end])
    assert found > 30


@pytest.fixture(scope="module")
def kind_of() -> Iterator[Callable[[str, AnswerContext], str]]:
    with asyncio.Runner() as runner:
        validators = AnswerValidators()
        yield lambda text, context: runner.run(validators.prefix_kind(text, context))
        runner.run(validators.close())


def test_a_specialists_checks_judge_what_was_cut(
    kind_of: Callable[[str, AnswerContext], str],
) -> None:
    sql = AnswerContext(checks=("sql",), finish_reason="length")
    assert kind_of("-" * 60, sql) == BROKEN
    assert kind_of(SQL[:30], sql) == OPEN
    # a command judges complete answers alone, and generic knows no form
    assert kind_of("-" * 60, AnswerContext(checks=("mine",), task_type="conversation")) == OPEN


def cut(kind: str, limit: int, tenant: str = "honest") -> JudgedAnswer:
    return JudgedAnswer(kind, tenant, limit, limit, is_cut=True)


@pytest.mark.parametrize(
    ("stop_match", "text", "kind", "outcome", "length"),
    [
        # its caller stopped it, with a text or a token, however early
        ("x", '{"a": ', "", None, 0),
        (7, '{"a": ', "", None, 0),
        ("x", "Here", "", None, 0),
        ("x", "```json\n{a: ", BROKEN, None, 0),
        ("x", '{"a": 1}', VALID, True, 0),
        # stop texts that did not come up change nothing
        (None, '{"a": ', INVALID, False, 5),
        (None, '{"a": 1}', VALID, True, 5),
    ],
)
def test_an_answer_that_its_caller_stopped_is_cut(
    stop_match: str | int | None, text: str, kind: str, outcome: bool | None, length: int
) -> None:
    asked = replace(asking("an object"), limits=Limits(stop=("x",), stop_token_ids=(7,)))
    router = Router([Specialist("base", fingerprint=BASE)], Fleet([], Answers([])))
    settings = SpecialistSettings(checks=("json",))
    config = EnsembleConfig(specialists={"base": settings})

    async def main() -> JudgedAnswer | None:
        validators = AnswerValidators()
        snapshot = ServingSnapshot(config, router, ValidatorCommands(()))
        plan = replace(router.plan(asked), trace=None)
        run = RequestRun(asked, plan, cast(Any, None), 0.0, 0.0, snapshot)
        run.read(Delta("r", 0, text, (1, 2, 3, 4), finish_reason=None))
        run.read(Delta("r", 0, "", (5,), finish_reason="stop", stop_match=stop_match))
        try:
            end = Finished("r", ("stop",), Usage(3, 5), Timings())
            return await Finisher(validators, cast(Any, None)).outcome(run, end)
        finally:
            await validators.close()

    found = asyncio.run(main())
    assert found is not None
    assert (found.kind, found.num_tokens, found.is_cut) == (kind, length, False)
    assert outcome_of(found) is outcome


@pytest.mark.parametrize(
    ("unfinished", "is_remote", "kind"),
    [((), False, ""), ((0,), False, INVALID), ((), True, INVALID)],
)
def test_a_schema_that_is_too_slow_counts_only_if_nobody_enforced_it(
    unfinished: tuple[int, ...], is_remote: bool, kind: str
) -> None:
    text = "[" * 400 + "]" * 400
    lists = ResponseFormat("json_schema", '{"type": "array", "items": {"$ref": "#"}}')
    asked = replace(asking("lists"), response_format=lists)
    router = Router([Specialist("base", fingerprint=BASE)], Fleet([], Answers([])))
    config = EnsembleConfig(specialists={"base": SpecialistSettings()})

    async def main() -> JudgedAnswer | None:
        validators = AnswerValidators()
        snapshot = ServingSnapshot(config, router, ValidatorCommands(()))
        plan = replace(router.plan(asked), trace=None)
        served = cast(Any, SimpleNamespace(is_remote=is_remote))
        run = RequestRun(asked, plan, served, 0.0, 0.0, snapshot, response_format=lists)
        run.read(Delta("r", 0, text, (1,), finish_reason="stop"))
        try:
            end = Finished("r", ("stop",), Usage(3, 5), Timings(), unfinished=unfinished)
            return await Finisher(validators, cast(Any, None)).outcome(run, end)
        finally:
            await validators.close()

    found = asyncio.run(main())
    assert found is not None and found.kind == kind


def test_a_limit_must_leave_room() -> None:
    lengths = WholeLengths()
    # nothing is known yet: a cut answer needs a few tokens
    assert not lengths.counts(cut(BROKEN, 8)) and lengths.counts(cut(BROKEN, 16))
    for length in range(1, 101):
        lengths.add(replace(GOOD, num_tokens=length))
    assert not lengths.counts(cut(BROKEN, 90)) and lengths.counts(cut(BROKEN, 96))
    # a whole answer under a limit that half of them exceed was selected for being short
    assert not lengths.counts(replace(GOOD, num_tokens=3, max_tokens=8))
    assert lengths.counts(replace(GOOD, num_tokens=3, max_tokens=60))
    assert not lengths.shows_runaway(cut("", 90)) and lengths.shows_runaway(cut("", 96))


@pytest.mark.parametrize("num_honest", [1, 2, 4])
@pytest.mark.parametrize("other", [5, 5000])
def test_no_tenant_decides_how_much_room_the_others_need(num_honest: int, other: int) -> None:
    """One tenant's answers are very long, or very short, and it sends as many as it can."""
    lengths, rng = WholeLengths(), random.Random(7)
    for number in range(2000):
        tenant = f"honest-{number % num_honest}"
        lengths.add(JudgedAnswer(VALID, tenant, rng.randint(20, 60), 400))
        for _ in range(3):
            lengths.add(JudgedAnswer(VALID, "other", other, 8000))
    copy = WholeLengths()
    copy.restore(json.loads(json.dumps(lengths.state())))
    for one in (lengths, copy):
        for number in range(num_honest):
            tenant = f"honest-{number}"
            assert one.counts(cut(BROKEN, 400, tenant))
            assert one.shows_runaway(cut(OPEN, 400, tenant))
            assert not one.counts(cut(BROKEN, 40, tenant))
            assert one.counts(replace(GOOD, tenant=tenant, max_tokens=100))


def test_a_tenant_of_low_limits_is_measured_by_the_others() -> None:
    """Its whole answers are the short ones, because its limits cut the long ones."""
    lengths, rng = WholeLengths(), random.Random(8)
    for _ in range(1000):
        for tenant, limit in (("honest", 400), ("low", 24)):
            length = rng.randint(15, 60)
            lengths.add(JudgedAnswer(VALID, tenant, min(length, limit), limit, length > limit))
    assert not lengths.counts(cut(BROKEN, 24, "low"))
    assert not lengths.shows_runaway(cut(OPEN, 24, "low"))


def test_lengths_of_an_earlier_release_are_kept() -> None:
    lengths = WholeLengths()
    lengths.restore({"lengths": list(range(1, 101)), "share": []})
    assert lengths.quantile(0.95) == lengths.quantile(0.95, "a") == 96


def test_tenants_with_few_lengths_are_one() -> None:
    lengths = WholeLengths()
    for number in range(100):
        lengths.add(JudgedAnswer(VALID, f"small-{number % 20}", 40, 400))
        lengths.add(JudgedAnswer(VALID, "other", 5000, 8000))
    assert lengths.shows_runaway(cut(OPEN, 400, "small-1"))
    assert lengths.shows_runaway(cut(OPEN, 400, "new"))


def test_no_tenant_supplies_more_than_half() -> None:
    share, rng = JudgedShare(), random.Random(3)
    # alone, everything counts
    assert all(share.admits("big") for _ in range(300))
    admitted = {"big": 0, "small": 0}
    for step in range(4000):
        tenant = "small" if rng.random() < 0.2 else "big"
        admitted[tenant] += share.admits(tenant) and step >= 400
    assert 0.4 < admitted["big"] / sum(admitted.values()) < 0.53
    copy = JudgedShare()
    copy.restore(json.loads(json.dumps(share.state())))
    assert [share.admits("big") for _ in range(50)] == [copy.admits("big") for _ in range(50)]


def judged(breaker: CorrectnessBreaker, answers: list[JudgedAnswer], now: float = 1.0) -> str:
    for answer in answers:
        breaker.judge(now, answer)
        breaker.look(now)
    return breaker.state


def test_cut_answers_trip_a_breaker() -> None:
    """All that it writes is dashes, and every caller gives a limit."""
    breaker = CorrectnessBreaker(SETTINGS)
    assert judged(breaker, [cut(BROKEN, 64)] * 19) == CLOSED
    assert judged(breaker, [cut(BROKEN, 64)] * 6) == SHADOW_ONLY
    # no cut answer shows that it is well again: only whole ones do
    assert judged(breaker, [cut(OPEN, 64)] * 200) == SHADOW_ONLY
    assert judged(breaker, [GOOD] * 60) == CLOSED


def test_a_runaway_is_a_breach_of_its_own() -> None:
    """Its answers were whole; now they do not end, and each could still become valid."""
    breaker = CorrectnessBreaker(SETTINGS)
    rng = random.Random(1)
    usual = [GOOD if rng.random() < 0.95 else cut(OPEN, 400) for _ in range(2000)]
    assert judged(breaker, usual) == CLOSED
    # under limits that are no room for most answers nothing is said about it
    assert judged(breaker, [cut(OPEN, 12)] * 500) == CLOSED
    saved = json.loads(json.dumps(breaker.saved()))
    state, changes = CLOSED, []
    for number in range(60):
        breaker.judge(2.0, cut(OPEN, 400))
        change = breaker.look(2.0)
        if change is not None:
            changes.append((number, change.state, change.why))
            state = change.state
    assert state == SHADOW_ONLY and len(changes) == 1
    assert changes[0][0] < 50 and changes[0][2] == "runaway"
    # the same after a restart
    other = CorrectnessBreaker(SETTINGS)
    other.restore(saved, 2.0)
    assert judged(other, [cut(OPEN, 400)] * (changes[0][0] + 1), 2.0) == SHADOW_ONLY
    # a specialist without a floor promised nothing
    free = CorrectnessBreaker(replace(SETTINGS, floor=0.0))
    assert judged(free, [*usual, *[cut(OPEN, 400)] * 200]) == CLOSED


def test_a_demoted_runaway_is_not_what_is_usual() -> None:
    """Two of three answers of its shadows still do not end; those that do are valid."""
    breaker, rng = CorrectnessBreaker(SETTINGS), random.Random(1)
    assert judged(breaker, [GOOD] * 300) == CLOSED
    assert judged(breaker, [cut(OPEN, 400)] * 40) == SHADOW_ONLY
    shadows = [GOOD if rng.random() < 0.33 else cut(OPEN, 400) for _ in range(600)]
    assert judged(breaker, shadows) == SHADOW_ONLY
    assert judged(breaker, [GOOD] * 60) == CLOSED


@pytest.mark.parametrize("kind", [VALID, INVALID, OPEN, UNFORMED, BROKEN, ""])
def test_low_limits_move_no_breaker(kind: str) -> None:
    """Ten answers of an adversary for each honest one, in both directions."""
    rng = random.Random(4)
    for rate, expected in ((0.97, CLOSED), (0.2, SHADOW_ONLY)):
        breaker = CorrectnessBreaker(SETTINGS)
        honest = CorrectnessBreaker(SETTINGS)
        for _ in range(400):
            good = rng.random() < rate
            answer = JudgedAnswer(VALID if good else INVALID, "honest", rng.randint(15, 60), 400)
            for one in (breaker, honest):
                one.judge(1.0, answer)
                one.look(1.0)
            for _ in range(10):
                limit = rng.randint(1, 8)
                is_cut = kind not in (VALID, INVALID)
                low = JudgedAnswer(kind, "low", rng.randint(1, limit), limit, is_cut)
                breaker.judge(1.0, low)
                breaker.look(1.0)
        assert breaker.state == honest.state == expected, kind
        assert abs(breaker.window.rate(1.0).judged - honest.window.rate(1.0).judged) <= 40


def test_a_candidate_whose_every_answer_is_cut_is_rolled_back() -> None:
    for limit in (16, 64):
        test = CanaryTest(SPEC, 0.0)
        number = 0
        while test.outcome == RUNNING and number < 100:
            number += 1
            test.judged(False, cut(OPEN, limit), 1.0)
            test.judged(True, cut(BROKEN, limit), 1.0)
        assert (test.outcome, test.why) == (ROLLED_BACK, "invalid")
        assert number <= 30, number


def test_a_candidate_that_does_not_end_is_rolled_back() -> None:
    """No check judges it, or each of its answers could still become valid."""
    for kind in ("", OPEN):
        test, number = CanaryTest(SPEC, 0.0), 0
        for _ in range(20):
            test.judged(False, replace(GOOD, kind=kind and VALID), 1.0)
        while test.outcome == RUNNING and number < 100:
            number += 1
            test.judged(False, replace(GOOD, kind=kind and VALID), 1.0)
            test.judged(True, cut(kind, 400), 1.0)
        assert (test.outcome, test.why) == (ROLLED_BACK, "runaway")
        assert number <= 30, number
        assert test.figures()["candidate_ended"] == 0


@pytest.mark.parametrize(("new", "outcome"), [(0.97, PROMOTED), (0.3, ROLLED_BACK)])
@pytest.mark.parametrize("kind", [VALID, INVALID, OPEN, BROKEN])
def test_low_limits_move_no_canary(new: float, outcome: str, kind: str) -> None:
    """The adversary's answers are all of one kind on both sides, or on the candidate's alone."""
    for sides in ((True, False), (True,), (False,)):
        rng, test = random.Random(9), CanaryTest(SPEC, 0.0)
        while test.outcome == RUNNING:
            is_new = rng.random() < 0.5
            good = rng.random() < (new if is_new else 0.97)
            answer = JudgedAnswer(VALID if good else INVALID, "honest", rng.randint(15, 60), 400)
            test.judged(is_new, answer, 1.0)
            for side in sides:
                limit = rng.randint(1, 8)
                is_cut = kind in (OPEN, BROKEN)
                low = JudgedAnswer(kind, "low", rng.randint(1, limit), limit, is_cut)
                for _ in range(5):
                    test.judged(side, low, 1.0)
        assert test.outcome == outcome, (sides, test.figures())


@pytest.mark.full
def test_as_good_a_candidate_is_not_rolled_back_for_its_lengths() -> None:
    """At most one in twenty in 1,000 answers of each, of which a tenth do not end."""
    rng, wrong = random.Random(2), 0
    for _ in range(100):
        test = CanaryTest(SPEC, 0.0)
        for _ in range(1000):
            for side in (True, False):
                runs_on = rng.random() < 0.1
                test.judged(side, cut("", 400) if runs_on else replace(GOOD, kind=""), 1.0)
        wrong += test.outcome == ROLLED_BACK
    assert wrong <= 5, wrong


def test_a_canary_of_cut_answers_goes_on_after_a_restart() -> None:
    rng, test = random.Random(6), CanaryTest(SPEC, 5.0)
    answers = [
        (rng.random() < 0.5, rng.choice([GOOD, cut(OPEN, 400), cut(UNFORMED, 400)]))
        for _ in range(120)
    ]
    for side, answer in answers[:60]:
        test.judged(side, answer, 6.0)
    copy = CanaryTest.restored(json.loads(json.dumps(test.saved())))
    assert copy.figures() == test.figures()
    for side, answer in answers[60:]:
        assert test.judged(side, answer, 7.0) == copy.judged(side, answer, 7.0)
    assert copy.figures() == test.figures()
