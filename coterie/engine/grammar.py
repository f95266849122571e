"""Holds drawn tokens to a grammar: which may follow, whether the text is complete, and that it can
still be completed in the tokens that are left.

One `Constraint` per choice. Its state is a function of the choice's own tokens, so it can be built
again behind any of them, by whoever takes over.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import InternalError
from coterie.core.request import ResponseFormat, own_tenant
from coterie.engine.grammar_ending import FEW, MANY, SOME, EndingFinder, EndingHints, hints_of
from coterie.models.grammar.grammar import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from coterie.core.plan import Assignment
    from coterie.models.text.tokenizer import Tokenizer

# compiled grammars that are kept; the least recently used go first
MAX_COMPILED = 64
# with so many tokens left, and twice the shortest answer's, every token is looked at
NEAR_END = 64
# tokens of a known way that one drawn token may have spelled
MAX_SKIPPED = 12


class CompiledGrammar(NamedTuple):
    """A grammar at its start, and the shortest answer found for it (None = none was)."""

    matcher: LLMatcher
    # the same over single bytes
    letters: LLMatcher
    shortest: list[int] | None
    vocabulary: GrammarVocabulary
    closer: EndingFinder
    hints: EndingHints


class Constraint:
    """One choice's place in its grammar, from `begin` on; one thread at a time works on it.

    Near the end of what may be produced, a token is taken only if the text can be completed in the
    tokens left behind it; else the next token of the known way to its end is taken instead.
    """

    __slots__ = (
        "_ends_here", "_horizon", "_left", "_letters", "_look_at", "_matcher", "_start", "_unspelt",
        "_way", "allowed", "error", "is_complete", "may_end", "shunned", "tenant",
    )  # fmt: skip

    def __init__(self, max_output: int, shunned: Sequence[int] = (), tenant: str = "") -> None:
        """`shunned` tokens come only where nothing else may."""
        self.shunned, self.tenant = tuple(shunned), tenant
        # bits of the tokens that may follow; None where the grammar has failed
        self.allowed: NDArray[np.uint32] | None = None
        # nothing may follow; the text may end behind what was sent of it
        self.is_complete = self.may_end = self._ends_here = False
        # why the grammar cannot be followed any further
        self.error: str | None = None
        self._left = max_output
        # tokens that complete the text from here; None = not looked for yet, or there is no way
        self._way: list[int] | None = None
        # tokens that `_letters` has not been told of
        self._unspelt: list[int] = []

    def begin(self, start: CompiledGrammar, output: Sequence[int]) -> None:
        """At the start of a grammar, behind the `output` that there is already."""
        self._start = start
        self._matcher, self._letters = start.matcher.deep_copy(), start.letters.deep_copy()
        shortest = start.shortest
        self._horizon = NEAR_END + 2 * len(shortest or ())
        # a way is looked for when no more than these are left
        self._look_at = self._left - 1
        if shortest is not None and len(shortest) <= self._left:
            self._note(list(shortest))
        for token in output:
            self._advance(token)
        self._look_ahead()
        self.may_end = self._ends_here

    def sent(self) -> None:
        """The token last taken is part of the text. Whoever draws says so: one that is still being
        worked out when a text is cut is not."""
        self.may_end = self._ends_here

    def take(self, token: int) -> int:
        """One more token of the output: `token`, or what must come instead for the text to end in
        time. A grammar that fails keeps its reason in `error`."""
        token = self._advance(token)
        self._look_ahead()
        return token

    def _advance(self, token: int) -> int:
        matcher = self._matcher
        if self.error is not None or not matcher.consume_token(token):
            self._fail()
            return token
        self._left -= 1
        self._unspelt.append(token)
        if self._way is not None:
            token = self._hold_to_way(self._way, token)
        elif self._left <= self._look_at:
            way = self._find(SOME)
            # without one every token is a new chance, and looking is dear
            self._look_at = self._left - max(self._left // 16, 1)
            if way is not None:
                self._note(way)
        self.is_complete = matcher.is_stopped()
        self._ends_here = self.is_complete or matcher.is_accepting()
        return token

    def _note(self, way: list[int]) -> None:
        """There is a way: it is held on to near the end, and looked for again before that. A token
        may make it longer by seven."""
        spare = self._left - len(way)
        if self._left <= self._horizon or spare < NEAR_END // 2:
            self._way = way
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

    def _hold_to_way(self, way: list[int], token: int) -> int:
        if way and token == way[0]:
            self._way = way[1:]
            return token
        after = self._way_behind(way)
        if after is not None:
            self._way = after
            return token
        vocabulary = self._start.vocabulary
        if not way and vocabulary.end >= vocabulary.num_ids:
            # no token ends a text of this model
            self._way = None
            return token
        self._matcher.rollback(1)
        token = way[0] if way else vocabulary.end
        self._matcher.consume_token(token)
        self._unspelt[-1] = token
        self._way = way[1:]
        return token

    def _way_behind(self, way: list[int]) -> list[int] | None:
        """From the state behind one more token, when the way before it was `way`."""
        if self._matcher.is_stopped():
            return []
        for skipped in range(min(len(way), MAX_SKIPPED), -1, -1):
            known = way[skipped:]
            if len(known) <= self._left and self._completes(known):
                return known
        # close to the end the known way is as good as any
        return self._find(SOME if self._left > 2 * len(way) + 8 else FEW)

    def _completes(self, way: list[int]) -> bool:
        if not way:
            return bool(self._matcher.is_accepting())
        ended = [*way, self._start.vocabulary.end]
        return bool(self._matcher.validate_tokens(ended) == len(ended))

    def _find(self, effort: int) -> list[int] | None:
        """A way from here, in the tokens left."""
        start, letters = self._start, self._letters
        # the newest token may yet be taken back
        *kept, newest = ([*start.vocabulary.spelled(token)] for token in self._unspelt)
        if not letters.consume_tokens([letter for spelt in kept for letter in spelt]):
            return None
        self._unspelt = self._unspelt[-1:]
        if not letters.consume_tokens(newest):
            return None
        way = start.closer.find(letters, self._left, start.hints, effort)
        letters.rollback(len(newest))
        return way if way is None or self._completes(way) else None


def allowed_tokens(
    constraints: Sequence[Constraint], banned: Sequence[Sequence[int]], size: int
) -> NDArray[np.bool_]:
    """[R, size]: which tokens may follow. Of each row's `banned` and shunned tokens, only where
    nothing else may.

    A grammar that fails allows everything here, and tells in `take`.
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
    """Compiled grammars of one engine, over its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._num_ids, self._eos_ids = tokenizer, num_ids, eos_ids
        self._parts: tuple[GrammarVocabulary, EndingFinder] | None = None
        self._compiled: OrderedDict[ResponseFormat, CompiledGrammar] = OrderedDict()
        # for the vocabulary, which takes long, and for the grammars
        self._building, self._lock = Lock(), Lock()
        self.work = GrammarWork()

    def warm(self) -> None:
        """Ready the vocabulary, on a thread of the caller's: the first request then waits less."""
        with self._building:
            if self._parts is None:
                words = GrammarVocabulary(self._tokenizer, self._num_ids, self._eos_ids)
                self._parts = words, EndingFinder(words)

    def constraint(self, assignment: Assignment, max_output: int) -> Constraint:
        """A choice's own, not begun."""
        shunned = self._eos_ids if assignment.limits.ignore_eos else ()
        return Constraint(max_output, shunned, own_tenant(assignment.tenant))

    def begin(
        self, assignment: Assignment, choices: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> GrammarTask:
        """Begin them behind the outputs that they have, on another thread. What is wrong with the
        grammar is the job's error."""
        wanted = assignment.sampling.constraint
        assert wanted is not None
        job = GrammarTask(own_tenant(assignment.tenant), partial(self._begin, wanted, choices))
        self.work.do([job])
        return job

    def _begin(
        self, wanted: ResponseFormat, choices: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> int:
        start = self._compile(wanted)
        for constraint, output in choices:
            constraint.begin(start, output)
        return len(choices)

    def _compile(self, wanted: ResponseFormat) -> CompiledGrammar:
        with self._lock:
            found = self._compiled.get(wanted)
            if found is not None:
                self._compiled.move_to_end(wanted)
                return found
        self.warm()
        assert self._parts is not None
        vocabulary, closer = self._parts
        matcher, letters = vocabulary.compile(wanted), vocabulary.compile_letters(wanted)
        hints = hints_of(wanted)
        shortest = closer.find(letters.deep_copy(), NEAR_END * 8, hints, MANY)
        found = CompiledGrammar(matcher, letters, shortest, vocabulary, closer, hints)
        with self._lock:
            self._compiled[wanted] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found


# of one step; what is not done by then is passed over in it
STEP_BUDGET_S = 0.03
MAX_THREADS = 8
# at the end of the process, for the piece that a thread is at
MAX_END_S = 10.0


class GrammarTask:
    """One piece of work. `done` is set last."""

    __slots__ = ("done", "error", "run", "tenant", "value", "waiter")

    def __init__(self, tenant: str, run: Callable[[], int]) -> None:
        self.tenant, self.run = tenant, run
        self.value = 0
        self.error: Exception | None = None
        self.done = False
        self.waiter: _Waiter | None = None

    def result(self) -> int:
        if self.error is not None:
            raise self.error
        return self.value

    def drop(self) -> None:
        """Nobody wants it any more: it is not begun, unless it is already."""
        _THREADS.drop(self)


class _Waiter:
    """Set when the last of some jobs is done."""

    __slots__ = ("event", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.event = threading.Event()


class _Threads:
    """Of this process, whatever the number of engines in it. Started by the first job."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        # by tenant, whose turn it is first
        self._queues: OrderedDict[str, deque[GrammarTask]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._is_over = False
        # set with every job that ends
        self.ended = threading.Event()

    def submit(self, jobs: Sequence[GrammarTask]) -> _Waiter:
        waiter = _Waiter(len(jobs))
        with self._lock:
            if not self._threads:
                self._start()
            for job in jobs:
                job.waiter = waiter
                self._queues.setdefault(job.tenant, deque()).append(job)
            self._lock.notify(len(jobs))
        return waiter

    def drop(self, job: GrammarTask) -> None:
        with self._lock:
            queue = self._queues.get(job.tenant)
            if queue is None or job not in queue:
                return
            queue.remove(job)
            if not queue:
                del self._queues[job.tenant]

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._queues.values()))

    def end(self) -> None:
        """A thread that is inside the grammar engine when the interpreter goes away takes the
        process with it."""
        with self._lock:
            self._is_over = True
            self._queues.clear()
            self._lock.notify_all()
        until = time.monotonic() + MAX_END_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _start(self) -> None:
        # a step computes on all cores: half of them keep up with it
        count = min(max((os.cpu_count() or 1) // 2, 1), MAX_THREADS)
        for number in range(count):
            name = f"grammar-{number}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.end)

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.value = job.run()
            except Exception as error:
                job.error = error
            except BaseException as error:
                # native code that panics raises no Exception; the thread goes on all the same
                job.error = InternalError(f"{type(error).__name__} in a grammar")
            with self._lock:
                job.done = True
                waiter = job.waiter
                if waiter is not None:
                    waiter.left -= 1
                    if not waiter.left:
                        waiter.event.set()
            self.ended.set()

    def _next(self) -> GrammarTask | None:
        with self._lock:
            while not self._queues:
                if self._is_over:
                    return None
                self._lock.wait()
            tenant, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            return job


_THREADS = _Threads()


class GrammarWork:
    """One engine's: what it has under way, and what its step may still wait."""

    def __init__(self) -> None:
        self._left_s = STEP_BUDGET_S
        # since start: seconds that the engine's thread waited, and work it did not wait for
        self.waited_s = 0.0
        self.num_late = 0

    def begin_step(self) -> None:
        self._left_s = STEP_BUDGET_S

    def do(self, jobs: Sequence[GrammarTask]) -> None:
        """Have them done; comes back when they are, or when the step has waited long enough."""
        if not jobs:
            return
        waiter = _THREADS.submit(jobs)
        started = time.perf_counter()
        waiter.event.wait(max(self._left_s, 0.0))
        spent = time.perf_counter() - started
        self._left_s -= spent
        self.waited_s += spent
        self.num_late += sum(not job.done for job in jobs)

    def nap(self, jobs: Sequence[GrammarTask]) -> None:
        """Nothing else can run: wait for some job to end."""
        _THREADS.ended.clear()
        if not any(job.done for job in jobs):
            started = time.perf_counter()
            _THREADS.ended.wait(STEP_BUDGET_S)
            self.waited_s += time.perf_counter() - started
