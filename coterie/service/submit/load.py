"""What is in flight at each engine, as counters and running sums: no decision scans a queue.

The report of a worker is one step old and does not include requests on their way. So the gateway
counts itself: it sees each submission, each `Started`, each token and each end.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from coterie.core.plan import Assignment
from coterie.core.request import MAX_PRIORITY, own_tenant

# requests with nearly as many tokens left are one group: each next group has a tenth more
GROUP_RATIO = 1.1
_MOST_TOKENS = 1 << 17


def _group_tables() -> tuple[list[int], list[int]]:
    """By number of tokens its group, and by group the most tokens."""
    group_of, most, size = [0, 0], [1], 1
    while size < _MOST_TOKENS:
        size = max(size + 1, int(size * GROUP_RATIO))
        group_of += [len(most)] * (size + 1 - len(group_of))
        most.append(size)
    return group_of, most


_GROUP_OF, _GROUP_TOKENS = _group_tables()


def token_group(num_tokens: int) -> int:
    return _GROUP_OF[min(max(num_tokens, 0), _MOST_TOKENS)]


@dataclass(slots=True, eq=False)
class ReplicaRequest:
    """A request at a replica: what admission needs to know about it."""

    priority: int
    tenant: str
    prompt_tokens: int
    # token limit of its answer
    max_tokens: int
    # time.monotonic(); None = none
    deadline: float | None = None
    # choices or beams
    num_sequences: int = 1
    # prompt tokens that are probably cached
    cached_tokens: int = 0
    # of its tenant
    share: float = 1.0
    # times of the clock; None = not yet
    taken_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    # tokens of all choices so far
    num_output: int = 0
    # whether it found a free place when it came
    had_place: bool = True
    # whether its deadline was expected to be met
    is_promised: bool = False
    # sums over its tokens after the first: lanes, and sequences, that ran meanwhile
    lane_rounds: float = 0.0
    sequence_rounds: float = 0.0
    # its group by tokens that are left
    group: int = 0
    # the engine's sums when it was taken, and at its first token
    taken: LoadSums | None = None
    first: LoadSums | None = None

    @property
    def uncached(self) -> int:
        return max(self.prompt_tokens - self.cached_tokens, 1)

    @property
    def tokens_left(self) -> int:
        return max(self.max_tokens - self.num_output // self.num_sequences, 0)


def replica_request(assignment: Assignment, cached_tokens: int = 0) -> ReplicaRequest:
    limits, sampling = assignment.limits, assignment.sampling
    return ReplicaRequest(
        limits.priority,
        own_tenant(assignment.tenant),
        assignment.num_prompt_tokens,
        limits.max_tokens or 1,
        assignment.deadline,
        max(sampling.n or 1, sampling.num_beams or 1),
        cached_tokens,
        limits.share,
    )


def rest_of(request: ReplicaRequest) -> ReplicaRequest:
    """What another replica has to do that continues the request: it computes again what there is
    of the answer."""
    made = request.num_output // request.num_sequences
    return ReplicaRequest(
        request.priority,
        request.tenant,
        request.prompt_tokens + request.num_output,
        max(request.max_tokens - made, 1),
        request.deadline,
        request.num_sequences,
        share=request.share,
        is_promised=request.is_promised,
    )


class LoadSums(NamedTuple):
    """Sums since start: the difference of two is what happened between them."""

    at: float
    # integrals over time: lanes with requests, sequences that run
    lanes_s: float
    sequences_s: float
    # prompt tokens that were computed
    prompt_tokens: int


class EngineLoad:
    """All requests of all lanes at one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        # sequences: those that run, or will as soon as the engine steps
        self.num_requests = self.num_sequences = 0
        # lane -> sequences in flight, and how many may run at once
        self._in_lane: defaultdict[str, int] = defaultdict(int)
        self._places: dict[str, int] = {}
        # prompt tokens that are not computed yet
        self.prompt_tokens = 0
        # lane -> requests in flight; only lanes with some
        self.lanes: defaultdict[str, int] = defaultdict(int)
        # requests by their group of tokens that are left
        self._groups: defaultdict[int, int] = defaultdict(int)
        # (priority, group) -> (deadline, order, request), the earliest first; some have left
        self._deadlines: dict[tuple[int, int], list[tuple[float, int, ReplicaRequest]]] = {}
        self._order = 0
        self._updated_at = clock()
        self._lanes_s = self._sequences_s = 0.0
        self._prompts_done = 0

    def set_places(self, lane: str, places: int) -> None:
        self._places[lane] = places

    def num_sequences_with(self, lane: str, count: int) -> int:
        """Sequences that run if `lane` gets `count` more."""
        places, here = self._places.get(lane, 1), self._in_lane.get(lane, 0)
        return self.num_sequences + min(here + count, places) - min(here, places)

    def num_lanes(self, lane: str) -> int:
        """Lanes with requests if `lane` gets one."""
        return len(self.lanes) + (lane not in self.lanes)

    def sums(self) -> LoadSums:
        self._advance()
        return LoadSums(self._updated_at, self._lanes_s, self._sequences_s, self._prompts_done)

    def add(self, lane: str, request: ReplicaRequest) -> None:
        self._advance()
        self.lanes[lane] += 1
        self.num_requests += 1
        self.num_sequences = self.num_sequences_with(lane, request.num_sequences)
        self._in_lane[lane] += request.num_sequences
        self.prompt_tokens += request.uncached
        request.group = token_group(request.tokens_left)
        self._groups[request.group] += 1
        self._note_deadline(request)
        request.taken = self.sums()

    def first_token(self, request: ReplicaRequest) -> None:
        self._advance()
        self.prompt_tokens -= request.uncached
        self._prompts_done += request.uncached
        request.first = self.sums()
        request.first_token_at = self._updated_at

    def advanced(self, request: ReplicaRequest) -> None:
        """It has more tokens than before."""
        group = token_group(request.tokens_left)
        if group != request.group:
            self._leave_group(request.group)
            request.group = group
            self._groups[group] += 1
            self._note_deadline(request)

    def remove(self, lane: str, request: ReplicaRequest) -> None:
        self._advance()
        self.lanes[lane] -= 1
        if not self.lanes[lane]:
            del self.lanes[lane]
        self.num_requests -= 1
        self.num_sequences = self.num_sequences_with(lane, -request.num_sequences)
        self._in_lane[lane] -= request.num_sequences
        if request.first_token_at is None:
            self.prompt_tokens -= request.uncached
        self._leave_group(request.group)
        # entries of groups that it left are found to be old by this
        request.group = -1
        for key in [key for key in self._deadlines if self._earliest(key) is None]:
            del self._deadlines[key]

    def deadlines(self, priority: int) -> Iterator[tuple[int, float]]:
        """(tokens left, earliest deadline) by groups of requests with this priority or higher."""
        for key in list(self._deadlines):
            if key[0] >= priority and (deadline := self._earliest(key)) is not None:
                yield _GROUP_TOKENS[key[1]], deadline

    def tokens_until_end(self, count: int) -> int:
        """Tokens that the `count`-th request to end still has to produce; if fewer are in flight,
        those of the last one."""
        seen = tokens = 0
        for group in sorted(self._groups):
            tokens = _GROUP_TOKENS[group]
            seen += self._groups[group]
            if seen >= count:
                break
        return tokens

    def profile(self, lane: str, share: float = 1.0, added: Iterable[float] = ()) -> LoadProfile:
        """The tokens that the requests still have to produce, each `share` of its limit, and
        those of requests that are `added` in `lane`."""
        # those that wait for a place do not slow the others down
        running = min(self.num_sequences / self.num_requests, 1.0) if self.num_requests else 1.0
        steps = [
            (_GROUP_TOKENS[group] * share, count * running) for group, count in self._groups.items()
        ]
        steps += [(tokens, 1.0) for tokens in added]
        steps.sort()
        return LoadProfile(steps, self.num_lanes(lane))

    def _advance(self) -> None:
        now = self._now()
        passed_s = now - self._updated_at
        if passed_s > 0:
            self._lanes_s += len(self.lanes) * passed_s
            self._sequences_s += self.num_sequences * passed_s
            self._updated_at = now

    def _note_deadline(self, request: ReplicaRequest) -> None:
        if request.deadline is not None:
            self._order += 1
            entry = request.deadline, self._order, request
            heappush(self._deadlines.setdefault((request.priority, request.group), []), entry)

    def _earliest(self, key: tuple[int, int]) -> float | None:
        heap = self._deadlines[key]
        while heap and heap[0][2].group != key[1]:
            heappop(heap)
        return heap[0][0] if heap else None

    def _leave_group(self, group: int) -> None:
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]


class LoadProfile:
    """How many sequences are left after so many more tokens of each, if none comes."""

    __slots__ = ("_sums", "lanes", "steps")

    def __init__(self, steps: Sequence[tuple[float, float]], lanes: int) -> None:
        """`steps`: (tokens left, sequences), the fewest tokens first."""
        self.steps, self.lanes = steps, lanes
        self._sums: list[tuple[float, float, float, float]] | None = None

    def rounds(self, num_tokens: float) -> tuple[float, float]:
        """While a request produces `num_tokens`: the sum over its tokens of the lanes, and of the
        sequences, that run. At most so many lanes run as sequences."""
        sums = self._sums
        if sums is None:
            sums = self._sums = self._summed()
        place = bisect_right(self.steps, (num_tokens, math.inf))
        lanes, lane_tokens, sequences, sequence_tokens = sums[place]
        all_lanes, _, all_sequences, _ = sums[-1]
        return (
            lane_tokens + (all_lanes - lanes) * num_tokens,
            sequence_tokens + (all_sequences - sequences) * num_tokens,
        )

    def _summed(self) -> list[tuple[float, float, float, float]]:
        """By place: lanes, their tokens, sequences, their tokens, of all steps before it. The
        longest sequences are counted as those of different lanes."""
        left, in_lanes = float(self.lanes), []
        for _, count in reversed(self.steps):
            in_lanes.append(min(count, left))
            left -= in_lanes[-1]
        sums = [(0.0, 0.0, 0.0, 0.0)]
        for (tokens, count), some in zip(self.steps, reversed(in_lanes), strict=True):
            lanes, lane_tokens, sequences, sequence_tokens = sums[-1]
            sums.append(
                (
                    lanes + some,
                    lane_tokens + some * tokens,
                    sequences + count,
                    sequence_tokens + count * tokens,
                )
            )
        return sums

    def after(self, num_tokens: float) -> LoadProfile:
        """What is left after so many tokens."""
        steps = [(tokens - num_tokens, n) for tokens, n in self.steps if tokens > num_tokens]
        return LoadProfile(steps, self.lanes)

    def added(self, num_tokens: float, count: float = 1.0) -> LoadProfile:
        steps = list(self.steps)
        insort(steps, (num_tokens, count))
        return LoadProfile(steps, self.lanes)


def _counts() -> defaultdict[str, int]:
    # a Counter takes several times as long to remove a key
    return defaultdict(int)


@dataclass(slots=True)
class ReplicaQueue:
    """The requests of one lane at one replica."""

    lane: str = ""
    # sequences that may run at once
    places: int = 1
    load: EngineLoad = field(default_factory=EngineLoad)
    clock: Callable[[], float] = time.monotonic
    # how many wait, by priority; how many run
    num_waiting: list[int] = field(default_factory=lambda: [0] * (MAX_PRIORITY + 1))
    num_running: list[int] = field(default_factory=lambda: [0] * (MAX_PRIORITY + 1))
    # requests by tenant; only tenants with some
    tenants: defaultdict[str, int] = field(default_factory=_counts)
    # running sequences by tenant
    tenants_running: defaultdict[str, int] = field(default_factory=_counts)
    # tokens of all their prompts, and the most tokens of all their answers
    prompt_tokens: int = 0
    output_tokens: int = 0
    # since when requests wait although a place is free; None = they do not
    stuck_since: float | None = None

    waiting: int = 0
    running: int = 0

    def __post_init__(self) -> None:
        self.load.set_places(self.lane, self.places)

    def __len__(self) -> int:
        return self.waiting + self.running

    def add(self, request: ReplicaRequest) -> None:
        request.taken_at = self.clock()
        request.had_place = self.running + self.waiting < self.places
        self.num_waiting[request.priority] += 1
        self.waiting += 1
        self.tenants[request.tenant] += 1
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.max_tokens * request.num_sequences
        self.load.add(self.lane, request)
        self._look_for_room()

    def started(self, request: ReplicaRequest) -> None:
        """Note the start. After a crash it is called again and changes nothing."""
        if request.started_at is None:
            request.started_at = self.clock()
            self.num_waiting[request.priority] -= 1
            self.waiting -= 1
            self.num_running[request.priority] += 1
            self.running += 1
            self.tenants_running[request.tenant] += 1
            self.stuck_since = None
            self._look_for_room()

    def produced(self, request: ReplicaRequest, num_tokens: int) -> None:
        """Note tokens of its answer."""
        request.num_output += num_tokens
        load = self.load
        if request.first_token_at is None:
            self.started(request)
            load.first_token(request)
            num_tokens -= 1
        if num_tokens > 0:
            rounds = num_tokens / request.num_sequences
            request.lane_rounds += rounds * len(load.lanes)
            request.sequence_rounds += rounds * load.num_sequences
        load.advanced(request)

    def remove(self, request: ReplicaRequest) -> None:
        if request.group < 0 or request.taken is None:
            # it was removed, or never added
            return
        if request.started_at is None:
            self.num_waiting[request.priority] -= 1
            self.waiting -= 1
        else:
            self.num_running[request.priority] -= 1
            self.running -= 1
            _less(self.tenants_running, request.tenant)
        _less(self.tenants, request.tenant)
        self.prompt_tokens -= request.prompt_tokens
        self.output_tokens -= request.max_tokens * request.num_sequences
        self.load.remove(self.lane, request)
        self._look_for_room()

    def ahead(self, priority: int) -> int:
        """Waiting requests that come before a new one of this priority."""
        return sum(self.num_waiting[priority:])

    def holds(self, tenant: str) -> bool:
        return tenant in self.tenants

    def stuck_s(self) -> float:
        """For how long a request has waited although a place is free: there is no memory for it."""
        return 0.0 if self.stuck_since is None else self.clock() - self.stuck_since

    def _look_for_room(self) -> None:
        if not self.waiting or self.running >= self.places:
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = self.clock()


def _less(counts: defaultdict[str, int], key: str) -> None:
    """Decrease a count and remove it at 0: the number of tenants over time has no limit."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
