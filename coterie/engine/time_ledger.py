"""Where the seconds of steps go, and those of each request: what a slow request waited for.

A request waits for its steps as a whole, whoever else is in them; so, other than the costs of
experts, these seconds are not divided between the requests of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from coterie.core.events import TimeSpent
from coterie.core.moe import MoeUsage


class StepTimes(NamedTuple):
    """Seconds of one step: computing, waiting for each tier of experts, and the engine's own."""

    device_s: float
    link_s: float
    disk_s: float
    cpu_s: float
    host_s: float

    @property
    def run_s(self) -> float:
        return self.device_s + self.link_s + self.disk_s + self.cpu_s


class TimeLedger:
    """All steps of an engine."""

    def __init__(self) -> None:
        # of all steps so far
        self.busy_s, self.num_steps = 0.0, 0
        # when the last step was computed; None: nothing has run since
        self._ran: float | None = None
        self._scheduled_s = 0.0

    def step(
        self,
        started: float,
        ran: float,
        scheduled_s: float,
        usage: MoeUsage | None,
        device_s: float | None = None,
    ) -> StepTimes:
        """A step that the engine began to schedule at `started` was computed at `ran`.
        `scheduled_s`: seconds of scheduling since the engine's start. `device_s`: of the step by
        the device's own clock; when that had nothing to do, the engine was what took time."""
        # tokens of the last step became text, and were sent
        between = 0.0 if self._ran is None else max(0.0, started - self._ran)
        planned, self._scheduled_s = scheduled_s - self._scheduled_s, scheduled_s
        whole_s = max(0.0, ran - started - planned)
        run_s = whole_s if device_s is None else min(whole_s, device_s)
        disk = cpu = link = 0.0
        if usage is not None:
            disk, cpu = usage.disk_s, usage.cpu_s
            link = max(0.0, usage.stall_s - disk - cpu)
            # several waits may pass at one time
            scale = min(1.0, run_s / max(link + disk + cpu, 1e-12))
            link, disk, cpu = link * scale, disk * scale, cpu * scale
        own = between + planned + whole_s - run_s
        times = StepTimes(run_s - link - disk - cpu, link, disk, cpu, own)
        self._ran = ran
        self.num_steps += 1
        self.busy_s += times.run_s + times.host_s
        return times

    def since_ran(self, now: float) -> float:
        """Seconds since the last step was computed, in which its tokens became text."""
        return 0.0 if self._ran is None else max(0.0, now - self._ran)

    def idle(self) -> None:
        """Nothing runs until the next step."""
        self._ran = None


@dataclass(slots=True)
class RequestLedger:
    """The steps of one request."""

    # `TimeLedger.busy_s` when its first step was scheduled
    from_s: float = 0.0
    own_s: float = 0.0
    device_s: float = 0.0
    link_s: float = 0.0
    disk_s: float = 0.0
    cpu_s: float = 0.0
    host_s: float = 0.0
    # in its steps, for the prompts of others
    prompts_s: float = 0.0
    # the last step that was added
    step: int = -1

    def add(self, number: int, times: StepTimes, others: float) -> None:
        """`others`: the part of the step that was for the prompts of others."""
        if number == self.step:
            return
        self.step, own = number, 1.0 - others
        self.device_s += times.device_s * own
        self.link_s += times.link_s * own
        self.disk_s += times.disk_s * own
        self.cpu_s += times.cpu_s * own
        self.host_s += times.host_s
        self.prompts_s += times.run_s * others
        self.own_s += times.run_s + times.host_s

    def spent(self, busy_s: float, ran_s: float, ending_s: float = 0.0) -> TimeSpent:
        """`ran_s`: since its first step was scheduled, until which all steps took `busy_s`.
        `ending_s`: since the last of them."""
        elsewhere = min(busy_s - self.from_s, ran_s - ending_s) - self.own_s
        # what the engine did for its first step before that was scheduled is in its queue's time
        early = max(0.0, self.own_s + ending_s - ran_s)
        return TimeSpent(
            self.device_s,
            self.link_s,
            self.disk_s,
            self.cpu_s,
            max(0.0, self.host_s + ending_s - early),
            self.prompts_s + max(0.0, elsewhere),
        )
