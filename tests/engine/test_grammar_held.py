"""Sequences whose grammars take longer than a step waits: whatever happens to them meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import InvalidRequest
from coterie.core.events import Delta, Failed, Finished
from coterie.core.plan import Admitted
from coterie.core.request import ResponseFormat
from coterie.engine import grammar
from coterie.engine.engine import Engine
from coterie.engine.grammar import Constraint, GrammarCache, GrammarTask
from coterie.engine.grammar_time import RequestTime
from coterie.engine.scheduler import Scheduler
from tests.helpers.models.toy_grammars import NESTED, REGEX, constrained, run
from tests.helpers.models.toy_model import (
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    taken_over,
    true_output,
)


class Gate:
    """Work on grammars is done, and not told, while it is shut."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def shut(self) -> None:
        self.opened.clear()

    def open(self) -> None:
        self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No step waits long for a grammar, and none is ready while the gate is shut."""
    monkeypatch.setattr(grammar, "STEP_BUDGET_S", 0.001)
    gate = Gate()
    for name in ("begin", "take"):
        whole = getattr(Constraint, name)

        def slow(self: Constraint, *args: Any, whole: Any = whole) -> Any:
            value = whole(self, *args)
            gate.opened.wait()
            return value

        monkeypatch.setattr(Constraint, name, slow)
    yield gate
    gate.open()


def scheduler_of(engine: Engine) -> Scheduler:
    return engine._lanes[0].scheduler


def until_held(engine: Engine, gate: Gate, num_tokens: int) -> list[Any]:
    """Steps until something is held behind `num_tokens` of output; the gate is shut then."""
    events: list[Any] = []
    while sum(isinstance(event, Delta) for event in events) < num_tokens:
        assert engine.has_work()
        events += engine.step()
    gate.shut()
    for _ in range(50):
        if scheduler_of(engine).held:
            break
        events += engine.step()
    assert scheduler_of(engine).held
    engine.check()
    return events


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_a_successor_goes_on_exactly_where_a_held_sequence_was(gate: Gate, num_tokens: int) -> None:
    whole = constrained("r", NESTED, max_tokens=18, n=2, seed=3, logprobs=2)
    full = outputs(run(whole))
    engine = make_engine()
    engine.add(whole)
    # its process is killed here: what was held is lost with it
    seen = [event for event in until_held(engine, gate, num_tokens) if isinstance(event, Delta)]
    successor = make_engine()
    successor.add(taken_over(whole, seen))
    gate.open()
    assert outputs([*seen, *drain(successor)]) == full
    # and had it lived, it would have gone on the same
    assert outputs([*seen, *drain(engine)]) == full


def test_an_aborted_one_leaves_nothing(gate: Gate) -> None:
    engine = make_engine()
    work = [constrained(f"r{i}", REGEX, seed=i, n=2) for i in range(4)]
    for assignment in work:
        engine.add(assignment)
    until_held(engine, gate, 3)
    late = [constrained(f"late{i}", NESTED, seed=i) for i in range(20)]
    for assignment in late:
        engine.add(assignment)
    for assignment in (*work, *late):
        engine.abort(assignment.request_id)
    events = drain(engine)
    assert sum(isinstance(event, Finished) for event in events) == len(work) + len(late)
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert not scheduler_of(engine).held and not engine._tracker.grammar_jobs
    # nothing is left to do but what a thread is at
    assert grammar._THREADS.num_waiting == 0
    # an id may come again while the work of its first bearer is still under way
    again = [constrained(one.request_id, REGEX, seed=5) for one in (work[0], late[0])]
    for assignment in again:
        assert isinstance(engine.add(assignment), Admitted)
    gate.open()
    found = drain(engine)
    for assignment in again:
        true = outputs(run(assignment))[assignment.request_id, 0]
        assert outputs(found)[assignment.request_id, 0] == true
    assert engine.stats()["kv_usage"] == 0


def test_one_that_is_preempted_draws_what_it_would_have(gate: Gate) -> None:
    whole = constrained("r", NESTED, max_tokens=18, seed=3)
    full = outputs(run(whole))
    engine = make_engine(make_lane(max_sequences=1, prefix_cache=False))
    engine.add(whole)
    events = until_held(engine, gate, 3)
    urgent = make_assignment("urgent", range(1, 9), max_tokens=6, priority=9)
    engine.add(urgent)
    while "urgent" in engine._tracker:
        events += engine.step()
        engine.check()
    assert engine.stats()["preemptions"] == 1 and scheduler_of(engine).held
    gate.open()
    events += drain(engine)
    assert outputs(events)["r", 0] == full["r", 0]
    assert outputs(events)["urgent", 0] == true_output(urgent)


def test_a_grammar_without_end_holds_up_nobody_and_expires(gate: Gate) -> None:
    clock = [100.0]
    engine = make_engine(clock=lambda: clock[0])
    engine.add(constrained("stuck", REGEX, deadline=130.0))
    events = until_held(engine, gate, 2)
    free = make_assignment("free", range(1, 9), max_tokens=12)
    engine.add(free)
    while "free" in engine._tracker:
        events += engine.step()
    assert outputs(events)["free", 0] == true_output(free)
    clock[0] = 131.0
    events += drain(engine)
    ended = events[-1]
    assert isinstance(ended, Finished) and ended.choices == ("timeout",)


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_a_cut_text_is_judged_by_what_was_sent(gate: Gate, num_tokens: int) -> None:
    engine = make_engine()
    pairs = ResponseFormat("regex", "(EF)+")
    engine.add(constrained("r", pairs, max_tokens=200, ignore_eos=True))
    events = until_held(engine, gate, num_tokens)
    engine.abort("r")
    events += drain(engine)
    # the token that was being worked out is no part of it
    is_whole = len(outputs(events)["r", 0]) % 2 == 0
    assert events[-1].unfinished == (() if is_whole else (0,))


class Panic(BaseException):
    """As native code raises it."""


@pytest.mark.parametrize("error", [Panic("at the lexer"), RuntimeError("broken")], ids=str)
def test_one_that_breaks_takes_nobody_along(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    take = Constraint.take

    def breaking(self: Constraint, token: int) -> int:
        if self.time.tenant == "bad":
            raise error
        return take(self, token)

    monkeypatch.setattr(Constraint, "take", breaking)
    neighbour, good = make_assignment("free", range(1, 9)), constrained("good", REGEX)
    events = run(constrained("bad", REGEX, tenant="bad"), neighbour, good)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["bad"]
    # our words, not the error's
    assert failed[0].code == "internal_error" and "lexer" not in failed[0].message
    assert outputs(events)["free", 0] == true_output(neighbour)
    assert outputs(events)["good", 0] == outputs(run(good))["good", 0]


class JustDone(GrammarTask):
    """Ends between the first time that somebody asks and the second."""

    asked = 0

    @property
    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1

    @done.setter
    def done(self, value: bool) -> None:
        """Its own matter."""


def test_what_goes_wrong_the_moment_it_is_looked_at_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(self: GrammarCache, *args: Any) -> GrammarTask:
        job = JustDone(RequestTime("t"), lambda: 0)
        job.error = InvalidRequest("the pattern cannot be enforced")
        return job

    monkeypatch.setattr(GrammarCache, "begin", begin)
    engine = make_engine()
    neighbour = make_assignment("free", range(1, 9))
    assert isinstance(engine.add(constrained("r", REGEX)), Admitted)
    engine.add(neighbour)
    events = drain(engine)
    failed = next(event for event in events if isinstance(event, Failed))
    assert failed.code == "invalid_request" and "cannot be enforced" in failed.message
    assert outputs(events)["free", 0] == true_output(neighbour)


ENDING = """
import sys
sys.path.insert(0, {root!r})
from tests.helpers.models.toy_model import EOS, VOCAB, ToyTokenizer
from coterie.core.request import ResponseFormat
from coterie.engine.grammar import GrammarCache, GrammarTask
from coterie.engine.grammar_time import RequestTime
grammars = GrammarCache(ToyTokenizer(), VOCAB, [EOS])
grammars.parts()
def work(n):
    pattern = "(a|b)*a(a|b){{%d}}c[D-H]{{%d}}|.*X.{{7}}Y" % (9 + n % 5, n + 1)
    grammars._compile(ResponseFormat("regex", pattern))
    return 0
grammars.work.do([GrammarTask(RequestTime("t"), lambda n=n: work(n)) for n in range(200)])
"""


def test_a_process_ends_well_with_work_under_way() -> None:
    """A thread inside the grammar engine used to fault when the interpreter went away."""
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(root=root)], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-500:]
