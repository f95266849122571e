"""Schedules one lane: which sequences wait and run, what the next step computes, what is preempted.

A step serves the running sequences in rank order (priority, then arrival). A sequence that needs a
block takes it from the worst-ranked one, so the best-ranked always makes progress. Sequences that
wait for adapters are skipped. A party (the urgent requests of a tenant, or its other requests) with
nothing running goes before parties that already run, so that no tenant and no priority can block
another one. At equal priority, the tenant that got the fewest tokens is next. Uses blocks only
through `KVSpace` and adapter stacks only through `AdapterHolds`.

While only decoding remains, the step after a launched one is certain before its tokens are known:
`schedule_ahead` plans it. A sequence whose end is found then still has a row in that step; nothing
of it is kept.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from coterie.core.fair_share import VirtualTokenCounters
from coterie.core.lane import LaneConfig, queue_capacity
from coterie.core.plan import Assignment
from coterie.core.request import own_tenant
from coterie.engine.adapter_holds import AdapterHolds
from coterie.engine.blocks import KVSpace
from coterie.engine.sequence import Party, Sequence, SequenceStatus, rank_of
from coterie.engine.step import DecodeRows, StepPlan, StepRow, StepSegment

# if logits of all prompt positions are needed, a chunk is at most this long, and a step has at most
# so many of these positions, to limit their memory
MAX_SCORED_ROWS, MAX_STEP_SCORED_ROWS = 128, 512
# with fewer sequences, arrays take longer than a loop
MIN_ARRAY_ROWS = 8


class Scheduler:
    def __init__(
        self,
        config: LaneConfig,
        holds: AdapterHolds | None = None,
        *,
        space: KVSpace | None = None,
        grouped: bool = False,
    ) -> None:
        """`grouped`: each step serves only one stack of adapters; the stacks take turns."""
        self.config = config
        self.space = space or KVSpace(config)
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
        # while sequences are admitted: tokens that all running ones still have to compute, and
        # blocks that these need for their next tokens
        self._num_pending = self._num_spare = 0
        # per party: how many sequences run, and how many wait
        self._num_running: Counter[Party] = Counter()
        self._num_waiting: Counter[Party] = Counter()
        # tokens that each tenant got, and how many output tokens of a sequence are in it
        self._tokens = VirtualTokenCounters()
        self._charged: dict[Sequence, int] = {}
        # sequences that started to run; the caller empties the list
        self.started: list[Sequence] = []
        # sequences whose adapters cannot be loaded; the caller ends them and empties the list
        self.failed_loads: list[Sequence] = []
        self._step = 0
        self._turns = AdapterTurns() if grouped else None
        # whether `schedule` has tried all that wait since anything changed
        self._tried_waiting = False
        # the rows of the last plan, if these are all that runs and each continues with one token
        self._decoding: DecodeRows | None = None
        # planned before the tokens of the plan before it were known, and not committed yet
        self._ahead: StepPlan | None = None
        # sequences that got a block for the last plan; those that got their last one for `_ahead`
        self._extended: list[Sequence] = []
        self._early: set[Sequence] = set()
        # ended sequences whose adapters `_ahead` may still read
        self._leaving: list[Sequence] = []

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
        self._tried_waiting = False
        self.num_waiting_tokens += sequence.num_prompt
        if sequence.share.tenant not in self._tokens:
            self._tokens.enter(sequence.share.tenant)
        self._num_waiting[sequence.party] += 1
        insort(self.waiting, sequence, key=rank_of)
        if sequence.adapter_key and self.holds is not None:
            self.holds.queue(sequence)

    def end(self, sequence: Sequence, session: Hashable | None = None) -> None:
        """Free everything at once. With `session` its blocks are kept for that session.

        Also if it has a row in a launched step: that step writes only behind the sequence's last
        token, in a block that is not cached, and the device runs whatever gets the block next
        later, in the same order.
        """
        self._tried_waiting = False
        if self._decoding is not None and (self._decoding.table_rows == sequence.row).any():
            self._decoding = None
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_prompt
            _less(self._num_waiting, sequence.party)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            _less(self._num_running, sequence.party)
        self._charge_output(sequence)
        self._charged.pop(sequence, None)
        tenant = sequence.share.tenant
        if tenant in self._tokens and not self._is_here(tenant):
            self._tokens.leave(tenant)
        if session is not None:
            self.space.keep(session, sequence)
        self.space.release(sequence)
        if self._ahead is None or sequence.status is not SequenceStatus.RUNNING:
            self._leave(sequence)
        else:
            self._leaving.append(sequence)
        self.held.discard(sequence)
        sequence.status = SequenceStatus.ENDED

    def schedule(self, shared: bool = False, taken: int = 0) -> StepPlan | None:
        """The plan of the next step; None if nothing can be computed. `shared`: sequences of other
        lanes wait for its end. `taken`: tokens of other lanes that the step computes already."""
        plan = self._schedule_decoding()
        return self._schedule_any(shared, taken) if plan is None else plan

    def _schedule_decoding(self) -> StepPlan | None:
        """The plan, where all that runs decodes one token and nothing else is to decide. The twin
        of `_schedule_any`, which computes the same in several times as long."""
        holds = self.holds
        if len(self.running) < MIN_ARRAY_ROWS or self.waiting or self.held:
            return None
        if holds is not None and (holds.waiting or holds.holders):
            return None
        before = self._decoding
        if before is not None and len(before) == len(self.running):
            rows: DecodeRows | None = before.advanced()
        else:
            before, rows = None, self._running_rows()
        if rows is None:
            return None
        copies = self._try_extend(rows, known=before is not None)
        if copies is None:
            return None
        self._tried_waiting = True
        return self._decode_plan(rows, copies)

    def _running_rows(self) -> DecodeRows | None:
        """All that runs, if each decodes one token and is no beam, which may wait for siblings."""
        starts = []
        for sequence in self.running:
            start = sequence.num_computed
            if (
                len(sequence.tokens) - start != 1
                or start < sequence.num_prompt
                or sequence.followers
                or sequence.draw.num_continuations
            ):
                return None
            starts.append(start)
        return DecodeRows.of(list(self.running), starts) if starts else None

    def _try_extend(self, rows: DecodeRows, *, known: bool) -> list[tuple[int, int]] | None:
        """Make the positions of all rows writable, without a preemption: the blocks to copy, or
        None if blocks are missing; then nothing changes. `known`: the positions before are
        writable, so only those at the start of a block have to be looked at."""
        places: Iterable[int] = range(len(rows))
        if known:
            places = np.flatnonzero(rows.starts % self.config.block_size == 0).tolist()
        missing = []
        for place in places:
            sequence, start = rows.sequences[place], int(rows.starts[place])
            if not self.space.is_ready(sequence, start):
                missing.append((sequence, start))
        if len(missing) > self.space.cache.num_available:
            return None
        copies: list[tuple[int, int]] = []
        for sequence, start in missing:
            # the other owner of a shared block may have copied it just now
            if not self.space.is_ready(sequence, start):
                self.space.extend(sequence, start, copies)
        self._extended = [sequence for sequence, _ in missing]
        return copies

    def _decode_plan(
        self,
        rows: DecodeRows,
        copies: list[tuple[int, int]],
        sources: NDArray[np.int64] | None = None,
        segments: Seq[StepSegment] = (),
    ) -> StepPlan:
        self._step += 1
        self._decoding = rows
        count = len(rows)
        return StepPlan(
            self._step, rows, copies, rows.sequences, range(count), count, 0, segments, sources
        )

    def _schedule_any(self, shared: bool = False, taken: int = 0) -> StepPlan | None:
        self._decoding = None
        if self.holds is not None and self.holds.waiting:
            self._preempt_for_closed(self.holds)
        if self.waiting:
            self._admit()
        self._tried_waiting = True
        self._step += 1
        key, num_decoding = self._pick_key()
        budget = self.config.max_step_tokens - num_decoding
        if self.config.max_mixed_tokens and (num_decoding or shared):
            budget = min(budget, self.config.max_mixed_tokens)
        budget = max(budget - taken, 0)
        kept, num_scored = self._kept_tokens(key, budget), 0
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
                count = min(count, budget - others, sequence.share.step_tokens or count)
                if sequence.draw.prompt_logprobs is not None:
                    count = min(count, MAX_SCORED_ROWS, MAX_STEP_SCORED_ROWS - num_scored)
                    num_scored += count
                budget -= count
                if kept:
                    kept[party] = max(kept.get(party, 0) - count, 0)
            if count and (
                self.space.is_ready(sequence, start) or self._make_room(sequence, copies)
            ):
                phase = "prefill" if start < sequence.num_prompt or count > 1 else "decode"
                rows.append(StepRow(sequence, start, count, phase))
        plan = make_plan(self._step, rows, copies, self.holds) if rows else None
        # a prompt uses tokens of the step that a waiting sequence may get next time
        self._tried_waiting &= plan is not None and not plan.num_prefill_tokens
        return plan

    def schedule_ahead(self, plan: StepPlan, counts: bool = False) -> StepPlan | None:
        """The plan after `plan`, which was launched and is not committed; None if it depends on the
        tokens of `plan`, or on anything that may change until they are known.

        Sequences that `plan` completes are left out. Nothing is preempted and nothing is admitted.
        `counts`: draws on the device count the tokens that the host does not know.
        """
        rows, sources = self._rows_after(plan, counts)
        if rows is None:
            return None
        # the token in flight completes the others
        places = np.flatnonzero(rows.starts + 1 < rows.limits)
        if len(places) < len(rows):
            rows, sources = rows.pick(places), sources[places]
        copies = self._try_extend(rows, known=isinstance(plan.rows, DecodeRows)) if rows else None
        if copies is None:
            return None
        self._early = set(self._extended)
        if self.holds is None or not self.holds.holders:
            self._ahead = self._decode_plan(rows, copies, sources)
            return self._ahead
        if len(rows) == len(plan.rows) and isinstance(plan.rows, DecodeRows):
            # the rows of `plan` are in order already
            segments = plan.segments
        else:
            order = np.array(_by_adapters([s.adapter_key for s in rows.sequences]))
            rows, sources = rows.pick(order), sources[order]
            segments = _segments(list(rows), self.holds)
        self._ahead = self._decode_plan(rows, copies, sources, segments)
        # the next step without this one ahead depends on the adapters too
        self._decoding = None
        return self._ahead

    def _rows_after(
        self, plan: StepPlan, counts: bool
    ) -> tuple[DecodeRows | None, NDArray[np.int64]]:
        """The next tokens of all that runs, and by row the draw of `plan` that gives the token;
        None if not every running sequence decodes its next token after `plan`, or anything else
        might be computed."""
        holds, nothing = self.holds, np.zeros(0, dtype=np.int64)
        if self.held or (self.waiting and not self._tried_waiting):
            return None, nothing
        if holds is not None and (holds.waiting or (holds.holders and self._turns is not None)):
            return None, nothing
        live = np.arange(len(plan.draws))
        if plan.rows is not self._decoding:
            running = SequenceStatus.RUNNING
            live = np.array([i for i, s in enumerate(plan.draws) if s.status is running], np.int64)
        if len(live) != len(self.running):
            return None, nothing
        if isinstance(plan.rows, DecodeRows):
            rows = plan.rows.advanced()
            rows = rows if len(live) == len(rows) else rows.pick(live)
        elif any(s.followers for s in plan.draws):
            return None, nothing
        else:
            # `plan` computes all known tokens of its draws, so the next one is at their number
            draws = [plan.draws[i] for i in live.tolist()]
            rows = DecodeRows.of(draws, [len(sequence.tokens) for sequence in draws])
        if not rows.runs_ahead:
            draws = rows.sequences
            if counts:
                # a draw of the host would wait for the step and hold back the tokens before it
                rows.runs_ahead = not any(s.draw.needs_host or s.draw.bad_words for s in draws)
            else:
                rows.runs_ahead = all(s.draw.may_run_ahead(s.num_output) for s in draws)
        return (rows if rows.runs_ahead else None), live

    def commit(self, plan: StepPlan) -> int:
        """After the plan was computed: advance its sequences, separate followers. Rows of sequences
        that ended since it was planned are left out. Returns how many these are."""
        self.landed(plan)
        if isinstance(plan.rows, DecodeRows):
            return self._commit_decoded(plan.rows)
        block_size, num_ended = self.config.block_size, 0
        for sequence, start, count, _ in plan.rows:
            if sequence.status is SequenceStatus.ENDED:
                num_ended += 1
                continue
            end = start + count
            if start // block_size == end // block_size:
                sequence.num_computed = end
            else:
                self.space.computed(sequence, count)
            if sequence.followers and end == len(sequence.tokens):
                for follower in sequence.followers:
                    self.fork(sequence, follower)
                sequence.followers = []
        return num_ended

    def _commit_decoded(self, rows: DecodeRows) -> int:
        block_size, num_ended = self.config.block_size, 0
        for sequence, end in zip(rows.sequences, (rows.starts + 1).tolist(), strict=True):
            if sequence.row is None:
                # it has ended
                num_ended += 1
            elif end % block_size:
                sequence.num_computed = end
            else:
                self.space.computed(sequence, 1)
        return num_ended

    def landed(self, plan: StepPlan) -> None:
        """The device has computed `plan`, or failed to."""
        if self._ahead is plan:
            self._ahead = None
            self._early.clear()
        for sequence in self._leaving:
            self._leave(sequence)
        self._leaving.clear()

    def limit_steps(self, tokens: int) -> None:
        """Later steps have at most so many tokens, more than sequences can run."""
        self.config = replace(self.config, max_step_tokens=tokens)

    def used_blocks(self, sequence: Sequence) -> Seq[int]:
        """Its blocks, without one that only a step in flight needs."""
        return sequence.blocks[:-1] if sequence in self._early else sequence.blocks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` continues from what `parent` has computed, or waits and recomputes it."""
        self._tried_waiting = False
        self._decoding = None
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
        assert self._charged.keys() <= {*self.running, *self.waiting}
        self.space.check(self.running + self.waiting)
        if self.holds is not None:
            self.holds.check(self.running, self.waiting)

    def _admit(self) -> None:
        self._count_running()
        if len(self._num_waiting | self._num_running) > 1 and not self._admit_absent():
            return
        barred: set[Sequence] = set()
        while (head := self._next_waiting(barred)) is not None:
            if self._is_barred(head):
                barred.add(head)
            elif not (self._has_budget(head) and (self._enter(head) or self._yield_to(head))):
                return

    def _next_waiting(self, barred: set[Sequence]) -> Sequence | None:
        """Of the highest priority that waits, the tenant that got the fewest tokens; of its
        sequences, the best rank."""
        best: Sequence | None = None
        tenants = {tenant for tenant, _ in self._num_waiting}
        if len(tenants) > 1:
            for sequence in self.running:
                self._charge_output(sequence)
        for sequence in self.waiting:
            if best is not None and sequence.priority < best.priority:
                break
            if sequence in barred or sequence.share.tenant not in tenants:
                continue
            # sequences of a tenant come in the order of their rank
            tenants.discard(sequence.share.tenant)
            if best is None or self._got(sequence) < self._got(best):
                best = sequence
            if not tenants:
                break
        return best

    def _got(self, sequence: Sequence) -> float:
        return self._tokens.of(sequence.share.tenant)

    def _charge_output(self, sequence: Sequence) -> None:
        """Count its output tokens for its tenant, those that are not counted yet."""
        new = sequence.num_output - self._charged.get(sequence, 0)
        if new > 0 and sequence.share.tenant in self._tokens:
            self._charged[sequence] = sequence.num_output
            self._tokens.charge(sequence.share.tenant, new, sequence.share.weight)

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
        """The first waiting sequence of every party with nothing running: the highest priority
        first, then the tenant that got the fewest tokens."""
        parties = {party for party in self._num_waiting if not self._num_running[party]}
        first_waiting: list[Sequence] = []
        for sequence in self.waiting if parties else ():
            if sequence.party in parties and sequence not in self.held:
                parties.remove(sequence.party)
                first_waiting.append(sequence)
        first_waiting.sort(key=lambda item: (-item.priority, self._got(item), item.rank))
        return first_waiting

    def _count_running(self) -> None:
        pending = [sequence for sequence in self.running if sequence.num_pending]
        self._num_pending = sum(sequence.num_pending for sequence in pending)
        is_ready = self.space.is_ready
        self._num_spare = sum(not is_ready(s, s.num_computed) for s in pending)

    def _enter(self, sequence: Sequence) -> bool:
        """Let it run from now on. False if there is no room."""
        if not self.space.admit(sequence, self._num_spare):
            return False
        # it has the block of its next token
        self._num_pending += sequence.num_pending
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
            prompt = sequence.num_prompt - sequence.num_computed
            self._tokens.charge(sequence.share.tenant, prompt, sequence.share.weight)
            self.started.append(sequence)
        self._num_running[sequence.party] += 1
        insort(self.running, sequence, key=rank_of)

    def _has_budget(self, head: Sequence) -> bool:
        """Whether a step has tokens left for `head`. If admitted later, it may find more in the
        cache."""
        ahead = self._num_pending
        if self.running and self.running[-1].rank > head.rank:
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
        position = sequence.num_computed
        while not self.space.is_ready(sequence, position):
            if self.space.extend(sequence, position, copies):
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
        self._count_running()

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


def make_plan(
    step: int, rows: list[StepRow], copies: list[tuple[int, int]], holds: AdapterHolds | None
) -> StepPlan:
    segments = _segments(rows, holds) if holds is not None and holds.holders else ()
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
    return StepPlan(step, rows, copies, draws, draw_rows, num_tokens, num_prefill, segments)


def join_plans(plans: Seq[StepPlan], holds: AdapterHolds | None) -> StepPlan:
    """One step for the plans of several lanes that share a KV cache."""
    if len(plans) == 1:
        return plans[0]
    rows = [row for plan in plans for row in plan.rows]
    copies = [copy for plan in plans for copy in plan.copies]
    return make_plan(plans[0].step, rows, copies, holds)


def _segments(rows: list[StepRow], holds: AdapterHolds) -> list[StepSegment]:
    """Sort rows by adapter stack, rows without one first; otherwise keep the order."""
    rows.sort(key=lambda row: row.sequence.adapter_key)
    segments, first = [], 0
    for key, some in groupby(rows, key=lambda row: row.sequence.adapter_key):
        last = first + len(list(some))
        if key:
            segments.append(StepSegment(first, last, holds.stack(key)))
        first = last
    return segments


def _by_adapters(keys: Seq[str]) -> list[int]:
    """Places sorted by adapter key, those without one first; otherwise in order."""
    return sorted(range(len(keys)), key=keys.__getitem__)


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
