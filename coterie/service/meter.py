"""Writes the speed and success of requests into the metrics, from their events.

It is on the path of every token, so it reads the clock only once per batch of events.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from coterie.core.events import Delta, Event, Failed, Finished, Started, Timings, Usage
from coterie.core.moe import MoeUsage
from coterie.core.plan import RoutePlan
from coterie.obs.log import log
from coterie.obs.metrics import Histogram, MetricRegistry, MetricValue
from coterie.service.slo.board import EPOCH, SpecialistSlo

if TYPE_CHECKING:
    pass

DEFAULT_WINDOW_S = 86_400.0
PHASES = ("grammar", "queue", "adapters", "prefill", "decode", "moe_stall", "moe_io")


class SpecialistSeries:
    """The often used metric series of one specialist, looked up once."""

    def __init__(self, registry: MetricRegistry, specialist: str) -> None:
        self.registry, self.specialist = registry, specialist
        self.prompt_tokens = self._value("vllm:prompt_tokens")
        self.generation_tokens = self._value("vllm:generation_tokens")
        self.prefix_queries = self._value("vllm:prefix_cache_queries")
        self.prefix_hits = self._value("vllm:prefix_cache_hits")
        self.preemptions = self._value("vllm:num_preemptions")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds")
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds")
        self.end_to_end = self._histogram("vllm:e2e_request_latency_seconds")
        self.queue_time = self._histogram("vllm:request_queue_time_seconds")
        self.inference_time = self._histogram("vllm:request_inference_time_seconds")
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds")
        self.decode_time = self._histogram("vllm:request_decode_time_seconds")
        self.token_time = self._histogram("vllm:request_time_per_output_token_seconds")
        self.request_prompt = self._histogram("vllm:request_prompt_tokens")
        self.request_computed = self._histogram("vllm:request_prefill_kv_computed_tokens")
        self.request_generation = self._histogram("vllm:request_generation_tokens")
        self.request_longest = self._histogram("vllm:request_max_num_generation_tokens")
        self.request_max_tokens = self._histogram("vllm:request_params_max_tokens")
        self.request_choices = self._histogram("vllm:request_params_n")
        self.prompt_cached = self._value("vllm:prompt_tokens_cached")

        self.admitted_time = self._histogram("coterie_admission_to_first_token_seconds")
        # replaced when the service starts, with what was measured before
        self.slo = SpecialistSlo(DEFAULT_WINDOW_S)

        self._spent = {
            phase: registry.value("coterie_request_seconds", specialist, phase) for phase in PHASES
        }

    def spent(self, end: Finished) -> None:
        """Record how the time of a request was spent."""
        timings, moe = end.timings, end.moe or MoeUsage()
        seconds = (
            timings.grammar_s,
            timings.queue_s,
            timings.load_s,
            timings.prefill_s,
            timings.decode_s,
            moe.stall_s,
            moe.io_s,
        )
        for series, amount in zip(self._spent.values(), seconds, strict=True):
            # most are 0; without a call
            if amount:
                series.value += amount

    def _value(self, name: str) -> MetricValue:
        return self.registry.value(name, self.specialist)

    def _histogram(self, name: str) -> Histogram:
        return self.registry.histogram(name, self.specialist)


class RequestMeter:
    """Measures one request."""

    __slots__ = (
        "_arrived_at", "_last_at", "_lengths", "_num_tokens", "_series", "_started", "_started_at",
        "_usage", "admitted_at", "first_token_s", "max_tokens",
    )  # fmt: skip

    def __init__(self, series: SpecialistSeries, arrived_at: float, choices: int) -> None:
        self._series = series
        # token limit of a choice; known when the prompt has been tokenised
        self.max_tokens: int | None = None
        self._arrived_at = self.admitted_at = arrived_at
        self._last_at = [0.0] * choices
        self._lengths = [0] * choices
        self._num_tokens = 0
        # known at the end
        self._usage: Usage | None = None
        self._started: Started | None = None
        self._started_at = 0.0
        self.first_token_s: float | None = None

    @property
    def started(self) -> Started | None:
        """None until the engine has begun with it."""
        return self._started

    @property
    def started_at(self) -> float:
        return self._started_at

    @property
    def last_token_at(self) -> float:
        """0 before the first token."""
        return max(self._last_at)

    @property
    def completion_tokens(self) -> int:
        return self._num_tokens

    @property
    def has_ended(self) -> bool:
        """Whether the engine has finished it."""
        return self._usage is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        if self._usage is not None:
            return self._usage.prompt_tokens + self._usage.completion_tokens
        return self._num_tokens + (0 if self._started is None else self._started.prompt_tokens)

    def so_far(self, request_id: str, reason: str) -> Finished:
        """A `Finished` event for a request whose engine sends nothing more."""
        total_s = time.monotonic() - self._arrived_at
        started = self._started or Started(request_id, "", 0, 0)
        queue_s = total_s if self._started is None else self._started_at - self._arrived_at
        first_s = self.first_token_s
        timings = Timings(
            queue_s=queue_s,
            prefill_s=max((total_s if first_s is None else first_s) - queue_s, 0.0),
            first_token_s=first_s or 0.0,
            decode_s=0.0 if first_s is None else self.last_token_at - self._arrived_at - first_s,
            total_s=total_s,
        )
        usage = Usage(
            started.prompt_tokens,
            self._num_tokens,
            started.cached_tokens,
            stored_tokens=started.stored_tokens,
        )
        return Finished(request_id, (reason,), usage, timings)

    def observe(self, events: list[Event]) -> None:
        now = time.monotonic()
        series, last_at = self._series, self._last_at
        for event in events:
            if isinstance(event, Delta):
                tokens = len(event.token_ids)
                series.generation_tokens.value += tokens
                self._num_tokens += tokens
                self._lengths[event.choice] += tokens
                before = last_at[event.choice]
                last_at[event.choice] = now
                if before and tokens:
                    gap_s = (now - before) / tokens
                    series.inter_token.observe(gap_s, tokens)
                    series.slo.tokens(EPOCH + now, gap_s, tokens)
                elif self.first_token_s is None:
                    self._first_token(now)
            elif isinstance(event, Started):
                self._started, self._started_at = event, event.at or now
                series.prompt_tokens.add(event.prompt_tokens)
                series.prefix_queries.add(event.prompt_tokens)
                series.prefix_hits.add(event.cached_tokens)
                series.prompt_cached.add(event.cached_tokens)
            else:
                self._ended(event, now)

    def _first_token(self, now: float) -> None:
        series, since_admission_s = self._series, now - self.admitted_at
        self.first_token_s = now - self._arrived_at
        series.first_token.observe(self.first_token_s)
        series.admitted_time.observe(since_admission_s)
        series.slo.first_token(EPOCH + now, self.first_token_s, since_admission_s)

    def _ended(self, event: Finished | Failed, now: float) -> None:
        series = self._series
        duration_s = now - self._arrived_at
        if isinstance(event, Failed):
            series.registry.value("coterie_failures", series.specialist, event.code).add()
            log(
                "request_failed", level="warning", request_id=event.request_id, code=event.code,
                model=series.specialist, duration_ms=round(duration_s * 1e3, 1),
            )  # fmt: skip
            return
        self._usage = event.usage
        self._count_late(event.usage)
        series.end_to_end.observe(duration_s)
        self._observe_phases(event)
        series.preemptions.add(event.timings.num_preemptions)
        series.slo.ended(EPOCH + now, event.timings.num_preemptions)
        for reason in event.choices[:1]:
            series.registry.value("vllm:request_success", series.specialist, reason).add()

    def _count_late(self, usage: Usage) -> None:
        """Tokens of which only the end told: a server elsewhere counts them itself."""
        known = 0 if self._started is None else self._started.prompt_tokens
        self._series.prompt_tokens.add(max(usage.prompt_tokens - known, 0))
        self._series.generation_tokens.add(max(usage.completion_tokens - self._num_tokens, 0))

    def _observe_phases(self, event: Finished) -> None:
        """The phases and sizes of a request, as vLLM's dashboards show them."""
        series, timings, usage = self._series, event.timings, event.usage
        series.queue_time.observe(timings.queue_s)
        series.inference_time.observe(max(timings.total_s - timings.queue_s, 0.0))
        series.prefill_time.observe(timings.prefill_s)
        series.decode_time.observe(timings.decode_s)
        longest = max(self._lengths)
        if longest > 1:
            series.token_time.observe(timings.decode_s / (longest - 1))
        series.request_prompt.observe(usage.prompt_tokens)
        series.request_computed.observe(usage.prompt_tokens - usage.cached_tokens)
        series.request_generation.observe(usage.completion_tokens)
        series.request_longest.observe(longest)
        series.request_choices.observe(len(self._lengths))
        if self.max_tokens is not None:
            series.request_max_tokens.observe(self.max_tokens)


# number of expert names that get their own series
MAX_NAMED = 200


class RouteMeter:
    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._router = registry.histogram("coterie_router_seconds")
        self._validation = registry.histogram("coterie_validation_seconds")
        # the base model always has its own series
        self._decisions = {"none": registry.value("coterie_route_decisions", "none")}

    def planned(self, plan: RoutePlan, router_s: float) -> None:
        self._router.observe(router_s)
        for adapter in plan.adapters:
            self._decision(adapter.name.partition("@")[0]).add()
        if not plan.adapters:
            self._decision("none").add()
        if plan.trace is not None and plan.trace.degraded:
            self.degraded(plan)

    def degraded(self, plan: RoutePlan) -> None:
        self._registry.value("coterie_degraded", plan.specialist).add()

    def finished(self, event: Finished) -> None:
        metrics, validation = event.metrics, event.validation
        if metrics is not None and metrics.num_experts:
            series = self._registry.histogram("coterie_expert_wait_seconds", metrics.specialist)
            series.observe(metrics.expert_load_latency_ms / 1000)
        if validation is not None:
            result = "valid" if validation.valid else "invalid"
            self._registry.value("coterie_validations", validation.validator, result).add()
            self._validation.observe(validation.duration_ms / 1000)

    def _decision(self, name: str) -> MetricValue:
        series = self._decisions.get(name)
        if series is None:
            if len(self._decisions) >= MAX_NAMED:
                return self._registry.value("coterie_route_decisions", "other")
            series = self._registry.value("coterie_route_decisions", name)
            self._decisions[name] = series
        return series
