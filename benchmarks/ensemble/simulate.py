"""Admission with a virtual clock: the server's own classes, engines that only count.

    python -m benchmarks.ensemble.simulate [--requests 1000000] [--load 0.8,1.5] [--json FILE]

64 specialists on 1,000 replicas by default. Real: `Admission`, `ReplicaSet`, the predictors, the
reservations, the shares of tenants and the breakers (simulated_faults.py). Simulated: the engines
(a token takes some time per busy lane and per sequence, a prompt delays all; their speed changes at
random), the callers and time. With `--lanes N`, N specialists share their engines.

Callers draw deadlines from 1.5 to 6 times the time that their request takes alone. Who is refused
comes back once, when it was told to. Capacity is the highest rate of answers in time that the same
engines reach with any fixed number of callers in a closed loop, without admission.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, cast

from benchmarks.ensemble.simulated_faults import FaultDrill
from coterie.core.errors import Overloaded, Saturated
from coterie.core.plan import Assignment, LaneState
from coterie.core.prefix import MAX_PUBLISHED, SHORT_BYTES, extend_chain, is_published, root_digest
from coterie.core.request import Limits, Sampling
from coterie.service.submit.admission import Admission, AdmissionResult
from coterie.service.submit.replicas import EngineGroupLoad, ReplicaSet

BLOCK, MAX_QUEUE, PLACES = 16, 256, 64
# closed loops that capacity is looked for with, and requests of each
CALLERS, CLOSED_LOOP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 800
# physics of an engine, seconds: a token, the same per sequence, a prompt token
TOKEN_S, SEQUENCE_S, PROMPT_S = 0.010, 0.002, 0.0002
SLACK = (1.5, 6.0)
COLLECT_EVERY = 20_000
# random speed: size of the changes, and how often a step takes much longer
NOISE, STALLS, STALL_S = 0.05, 0.002, 0.3
PREFIXES_KEPT = 64
VOCABULARY = range(1, 30000)


@dataclass(slots=True, eq=False)
class Call:
    """One request of a caller."""

    specialist: int
    lane: str
    tenant: str
    prompt_ids: tuple[int, ...]
    num_tokens: int
    slack: float
    is_retry: bool = False
    # who answers only to be judged
    shadow: str = ""
    # set when it is admitted
    result: AdmissionResult | None = None
    deadline: float = 0.0
    ends_at_tokens: float = 0.0

    @property
    def alone_s(self) -> float:
        prompt_s = len(self.prompt_ids) * PROMPT_S
        return prompt_s + self.num_tokens * (TOKEN_S + SEQUENCE_S)


class SimulatedReplica:
    """An engine that computes nothing: all sequences advance by one token per round."""

    def __init__(self, name: str, lanes: Sequence[str], rng: random.Random) -> None:
        self.name, self._rng = name, rng
        self._busy: Counter[str] = Counter()
        self.active: list[tuple[float, int, Call]] = []
        self.version = 0
        # rounds that were computed; when that was; until when prompts hold the engine
        self.rounds = 0.0
        self._at = 0.0
        self._prompts_until = 0.0
        self._speed = 1.0
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._states: dict[str, LaneState] = {}
        self._published: dict[str, OrderedDict[bytes, None]] = {}
        for lane in lanes:
            self._publish(lane)

    def healthy(self) -> bool:
        return True

    def retry_after_s(self) -> float:
        return 1.0

    def lane_states(self) -> dict[str, LaneState]:
        return self._states

    def round_s(self) -> float:
        return (TOKEN_S * len(self._busy) + SEQUENCE_S * len(self.active)) * self._speed

    def advance(self, now: float) -> None:
        """Compute until `now`."""
        start = max(self._at, min(self._prompts_until, now))
        rounds = max(now - start, 0.0) / self.round_s() if self.active else 0.0
        self._at = now
        self.rounds += rounds

    def take(self, call: Call, now: float, order: int) -> float:
        """Returns when its first token is there."""
        cached = self._reuse(call)
        self._speed = min(max(self._speed * math.exp(self._rng.gauss(0, NOISE)), 0.85), 1.2)
        prompt_s = max(len(call.prompt_ids) - cached, 1) * PROMPT_S * self._speed
        if self._rng.random() < STALLS:
            prompt_s += STALL_S * self._rng.random()
        self._prompts_until = max(self._prompts_until, now) + prompt_s
        self._busy[call.lane] += 1
        call.ends_at_tokens = self.rounds + call.num_tokens
        heappush(self.active, (call.ends_at_tokens, order, call))
        self.version += 1
        return self._prompts_until + self.round_s()

    def next_end(self, now: float) -> float:
        rounds = self.active[0][0] - self.rounds
        return max(now, self._prompts_until) + max(rounds, 0.0) * self.round_s()

    def finish(self) -> list[Call]:
        ended = []
        while self.active and self.active[0][0] <= self.rounds + 1e-6:
            ended.append(call := heappop(self.active)[2])
            self._busy[call.lane] -= 1
            if not self._busy[call.lane]:
                del self._busy[call.lane]
        self.version += 1
        return ended

    def _reuse(self, call: Call) -> int:
        chain: list[bytes] = []
        root = root_digest(call.lane, (), call.tenant)
        extend_chain(chain, root, call.prompt_ids, BLOCK, (len(call.prompt_ids) - 1) // BLOCK)
        depth = 0
        while depth < len(chain) and chain[depth][:SHORT_BYTES] in self._cached:
            depth += 1
        for digest in chain:
            short = digest[:SHORT_BYTES]
            self._cached[short] = None
            self._cached.move_to_end(short)
        changed = depth < len(chain)
        while len(self._cached) > PREFIXES_KEPT * 8:
            gone, _ = self._cached.popitem(last=False)
            for known in self._published.values():
                known.pop(gone, None)
        if changed:
            published = {d[:SHORT_BYTES] for i, d in enumerate(chain, 1) if is_published(i)}
            self._publish(call.lane, published)
        return depth * BLOCK

    def _publish(self, lane: str, new: set[bytes] | None = None) -> None:
        known = self._published.setdefault(lane, OrderedDict())
        for digest in new or ():
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > MAX_PUBLISHED:
            known.popitem(last=False)
        digests = frozenset(known)
        state = LaneState(lane, 0, MAX_QUEUE, 10**6, 10**6, (), digests, 0.0, False, 0.0, BLOCK)
        self._states = self._states | {lane: state}


@dataclass(slots=True)
class Tally:
    offered: int = 0
    admitted: int = 0
    in_time: int = 0
    missed: int = 0
    refused: int = 0
    saturated: int = 0
    told: int = 0
    told_admitted: int = 0
    waits: list[float] = field(default_factory=list)
    decisions: array[float] = field(default_factory=lambda: array("d"))
    tokens_by_tenant: Counter[str] = field(default_factory=Counter)
    asked_by_tenant: Counter[str] = field(default_factory=Counter)
    by_specialist: Counter[int] = field(default_factory=Counter)
    asked_by_specialist: Counter[int] = field(default_factory=Counter)
    cached_tokens: int = 0
    prompt_tokens: int = 0


class Simulation:
    def __init__(self, arguments: argparse.Namespace, load: float) -> None:
        self.arguments = arguments
        self.rng = random.Random(arguments.seed)
        self.now = 0.0
        self.load = load
        clock = lambda: self.now  # noqa: E731
        self.admission = Admission(clock)
        self.sets: list[ReplicaSet] = []
        # replicas in proportion to the traffic: a few specialists get most of it
        num_groups = max(arguments.specialists // arguments.lanes, 1)
        shares = [1.0 / (1 + index) ** 0.5 for index in range(num_groups)]
        total = sum(shares)
        counts = [max(1, round(arguments.replicas * s / total)) for s in shares]
        self.weights: list[int] = []
        for index, count in enumerate(counts):
            lanes = [f"s{index}.{n}" for n in range(arguments.lanes)]
            members = [SimulatedReplica(f"g{index}r{n}", lanes, self.rng) for n in range(count)]
            shared = EngineGroupLoad((member.name for member in members), clock)
            for lane in lanes:
                self.sets.append(ReplicaSet(lane, cast(Any, members), PLACES, shared, clock))
                self.weights.append(count)
        self.num_replicas = sum(counts)
        tenants = [f"t{index}" for index in range(arguments.tenants)]
        # the first sends as much as a third of the others together
        self.tenants = tenants
        self.tenant_weights = [max((len(tenants) - 1) / 3, 1.0)] + [1.0] * (len(tenants) - 1)
        self.prefixes = {
            tenant: [
                tuple(self.rng.randrange(1, 30000) for _ in range(self.rng.choice((48, 96, 192))))
                for _ in range(8)
            ]
            for tenant in tenants
        }
        self.capacity = self.engine_capacity(arguments.lanes) * self.num_replicas
        total_s = (arguments.requests + arguments.warmup) / (self.capacity * load)
        self.faults = FaultDrill(self.sets, clock, self.rng, total_s)
        self.tally = Tally()
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = 0

    def draw(self) -> Call:
        rng = self.rng
        tenant = rng.choices(self.tenants, self.tenant_weights)[0]
        (specialist,) = rng.choices(range(len(self.sets)), self.weights)
        prefix = rng.choice(self.prefixes[tenant])
        own = tuple(rng.choices(VOCABULARY, k=rng.randrange(8, 48)))
        tokens = min(max(int(rng.lognormvariate(3.9, 0.6)), 8), 400)
        lane = self.sets[specialist].specialist
        return Call(specialist, lane, tenant, prefix + own, tokens, rng.uniform(*SLACK))

    def engine_capacity(self, num_lanes: int) -> float:
        """Answers in time per second of one engine, with the best number of callers."""
        return max(self._closed_loop(callers, num_lanes) for callers in CALLERS)

    def _closed_loop(self, callers: int, num_lanes: int) -> float:
        lanes = [f"s0.{n}" for n in range(num_lanes)]
        engine, now, in_time = SimulatedReplica("closed", lanes, self.rng), 0.0, 0
        for order in range(CLOSED_LOOP):
            if len(engine.active) == callers:
                now = engine.next_end(now)
                engine.advance(now)
                for call in engine.finish():
                    in_time += now <= call.deadline
            call = self.draw()
            call.lane = self.rng.choice(lanes)
            call.deadline = now + call.slack * call.alone_s
            engine.advance(now)
            engine.take(call, now, order)
        return in_time / now

    def run(self) -> dict[str, Any]:
        num_requests, warmup = self.arguments.requests, self.arguments.warmup
        rate = self.capacity * self.load
        sent = 0
        self._push(0.0, "arrive", None)
        # most objects here are those of the simulated callers, so garbage is collected between
        # decisions
        gc.collect()
        gc.freeze()
        gc.disable()
        began = time.perf_counter()
        measured_from = 0.0
        while self._events:
            self.now, _, kind, what = heappop(self._events)
            if kind == "arrive":
                if sent == warmup:
                    self.tally, measured_from = Tally(), self.now
                self._ask(self.draw())
                sent += 1
                if sent % COLLECT_EVERY == 0:
                    gc.collect()
                if sent < num_requests + warmup:
                    self._push(self.now + self.rng.expovariate(rate), "arrive", None)
                else:
                    measured_to = self.now
            elif kind == "retry":
                self._ask(what)
            elif kind == "first":
                self._first_token(what)
            elif what[0].version == what[1]:
                self._complete(what[0])
        gc.enable()
        return self.report(measured_to - measured_from, time.perf_counter() - began)

    def _ask(self, call: Call) -> None:
        tally, asked = self.tally, self.sets[call.specialist].specialist
        call.deadline = self.now + call.slack * call.alone_s
        limits = Limits(max_tokens=call.num_tokens)
        self._order += 1
        work = Assignment(
            str(self._order), asked, call.prompt_ids, Sampling(), limits, (), "", call.tenant,
            call.deadline, self.now,
        )  # fmt: skip
        if not call.is_retry:
            tally.offered += 1
            tally.asked_by_tenant[call.tenant] += call.num_tokens + len(call.prompt_ids)
            tally.asked_by_specialist[call.specialist] += 1
        else:
            tally.told += 1
        started = time.thread_time()
        try:
            steered = self.faults.steer(work.request_id, asked)
            call.lane, call.shadow = steered.specialist, steered.shadow
            if call.lane != asked:
                work = replace(work, lane=call.lane)
            replicas = self.sets[self.faults.index_of(call.lane)]
            result = self.admission.admit(replicas, work)
        except Overloaded as error:
            tally.decisions.append(time.thread_time() - started)
            self._refused(call, error)
            return
        tally.decisions.append(time.thread_time() - started)
        tally.admitted += 1
        tally.told_admitted += call.is_retry
        call.result = result
        replica = result.replica
        assert isinstance(replica, SimulatedReplica)
        queue = replicas.queue(replica)
        self._sync(replica)
        queue.add(result.request)
        tally.cached_tokens += result.request.cached_tokens
        tally.prompt_tokens += len(call.prompt_ids)
        first_at = replica.take(call, self.now, self._order)
        self._push(first_at, "first", call)
        self._push(replica.next_end(self.now), "end", (replica, replica.version))

    def _refused(self, call: Call, error: Overloaded) -> None:
        tally = self.tally
        if call.is_retry:
            return
        tally.refused += 1
        if isinstance(error, Saturated) or error.retry_after_s is None:
            tally.saturated += 1
            return
        tally.waits.append(error.retry_after_s)
        call.is_retry = True
        self._push(self.now + error.retry_after_s, "retry", call)

    def _first_token(self, call: Call) -> None:
        assert call.result is not None
        request = call.result.request
        if request.first_token_at is None and request.group >= 0:
            self._set_of(call).queue(call.result.replica).produced(request, 1)

    def _sync(self, replica: SimulatedReplica) -> None:
        replica.advance(self.now)
        for _, _, call in replica.active:
            assert call.result is not None
            request = call.result.request
            if request.first_token_at is not None:
                behind = call.num_tokens - (call.ends_at_tokens - replica.rounds)
                new = min(int(behind), call.num_tokens) - request.num_output
                if new > 0:
                    self._set_of(call).queue(call.result.replica).produced(request, new)

    def _complete(self, replica: SimulatedReplica) -> None:
        self._sync(replica)
        for call in replica.finish():
            assert call.result is not None
            replicas, request = self._set_of(call), call.result.request
            queue = replicas.queue(call.result.replica)
            if request.num_output < call.num_tokens:
                queue.produced(request, call.num_tokens - request.num_output)
            asked = self.sets[call.specialist].specialist
            is_failed = self.faults.fails(replica.name)
            self.admission.ended(replicas, queue, request, is_whole=not is_failed)
            if is_failed:
                self.faults.failed(call.lane, replica.name)
                continue
            self.faults.answered(asked, call.lane, replica.name, call.shadow)
            if self.now <= call.deadline:
                self.tally.in_time += 1
                self.tally.tokens_by_tenant[call.tenant] += call.num_tokens + len(call.prompt_ids)
                self.tally.by_specialist[call.specialist] += 1
            else:
                self.tally.missed += 1
        if replica.active:
            self._push(replica.next_end(self.now), "end", (replica, replica.version))

    def _set_of(self, call: Call) -> ReplicaSet:
        """Of the specialist that answers."""
        return self.sets[self.faults.index_of(call.lane)]

    def _push(self, at: float, kind: str, what: Any) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, kind, what))

    def report(self, seconds: float, wall_s: float) -> dict[str, Any]:
        tally = self.tally
        spent = sorted(tally.decisions)
        ended = max(tally.in_time + tally.missed, 1)
        dues = fair_dues(tally.asked_by_tenant, sum(tally.tokens_by_tenant.values()))
        shares = {t: tally.tokens_by_tenant[t] / dues[t] for t in dues if dues[t] > 0}
        worst = min(shares, key=shares.__getitem__)
        served = [
            tally.by_specialist[s] / n for s, n in tally.asked_by_specialist.items() if n >= 20
        ]
        return {
            "load": self.load,
            "specialists": len(self.sets),
            "replicas": self.num_replicas,
            "requests": tally.offered,
            "capacity_rps": round(self.capacity, 1),
            "goodput_rps": round(tally.in_time / seconds, 1),
            "goodput_of_capacity": round(tally.in_time / seconds / self.capacity, 3),
            "admitted": tally.admitted,
            "miss_share": round(tally.missed / ended, 5),
            "refused": tally.refused,
            "saturated": tally.saturated,
            "told_to_wait": tally.told,
            "told_and_admitted": round(tally.told_admitted / max(tally.told, 1), 3),
            "wait_p50_s": round(statistics.median(tally.waits), 2) if tally.waits else 0.0,
            "decision_p50_us": round(spent[len(spent) // 2] * 1e6, 1),
            "decision_p99_us": round(spent[int(len(spent) * 0.99)] * 1e6, 1),
            "worst_tenant": worst,
            "worst_tenant_of_due": round(shares[worst], 3),
            "least_served_specialist": round(min(served), 3),
            "prefix_hit_share": round(tally.cached_tokens / max(tally.prompt_tokens, 1), 3),
            "wall_s": round(wall_s, 1),
        } | self.faults.report()


def fair_dues(asked: Counter[str], total: float) -> dict[str, float]:
    """What each tenant should get of `total`: equal shares, none more than it asked for."""
    dues: dict[str, float] = {}
    left = dict(asked)
    while left:
        share = total / len(left)
        small = {tenant: amount for tenant, amount in left.items() if amount <= share}
        if not small:
            return dues | dict.fromkeys(left, share)
        for tenant, amount in small.items():
            dues[tenant] = amount
            total -= amount
            del left[tenant]
    return dues


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--specialists", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=1, help="specialists per engine")
    parser.add_argument("--tenants", type=int, default=24)
    parser.add_argument("--load", default="0.8,1.5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    arguments.warmup = min(arguments.requests // 10, 50_000)
    reports = []
    for load in arguments.load.split(","):
        simulation = Simulation(arguments, float(load))
        report = simulation.run()
        reports.append(report)
        for name, value in report.items():
            print(f"{name:24} {value}")
        print(flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(reports, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
