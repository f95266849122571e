"""Times work on a machine that other processes use too.

The work is cut into slices of a few milliseconds. The fastest ones show the true speed even beside
busy processes, if they agree and no thread of this process waited for a processor meanwhile (they
are clean). Slices of all works are interleaved, so that works that are
compared see the same machine.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

# slices that a work needs, in so many turns, as the speed of a machine may change every second; the
# fastest ones count, and they must agree within this share
LEAST_SLICES, LEAST_TURNS, FASTEST, APART = 8, 3, 3, 0.10
# the same of slices in which several threads of this process wait for one another
POOLED_SLICES, POOLED_APART = 24, 0.20
# waiting that is no disturbance: a share of the slice, and the wake-up of a thread
_WAITED_SHARE, _WAITED_S = 0.03, 20e-6
# without schedstat: what one involuntary switch stands for
_SWITCH_S = 1e-3
# a work whose slices do not agree is tried again so many times, each time for so long
TRIES, PATIENCE_S = 3, 2.5
_PAUSE_S = 0.2
# a turn of one work: slices, and seconds after which no other one begins
_TURN, _TURN_S = 12, 0.08
# before a slice, once others are seen to use the machine: who slept is scheduled sooner
_REST_S = 0.002
# where nothing else is known, the true time is at least this share of the shortest
_SHORTEST_SHARE = 0.6
# from this share on, others use the machine; the part that this adds to what cannot be checked
_OTHERS, _STOLEN, _UNCHECKED, _MOST_UNCHECKED = 0.05, 0.02, 0.15, 0.25
# several threads never take so many times what one alone takes
_THREADS_COST = 3
_PACE = b"\0" * (64 << 10)
_PACE_APART = 0.15


@dataclass(frozen=True, slots=True)
class SliceTiming:
    """What one slice takes on a quiet machine."""

    seconds: float
    # processor time of all threads
    core_s: float
    # the true time lies within this share of `seconds`
    spread: float
    # enough slices were clean and agree
    settled: bool


@dataclass(frozen=True, slots=True)
class TimeSlice:
    # of parts that follow one another
    parts: tuple[float, ...]
    core_s: float
    waited_s: float

    @property
    def seconds(self) -> float:
        return sum(self.parts)

    @property
    def is_clean(self) -> bool:
        return self.waited_s <= self.seconds * _WAITED_SHARE + _WAITED_S


class TimedWork:
    """Something that is run again and again. `run` returns its own seconds, by parts that follow
    one another, or None to be timed whole; `prepare` is not timed. `pooled`: more threads than
    cores, which wait for one another. `threads`: how many compute at the same time; `on_one` does
    the same on the calling thread alone."""

    def __init__(
        self,
        run: Callable[[], Sequence[float] | None],
        *,
        prepare: Callable[[], object] | None = None,
        pooled: bool = False,
        threads: int = 1,
        on_one: Callable[[], object] | None = None,
    ) -> None:
        self._run, self._prepare = run, prepare
        self._pooled, self._threads = pooled, threads
        self._on_one = on_one
        # processor time of one thread that does all, if that was needed
        self._one_s: float | None = None
        self.slices: list[TimeSlice] = []
        self.turns = 0
        run()

    def take_turn(self, rest_s: float = 0.0) -> None:
        self.turns += 1
        deadline = time.perf_counter() + _TURN_S
        for _ in range(_TURN):
            if rest_s:
                time.sleep(rest_s)
            self.take()
            if time.perf_counter() > deadline:
                return

    def take(self) -> None:
        if self._prepare is not None:
            self._prepare()
        waited, core, started = waited_s(), time.process_time(), time.perf_counter()
        parts = self._run()
        seconds = time.perf_counter() - started
        core_s, waited = time.process_time() - core, waited_s() - waited
        if parts is not None:
            # what was not timed took its share of the processor time
            core_s *= min(1.0, sum(parts) / seconds)
        self.slices.append(TimeSlice(tuple(parts or (seconds,)), core_s, waited))

    @property
    def is_pooled(self) -> bool:
        return self._pooled

    def least_s(self) -> float:
        """What a slice takes at least: its processor time on all processors, and the time in which
        no thread waited for one."""
        fastest = sorted(self.slices, key=lambda each: each.seconds)[:FASTEST]
        return min(max(s.core_s / self._threads, s.seconds - s.waited_s) for s in fastest)

    @property
    def is_settled(self) -> bool:
        least = POOLED_SLICES if self._pooled else LEAST_SLICES
        enough = len(self.slices) >= least and self.turns >= LEAST_TURNS
        return enough and self.timing().settled

    def time_on_one(self) -> None:
        """Processor time of one thread does not depend on other processes: it says between which
        bounds the time of all threads lies."""
        if self._on_one is None or self._threads == 1:
            return
        taken = []
        for _ in range(FASTEST):
            if self._prepare is not None:
                self._prepare()
            started = time.thread_time()
            self._on_one()
            taken.append(time.thread_time() - started)
        self._one_s = min(taken)

    def timing(self) -> SliceTiming:
        """From the fastest slices, of each part: others only ever make a slice longer."""
        columns = [
            sorted(column)[:FASTEST] for column in zip(*(s.parts for s in self.slices), strict=True)
        ]
        least, seconds, most = (
            sum(column[min(row, len(column) - 1)] for column in columns) for row in range(FASTEST)
        )
        core_s = min(each.core_s for each in self.slices)
        spread = most / least - 1 if least > 0 else 0.0
        plausible = self._is_plausible(least)
        if plausible and spread <= self._apart:
            return SliceTiming(seconds, core_s, spread, True)
        if plausible and len(columns) == 1:
            return SliceTiming(least, core_s, max(spread, 2 * APART), False)
        low, high = least * _SHORTEST_SHARE, least
        if self._one_s is not None:
            low, high = min(self._one_s / self._threads, least), min(self._one_s, least)
        seconds = sqrt(low * high)
        return SliceTiming(
            seconds, core_s, max(high / seconds - 1 if seconds > 0 else 0.0, APART), False
        )

    @property
    def _apart(self) -> float:
        return POOLED_APART if self._pooled else APART

    def _is_plausible(self, least: float) -> bool:
        """Whether a clean slice was about as fast as the fastest. Threads of a pool wait for one
        another anyway; and short parts need no clean whole. But threads that meet often may be late
        every time, and alike: what one alone takes shows it."""
        if self._one_s is not None and least > _THREADS_COST * self._one_s:
            return False
        if self._pooled or len(self.slices[0].parts) > 1:
            return True
        limit = least * (1 + APART)
        return any(each.is_clean and each.seconds <= limit for each in self.slices)


@dataclass(frozen=True, slots=True)
class TimingReport:
    timings: Mapping[str, SliceTiming]
    # what others did meanwhile; "": nothing that is worth a word
    others: str
    # the processors' speed changed meanwhile; "": it did not
    drift: str

    def seconds(self, name: str) -> float:
        return self.timings[name].seconds

    def spread(self, *names: str) -> float:
        """The largest of these timings."""
        return max(self.timings[name].spread for name in names)

    def reason(self, names: Iterable[str]) -> str:
        """What disturbed these timings; "" if nothing did, or if they are settled all the same."""
        if all(self.timings[name].settled for name in names):
            return self.drift
        return ", ".join(filter(None, (self.others, self.drift)))


def time_together(works: Mapping[str, TimedWork]) -> TimingReport:
    """All works in turns, until each is settled or was tried TRIES times."""
    use, pace = MachineUse(), TimedWork(_run_pace)
    for attempt in range(TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        rest_s = _REST_S if attempt else 0.0
        deadline = time.perf_counter() + PATIENCE_S
        open_works = list(works.values())
        while open_works and time.perf_counter() < deadline:
            open_works = [work for work in open_works if not work.is_settled]
            pace.take()
            for work in open_works:
                work.take_turn(rest_s)
        if not open_works:
            break
    pace.take()
    others, stolen = use.shares()
    for work in works.values():
        if others >= _OTHERS or not work.is_settled:
            work.time_on_one()
    timings = {name: work.timing() for name, work in works.items()}
    if others >= _OTHERS:
        timings = {name: _widened(each, works[name], others) for name, each in timings.items()}
    return TimingReport(timings, _use_text(others, stolen), _drift(pace.slices))


def _widened(timing: SliceTiming, work: TimedWork, others: float) -> SliceTiming:
    """Slices of a pool cannot be checked one by one. Beside others, which used this share of the
    processors, the true time may be shorter: at most by that share, and by no more than the threads
    waited."""
    if not work.is_pooled:
        return timing
    high = timing.seconds
    low = min(high, max(work.least_s(), high * (1 - others)))
    seconds = sqrt(low * high)
    spread = max(timing.spread, high / seconds - 1 if seconds > 0 else 0.0, _UNCHECKED)
    return SliceTiming(seconds, timing.core_s, spread, timing.settled and spread <= _MOST_UNCHECKED)


def _run_pace() -> None:
    hashlib.sha256(_PACE).digest()


def _drift(slices: Sequence[TimeSlice]) -> str:
    """Whether the speed of the processors changed between the first and the last half."""
    half = len(slices) // 2
    if half < 3:
        return ""
    first, last = (min(s.seconds for s in part) for part in (slices[:half], slices[half:]))
    change = abs(last / first - 1)
    return f"the speed of the processors changed by {change:.0%}" if change >= _PACE_APART else ""


class MachineUse:
    """What others used of the processors since this was made, as shares of all their time."""

    def __init__(self) -> None:
        self._before, self._own_s = _processor_s(), time.process_time()

    def shares(self) -> tuple[float, float]:
        """Other processes, and the hypervisor. Zeros where the system does not say."""
        now, own_s = _processor_s(), time.process_time() - self._own_s
        busy, stolen, total = (b - a for a, b in zip(self._before, now, strict=True))
        if total <= 0:
            return 0.0, 0.0
        return max(0.0, busy - own_s) / total, max(0.0, stolen) / total

    def reason(self) -> str:
        """The same in words; "" if it was next to nothing."""
        return _use_text(*self.shares())


def _use_text(others: float, stolen: float) -> str:
    found = []
    if others >= _OTHERS:
        found.append(f"other processes used {others:.0%} of the processors")
    if stolen >= _STOLEN:
        found.append(f"the hypervisor took {stolen:.0%} of them")
    return ", ".join(found)


def _processor_s() -> tuple[float, float, float]:
    """Seconds of all processors: busy, stolen, in all."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        return 0.0, 0.0, 0.0
    user, nice, system, idle, waiting, irq, soft_irq, stolen = (
        int(field) / os.sysconf("SC_CLK_TCK") for field in fields
    )
    busy = user + nice + system + irq + soft_irq
    return busy, stolen, busy + stolen + idle + waiting


def waited_s() -> float:
    """Seconds that threads of this process were ready and had no processor, since they began."""
    waits = list(_thread_waits())
    if waits:
        return sum(waits) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw * _SWITCH_S


def _thread_waits() -> Iterator[int]:
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                yield int(file.read().split()[1])
        except (OSError, IndexError, ValueError):
            continue
