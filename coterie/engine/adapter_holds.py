"""Who holds a resident stack of adapters, who waits for one, and who makes way for whom.

A sequence that runs holds its stack; a preempted one gives it up. Serves every lane of an engine.
Knows the pool only by `AdapterPoolView`, and nothing of blocks, steps or tensors.

Nobody waits for somebody else's stack: whoever's is not there is passed over. For a key that found
no room in PATIENCE_STEPS rounds one resident stack is closed, that with the least left to produce:
it drains, as only its running requests and higher priorities may use it. When that is not enough,
the next one. Of several such keys the highest priority goes first, then the longest wait, and the
pool gives room to that one before the others. Where a stack's users all have a lower priority than
who waits, they yield at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from coterie.core.errors import CoterieError, NotFound, WeightsError
from coterie.core.plan import AdapterChoice
from coterie.engine.sequence import Sequence

if TYPE_CHECKING:
    from coterie.kernels.patch import PatchStack

PATIENCE_STEPS = 8
# while nothing can run before something is loaded; a new request comes in as much later
NAP_S = 0.002


class StackFacts(Protocol):
    """What is known of a stack before anything is loaded."""

    @property
    def key(self) -> str: ...

    @property
    def num_virtual_tokens(self) -> int: ...


class AdapterPoolView(Protocol):
    """What the engine's thread asks of a pool (adapters/pool.py)."""

    def describe(self, adapters: Seq[AdapterChoice]) -> StackFacts:
        """Cheap. Raises a CoterieError when the stack can never run here."""

    def want(self, adapters: Seq[AdapterChoice]) -> None:
        """Begin to load; idempotent."""

    def state(self, key: str) -> str:
        """ready, loading, full (loaded, but no room where the model runs) or failed. Asking keeps
        a key wanted."""

    def prefer(self, key: str) -> None:
        """Of the full ones this is the next to get room; the others keep their order."""

    def failure(self, key: str) -> CoterieError: ...

    def take(self, key: str) -> PatchStack:
        """Of a ready key: it stays as it is until as many releases. Raises when it is not."""

    def release(self, key: str) -> None: ...

    def stack(self, key: str) -> PatchStack:
        """Of a taken key."""

    def stack_bytes(self, key: str) -> int:
        """Of a taken key: what it takes where the model runs."""

    def wait(self, timeout_s: float) -> None:
        """Until something may have changed."""

    def stats(self) -> dict[str, float]: ...

    def resident(self) -> tuple[str, ...]: ...


class AdapterHolds:
    def __init__(
        self, adapters: AdapterPoolView, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._adapters, self._now = adapters, clock
        # requests that were passed over: since when, and until when, 0 = still
        self._passed: dict[str, tuple[float, float]] = {}
        # by key: who has its stack taken, and who waits for it
        self.holders: dict[str, set[Sequence]] = {}
        self.waiting: dict[str, set[Sequence]] = {}
        # keys that wait since they found no room -> the round in which they first did not
        self._full: dict[str, int] = {}
        # stacks that drain, for which key, and the priority of that one's best
        self._closed: list[str] = []
        self._closed_for = ""
        self._closed_priority = 0
        self._round = self._closed_at = 0
        # what the pool said in this round of keys that are not ready
        self._states: dict[str, str] = {}

    def queue(self, sequence: Sequence) -> None:
        """It waits from now on; its stack is loaded meanwhile."""
        self.waiting.setdefault(sequence.adapter_key, set()).add(sequence)
        self._adapters.want(sequence.front.adapters)

    def ask(self, sequence: Sequence) -> str:
        """ "seated": its stack is taken and it may run; "waiting", or "failed"."""
        answer = self._answer(sequence)
        if answer == "waiting":
            if sequence.request_id not in self._passed:
                self._passed[sequence.request_id] = (self._now(), 0.0)
        elif sequence.request_id in self._passed:
            since, until = self._passed[sequence.request_id]
            self._passed[sequence.request_id] = (since, until or self._now())
        return answer

    def waited_s(self, request_id: str) -> float:
        """How long it was passed over since this was last asked; nothing is remembered of it."""
        since, until = self._passed.pop(request_id, (0.0, 0.0))
        return (until or self._now()) - since if since else 0.0

    def _answer(self, sequence: Sequence) -> str:
        key = sequence.adapter_key
        holders = self.holders.get(key)
        if holders is not None and sequence in holders:
            return "seated"
        if key in self._closed and not self._passes(sequence):
            return "waiting"
        if holders is None:
            state = self._state(key)
            if state == "full":
                self._full.setdefault(key, self._round)
            if state != "ready":
                return "failed" if state == "failed" else "waiting"
        try:
            self.join(sequence)
        except CoterieError:
            # pushed out since its state was asked
            return "waiting"
        self._quit(self.waiting, sequence)
        self._full.pop(key, None)
        return "seated"

    def join(self, sequence: Sequence) -> None:
        """A stack that is ready, or that a sibling holds, is taken once more."""
        self._adapters.take(sequence.adapter_key)
        self.holders.setdefault(sequence.adapter_key, set()).add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It ended or yields, whether it held its stack or not."""
        if self._quit(self.holders, sequence):
            self._adapters.release(sequence.adapter_key)
        self._quit(self.waiting, sequence)

    def stack(self, key: str) -> PatchStack:
        return self._adapters.stack(key)

    def stack_bytes(self, key: str) -> int:
        return self._adapters.stack_bytes(key)

    def failure(self, key: str) -> CoterieError:
        return self._adapters.failure(key)

    def nap(self) -> None:
        """Nothing can run before something is loaded: leave the core to the loader."""
        self._adapters.wait(NAP_S)

    def next_round(self) -> None:
        """Decide for whom, and which, stacks are closed. Once before each admission."""
        self._round += 1
        self._states.clear()
        self._full = {key: since for key, since in self._full.items() if key in self.waiting}
        first = min(self._full, key=lambda key: (-self._priority(key), self._full[key]), default="")
        if first != self._closed_for:
            self._closed.clear()
            self._closed_for = first
        if not first:
            return
        self._closed_priority = self._priority(first)
        self._adapters.prefer(first)
        if any(key in self.holders for key in self._closed):
            self._closed_at = self._round
            return
        # the pool needs some rounds to use the room that it got
        due = not self._closed or self._round - self._closed_at >= PATIENCE_STEPS
        if due and self._state(first) == "full":
            self._close_one(self._round - self._full[first] >= PATIENCE_STEPS)

    def yielding(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Those that hold a closed stack and have a lower priority than who it is closed for."""
        if not self._closed:
            return []
        return [
            s
            for s in sequences
            if s.adapter_key in self._closed
            and s.priority < self._closed_priority
            and s in self.holders.get(s.adapter_key, ())
        ]

    def check(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> None:
        """Raises AssertionError when a lane's sequences and the holds do not agree."""
        for sequence in running:
            if sequence.adapter_key:
                assert sequence in self.holders[sequence.adapter_key]
                assert sequence not in self.waiting.get(sequence.adapter_key, ())
                assert self.stack(sequence.adapter_key).key == sequence.adapter_key
        for sequence in waiting:
            if sequence.adapter_key:
                held = sequence in self.holders.get(sequence.adapter_key, ())
                assert held != (sequence in self.waiting.get(sequence.adapter_key, ()))

    def _close_one(self, is_overdue: bool) -> None:
        def left(key: str) -> int:
            return max(s.max_total - len(s.tokens) for s in self.holders[key])

        open_keys = [key for key in self.holders if key not in self._closed]
        below = [
            key
            for key in open_keys
            if all(s.priority < self._closed_priority for s in self.holders[key])
        ]
        candidates = below or (open_keys if is_overdue else [])
        if candidates:
            self._closed.append(min(candidates, key=left))
            self._closed_at = self._round

    def _passes(self, sequence: Sequence) -> bool:
        """A closed stack is open to higher priorities, and to requests that run on it already:
        beams wait for each other."""
        holders = self.holders.get(sequence.adapter_key, ())
        running = any(one.request_id == sequence.request_id for one in holders)
        return running or sequence.priority > self._closed_priority

    def _priority(self, key: str) -> int:
        return max(sequence.priority for sequence in self.waiting[key])

    def _state(self, key: str) -> str:
        state = self._states.get(key)
        if state is None:
            state = self._adapters.state(key)
            if state != "ready":
                self._states[key] = state
        return state

    @staticmethod
    def _quit(members: dict[str, set[Sequence]], sequence: Sequence) -> bool:
        group = members.get(sequence.adapter_key)
        if group is None or sequence not in group:
            return False
        group.remove(sequence)
        if not group:
            del members[sequence.adapter_key]
        return True


def error_for_client(error: CoterieError, adapters: Seq[AdapterChoice]) -> CoterieError:
    """What a client reads of it. Of files that are damaged or gone, the adapters' names: the
    error's own words name places of this machine, and the client's model does exist."""
    if not isinstance(error, (WeightsError, NotFound)):
        return error
    names = ", ".join(adapter.name for adapter in adapters)
    return WeightsError(f"adapters {names} could not be loaded; the log has the reason")
