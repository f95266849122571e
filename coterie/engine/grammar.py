"""Constrains drawn tokens to a grammar: which tokens may follow, whether the text is complete, and
that it can still be completed with the remaining tokens.

There is one `Constraint` per choice. Its state depends only on the tokens of the choice, so another
worker that continues the request can build it again.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import InternalError
from coterie.core.lru import LruCache
from coterie.core.request import ResponseFormat, own_tenant
from coterie.engine.grammar_ending import FEW, MANY, SOME, EndingFinder, EndingHints, hints_of
from coterie.engine.grammar_time import (
    CLOCK,
    FREE_S,
    FREE_START_S,
    RequestTime,
    TenantTimes,
    TimeIsUp,
    consumed,
    follows,
)
from coterie.models.grammar.grammar import GrammarVocabulary
from coterie.weights.shortage import started

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from coterie.core.plan import Assignment
    from coterie.models.text.tokenizer import Tokenizer

# number of compiled grammars that are cached
MAX_COMPILED = 64
# with this many tokens left, plus twice the length of the shortest answer, every token is checked
NEAR_END = 64
# tokens of a known ending that one drawn token may replace
MAX_SKIPPED = 12


class CompiledGrammar(NamedTuple):
    """A grammar in its start state, and the shortest answer that was found (None = none was)."""

    matcher: LLMatcher
    # the same grammar over single bytes
    letters: LLMatcher
    shortest: list[int] | None
    vocabulary: GrammarVocabulary
    finder: EndingFinder
    hints: EndingHints


class Constraint:
    """The state of one choice in its grammar, after `begin`. One thread at a time uses it.

    Near the token limit, a drawn token is accepted only if the text can still be completed with the
    tokens that are left after it; otherwise the next token of a known ending is taken instead.
    """

    __slots__ = (
        "_ending", "_ends_here", "_horizon", "_left", "_letters", "_look_at", "_matcher", "_start",
        "_unspelt", "allowed", "error", "is_complete", "may_end", "shunned", "time",
    )  # fmt: skip

    def __init__(
        self, max_output: int, shunned: Sequence[int] = (), time: RequestTime | None = None
    ) -> None:
        """`shunned` tokens are allowed only if no other token is. `time`: the account of the
        request."""
        self.shunned, self.time = tuple(shunned), time or RequestTime("")
        # bit mask of the tokens that may follow; None if the grammar has failed
        self.allowed: NDArray[np.uint32] | None = None
        # is_complete: no token may follow; may_end: the text may end after the part that was sent
        self.is_complete = self.may_end = self._ends_here = False
        # why the grammar failed
        self.error: str | None = None
        self._left = max_output
        # tokens that complete the text from here; None = not searched yet, or not found
        self._ending: list[int] | None = None
        # tokens that `_letters` has not consumed yet
        self._unspelt: list[int] = []

    def begin(self, start: CompiledGrammar, output: Sequence[int]) -> None:
        """Start a grammar and consume the `output` that already exists."""
        self._start = start
        self._matcher, self._letters = start.matcher.deep_copy(), start.letters.deep_copy()
        shortest = start.shortest
        self._horizon = NEAR_END + 2 * len(shortest or ())
        # an ending is searched when no more tokens than these are left
        self._look_at = self._left - 1
        if shortest is not None and len(shortest) <= self._left:
            self._note(list(shortest))
        for token in output:
            self._advance(token)
        self._look_ahead()
        self.may_end = self._ends_here

    def sent(self) -> None:
        """Note that the last token is part of the text. A token whose grammar work had not ended
        when the text was cut is not part of it."""
        self.may_end = self._ends_here

    def take(self, token: int) -> int:
        """Add one token to the output. Returns `token`, or the token that must come instead so that
        the text ends in time. If the grammar fails, `error` has the reason."""
        token = self._advance(token)
        self._look_ahead()
        return token

    def _advance(self, token: int) -> int:
        matcher = self._matcher
        CLOCK.check()
        if self.error is not None or not matcher.consume_token(token):
            self._fail()
            return token
        CLOCK.check_call()
        self._left -= 1
        self._unspelt.append(token)
        if self._ending is not None:
            token = self._keep_to_ending(self._ending, token)
        elif self._left <= self._look_at:
            ending = self._find(SOME)
            # if none is found, a later state may have one; but the search is slow, so not every
            # time
            self._look_at = self._left - max(self._left // 16, 1)
            if ending is not None:
                self._note(ending)
        self.is_complete = matcher.is_stopped()
        self._ends_here = self.is_complete or matcher.is_accepting()
        return token

    def _note(self, ending: list[int]) -> None:
        """Note a known ending. Near the token limit it is kept up to date; before that it is
        searched again after some tokens. One token may make the ending up to seven tokens
        longer."""
        spare = self._left - len(ending)
        if self._left <= self._horizon or spare < NEAR_END // 2:
            self._ending = ending
        self._look_at = self._left - max(spare // 8, 1)

    def _look_ahead(self) -> None:
        self.allowed = None
        if self.is_complete or self.error is not None:
            return
        words = np.zeros(self._start.vocabulary.num_words, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._fail()
        else:
            self.allowed = words

    def _fail(self) -> None:
        self.error = self.error or " ".join(self._matcher.get_error().split())[:300]

    def _keep_to_ending(self, ending: list[int], token: int) -> int:
        if ending and token == ending[0]:
            self._ending = ending[1:]
            return token
        after = self._ending_after(ending)
        if after is not None:
            self._ending = after
            return token
        vocabulary = self._start.vocabulary
        if not ending and vocabulary.end >= vocabulary.num_ids:
            # this model has no token that ends a text
            self._ending = None
            return token
        self._matcher.rollback(1)
        token = ending[0] if ending else vocabulary.end
        self._matcher.consume_token(token)
        self._unspelt[-1] = token
        self._ending = ending[1:]
        return token

    def _ending_after(self, ending: list[int]) -> list[int] | None:
        """The ending after one more token, if the ending before it was `ending`."""
        if self._matcher.is_stopped():
            return []
        for skipped in range(min(len(ending), MAX_SKIPPED), -1, -1):
            known = ending[skipped:]
            if len(known) <= self._left and self._completes(known):
                return known
        # near the end a long search is not worth it
        return self._find(SOME if self._left > 2 * len(ending) + 8 else FEW)

    def _completes(self, ending: list[int]) -> bool:
        if not ending:
            return bool(self._matcher.is_accepting())
        tokens = [*ending, self._start.vocabulary.end]
        return follows(self._matcher, tokens, self._start.hints.may_be_ambiguous)

    def _find(self, effort: int) -> list[int] | None:
        """Search an ending from here that fits into the remaining tokens."""
        start, letters = self._start, self._letters
        # the newest token may still be replaced
        *kept, newest = ([*start.vocabulary.spelled(token)] for token in self._unspelt)
        if not consumed(letters, [letter for spelt in kept for letter in spelt]):
            return None
        self._unspelt = self._unspelt[-1:]
        if not consumed(letters, newest):
            return None
        ending = start.finder.find(letters, self._left, start.hints, effort)
        letters.rollback(len(newest))
        return ending if ending is None or self._completes(ending) else None


def allowed_tokens(
    constraints: Sequence[Constraint], banned: Sequence[Sequence[int]], size: int
) -> NDArray[np.bool_]:
    """[R, size]: which tokens may follow. The `banned` and shunned tokens of a row may follow only
    if no other token may.

    A failed grammar allows everything here; `take` reports its error.
    """
    allowed = np.ones((len(constraints), size), dtype=np.bool_)
    for row, constraint in enumerate(constraints):
        if constraint.allowed is None:
            continue
        words = constraint.allowed.view(np.uint8)
        allowed[row] = np.unpackbits(words, count=size, bitorder="little").view(np.bool_)
        avoided = [*constraint.shunned, *banned[row]]
        if avoided:
            kept = allowed[row, avoided]
            allowed[row, avoided] = False
            if not allowed[row].any():
                allowed[row, avoided] = kept
    return allowed


class GrammarCache:
    """The compiled grammars of one engine, for its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._num_ids, self._eos_ids = tokenizer, num_ids, eos_ids
        self._parts: tuple[GrammarVocabulary, EndingFinder] | None = None
        self._compiled: LruCache[ResponseFormat, CompiledGrammar] = LruCache(MAX_COMPILED)
        # for building the parts, which takes long
        self._building = Lock()
        self.work = GrammarWork()

    def parts(self) -> tuple[GrammarVocabulary, EndingFinder]:
        """Built for the first request that has a grammar: with a vocabulary of 151,000 tokens they
        take 90 MB, and on a slow core 1.5 s, that no request is charged for."""
        with self._building:
            if self._parts is None:
                began = time.thread_time()
                words = GrammarVocabulary(self._tokenizer, self._num_ids, self._eos_ids)
                self._parts = words, EndingFinder(words)
                CLOCK.excuse(time.thread_time() - began)
            return self._parts

    def constraints(
        self, assignment: Assignment, max_output: int, count: int
    ) -> dict[int, Constraint]:
        """New constraints for the choices of a request; `begin` starts them."""
        shunned = self._eos_ids if assignment.limits.ignore_eos else ()
        account = RequestTime(own_tenant(assignment.tenant))
        return {n: Constraint(max_output, shunned, account) for n in range(count)}

    def begin(
        self, assignment: Assignment, choices: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> GrammarTask:
        """Start the constraints with their existing outputs, on another thread. An invalid grammar
        is the error of the task."""
        answer_format = assignment.sampling.constraint
        assert answer_format is not None
        num_tokens = sum(len(output) for _, output in choices)
        job = GrammarTask(
            choices[0][0].time,
            partial(self._begin, answer_format, choices),
            FREE_START_S + FREE_S * num_tokens,
        )
        self.work.do([job])
        return job

    def _begin(
        self, answer_format: ResponseFormat, choices: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> int:
        start = self._compiled.get_or_make(answer_format, partial(self._compile, answer_format))
        for constraint, output in choices:
            constraint.begin(start, output)
        return len(choices)

    def _compile(self, answer_format: ResponseFormat) -> CompiledGrammar:
        vocabulary, finder = self.parts()
        matcher, letters = (
            vocabulary.compile(answer_format),
            vocabulary.compile_letters(answer_format),
        )
        hints = hints_of(answer_format)
        shortest = finder.find(letters.deep_copy(), NEAR_END * 8, hints, MANY)
        return CompiledGrammar(matcher, letters, shortest, vocabulary, finder, hints)


# how long one step waits for grammar work; sequences whose work is not done are skipped in the step
STEP_BUDGET_S = 0.03
MAX_THREADS = 8
# how long to wait at the end of the process for running work
MAX_END_S = 10.0


class GrammarTask:
    """One piece of grammar work. `done` is set last."""

    __slots__ = ("done", "error", "free_s", "run", "time", "value", "waiter")

    def __init__(self, time: RequestTime, run: Callable[[], int], free_s: float = FREE_S) -> None:
        self.time, self.run, self.free_s = time, run, free_s
        self.value = 0
        self.error: Exception | None = None
        self.done = False
        self.waiter: _Waiter | None = None

    def result(self) -> int:
        if self.error is not None:
            raise self.error
        return self.value

    def drop(self) -> None:
        """Cancel it, unless it has already started."""
        _THREADS.drop(self)


class _Waiter:
    """An event that is set when the last of several tasks is done."""

    __slots__ = ("event", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.event = threading.Event()
        if not left:
            self.event.set()


class _Threads:
    """The grammar threads of this process, for all its engines. Started by the first task."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        # tasks by tenant, the tenant that waits longest first
        self._queues: OrderedDict[str, deque[GrammarTask]] = OrderedDict()
        # tenant -> how many of its tasks run
        self._running: Counter[str] = Counter()
        self._times = TenantTimes()
        self.num_refused = 0
        self._threads: list[threading.Thread] = []
        self._is_over = False
        # set whenever a task ends
        self.ended = threading.Event()

    def submit(self, jobs: Sequence[GrammarTask]) -> _Waiter:
        """The waiter is for the tasks that are likely to end within a step: those of requests whose
        last task did."""
        awaited = [job for job in jobs if job.time.last_s < STEP_BUDGET_S]
        waiter = _Waiter(len(awaited))
        with self._lock:
            if not self._threads:
                self._start()
            for job in awaited:
                job.waiter = waiter
            for job in jobs:
                self._queues.setdefault(job.time.tenant, deque()).append(job)
            self._lock.notify(len(jobs))
        return waiter

    def drop(self, job: GrammarTask) -> None:
        with self._lock:
            queue = self._queues.get(job.time.tenant)
            if queue is None or job not in queue:
                return
            queue.remove(job)
            if not queue:
                del self._queues[job.time.tenant]

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._queues.values()))

    def end(self) -> None:
        """Stop the threads. If a thread is inside the grammar engine when the interpreter exits,
        the process crashes."""
        with self._lock:
            self._is_over = True
            self._queues.clear()
            self._lock.notify_all()
        until = time.monotonic() + MAX_END_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _start(self) -> None:
        # the model computes on all cores; half of them are enough for grammar work. One tenant gets
        # all but one
        count = min(max((os.cpu_count() or 1) // 2, 2), MAX_THREADS)
        self._threads = started(self._serve, "grammar", count)
        atexit.register(self.end)

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            with self._lock:
                left_s = self._times.left_s(job.time)
            spent_s = self._run(job, left_s)
            with self._lock:
                self._running[job.time.tenant] -= 1
                self._times.charge(job.time, spent_s, CLOCK)
                if isinstance(job.error, TimeIsUp):
                    job.error = self._times.refusal(job.time)
                    self.num_refused += 1
                job.done = True
                waiter = job.waiter
                if waiter is not None:
                    waiter.left -= 1
                    if not waiter.left:
                        waiter.event.set()
                # its tenant may have waited for this one
                self._lock.notify()
            self.ended.set()

    def _run(self, job: GrammarTask, left_s: float) -> float:
        """Run a task; returns the processor time that it took."""
        began = CLOCK.begin(max(left_s, 0.0), job.free_s)
        try:
            if left_s <= 0:
                raise TimeIsUp
            job.value = job.run()
        except Exception as error:
            job.error = error
        except BaseException as error:
            # a panic in native code raises no Exception; the thread must continue
            job.error = InternalError(f"{type(error).__name__} in a grammar")
        return time.thread_time() - began

    def _next(self) -> GrammarTask | None:
        with self._lock:
            while (tenant := self._chosen()) is None:
                if self._is_over:
                    return None
                self._lock.wait()
            queue = self._queues.pop(tenant)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            self._running[tenant] += 1
            return job

    def _chosen(self) -> str | None:
        """The tenant that took the least time lately, of those that have no thread too many."""
        most = max(len(self._threads) - 1, 1)
        free = [tenant for tenant in self._queues if self._running[tenant] < most]
        return min(free, key=self._times.lately_s, default=None)


_THREADS = _Threads()


class GrammarWork:
    """The grammar work of one engine, and how long its current step may still wait."""

    def __init__(self) -> None:
        self._left_s = STEP_BUDGET_S
        # since start: seconds that the engine's thread waited, and tasks it did not wait for
        self.waited_s = 0.0
        self.num_late = 0

    @property
    def num_refused(self) -> int:
        """In this process: tasks of requests or tenants that took too much time."""
        return _THREADS.num_refused

    def begin_step(self) -> None:
        self._left_s = STEP_BUDGET_S

    def do(self, jobs: Sequence[GrammarTask]) -> None:
        """Run the tasks. Returns when they are done, or when the step has waited long enough. It
        does not wait for requests whose last task took longer than a step may wait."""
        if not jobs:
            return
        waiter = _THREADS.submit(jobs)
        started = time.perf_counter()
        waiter.event.wait(max(self._left_s, 0.0))
        spent = time.perf_counter() - started
        self._left_s -= spent
        self.waited_s += spent
        self.num_late += sum(not job.done for job in jobs)

    def wait_for_any(self, jobs: Sequence[GrammarTask]) -> None:
        """Nothing else can run: wait until a task ends."""
        _THREADS.ended.clear()
        if not any(job.done for job in jobs):
            started = time.perf_counter()
            _THREADS.ended.wait(STEP_BUDGET_S)
            self.waited_s += time.perf_counter() - started
