"""`coterie serve` over an engine that answers at once: what is left is the gateway.

    python -m benchmarks.ensemble.null_engine serve --config FILE

Everything but the engine is the server's own: HTTP, routing, tokenising, admission, receipts. With
NULL_ENGINE_TIMES=FILE the seconds from a request's arrival to its submission are appended to FILE,
8 bytes each: parse, route, tokenise, admit, stamp, and waiting for requests before it.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coterie.core.events import Delta, Finished, Started, Timings, Usage
from coterie.core.plan import AdapterChoice, Admitted, Assignment, LaneState, Rejected
from coterie.workers.contract import (
    AdapterInfo,
    AdapterLoad,
    OnOutage,
    Replica,
    ReplicaInfo,
    Sink,
    WorkerSpec,
    never_moved,
)

ANSWER = "It is so."


class NullReplica:
    """Answers every request with the same words in the next turn of the event loop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.name = spec.name
        self._spec = spec
        self._running: set[str] = set()
        lanes = spec.lanes
        self._states = {
            lane.name: LaneState(
                lane.name,
                0,
                lane.max_queue,
                100_000,
                100_000,
                (),
                frozenset(),
                0.001,
                False,
                step_s=0.001,
            )
            for lane in lanes
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        times = os.environ.get("NULL_ENGINE_TIMES")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._times = os.open(times, flags, 0o600) if times else None

    async def start(self) -> ReplicaInfo:
        from coterie.weights.checkpoint import open_checkpoint

        self._loop = asyncio.get_running_loop()
        spec = self._spec
        fingerprint = await asyncio.to_thread(
            lambda: open_checkpoint(Path(spec.model)).fingerprint()
        )
        return ReplicaInfo(
            name=self.name,
            pid=os.getpid(),
            architecture="null",
            dtype="null",
            device="none",
            threads=0,
            weight_bytes=0,
            kv_bytes=0,
            fingerprint=fingerprint,
            contexts={lane.name: lane.context or 2048 for lane in spec.lanes},
            max_sequences={lane.name: lane.max_sequences for lane in spec.lanes},
            generation={},
            adapters=AdapterInfo(10**9, 10**9, 64),
        )

    async def submit(
        self, assignment: Assignment, sink: Sink, on_outage: OnOutage = never_moved
    ) -> Admitted | Rejected:
        assert self._loop is not None
        if self._times is not None:
            spent_s = time.monotonic() - assignment.arrived_at
            os.write(self._times, struct.pack("<d", spent_s))
        self._running.add(assignment.request_id)
        self._loop.call_soon(self._answer, assignment, sink)
        return Admitted(self.name)

    def _answer(self, assignment: Assignment, sink: Sink) -> None:
        request_id, prompt = assignment.request_id, len(assignment.prompt_ids)
        if request_id not in self._running:
            return
        self._running.discard(request_id)
        sink(Started(request_id, self.name, prompt, 0))
        choices = assignment.sampling.n or 1
        for choice in range(choices):
            sink(Delta(request_id, choice, ANSWER, (1, 2, 3), finish_reason="stop"))
        timings = Timings(queue_s=1e-6, prefill_s=1e-6, first_token_s=2e-6, total_s=2e-6)
        usage = Usage(prompt, 3 * choices)
        sink(Finished(request_id, ("stop",) * choices, usage, timings))

    def move(self, request_id: str, to: Replica) -> bool:
        return False

    async def abort(self, request_id: str) -> None:
        self._running.discard(request_id)

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        """There is nothing to load."""

    def lane_states(self) -> dict[str, LaneState]:
        return self._states

    def in_flight(self) -> int:
        return len(self._running)

    def stats(self) -> dict[str, float]:
        return {}

    def adapter_loads(self) -> tuple[AdapterLoad, ...]:
        return ()

    def residency(self) -> None:
        """There are no MoE experts."""

    def healthy(self) -> bool:
        return self._loop is not None

    def state(self) -> str:
        return "up"

    def retry_after_s(self) -> float:
        return 1.0

    async def drain(self, timeout_s: float) -> None:
        """What was submitted is answered already."""

    async def close(self) -> None:
        self._running.clear()


def main() -> int:
    from coterie.cli.main import main as command
    from coterie.service import build

    build._process_maker = lambda engine: NullReplica
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
