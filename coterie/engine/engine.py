"""The engine of one replica: several lanes with one model. Each step is schedule, run, commit.

On the CPU a step computes rows of all lanes with the same block size; on a GPU, where steps are
captured for the KV cache of one lane, the lanes take turns.

With `run_ahead` a step is launched before the tokens of the step before it are read, whenever that
step is certain without them: the host then works while the device computes. Ends are found one step
late, and the rows that ended sequences have in the step in flight are dropped. The results are the
same.

Not thread-safe: one thread calls it. Every accepted request ends with exactly one Finished or
Failed, whatever the model or a request does.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from coterie.core.errors import (
    ConfigError,
    CoterieError,
    Unavailable,
    WeightsError,
)
from coterie.core.events import Event
from coterie.core.lane import LaneConfig
from coterie.core.moe import USAGE_FIELDS, MoeUsage
from coterie.core.plan import Admitted, Assignment, LaneState, Rejected
from coterie.engine.active_request import RequestSetup, open_request, refuse, sequence_adapters
from coterie.engine.adapter_holds import AdapterHolds, AdapterPoolView
from coterie.engine.blocks import plan_caches
from coterie.engine.detokenize import TokenPieces
from coterie.engine.device_steps import LaunchedStep
from coterie.engine.grammar import GrammarCache
from coterie.engine.request_tracker import RequestTracker
from coterie.engine.runner import Runner
from coterie.engine.scheduler import Scheduler, join_plans
from coterie.weights.shortage import is_shortage

if TYPE_CHECKING:
    from coterie.engine.step import StepPlan, StepResult
    from coterie.models.base import CausalLM
    from coterie.models.build.moe import MoeExperts
    from coterie.models.text.tokenizer import Tokenizer


HORIZON_S = 30.0
# estimate before anything was measured
FIRST_GUESS_S = 1.0
MAX_RETRY_S = 600.0
NO_MEMORY = "there is not enough memory to compute this now"


class LaneThroughput:
    def __init__(self) -> None:
        self._busy_s = 0.0
        self._tokens = 0.0
        self._ended = 0.0
        self._steps = 0.0

    def record(self, step_s: float, num_tokens: int, num_ended: int) -> None:
        """Note one step of this lane: its duration, its tokens, and the requests that ended."""
        keep = math.exp(-step_s / HORIZON_S)
        self._busy_s = self._busy_s * keep + step_s
        self._tokens = self._tokens * keep + num_tokens
        self._ended = self._ended * keep + num_ended
        self._steps = self._steps * keep + 1

    @property
    def step_s(self) -> float:
        return self._busy_s / self._steps if self._steps else 0.0

    def first_token_s(self, pending_tokens: int, num_ahead: int) -> float:
        """Estimated time to the first token, if `pending_tokens` are computed first and `num_ahead`
        requests have to end first."""
        if not self._steps:
            return 0.0
        compute_s = pending_tokens * self._busy_s / max(self._tokens, 1.0)
        return self.step_s + compute_s + num_ahead * self._end_interval_s(pending_tokens)

    def retry_after_s(self, queue: int, pending_tokens: int) -> float:
        """Time until an eighth of a full queue has started, at the rate at which requests end."""
        if not self._steps:
            return FIRST_GUESS_S
        moved = max(queue // 8, 1)
        wait_s = moved * self._end_interval_s(pending_tokens)
        return min(max(wait_s, 0.1), MAX_RETRY_S)

    def _end_interval_s(self, pending_tokens: int) -> float:
        if self._ended >= 1e-3:
            return self._busy_s / self._ended
        return pending_tokens * self._busy_s / max(self._tokens, 1.0)


log = logging.getLogger(__name__)

COUNTERS = (
    "steps",
    "prefill_tokens",
    "generated_tokens",
    "schedule_s",
    "run_s",
    "sample_s",
    "commit_s",
    # steps that were computed again, in smaller ones, because memory was refused
    "smaller_steps",
)


@dataclass(slots=True)
class Lane:
    config: LaneConfig
    scheduler: Scheduler
    runner: Runner
    throughput: LaneThroughput = field(default_factory=LaneThroughput)

    @property
    def weight(self) -> float:
        return self.config.weight

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def num_pending_tokens(self) -> int:
        running = sum(len(s.tokens) - s.num_computed for s in self.scheduler.running)
        return self.scheduler.num_waiting_tokens + running

    def first_token_s(self) -> float:
        scheduler = self.scheduler
        busy = len(scheduler.waiting) + len(scheduler.running)
        ahead = max(busy + 1 - self.config.max_sequences, 0)
        return self.throughput.first_token_s(self.num_pending_tokens(), ahead)


class LanePlan(NamedTuple):
    """The part of a step that belongs to one lane."""

    # its index
    lane: int
    plan: StepPlan


class StepFlight(NamedTuple):
    """A launched step that is not committed yet."""

    parts: Seq[LanePlan]
    launched: LaunchedStep


class Engine:
    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        lanes: Seq[LaneConfig],
        *,
        replica: str = "r0",
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterPoolView | None = None,
        batching: str = "mixed",
        run_ahead: bool | None = None,
    ) -> None:
        """`batching` of adapters: `mixed` or `grouped`, see core.adapters.AdapterSettings.

        `run_ahead`: launch a step before the tokens of the step before it are read; by default on
        a GPU, as elsewhere it saves no time.
        """
        self._replica = replica
        self._vocab = model.spec.vocab
        self._eos_ids = frozenset((*tokenizer.eos_ids, *model.spec.eos_ids))
        self._pieces = TokenPieces(tokenizer)
        self._grammars = GrammarCache(tokenizer, self._vocab, sorted(self._eos_ids))
        self._adapters = adapters
        self._holds = None if adapters is None else AdapterHolds(adapters, clock)
        trade = model.memory_trade
        if trade is not None and len(lanes) > 1:
            raise ConfigError(
                f"elastic_memory serves one specialist of an engine, not {len(lanes)}",
                param="elastic_memory",
            )
        on_cpu, is_grouped = model.device.type == "cpu", batching == "grouped"
        self._lane_named: dict[str, Lane] = {}
        for cache in plan_caches(lanes, shared=on_cpu):
            whole, tables = cache.config, cache.tables
            runner = Runner(model, whole, tables, adapters is not None, self._grammars.work)
            for config, space in cache.spaces(trade):
                scheduler = Scheduler(config, self._holds, space=space, grouped=is_grouped)
                self._lane_named[config.name] = Lane(config, scheduler, runner)
        # a whole prompt of a model that walks its experts by groups is one step: others wait
        walks = model.experts is not None and model.experts.groups("prefill") is not None
        self._joins_lanes = on_cpu and not is_grouped and not walks
        self._lanes = [self._lane_named[config.name] for config in lanes]
        self._turns = DeficitRoundRobin(self._lanes, lambda lane: lane.has_work)
        self._runs_ahead = model.device.type == "cuda" if run_ahead is None else run_ahead
        # the step that was launched ahead by the last call of `step`
        self._flight: StepFlight | None = None
        schedulers = {lane.config.name: lane.scheduler for lane in self._lanes}
        self._tracker = RequestTracker(schedulers, replica, clock)
        self._outbox: list[Event] = []
        self._num_added = 0
        self._counts = dict.fromkeys(COUNTERS, 0.0)
        self._experts = None if model.experts is None else MoeMaintenance(model.experts)
        # counts of captured graphs, where there are any
        self.graph_stats: Callable[[], dict[str, float]] = dict

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the steps of all lanes now, not when they are first needed."""
        for runner in {id(lane.runner): lane.runner for lane in self._lanes}.values():
            runner.capture(progress)

    def add(self, assignment: Assignment) -> Admitted | Rejected:
        """Put a request into its lane's queue, or return why not. Never raises for bad input."""
        lane = self._lane_named.get(assignment.lane)
        if lane is None:
            return Rejected("not_found", f"no lane {assignment.lane!r} here", None)
        if assignment.request_id in self._tracker:
            return Rejected("invalid_request", "a request with this id is running", None)
        front = sequence_adapters(assignment, self._adapters, self._vocab)
        if isinstance(front, Rejected):
            return front
        rejected = refuse(assignment, front, lane.config, self._vocab)
        if rejected is not None:
            return rejected
        if lane.scheduler.is_full(assignment):
            wait_s = lane.throughput.retry_after_s(lane.config.max_queue, lane.num_pending_tokens())
            reason = f"{len(lane.scheduler.waiting)} sequences wait already"
            return Rejected("overloaded", reason, wait_s)
        self._num_added += 1
        entry = RequestSetup(lane.config, front, self._num_added, self._grammars)
        try:
            request = open_request(assignment, entry, self._pieces, self._eos_ids)
        except CoterieError as error:
            return Rejected(error.code, error.message, error.retry_after_s)
        except Exception as error:
            if not _is_memory_refused(error):
                raise
            return Rejected("unavailable", NO_MEMORY, FIRST_GUESS_S)
        self._tracker.open(request, self._outbox)
        return Admitted(self._replica)

    def abort(self, request_id: str) -> None:
        """Free the request's blocks at once; its Finished comes with the next step."""
        self._tracker.abort(request_id, self._outbox)

    def has_work(self) -> bool:
        has_work = any(lane.has_work for lane in self._lanes)
        return has_work or bool(self._outbox) or self._flight is not None

    def step(self) -> list[Event]:
        """Schedule, run, commit. Returns the events since the last call."""
        started = time.perf_counter()
        events, self._outbox = self._outbox, []
        self._grammars.work.begin_step()
        self._tracker.settle(events)
        self._tracker.expire(events)
        flight, self._flight = self._flight, None
        if flight is None:
            parts = self._schedule(events)
            if not parts:
                self._tracker.times.idle()
                if not events:
                    self._wait_for_background()
                return events
            plan = join_plans([part.plan for part in parts], self._holds)
            self._counts["schedule_s"] += time.perf_counter() - started
            try:
                flight = StepFlight(parts, self._lanes[parts[0].lane].runner.launch(plan))
            except Exception as error:
                if not self._takes_smaller_steps(parts, plan, error):
                    self._failed(parts, plan, error, events)
                return events
        if not self._runs_ahead:
            self._land(flight, started, events)
            return events
        problem, ahead = None, self._schedule_ahead(flight)
        if ahead is not None:
            try:
                launched = self._lanes[ahead.lane].runner.launch(ahead.plan, flight.launched)
                self._flight = StepFlight((ahead,), launched)
            except Exception as error:
                problem = error
        self._land(flight, started, events)
        if ahead is not None and problem is not None:
            self._failed((ahead,), ahead.plan, problem, events)
        return events

    def _schedule_ahead(self, flight: StepFlight) -> LanePlan | None:
        """The plan after a launched one, if it is certain already."""
        index = flight.parts[0].lane
        lane = self._lanes[index]
        if any(other.has_work for other in self._lanes if other is not lane):
            return None
        if self._experts is not None and not self._experts.are_settled:
            return None
        started = time.perf_counter()
        plan = lane.scheduler.schedule_ahead(flight.launched.plan, lane.runner.counts_on_device)
        self._counts["schedule_s"] += time.perf_counter() - started
        return None if plan is None else LanePlan(index, plan)

    def _land(self, flight: StepFlight, started: float, events: list[Event]) -> None:
        """Wait for a launched step and commit it. Another one may have been launched after it."""
        parts, plan = flight.parts, flight.launched.plan
        try:
            result = self._lanes[parts[0].lane].runner.collect(flight.launched)
        except Exception as error:
            self._failed(parts, plan, error, events)
            return
        ran = time.perf_counter()
        usage = None if result.dispatch is None else result.dispatch.total
        scheduled_s = self._counts["schedule_s"]
        times = self._tracker.times.step(started, ran, scheduled_s, usage, result.device_s)
        self._tracker.charge_time(plan, times)
        num_ended = [self._lanes[part.lane].scheduler.commit(part.plan) for part in parts]
        self._tracker.commit(plan, result, events)
        if sum(num_ended) < len(plan.rows):
            self._account(flight, result, (started, ran), num_ended)
        for part in parts:
            self._lanes[part.lane].scheduler.space.ended_step()
        if self._experts is not None:
            # a step in flight reads the experts where they are
            still = self._flight is None or self._experts.move_beside_steps
            moved = self._experts.after_step(plan, result, update=still)
            if moved is not None:
                self._tracker.charge_moe_updates(plan, moved)
        if self._tracker.is_empty:
            self._tracker.times.idle()

    def _wait_for_background(self) -> None:
        """Wait briefly, because nothing can run before an adapter or a grammar is ready."""
        jobs = self._tracker.grammar_jobs
        if jobs:
            self._grammars.work.wait_for_any(jobs)
        elif self._holds is not None and self._holds.waiting:
            self._holds.wait_for_load()

    def settle_moe(self, updates: int) -> None:
        """Between requests: move MoE experts to where they are used, `updates` rounds at most."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._land(flight, time.perf_counter(), self._outbox)
        if self._experts is not None:
            self._experts.update(updates)

    def _takes_smaller_steps(self, parts: Seq[LanePlan], plan: StepPlan, error: Exception) -> bool:
        """Memory was refused for a step with prompts: whether its rows, none of which has advanced,
        can be computed in steps of half as many tokens. Later ones are not larger either."""
        if not _is_memory_refused(error):
            return False
        wide = [part for part in parts if part.plan.num_prefill_tokens]
        schedulers = [self._lanes[part.lane].scheduler for part in wide]
        smaller = [part.plan.num_tokens // 2 for part in wide]
        if plan.copies or not wide:
            return False
        if any(n <= s.config.max_sequences for n, s in zip(smaller, schedulers, strict=True)):
            return False
        for tokens, scheduler in zip(smaller, schedulers, strict=True):
            scheduler.limit_steps(tokens)
        for part in parts:
            self._lanes[part.lane].scheduler.landed(part.plan)
        self._counts["smaller_steps"] += 1
        tokens = sum(smaller)
        reason = f"memory was refused: steps of at most {tokens} tokens from now on"
        log.warning("smaller_steps", extra={"replica": self._replica, "reason": reason})
        return True

    def _failed(
        self, parts: Seq[LanePlan], plan: StepPlan, error: Exception, events: list[Event]
    ) -> None:
        if _is_memory_refused(error):
            error = Unavailable(NO_MEMORY, retry_after_s=FIRST_GUESS_S)
        for part in parts:
            self._lanes[part.lane].scheduler.landed(part.plan)
        fields = {"replica": self._replica}
        if isinstance(error, WeightsError):
            # the message names files, never a prompt
            fields["reason"] = error.message
        log.exception("step_failed", extra=fields)
        self._tracker.fail(plan, error, events)

    def lane_states(self) -> tuple[LaneState, ...]:
        resident = () if self._adapters is None else self._adapters.resident()
        return tuple(
            LaneState(
                lane=lane.config.name,
                queued=len(lane.scheduler.waiting),
                max_queue=lane.config.max_queue,
                free_tokens=lane.scheduler.space.cache.num_available * lane.config.block_size,
                total_tokens=lane.config.num_blocks * lane.config.block_size,
                resident_adapters=resident,
                prefix_digests=lane.scheduler.space.cache.digests,
                predicted_first_token_s=lane.first_token_s(),
                preempting=any(s.num_preemptions for s in lane.scheduler.waiting),
                step_s=lane.throughput.step_s,
                block_size=lane.config.block_size,
                cached_tokens=lane.scheduler.space.cache.num_idle * lane.config.block_size,
            )
            for lane in self._lanes
        )

    def stats(self) -> dict[str, float]:
        """Totals since start, and the numbers of blocks and sequences in use."""
        schedulers = [lane.scheduler for lane in self._lanes]
        total = sum(lane.config.num_blocks for lane in self._lanes)
        available = sum(scheduler.space.cache.num_available for scheduler in schedulers)
        experts = {} if self._experts is None else self._experts.stats(not self.has_work())
        adapters = {} if self._adapters is None else self._adapters.stats()
        work = self._grammars.work
        return (
            self._counts
            | {"grammar_s": work.waited_s, "grammar_late": float(work.num_late)}
            | {"grammar_refused": float(work.num_refused)}
            | experts
            | adapters
            | self.graph_stats()
            | {
                "running": sum(len(scheduler.running) for scheduler in schedulers),
                "waiting": sum(len(scheduler.waiting) for scheduler in schedulers),
                "kv_usage": (total - available) / total,
                "cached_blocks": sum(scheduler.space.cache.num_cached for scheduler in schedulers),
                "prefix_queries_tokens": sum(s.space.prefix_query_tokens for s in schedulers),
                "prefix_hits_tokens": sum(s.space.prefix_hit_tokens for s in schedulers),
                "preemptions": sum(scheduler.num_preemptions for scheduler in schedulers),
            }
        )

    def check(self) -> None:
        """Raises AssertionError if the counts are inconsistent."""
        for lane in self._lanes:
            lane.scheduler.check()

    def _schedule(self, events: list[Event]) -> list[LanePlan]:
        """What the next step computes: of the lane whose turn it is, and of all that share its KV
        cache."""
        parts: list[LanePlan] = []
        num_tokens = 0
        order = self._turns.order()
        for index in order:
            lane = self._lanes[index]
            if parts and lane.runner is not self._lanes[parts[0].lane].runner:
                continue
            scheduler = lane.scheduler
            plan = scheduler.schedule(shared=len(order) > 1, taken=num_tokens)
            for sequence in scheduler.started:
                self._tracker.start(sequence, events)
            scheduler.started.clear()
            if scheduler.failed_loads:
                self._fail_adapters(scheduler, events)
            if plan is not None:
                parts.append(LanePlan(index, plan))
                num_tokens += plan.num_tokens
                if not self._joins_lanes:
                    break
        return parts

    def _fail_adapters(self, scheduler: Scheduler, events: list[Event]) -> None:
        failed_loads, scheduler.failed_loads = scheduler.failed_loads, []
        assert self._holds is not None
        for sequence in failed_loads:
            self._tracker.fail_adapters(sequence, self._holds.failure(sequence.adapter_key), events)

    def _account(
        self,
        flight: StepFlight,
        result: StepResult,
        times: tuple[float, float],
        num_ended: list[int],
    ) -> None:
        """Count a step, without the rows of sequences that ended before it: so many in each
        part."""
        started, ran = times
        now = time.perf_counter()
        plan, counts = flight.launched.plan, self._counts
        for (index, part), ended_rows in zip(flight.parts, num_ended, strict=True):
            lane = self._lanes[index]
            self._turns.charge(index, part.num_tokens)
            ended = self._tracker.num_ended.pop(lane.config.name, 0)
            lane.throughput.record(now - started, part.num_tokens - ended_rows, ended)
        counts["steps"] += 1
        counts["prefill_tokens"] += plan.num_prefill_tokens
        counts["generated_tokens"] += len(plan.draws) - sum(num_ended)
        counts["run_s"] += result.run_s
        counts["sample_s"] += result.sample_s
        counts["commit_s"] += now - ran


def _is_memory_refused(error: Exception) -> bool:
    """To the step itself, not to an expert that it loads."""
    return is_shortage(error) and not isinstance(error, WeightsError)


REPORT_EVERY_S = 1.0


class MoeMaintenance:
    def __init__(self, runtime: MoeExperts, clock: Callable[[], float] = time.monotonic) -> None:
        self._runtime, self._now = runtime, clock
        self._total = MoeUsage()
        self._reported_at = -REPORT_EVERY_S
        self._standing: dict[str, float] = {}
        # updates that failed
        self._failed = 0

    @property
    def are_settled(self) -> bool:
        """Whether all experts are where they are used, so that updates have nothing to move."""
        runtime = self._runtime
        return runtime.resident("decode") is not None or runtime.device_pool() is not None

    @property
    def move_beside_steps(self) -> bool:
        return self._runtime.moves_beside_steps

    def after_step(self, plan: StepPlan, result: StepResult, update: bool) -> MoeUsage | None:
        """Count the step and, with `update`, move experts. Returns the cost for the requests that
        continue, if there was one."""
        if result.dispatch is not None:
            self._total += result.dispatch.total
        decodes = plan.num_tokens > plan.num_prefill_tokens
        return self.update(1) if update and decodes else None

    def update(self, rounds: int) -> MoeUsage | None:
        """A failed move is only logged: a request that needs that expert gets the error."""
        updates = swaps = 0
        try:
            for _ in range(rounds):
                made, moved = self._runtime.update()
                updates, swaps = updates + made, swaps + moved
        except WeightsError as error:
            self._failed += 1
            log.warning("expert_update_failed", extra={"reason": error.message})
        if not updates and not swaps:
            return None
        done = MoeUsage(updates=updates, swaps=swaps)
        self._total += done
        return done

    def stats(self, idle: bool) -> dict[str, float]:
        now = self._now()
        if idle or now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self._standing = report_stats(self._runtime.report())
        total = self._total
        counts = {f"moe_{name}": float(getattr(total, name)) for name in USAGE_FIELDS}
        rates = sorted(hits / max(1, demands) for _, demands, hits in total.layers) or [0.0]
        return (
            counts
            | self._standing
            | {
                "moe_updates_failed": self._failed,
                "moe_fallback_rate": total.fallback_rate,
                "moe_lowest_hit_rate": rates[0],
                "moe_median_hit_rate": rates[len(rates) // 2],
                "moe_highest_hit_rate": rates[-1],
            }
        )


def report_stats(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a runtime's report that are metrics and are not counted by steps."""
    tiers = report["tiers"]
    return {
        "moe_device_evictions": tiers["device"]["evictions"],
        "moe_host_evictions": tiers["host"]["evictions"],
        "moe_device_bytes": tiers["device"]["budget_bytes"],
        "moe_host_bytes": tiers["host"]["budget_bytes"],
        "moe_saved_bytes": report["memory_saved_bytes"],
        "moe_shortages": report["shortages"],
        "moe_fallbacks": int(report["fallback"] != ""),
        "moe_cpu_silent": report["cpu_share"].get("failures", 0),
        "moe_cpu_repeats": report["cpu_share"].get("repeated", 0),
        "moe_kv_slabs": report["elastic"].get("kv_slabs", 0),
        "moe_expert_slabs": report["elastic"].get("slabs", 0)
        - report["elastic"].get("kv_slabs", 0),
        "moe_slabs_taken": report["elastic"].get("taken", 0),
        "moe_slabs_returned": report["elastic"].get("returned", 0),
    }


# A step reads all weights even for few tokens, so it is charged at least this many tokens.
STEP_FLOOR_TOKENS = 32


class WeightedLane(Protocol):
    @property
    def weight(self) -> float: ...


AnyLane = TypeVar("AnyLane", bound=WeightedLane)


class DeficitRoundRobin(Generic[AnyLane]):
    """Deficit round-robin by tokens: over time each busy lane gets tokens in proportion to its
    weight. A lane without work collects no credit."""

    def __init__(self, lanes: Seq[AnyLane], has_work: Callable[[AnyLane], bool]) -> None:
        self._lanes = lanes
        self._has_work = has_work
        self._deficits = [0.0] * len(lanes)
        self._turn = 0
        self._contended = False

    def order(self) -> list[int]:
        """Lanes with work, in the order in which to serve them."""
        busy = [index for index, lane in enumerate(self._lanes) if self._has_work(lane)]
        self._contended = len(busy) > 1
        if not self._contended:
            self._deficits = [0.0] * len(self._lanes)
            return busy
        for index in range(len(self._lanes)):
            if index not in busy:
                self._deficits[index] = 0.0
        while self._turn not in busy or self._deficits[self._turn] <= 0:
            self._turn = (self._turn + 1) % len(self._lanes)
            if self._turn in busy:
                self._deficits[self._turn] += STEP_FLOOR_TOKENS * self._lanes[self._turn].weight
        return sorted(busy, key=lambda index: (index - self._turn) % len(self._lanes))

    def charge(self, index: int, num_tokens: int) -> None:
        """Charge a lane that was served. A lane that is alone is not charged."""
        if self._contended:
            self._deficits[index] -= max(num_tokens, STEP_FLOOR_TOKENS)
