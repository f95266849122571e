"""Random walks over the whole engine with tiny pools: no leak, no wrong reuse, no starvation.

The model is the KV-faithful toy, so a token is right only if every block it was computed from held
exactly its own chain, on its own stack of adapters. After each rule the books of pool, cache,
seats and scheduler are checked.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coterie.core.events import Delta, Failed, Finished, Started
from coterie.core.plan import AdapterChoice, Admitted, Assignment, Rejected
from coterie.engine.adapter_holds import PATIENCE_STEPS
from tests.helpers.models.toy_model import (
    EOS,
    VOCAB,
    ManualClock,
    ToyAdapters,
    ToyModel,
    make_assignment,
    make_engine,
    make_lane,
    toy_soft,
    true_output,
)

# shared beginnings: whole blocks, part of a block, one that differs only late, and the same blocks
# behind different ones
STEMS = [list(range(1, 1 + length)) for length in (1, 4, 7, 8, 13, 20)]
STEMS += [[1, 2, 3, 4, 9, 9], [1, 2, 3, 4] * 3, [5, 6, 7, 8, 1, 2, 3, 4, 1], [9, 9] * 7]

# none, one name with two digests, soft prompts, stacks, other weights, and one that is broken
NAMED = {name: AdapterChoice(name[0], name) for name in ("a", "a2", "b", "s:3", "t:9", "bad")}
STACKS: list[tuple[AdapterChoice, ...]] = [
    (), (), (), (NAMED["a"],), (NAMED["a2"],), (NAMED["b"],), (NAMED["s:3"],), (NAMED["t:9"],),
    (NAMED["a"], NAMED["b"]), (NAMED["b"], NAMED["a"]), (NAMED["s:3"], NAMED["a"], NAMED["t:9"]),
    (AdapterChoice("a", "a", 0.5),), (NAMED["bad"],),
]  # fmt: skip


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([10, 14, 24, 60]),
        block_size=st.sampled_from([2, 4, 8]),
        max_sequences=st.sampled_from([2, 4, 8]),
        step_tokens=st.sampled_from([8, 11, 32]),
        slots=st.sampled_from([0, 1, 3]),
        prefix_cache=st.booleans(),
        two_lanes=st.booleans(),
        seats=st.sampled_from([1, 2, 5]),
        load_ticks=st.sampled_from([0, 1, 6]),
        batching=st.sampled_from(["mixed", "mixed", "grouped"]),
        run_ahead=st.booleans(),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        step_tokens: int,
        slots: int,
        prefix_cache: bool,
        two_lanes: bool,
        seats: int,
        load_ticks: int,
        batching: str,
        run_ahead: bool,
    ) -> None:
        names = ("lane", "other") if two_lanes else ("lane",)
        lanes = [
            make_lane(
                name,
                num_blocks=num_blocks,
                block_size=block_size,
                max_sequences=max_sequences,
                max_step_tokens=step_tokens,
                kv_cache_slots=slots,
                prefix_cache=prefix_cache,
                max_queue=6,
                context=64,
            )
            for name in names
        ]
        self.clock, self.model = ManualClock(), ToyModel()
        self.pool = ToyAdapters(seats, load_ticks)
        self.engine = make_engine(
            *lanes,
            model=self.model,
            clock=self.clock,
            adapters=self.pool,
            batching=batching,
            run_ahead=run_ahead,
        )
        self.names = names
        self.open: dict[str, Assignment] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.started: set[str] = set()
        self.broken: set[str] = set()
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for _ in range(self.most_steps()):
                if not self.engine.has_work():
                    break
                self.pool.tick()
                self.take(self.engine.step())
                self.engine.check()
            assert not self.open, "requests that never ended"
            stats = self.engine.stats()
            assert stats["kv_usage"] == stats["running"] == stats["waiting"] == 0
            assert not self.pool.users

    def most_steps(self) -> int:
        """Starvation bound: every token computed thrice, alone, and every stack loaded alone, would
        take so long."""
        work = (
            (len(toy_soft(a.adapters)) + len(a.prompt_ids) + (a.limits.max_tokens or 0))
            * (a.sampling.n or 1)
            * (a.sampling.num_beams or 1)
            for a in self.open.values()
        )
        return 10 + 3 * sum(work) + len(self.open) * (PATIENCE_STEPS + self.pool.load_ticks + 1)

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        priority=st.integers(0, 3),
        tenant=st.sampled_from(["t", "u"]),
        session=st.sampled_from(["", "a", "b", "c", "d"]),
        shape=st.sampled_from([(1, 1)] * 4 + [(3, 1), (2, 2), (1, 3)]),
        temperature=st.sampled_from([0.0, 1.0]),
        max_tokens=st.integers(1, 24),
        patience=st.sampled_from([None, None, 5.0]),
        ignore_eos=st.booleans(),
        lane=st.integers(0, 1),
        adapters=st.sampled_from(STACKS),
    )
    def add(
        self,
        stem: list[int],
        tail: list[int],
        shape: tuple[int, int],
        patience: float | None,
        lane: int,
        **rest: Any,
    ) -> None:
        self.count += 1
        n, num_beams = shape
        assignment = make_assignment(
            f"r{self.count}",
            stem + tail,
            n=n,
            num_beams=num_beams,
            seed=self.count,
            lane=self.names[lane % len(self.names)],
            deadline=None if patience is None else self.clock.now + patience,
            arrived_at=self.clock.now,
            **rest,
        )
        verdict = self.engine.add(assignment)
        if isinstance(verdict, Admitted):
            self.open[assignment.request_id] = assignment
        else:
            assert isinstance(verdict, Rejected)
            assert verdict.code in ("overloaded", "context_length_exceeded", "invalid_request")
            assert (verdict.retry_after_s is not None) == (verdict.code == "overloaded")

    @rule(
        stem=st.sampled_from(STEMS),
        count=st.integers(2, 4),
        max_tokens=st.integers(4, 24),
        first=st.integers(0, 7),
    )
    def add_crowd(self, stem: list[int], count: int, max_tokens: int, first: int) -> None:
        for number in range(count):
            self.add(
                stem=stem,
                tail=[number] * number,
                shape=(1 + number % 2, 1),
                patience=None,
                lane=0,
                temperature=1.0,
                max_tokens=max_tokens,
                priority=number % 2,
                session="crowd",
                adapters=STACKS[3 + (first + number) % 8],
            )

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.clock.now += 0.1
            self.pool.tick()
            self.take(self.engine.step())
            self.engine.check()

    @rule(kind=st.sampled_from(["abort", "abort", "wait", "break"]), pick=st.integers(0, 99))
    def trouble(self, kind: str, pick: int) -> None:
        if kind == "wait":
            self.clock.now += 3.0
        elif kind == "abort" and self.open:
            self.engine.abort(sorted(self.open)[pick % len(self.open)])
        elif pick < 25:
            self.model.fail_next = True
            self.take(self.engine.step())
            self.model.fail_next = False

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def take(self, events: list[Any]) -> None:
        for event in events:
            assignment = self.open[event.request_id]
            if isinstance(event, Started):
                assert event.request_id not in self.started
                self.started.add(event.request_id)
                assert NAMED["bad"] not in assignment.adapters
                assert event.cached_tokens < len(assignment.prompt_ids)
            elif isinstance(event, Delta):
                self.take_delta(assignment, event)
            elif isinstance(event, Finished):
                self.take_end(assignment, event)
            else:
                assert isinstance(event, Failed)
                bad = NAMED["bad"] in assignment.adapters and event.request_id not in self.started
                assert event.code == ("weights_error" if bad else "internal_error")
                del self.open[event.request_id]

    def take_delta(self, assignment: Assignment, delta: Delta) -> None:
        key = (delta.request_id, delta.choice)
        assert key not in self.ended
        found = self.tokens.setdefault(key, [])
        found.extend(delta.token_ids)
        if assignment.sampling.num_beams == 1 and delta.token_ids:
            expected = true_output(assignment, delta.choice, len(found))
            assert found == expected, (assignment, found, expected)
        if delta.finish_reason is not None:
            self.ended[key] = delta.finish_reason

    def take_end(self, assignment: Assignment, event: Finished) -> None:
        del self.open[event.request_id]
        assert len(event.choices) == assignment.sampling.n
        for choice, reason in enumerate(event.choices):
            key = (event.request_id, choice)
            assert self.ended[key] == reason
            found = self.tokens.get(key, [])
            if reason == "length":
                room = 64 - len(assignment.prompt_ids) - len(toy_soft(assignment.adapters))
                assert len(found) <= min(assignment.limits.max_tokens or 0, room)
            elif reason == "stop":
                assert found[-1] == EOS and not assignment.limits.ignore_eos
            else:
                assert reason in ("abort", "timeout")


def run_machine(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_beams_whose_sibling_waits_behind_another_tenant_end() -> None:
    """Of two beams one runs and waits for the other, which gets no blocks before a tenant with
    nothing running, whose prompt does not fit beside the first beam."""
    machine = EngineMachine()
    machine.build(
        num_blocks=10, block_size=4, max_sequences=2, step_tokens=8, slots=0, prefix_cache=True,
        two_lanes=False, seats=1, load_ticks=0, batching="mixed",
        run_ahead=False,
    )  # fmt: skip
    machine.add_crowd(count=2, first=0, max_tokens=7, stem=[1])
    machine.step(count=12)
    machine.add(
        adapters=(), ignore_eos=False, lane=0, max_tokens=3, patience=None, priority=0, session="",
        shape=(2, 2), stem=[1, 2, 3, 4], tail=[0, 2, 0], temperature=0.0, tenant="u",
    )  # fmt: skip
    machine.step(count=1)
    machine.add_crowd(count=2, first=0, max_tokens=16, stem=list(range(1, 21)))
    machine.teardown()


def test_random_walks() -> None:
    run_machine(examples=14, steps=32)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_random_walks_in_full() -> None:
    run_machine(examples=100, steps=50)
