"""The specialists as an ensemble while the server runs: steers requests, judges, measures load,
starts shadows, promotes canaries, and keeps its state on disk.

`breaker/control.py` decides; this module connects it with the fleet, the clock and the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coterie.core.errors import Conflict, CoterieError, Saturated, Unavailable
from coterie.core.receipt import CLOSED
from coterie.core.request import MAX_PRIORITY, own_tenant
from coterie.core.snapshot import EnsembleConfig
from coterie.obs.log import log
from coterie.service.breaker.control import EnsembleControl
from coterie.service.breaker.steering import SteeredPlan, SteerRequest
from coterie.service.breaker.watch import ControlChange, WatchedSpecialist, judging, steady_clock
from coterie.service.canary import CanarySpec
from coterie.service.shadow.calibration import CalibrationLabels
from coterie.service.shadow.dispatch import DONE, PrimaryRun, ShadowDispatcher, ShadowTask
from coterie.service.shadow.runner import ShadowRunner, shadow_request
from coterie.service.slo.board import SpecialistSlo
from coterie.service.slo.evidence import CUT_KINDS, INVALID, VALID, JudgedAnswer
from coterie.service.slo.keeper import EnsembleKeeper
from coterie.service.slo.report import SloReporter

if TYPE_CHECKING:
    from coterie.core.adapters import AdapterCard
    from coterie.core.request import Sampling
    from coterie.service.adapters.admin import AdapterAdmin
    from coterie.service.fleet import Fleet, ServedSpecialist
    from coterie.service.plan import RequestRun
    from coterie.service.records.store import VerdictEffect
    from coterie.workers.contract import Replica

# how often load is looked at, and after how many looks the rest is
TICK_S, SLOW_TICKS = 0.25, 4
# ticks between two writes of windows; changes are written at the next slow tick
WRITE_TICKS = 20
# without a promise, this wait for a first token is as much as a specialist should bear
PATIENCE_S = 10.0
# entries of the audit log that are kept in memory
RECENT_CHANGES = 20
# codes of failures that are the replica's fault
REPLICA_FAULTS = frozenset({"worker_crashed", "unavailable", "internal_error"})


class EnsembleService:
    """Used from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        admin: AdapterAdmin,
        keeper: EnsembleKeeper | None = None,
        outcomes: Callable[[str], tuple[int, int]] | None = None,
    ) -> None:
        """`outcomes`: (valid, judged) answers of an adapter, by its digest."""
        self._fleet, self._admin, self._outcomes = fleet, admin, outcomes
        self._keeper = keeper or EnsembleKeeper()
        self._labels = CalibrationLabels(self._keeper.add_disagreement)
        # what the control was configured with
        self._inputs = EnsembleConfig()
        self._clock = steady_clock()
        self._control: EnsembleControl | None = None
        self._reporter: SloReporter | None = None
        self._shadows: ShadowDispatcher | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        # the newest entries of the audit log, oldest first
        self.recent_changes: deque[ControlChange] = deque(maxlen=RECENT_CHANGES)
        # adapter versions that are to become current
        self._promotions: list[ControlChange] = []
        # by specialist and replica
        self._restarts: dict[str, float] = {}

    @property
    def control(self) -> EnsembleControl:
        if self._control is None:
            raise Unavailable("the models are still loading", retry_after_s=5.0)
        return self._control

    async def start(self, runner: ShadowRunner) -> None:
        """After the fleet has started."""
        inputs, served = self._fleet.snapshot.config, self._fleet.served
        self._inputs = inputs
        self._control = EnsembleControl(
            _watched(inputs, served),
            inputs.ensemble,
            inputs.intents.values(),
            clock=self._clock,
            outcomes=self._outcomes,
            let_in=self._let_in,
        )
        run = partial(self._run_shadow, runner)
        self._shadows = ShadowDispatcher(run, self._engines, inputs.ensemble.max_shadows)
        for item in served.values():
            item.series.slo = SpecialistSlo(inputs.ensemble.window_s)
            item.replicas.ejected = partial(self.ejected, item.name)
            item.replicas.drained = self.drained
        self._reporter = SloReporter(self._control, served)
        await self._keeper.open(self._control, served)
        self.recent_changes.extend(await self._keeper.newest_changes(RECENT_CHANGES))
        # what crashes from now on is counted, also before the first tick
        self._look_at_restarts()
        self._ticking = asyncio.ensure_future(self._tick())

    async def close(self) -> None:
        ticking, self._ticking = self._ticking, None
        if ticking is not None:
            # not cancelled: it may be writing
            self._closing.set()
            await ticking
        await self.stop_shadows()
        if self._control is not None:
            await self.keep_changes()
        await self._keeper.close()

    async def stop_shadows(self) -> None:
        """No shadow runs from now on."""
        if self._shadows is not None:
            await self._shadows.close()

    def _configured(self, config: EnsembleConfig) -> None:
        """Take over changed settings at once; what is known stays."""
        before, self._inputs = self._inputs, config
        watched = _watched(config, self._fleet.served)
        self.control.reconfigure(watched, config.ensemble, config.intents.values())
        if self._shadows is not None:
            self._shadows.max_running = config.ensemble.max_shadows
        if config.ensemble.window_s != before.ensemble.window_s:
            # what was measured before is in parts of another length
            for item in self._fleet.served.values():
                item.series.slo = SpecialistSlo(config.ensemble.window_s)

    # requests

    def steer(self, run: RequestRun, request: SteerRequest) -> SteeredPlan:
        """Raises Overloaded if the request cannot run now. `request` is that of the run."""
        config = run.snapshot.config
        if config is not self._inputs:
            self._configured(config)
        self.control.reachable(run.plan.specialist, run.served.replicas.ready())
        watch = self.control.watches.get(run.plan.specialist)
        if watch is not None:
            # also for the receipt of a refusal
            run.breaker = watch.state(self._clock())
        return self.control.steer(run.plan, request)

    def _let_in(self, specialist: str, tenant: str, priority: int) -> bool:
        """Whether a refused request of this tenant was told to come now."""
        served = self._fleet.served.get(specialist)
        if served is None:
            return False
        book = served.replicas.shared.reservations
        # the clock of admission
        return book.let_in(tenant, priority, time.monotonic())

    def instead(self, run: RequestRun) -> SteeredPlan | None:
        """Who answers in place of a specialist that failed before it began; None = nobody."""
        self.control.reachable(run.plan.specialist, run.served.replicas.ready())
        return self.control.instead(run.plan, steer_request(run))

    def may_answer(self, specialist: str) -> bool:
        """Whether no breaker keeps it from answering."""
        watch = None if self._control is None else self._control.watches.get(specialist)
        return watch is None or watch.state(self._clock()) == CLOSED

    def primary(self, served: ServedSpecialist) -> PrimaryRun:
        """While a request of a caller is on the engines of this specialist, shadows wait."""
        return PrimaryRun(self._shadows, served.replicas.names)

    def answered(self, run: RequestRun, vendor: Sampling) -> None:
        """A primary has ended with an answer; `run.judged` is None if it was not judged."""
        plan, judged, answered_at = run.plan, run.judged, self._clock()
        # before this answer
        was_healthy = bool(plan.shadow) and self._is_healthy(plan.specialist, answered_at)
        if run.replica:
            self.control.replica_succeeded(plan.specialist, run.replica)
        if judged is not None:
            self.control.judged(plan, judged, steer_request(run), alone=not run.shows_specialist)
            if judged.kind in CUT_KINDS:
                series = self._fleet.registry.value(
                    "coterie_cut_answers", plan.specialist, judged.kind
                )
                series.add()
        if run.outcome is not None and run.shows_specialist:
            self._count_health(plan.specialist, run.outcome, answered_at)
        # other faults say nothing about who a prompt is for
        is_sound = was_healthy and run.shows_specialist
        if plan.shadow and self._shadows is not None:
            target = plan.shadow

            def on_end(result: str, answer: JudgedAnswer | None) -> None:
                if self._shadow_ended(run, target, result, answer):
                    self._label(run, task, answered_at, is_sound)

            request = shadow_request(run, target)
            task = ShadowTask(request, vendor, target, run.shadow_why, on_end, primary=run)
            self._shadows.offer(task)

    def failed(self, run: RequestRun, code: str) -> None:
        if code in REPLICA_FAULTS and run.replica:
            self.control.replica_failed(run.plan.specialist, run.replica)

    def ejected(self, specialist: str) -> frozenset[str]:
        return frozenset() if self._control is None else self._control.ejected(specialist)

    def drained(self) -> frozenset[str]:
        return frozenset() if self._control is None else self._control.drained

    async def _run_shadow(self, runner: ShadowRunner, task: ShadowTask) -> JudgedAnswer | None:
        watch = self.control.watches.get(task.target)
        if watch is not None and watch.is_draining:
            raise Saturated(f"{task.target} is draining")
        return await runner.run(task)

    def _shadow_ended(
        self, run: RequestRun, target: str, result: str, answer: JudgedAnswer | None
    ) -> bool:
        """Whether the primary and its shadow disagreed."""
        primary = run.outcome
        if result == DONE:
            result = "unjudged"
            if answer is not None:
                answer = replace(answer, tenant=own_tenant(run.request.tenant))
                self.control.judged_alone(target, answer)
            if answer is not None and answer.kind in (VALID, INVALID):
                self._count_health(target, answer.kind == VALID, self._clock())
                result = "judged" if primary is None else "agreed"
                if primary is not None and primary != (answer.kind == VALID):
                    result = "disagreed"
        self._fleet.registry.value("coterie_shadows", target, result).add()
        return result == "disagreed"

    def _label(self, run: RequestRun, task: ShadowTask, at: float, is_sound: bool) -> None:
        name = run.plan.specialist
        watch = self.control.watches.get(name)
        is_bad = watch is None or self._labels.is_bad(watch, self._clock())
        found = self._labels.labelled(run, task, at, primary_is_healthy=is_sound and not is_bad)
        self._fleet.registry.value("coterie_calibration_labels", name, found).add()

    def _is_healthy(self, specialist: str, at: float) -> bool:
        watch = self.control.watches.get(specialist)
        return watch is not None and self._labels.is_healthy(watch, at)

    def _count_health(self, specialist: str, valid: bool, at: float) -> None:
        watch = self.control.watches.get(specialist)
        if watch is not None:
            self._labels.judged(watch, valid, self._inputs.ensemble.min_judged, at)

    def verdict(self, effect: VerdictEffect, good: bool) -> None:
        """A caller has judged an answer. It counts if no check did, and if the answer says
        something about its specialist: what a check found is not for one caller to change, or it
        could demote a specialist for all."""
        is_recent = effect.finished_at >= self._clock() - self._inputs.ensemble.window_s
        counts = effect.shows_specialist and not effect.is_checked
        if self._control is not None and is_recent and counts:
            kind = VALID if good else INVALID
            # under a low limit its caller's verdict says as little as a check's
            answer = JudgedAnswer(kind, effect.tenant, max_tokens=effect.cut_at)
            self._control.judged_alone(effect.specialist, answer)

    # the operator

    async def start_canary(self, name: str, share: float, actor: str) -> dict[str, Any]:
        """A canary for an adapter: `name@version`, or the version of `name` that was installed
        last."""
        return self._start_canary(await self._candidate(name), share, actor)

    async def promote(
        self, name: str, share: float, actor: str
    ) -> tuple[AdapterCard, dict[str, Any] | None]:
        """Let a staged version answer: as a canary where a check or a floor can judge it, else it
        becomes current at once. Returns the version, and the canary's figures."""
        card = await self._candidate(name)
        if self._is_judged(card):
            return card, self._start_canary(card, share, actor)
        card = await self._admin.alias(card.name, card.name, card.version)
        self._resolve_fixed(card.name)
        return card, None

    async def _candidate(self, name: str) -> AdapterCard:
        bare, at, version = name.partition("@")
        shown = await self._admin.show(bare, version if at else None)
        card = shown.card if at else max(shown.versions, key=_installed_at)
        if card.digest == self._admin.current()[card.name].digest:
            raise Conflict(
                f"{card.name}@{card.version} is the current version already: install the next one, "
                "or name another with @VERSION"
            )
        return card

    def _start_canary(self, card: AdapterCard, share: float, actor: str) -> dict[str, Any]:
        self.control.canaries.check(card.name, share)
        current, label = self._admin.current()[card.name], f"{card.name}@{card.version}"
        spec = CanarySpec("adapter", card.name, card.digest, current.digest, share, label)
        return self.control.start_canary(spec, actor)

    def _is_judged(self, card: AdapterCard) -> bool:
        """Whether its answers can be judged: its package states a form, or a specialist that it
        can run on has checks or a floor."""
        profile = self._fleet.catalog.profile(card)
        if profile.answer_pattern or profile.response_format is not None:
            return True
        # a reload may have been since the last request
        specialists = self._fleet.snapshot.config.specialists
        settings = (specialists.get(name) for name in self._fleet.router.fits(card))
        return any(item and (judging(item.checks) or item.slo.correctness) for item in settings)

    def start_specialist_canary(
        self, specialist: str, intent: str, share: float, actor: str
    ) -> dict[str, Any]:
        """A canary for a specialist: it takes a share of the intent that another one serves."""
        owner = self.control.canaries.owner(intent) or next(
            (
                name
                for name, settings in self._inputs.specialists.items()
                if intent in settings.intents
            ),
            self._base,
        )
        if owner == specialist:
            raise Conflict(f"{specialist} answers {intent!r} already")
        spec = CanarySpec("specialist", intent, specialist, owner, share, specialist)
        return self.control.start_canary(spec, actor)

    async def keep_changes(self) -> None:
        """When it returns, the changes so far and the state they led to are on disk."""
        self._take_changes()
        await self._keeper.write(self.control, self._fleet.served)

    async def note(self, actor: str, kind: str, subject: str, details: Mapping[str, Any]) -> None:
        """Write a change that an admin made elsewhere into the audit log."""
        self.control.changes.add(actor, kind, subject, details)
        await self.keep_changes()

    async def audit(self, limit: int, before: int | None = None) -> list[dict[str, Any]]:
        """The newest entries first."""
        await self.keep_changes()
        return await self._keeper.audit(limit, before)

    def report(self, tenant: str = "") -> list[dict[str, Any]]:
        """What every specialist delivers and how it stands; `tenant`: of those that it may use."""
        if self._reporter is None:
            return []
        shown = self._reporter.report()
        allowed = self._fleet.snapshot.config.may_use(own_tenant(tenant)) if tenant else ()
        return [item for item in shown if not allowed or item["specialist"] in allowed]

    def replica(self, name: str) -> dict[str, Any]:
        """How a replica stands: drained when nothing is in flight."""
        found = self._replicas()[name]
        draining = name in self.drained()
        return {"replica": name, "draining": draining, "in_flight": found.in_flight()}

    def slo_header(self, specialist: str) -> str:
        return "" if self._reporter is None else self._reporter.header(specialist)

    def measure(self) -> None:
        """Update the gauges."""
        if self._reporter is not None:
            self._reporter.measure(self._fleet.registry)

    def status(self) -> dict[str, Any]:
        shadows = self._shadows
        return {
            "specialists": self.report(),
            "replicas": [self.replica(name) for name in sorted(self._replicas())],
            "intents": self.control.intents(),
            "canaries": self.control.canaries.figures(),
            "shadows": {
                "running": 0 if shadows is None else shadows.num_running,
                "waiting": 0 if shadows is None else shadows.num_waiting,
                "most": self._inputs.ensemble.max_shadows,
            },
        }

    def _replicas(self) -> dict[str, Replica]:
        """By name; specialists that share an engine share its replicas."""
        served = self._fleet.served.values()
        return {replica.name: replica for item in served for replica in item.replicas.members}

    @property
    def _base(self) -> str:
        return next(iter(self._inputs.specialists))

    def _engines(self, specialist: str) -> tuple[str, ...]:
        served = self._fleet.served.get(specialist)
        return () if served is None else served.replicas.names

    # time

    async def _tick(self) -> None:
        count = 0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), TICK_S)
                return
            count += 1
            try:
                self._look_at_load()
                if count % SLOW_TICKS == 0:
                    await self._slow_tick(count)
            except Exception as error:
                # the control must go on after any fault
                log("unhandled error", level="error", error=error)

    async def _slow_tick(self, count: int) -> None:
        self.control.look()
        self._look_at_restarts()
        if self._shadows is not None:
            self._shadows.start_waiting()
        has_changed = self._take_changes()
        while self._promotions:
            await self._promote(self._promotions.pop(0))
        self._stop_outdated_canaries()
        is_due = count % WRITE_TICKS == 0
        if self._keeper.has_waiting or is_due:
            await self._keeper.write(self.control, self._fleet.served, whole=is_due or has_changed)

    def _take_changes(self) -> bool:
        """Hand new changes on. Returns whether there were any."""
        changes = self.control.changes.take()
        self._keeper.add(changes)
        self.recent_changes.extend(changes)
        for change in changes:
            self._fleet.registry.value("coterie_control_changes", change.kind).add()
            why = f" ({change.details['why']})" if change.details.get("why") else ""
            reason = f"{change.kind} by {change.actor}{why}"
            log("ensemble_changed", model=change.subject, reason=reason)
            if change.kind in ("breaker_tripped", "demoted"):
                self._labels.demoted(change.subject, change.at)
            if change.kind == "canary_promoted" and change.details["kind"] == "adapter":
                self._promotions.append(change)
        return bool(changes)

    def _look_at_load(self) -> None:
        for name, item in self._fleet.served.items():
            # a replica that is drained takes nothing off the others
            states, queued = item.replicas.taking()
            room = sum(state.max_queue for state in states)
            promise = self.control.watches[name].settings.slo.ttft_p95_s
            wait_s = min((state.predicted_first_token_s for state in states), default=0.0)
            load = max(2 * queued / room if room else 0.0, wait_s / (promise or PATIENCE_S))
            self.control.reachable(name, item.replicas.ready())
            self.control.loaded(name, load, is_full=bool(room) and queued >= room)

    def _look_at_restarts(self) -> None:
        """A worker that was started again has crashed, even if no request noticed."""
        for name, item in self._fleet.served.items():
            for replica in item.replicas.members:
                key = f"{name} {replica.name}"
                count = replica.stats().get("restarts", 0.0)
                for _ in range(int(count - self._restarts.get(key, count))):
                    self.control.replica_failed(name, replica.name)
                self._restarts[key] = count

    async def _promote(self, change: ControlChange) -> None:
        name, _, version = str(change.details["label"]).partition("@")
        try:
            await self._admin.alias(name, name, version)
            self._resolve_fixed(name)
        except CoterieError as error:
            log("canary_not_promoted", level="error", reason=error.message, model=name)
            self.control.changes.add("control", "promotion_failed", name, {"reason": error.message})

    def _resolve_fixed(self, adapter: str) -> None:
        """Specialists that always run with `adapter` use its current version from now on."""
        fleet, before = self._fleet, self._fleet.snapshot
        stacks = before.config.adapters.values()
        if any(item.name.partition("@")[0] == adapter for stack in stacks for item in stack):
            rights, commands = before.config.rights, before.commands
            trained = before.router.trained
            fleet.adopt(fleet.config, fleet.prepare(fleet.config, rights, commands, trained))

    def _stop_outdated_canaries(self) -> None:
        """An adapter whose current version changed meanwhile is not compared any more."""
        current: dict[str, AdapterCard] | None = None
        for figures in self.control.canaries.figures():
            if figures["kind"] == "adapter":
                current = current or self._admin.current()
                card = current.get(figures["subject"])
                if card is None or card.digest != figures["current"]:
                    self.control.canaries.stop(figures["subject"], "control")


def steer_request(run: RequestRun) -> SteerRequest:
    """What steering must know about a request beside its plan."""
    request, hints = run.request, run.request.hints
    settings = run.snapshot.config.specialists.get(run.plan.specialist)
    fixed = () if settings is None else settings.adapters
    is_job = request.submitted_at is not None
    names = [hints.model or "", *(item.name for item in hints.adapters), *fixed]
    return SteerRequest(
        request.id,
        # a job was accepted long ago
        MAX_PRIORITY if is_job else request.limits.priority,
        is_named=hints.names_answerer,
        is_pinned=any("@" in name for name in names),
        allowed=frozenset(hints.allowed) or None,
        tenant="" if is_job else own_tenant(request.tenant),
        share=1.0 if run.tenant is None else run.tenant.share,
    )


def _watched(
    inputs: EnsembleConfig, served: Mapping[str, ServedSpecialist]
) -> list[WatchedSpecialist]:
    return [
        WatchedSpecialist(
            name,
            settings.fallback,
            settings.slo,
            has_checks=judging(settings.checks),
            may_shadow=not settings.remote.url or settings.remote.shadow,
            replicas=served[name].replicas.names,
        )
        for name, settings in inputs.specialists.items()
        if name in served
    ]


def _installed_at(card: AdapterCard) -> float:
    return card.installed_at
