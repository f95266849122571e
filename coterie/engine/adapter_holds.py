"""Which sequences hold a resident stack of adapters, which wait for one, and which give theirs up.

A running sequence holds its stack; a preempted one releases it. One object serves all lanes of an
engine. It uses the pool only through `AdapterPoolView`.

A sequence whose stack is not resident is skipped; the others do not wait for it. If a key found no
room in PATIENCE_STEPS rounds, one resident stack is closed, the one with the fewest tokens left to
produce. A closed stack drains: only requests that already use it and requests of higher priority
may use it. If that is not enough, the next stack is closed. Of several keys without room, the
highest priority goes first, then the longest wait; the pool gives room to that key first. If all
users of a stack have a lower priority than the waiting sequence, they are preempted at once.
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
# length of one wait while nothing can run before a load ends; a new request waits at most this long
WAIT_S = 0.002


class StackFacts(Protocol):
    """Facts about a stack that are known before it is loaded."""

    @property
    def key(self) -> str: ...

    @property
    def num_virtual_tokens(self) -> int: ...


class AdapterPoolView(Protocol):
    """The part of a pool (adapters/pool.py) that the engine's thread uses."""

    def describe(self, adapters: Seq[AdapterChoice]) -> StackFacts:
        """Fast. Raises a CoterieError if the stack can never run here."""

    def want(self, adapters: Seq[AdapterChoice]) -> None:
        """Start to load; idempotent."""

    def state(self, key: str) -> str:
        """ready, loading, full (loaded, but no room on the device) or failed. A call also keeps the
        key wanted."""

    def prefer(self, key: str) -> None:
        """Of the keys in state full, this one gets room next; the others keep their order."""

    def failure(self, key: str) -> CoterieError: ...

    def take(self, key: str) -> PatchStack:
        """Take a ready key: it stays resident until it is released as often. Raises if it is not
        ready."""

    def release(self, key: str) -> None: ...

    def stack(self, key: str) -> PatchStack:
        """The stack of a taken key."""

    def stack_bytes(self, key: str) -> int:
        """Bytes on the device of a taken key."""

    def wait(self, timeout_s: float) -> None:
        """Wait until something may have changed."""

    def stats(self) -> dict[str, float]: ...

    def resident(self) -> tuple[str, ...]: ...


class AdapterHolds:
    def __init__(
        self, adapters: AdapterPoolView, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._adapters, self._now = adapters, clock
        # skipped requests: since when, and until when (0 = still)
        self._skipped: dict[str, tuple[float, float]] = {}
        # by key: sequences that hold its stack, and sequences that wait for it
        self.holders: dict[str, set[Sequence]] = {}
        self.waiting: dict[str, set[Sequence]] = {}
        # keys that found no room -> the first round in which they found none
        self._full: dict[str, int] = {}
        # stacks that are closed, for which key, and the highest priority that waits for that key
        self._closed: list[str] = []
        self._closed_for = ""
        self._closed_priority = 0
        self._round = self._closed_at = 0
        # states of keys that are not ready, as the pool reported them in this round
        self._states: dict[str, str] = {}

    def queue(self, sequence: Sequence) -> None:
        """Let the sequence wait; its stack is loaded in the meantime."""
        self.waiting.setdefault(sequence.adapter_key, set()).add(sequence)
        self._adapters.want(sequence.front.adapters)

    def try_hold(self, sequence: Sequence) -> str:
        """Try to hold the stack: "held" (it may run), "waiting" or "failed"."""
        answer = self._answer(sequence)
        if answer == "waiting":
            if sequence.request_id not in self._skipped:
                self._skipped[sequence.request_id] = (self._now(), 0.0)
        elif sequence.request_id in self._skipped:
            since, until = self._skipped[sequence.request_id]
            self._skipped[sequence.request_id] = (since, until or self._now())
        return answer

    def waited_s(self, request_id: str) -> float:
        """How long the request was skipped since the last call. Resets the count."""
        since, until = self._skipped.pop(request_id, (0.0, 0.0))
        return (until or self._now()) - since if since else 0.0

    def _answer(self, sequence: Sequence) -> str:
        key = sequence.adapter_key
        holders = self.holders.get(key)
        if holders is not None and sequence in holders:
            return "held"
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
            # evicted since its state was read
            return "waiting"
        self._quit(self.waiting, sequence)
        self._full.pop(key, None)
        return "held"

    def join(self, sequence: Sequence) -> None:
        """Hold a stack that is ready, or that a sibling holds."""
        self._adapters.take(sequence.adapter_key)
        self.holders.setdefault(sequence.adapter_key, set()).add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Release the stack of a sequence that ended or is preempted, if it held one."""
        if self._quit(self.holders, sequence):
            self._adapters.release(sequence.adapter_key)
        self._quit(self.waiting, sequence)

    def stack(self, key: str) -> PatchStack:
        return self._adapters.stack(key)

    def stack_bytes(self, key: str) -> int:
        return self._adapters.stack_bytes(key)

    def failure(self, key: str) -> CoterieError:
        return self._adapters.failure(key)

    def wait_for_load(self) -> None:
        """Wait briefly: nothing can run before a load ends, so leave the core to the loader."""
        self._adapters.wait(WAIT_S)

    def next_round(self) -> None:
        """Decide which stacks are closed, and for which key. Called once before each admission."""
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
        # the pool needs some rounds to use the new room
        due = not self._closed or self._round - self._closed_at >= PATIENCE_STEPS
        if due and self._state(first) == "full":
            self._close_one(self._round - self._full[first] >= PATIENCE_STEPS)

    def yielding(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """The sequences that hold a closed stack and have a lower priority than the one it was
        closed for."""
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
        """Raises AssertionError if a lane's sequences and the holds do not agree."""
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
        """Whether the sequence may use a closed stack: if its priority is higher, or if its request
        already uses the stack, because beams wait for each other."""
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
    """The error for a client. If files are damaged or missing, it names only the adapters: the
    original message names paths of this machine, and "not found" would be about the model."""
    if not isinstance(error, (WeightsError, NotFound)):
        return error
    names = ", ".join(adapter.name for adapter in adapters)
    return WeightsError(f"adapters {names} could not be loaded; the log has the reason")
