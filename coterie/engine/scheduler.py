"""Schedules one lane: which sequences wait and run, what the next step computes, what is preempted.

A step serves the running sequences in rank order (priority, then arrival). A sequence that needs a
block takes it from the worst-ranked one, so the best-ranked always makes progress. Sequences that
wait for adapters are skipped. A party (the urgent requests of a tenant, or its other requests) with
nothing running goes before parties that already run, so that no tenant and no priority can block
another one. Uses blocks only through `KVSpace` and adapter stacks only through `AdapterHolds`.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from itertools import groupby

from coterie.core.lane import LaneConfig, queue_capacity
from coterie.core.plan import Assignment
from coterie.core.request import own_tenant
from coterie.engine.adapter_holds import AdapterHolds
from coterie.engine.blocks import KVSpace
from coterie.engine.sequence import Party, Sequence, SequenceStatus, rank_of
from coterie.engine.step import StepPlan, StepRow, StepSegment

# if logits of all prompt positions are needed, a chunk is at most this long, to limit their memory
MAX_SCORED_ROWS = 128


class Scheduler:
    def __init__(
        self, config: LaneConfig, holds: AdapterHolds | None = None, *, grouped: bool = False
    ) -> None:
        """`grouped`: each step serves only one stack of adapters; the stacks take turns."""
        self.config = config
        self.space = KVSpace(config)
        self.holds = holds
        # both sorted by rank, best first
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # sequences (waiting, running or following) whose grammar tasks run: they are not computed
        # until the tasks are done
        self.held: set[Sequence] = set()
        # prompt tokens of all waiting sequences
        self.num_waiting_tokens = 0
        self.num_preemptions = 0
        # per party: how many sequences run, and how many wait
        self._num_running: Counter[Party] = Counter()
        self._num_waiting: Counter[Party] = Counter()
        # sequences that started to run; the caller empties the list
        self.started: list[Sequence] = []
        # sequences whose adapters cannot be loaded; the caller ends them and empties the list
        self.failed_loads: list[Sequence] = []
        self._step = 0
        self._turns = AdapterTurns() if grouped else None

    def is_full(self, assignment: Assignment) -> bool:
        """Whether the queue is full for this request. Waiting requests of lower priority do not
        count. A request with a reservation, or of a tenant without any request here, may exceed the
        limit a little."""
        rank = (-assignment.limits.priority, math.inf, 0, 0)
        most = queue_capacity(
            self.config.max_queue,
            is_expected=assignment.limits.is_expected,
            is_new=not self._is_here(own_tenant(assignment.tenant)),
        )
        return bisect(self.waiting, rank, key=rank_of) >= most

    def _is_here(self, tenant: str) -> bool:
        parties = ((tenant, False), (tenant, True))
        return any(self._num_running[p] or self._num_waiting[p] for p in parties)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self.num_waiting_tokens += sequence.num_prompt
        self._num_waiting[sequence.party] += 1
        insort(self.waiting, sequence, key=rank_of)
        if sequence.adapter_key and self.holds is not None:
            self.holds.queue(sequence)

    def end(self, sequence: Sequence, session: Hashable | None = None) -> None:
        """Free everything at once. With `session` its blocks are kept for that session."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_prompt
            _less(self._num_waiting, sequence.party)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            _less(self._num_running, sequence.party)
        if session is not None:
            self.space.keep(session, sequence)
        self.space.release(sequence)
        self._leave(sequence)
        self.held.discard(sequence)
        sequence.status = SequenceStatus.ENDED

    def schedule(self) -> StepPlan | None:
        """The plan of the next step; None if nothing can be computed."""
        if self.holds is not None and self.holds.waiting:
            self._preempt_for_closed(self.holds)
        if self.waiting:
            self._admit()
        self._step += 1
        key, num_decoding = self._pick_key()
        budget = self.config.max_step_tokens - num_decoding
        kept = self._kept_tokens(key, budget)
        rows: list[StepRow] = []
        copies: list[tuple[int, int]] = []
        position = 0
        # preempted sequences are always after `position`, because the worst-ranked are preempted
        while position < len(self.running):
            sequence = self.running[position]
            position += 1
            start = sequence.num_computed
            count = len(sequence.tokens) - start
            if (
                count == 0
                or sequence in self.held
                or (key is not None and sequence.adapter_key != key)
            ):
                continue
            if count > 1:
                party = sequence.party
                others = sum(tokens for other, tokens in kept.items() if other != party)
                count = self._chunk(sequence, min(count, budget - others))
                budget -= count
                if kept:
                    kept[party] = max(kept.get(party, 0) - count, 0)
            if count and (self.space.is_ready(sequence) or self._make_room(sequence, copies)):
                phase = "prefill" if start < sequence.num_prompt or count > 1 else "decode"
                rows.append(StepRow(sequence, start, count, phase))
        return self._plan(rows, copies) if rows else None

    def commit(self, plan: StepPlan) -> None:
        """After the plan was computed: advance its sequences, separate followers."""
        block_size = self.config.block_size
        for sequence, start, count, _ in plan.rows:
            end = start + count
            if start // block_size == end // block_size:
                sequence.num_computed = end
            else:
                self.space.computed(sequence, count)
            if sequence.followers and end == len(sequence.tokens):
                for follower in sequence.followers:
                    self.fork(sequence, follower)
                sequence.followers = []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` continues from what `parent` has computed, or waits and recomputes it."""
        if self.space.fork(parent, child):
            child.status = SequenceStatus.RUNNING
            self._num_running[child.party] += 1
            insort(self.running, child, key=rank_of)
            if child.adapter_key and self.holds is not None:
                self.holds.join(child)
        else:
            self.add(child)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.waiting == sorted(self.waiting, key=rank_of)
        assert self.running == sorted(self.running, key=rank_of)
        assert all(s.status is SequenceStatus.WAITING and s.row is None for s in self.waiting)
        assert all(s.status is SequenceStatus.RUNNING and s.row is not None for s in self.running)
        assert all(s.status is not SequenceStatus.ENDED for s in self.held)
        assert len(self.running) + self.space.tables.num_free == self.config.max_sequences
        assert self.num_waiting_tokens == sum(s.num_prompt for s in self.waiting)
        assert self._num_waiting == Counter(s.party for s in self.waiting)
        assert self._num_running == Counter(s.party for s in self.running)
        self.space.check(self.running + self.waiting)
        if self.holds is not None:
            self.holds.check(self.running, self.waiting)

    def _admit(self) -> None:
        if len(self._num_waiting | self._num_running) > 1 and not self._admit_absent():
            return
        position = 0
        while position < len(self.waiting):
            head = self.waiting[position]
            if self._is_barred(head):
                position += 1
            elif not (self._has_budget(head) and (self._enter(head) or self._yield_to(head))):
                return

    def _admit_absent(self) -> bool:
        """Admit one sequence of each party with nothing running. False if one of them does not fit:
        then the next free blocks are for it. If no running sequence can make progress, no more
        blocks will be free: then others may be admitted."""
        for head in self._absent():
            if self._is_barred(head):
                continue
            while not self._enter(head):
                if not self._yield_to(head) and not self._share_with(head):
                    return self._is_stuck()
        return True

    def _is_stuck(self) -> bool:
        """Whether all that run are beams that wait for a sibling in the queue."""
        return not any(s.num_pending or s in self.held for s in self.running)

    def _absent(self) -> list[Sequence]:
        """The first waiting sequence of every party with nothing running, best rank first."""
        parties = {party for party in self._num_waiting if not self._num_running[party]}
        first_waiting: list[Sequence] = []
        for sequence in self.waiting if parties else ():
            if sequence.party in parties and sequence not in self.held:
                parties.remove(sequence.party)
                first_waiting.append(sequence)
        return first_waiting

    def _enter(self, sequence: Sequence) -> bool:
        """Let it run from now on. False if there is no room."""
        spare = sum(not self.space.is_ready(s) for s in self.running if s.num_pending)
        if not self.space.admit(sequence, spare):
            return False
        self.num_waiting_tokens -= sequence.num_prompt
        self.waiting.remove(sequence)
        _less(self._num_waiting, sequence.party)
        self._start(sequence)
        return True

    def _is_barred(self, sequence: Sequence) -> bool:
        """Whether it cannot run for a reason other than room: grammar, tenant's limit, adapters."""
        if sequence in self.held or self._is_capped(sequence):
            return True
        return bool(sequence.adapter_key) and not self._holds_adapters(sequence)

    def _is_capped(self, sequence: Sequence) -> bool:
        """Whether its tenant already runs as many sequences as allowed. A request with more
        sequences than that may run alone."""
        if not sequence.share.max_running:
            return False
        running = self._num_of(sequence.share.tenant)
        return running > 0 and running + 1 + len(sequence.followers) > sequence.share.max_running

    def _num_of(self, tenant: str) -> int:
        return self._num_running[tenant, False] + self._num_running[tenant, True]

    def _holds_adapters(self, sequence: Sequence) -> bool:
        """Whether its adapters are loaded and held. If it then gets no blocks, it still keeps them:
        otherwise it might never get both at the same time."""
        assert self.holds is not None, "a sequence with adapters where there are none"
        answer = self.holds.try_hold(sequence)
        if answer == "failed":
            self.failed_loads.append(sequence)
        return answer == "held"

    def _preempt_for_closed(self, holds: AdapterHolds) -> None:
        holds.next_round()
        for sequence in holds.yielding(self.running):
            self._preempt(sequence)
        for sequence in holds.yielding(self.waiting):
            holds.leave(sequence)
            holds.queue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.adapter_key and self.holds is not None:
            self.holds.leave(sequence)

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        if not sequence.num_preemptions:
            sequence.num_cached = sequence.num_computed
            self.started.append(sequence)
        self._num_running[sequence.party] += 1
        insort(self.running, sequence, key=rank_of)

    def _has_budget(self, head: Sequence) -> bool:
        """Whether a step has tokens left for `head`. If admitted later, it may find more in the
        cache."""
        ahead = sum(s.num_pending for s in self.running if s.rank < head.rank)
        return ahead < self.config.max_step_tokens

    def _yield_to(self, head: Sequence) -> bool:
        """Preempt the worst-ranked sequence for a strictly higher priority. False if there is none.

        If no sequence can make progress, the rank decides.
        """
        if not self.running:
            return False
        worst = self.running[-1]
        if self._is_stuck() and worst.rank > head.rank:
            self._preempt(worst)
            return True
        lower = [s for s in self.running if s.priority < head.priority]
        if self._num_running[head.party]:
            # the only running sequence of a party is not preempted
            lower = [s for s in lower if self._num_running[s.party] > 1]
        return self._preempt_for(head, lower)

    def _share_with(self, head: Sequence) -> bool:
        """Preempt for a tenant with nothing running: the worst-ranked sequence of the tenant that
        runs the most. That tenant keeps at least one."""
        if self._num_of(head.share.tenant):
            return False
        counts = Counter(sequence.share.tenant for sequence in self.running)
        most = max(counts, key=counts.__getitem__, default="")
        theirs = [sequence for sequence in self.running if sequence.share.tenant == most]
        return self._preempt_for(head, theirs[1:])

    def _preempt_for(self, head: Sequence, yielding: list[Sequence]) -> bool:
        """Preempt the last of `yielding`, if `head` fits after all of them are preempted."""
        reclaimed = sum(len(sequence.blocks) for sequence in yielding)
        room = self.space.cache.num_available + reclaimed
        if not yielding or self.space.num_missing(head) > room:
            return False
        self._preempt(yielding[-1])
        return True

    def _kept_tokens(self, key: str | None, budget: int) -> dict[Party, int]:
        """The prompt tokens of a step that are reserved for each party, if several have prompts."""
        if len(self._num_running) < 2:
            return {}
        pending: Counter[Party] = Counter()
        for sequence in self.running:
            if sequence.num_pending > 1 and key in (None, sequence.adapter_key):
                pending[sequence.party] += sequence.num_pending
        most = budget // (2 * len(pending)) if len(pending) > 1 else 0
        return {party: min(tokens, most) for party, tokens in pending.items() if most}

    def _make_room(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Make room for the next token. False if `sequence` itself was preempted."""
        while not self.space.is_ready(sequence):
            if self.space.extend(sequence, copies):
                return True
            worst = self.running[-1]
            self._preempt(worst)
            if worst is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        _less(self._num_running, sequence.party)
        self.space.release(sequence)
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    def _pick_key(self) -> tuple[str | None, int]:
        """The adapter key whose turn it is (None = all), and how many of its sequences decode."""
        if self._turns is None or self.holds is None or not self.holds.holders:
            return None, sum(len(s.tokens) - s.num_computed == 1 for s in self.running)
        decoding: dict[str, int] = {}
        for sequence in self.running:
            pending = len(sequence.tokens) - sequence.num_computed
            if pending:
                key = sequence.adapter_key
                decoding[key] = decoding.get(key, 0) + (pending == 1)
        if not decoding:
            return None, 0
        key = self._turns.pick(list(decoding))
        return key, decoding[key]

    def _chunk(self, sequence: Sequence, count: int) -> int:
        if sequence.draw.prompt_logprobs is None:
            return count
        return min(count, MAX_SCORED_ROWS)

    def _plan(self, rows: list[StepRow], copies: list[tuple[int, int]]) -> StepPlan:
        segments = self._segments(rows) if self.holds is not None and self.holds.holders else ()
        draws: list[Sequence] = []
        draw_rows: list[int] = []
        num_tokens = num_prefill = 0
        for index, (sequence, start, count, phase) in enumerate(rows):
            num_tokens += count
            if phase == "prefill":
                num_prefill += count
            if start + count == len(sequence.tokens):
                draws.append(sequence)
                draw_rows.append(index)
                if sequence.followers:
                    draws += sequence.followers
                    draw_rows += [index] * len(sequence.followers)
        return StepPlan(
            self._step, rows, copies, draws, draw_rows, num_tokens, num_prefill, segments
        )

    def _segments(self, rows: list[StepRow]) -> list[StepSegment]:
        """Sort rows by adapter stack, rows without one first; otherwise keep the order."""
        assert self.holds is not None
        rows.sort(key=lambda row: row.sequence.adapter_key)
        segments, first = [], 0
        for key, some in groupby(rows, key=lambda row: row.sequence.adapter_key):
            last = first + len(list(some))
            if key:
                segments.append(StepSegment(first, last, self.holds.stack(key)))
            first = last
        return segments


def _less(counts: Counter[Party], party: Party) -> None:
    """Decrease a count and remove it at 0: the number of parties over time has no limit."""
    counts[party] -= 1
    if not counts[party]:
        del counts[party]


# a key that was skipped this often in a row goes next, independent of rank
MAX_PASSED_OVER = 4


class AdapterTurns:
    """Picks one adapter key per step: that of the best-ranked sequence, unless another key has
    waited too long.

    With K active keys each is served at least once in MAX_PASSED_OVER + K steps.
    """

    def __init__(self) -> None:
        self._passed_over: dict[str, int] = {}

    def pick(self, keys: Seq[str]) -> str:
        """`keys`: the keys with work, best rank first, each once."""
        if len(keys) == 1:
            self._passed_over.clear()
            return keys[0]
        passed = {key: self._passed_over.get(key, 0) for key in keys}
        longest = max(keys, key=lambda key: passed[key])
        chosen = longest if passed[longest] >= MAX_PASSED_OVER else keys[0]
        self._passed_over = {key: 0 if key == chosen else passed[key] + 1 for key in keys}
        return chosen
