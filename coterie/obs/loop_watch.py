"""Measures how late the event loop runs, and logs what it is doing while it is blocked.

The loop schedules a regular callback (a beat); a thread checks it. The lag is a histogram. When a
beat is over a second late, the frames of the loop's thread are logged at once (names and lines,
never values). When the loop goes on, the length of the block is logged. A native call that keeps
the interpreter lock is logged only after it returns: until then no thread can write.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from types import TracebackType

from coterie.obs.log import log
from coterie.obs.metrics import MetricRegistry

BEAT_S = 0.25
BLOCKED_S = 1.0


class LoopWatch:
    """`with LoopWatch(registry):` on the event loop to watch."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._lag = registry.histogram("coterie_event_loop_lag_seconds")
        self._blocks = registry.value("coterie_event_loop_blocks")
        self._beat_at = 0.0
        # used by the thread only: time of the last beat before the block that was logged last
        self._logged_beat_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = threading.Event()

    def __enter__(self) -> LoopWatch:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(BEAT_S, self._beat, self._beat_at + BEAT_S)
        threading.Thread(target=self._check_beats, name="loop-watch", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self, due: float) -> None:
        now = time.monotonic()
        lag_s = max(0.0, now - due)
        self._lag.observe(lag_s)
        if lag_s > BLOCKED_S:
            self._blocks.add()
            log("event_loop_resumed", level="warning", wait_s=round(lag_s, 3))
        self._beat_at = now
        self._timer = self._loop.call_later(BEAT_S, self._beat, now + BEAT_S)

    def _check_beats(self) -> None:
        while not self._closed.wait(BEAT_S):
            beat_at = self._beat_at
            lag_s = time.monotonic() - beat_at - BEAT_S
            if lag_s > BLOCKED_S and self._logged_beat_at != beat_at:
                self._logged_beat_at = beat_at
                self._log_block(lag_s)

    def _log_block(self, lag_s: float) -> None:
        frame = sys._current_frames().get(self._thread_id)
        # do not look up source lines: a slow disk may be the cause
        stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
        frames = [f"{item.filename}:{item.lineno} {item.name}" for item in stack]
        log("event_loop_blocked", level="error", wait_s=round(lag_s, 3), frames=frames)
