"""service/breaker/control.py: drills with a clock that the test moves."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.ensemble import EnsembleSettings, IntentSettings, SloSettings
from coterie.core.errors import Conflict, InvalidRequest, NotFound, Overloaded, Saturated
from coterie.core.plan import AdapterChoice, AlternateSpecialist, RoutePlan
from coterie.core.request import Sampling
from coterie.service.breaker.control import EnsembleControl
from coterie.service.breaker.spike import DemandShares
from coterie.service.breaker.steering import SteeredPlan, SteerRequest
from coterie.service.breaker.watch import WatchedSpecialist
from coterie.service.canary import CanarySpec
from coterie.service.slo.evidence import JudgedAnswer, whole

COUNT = itertools.count()
FLOOR = SloSettings(correctness=0.9)


class Drill:
    """A control, its clock, and traffic with a share of valid answers per specialist."""

    def __init__(
        self,
        *specialists: WatchedSpecialist,
        intents: Any = (),
        outcomes: Any = None,
        **values: Any,
    ) -> None:
        self.now = 1_000_000.0
        self.rng = random.Random(1)
        self.settings = EnsembleSettings(**values)
        self.intents = tuple(intents)
        self.control = EnsembleControl(
            specialists,
            self.settings,
            self.intents,
            clock=lambda: self.now,
            outcomes=outcomes,
        )
        self.rates = {item.name: 1.0 for item in specialists}
        self.asked = SteerRequest("r", 5)

    def plan(self, specialist: str, **values: Any) -> RoutePlan:
        defaults: dict[str, Any] = {"confidence": 0.95, "reasons": (), "adapters": ()}
        return RoutePlan(f"r{next(COUNT)}", specialist, sampling=Sampling(), **(defaults | values))

    def steer(self, specialist: str, priority: int = 5, **values: Any) -> SteeredPlan:
        named = {
            key: values.pop(key)
            for key in ("is_named", "is_pinned", "allowed", "tenant", "share")
            if key in values
        }
        plan = self.plan(specialist, **values)
        self.asked = SteerRequest(plan.request_id, priority, **named)
        return self.control.steer(plan, self.asked)

    def judge(self, specialist: str, intent: str = "", adapters: Any = ()) -> None:
        """The answer to the request that was steered last."""
        valid = self.rng.random() < self.rates[specialist]
        plan = self.plan(specialist, adapters=adapters, intent=intent)
        self.control.judged(plan, whole(valid), self.asked)

    def traffic(
        self, specialist: str, seconds: float, gap_s: float = 1.0, **values: Any
    ) -> Counter:
        """Requests at an even pace, their answers and their shadows judged."""
        seen: Counter[str] = Counter()
        for _ in range(int(seconds / gap_s)):
            self.now += gap_s
            steered = self.steer(specialist, **values)
            seen[steered.specialist] += 1
            self.judge(steered.specialist, values.get("intent", ""))
            if steered.shadow:
                seen[f"shadow {steered.shadow}"] += 1
                valid = self.rng.random() < self.rates[steered.shadow]
                self.control.judged_alone(steered.shadow, whole(valid))
        return seen

    def audit(self) -> list[tuple[str, str]]:
        return [(change.kind, change.subject) for change in self.control.changes.take()]


def three(**values: Any) -> Drill:
    return Drill(
        WatchedSpecialist("base"),
        WatchedSpecialist("sql", "spare", FLOOR, has_checks=True),
        WatchedSpecialist("spare", "", FLOOR, has_checks=True),
        intents=[IntentSettings("query", shadow_below=0.5, spill_below=0.3)],
        **values,
    )


def test_regression_demotes_recovery_restores() -> None:
    drill = three(breach_s=60, recovery_s=300, shadow_sample=0.1)
    drill.traffic("sql", 600)
    drill.traffic("spare", 600)
    drill.rates["sql"] = 0.4
    drill.traffic("sql", 300)
    assert drill.audit() == [("breaker_tripped", "sql")]
    # the fallback answers, and the demoted one keeps its sample
    seen = drill.traffic("sql", 1000)
    assert not seen["sql"] and seen["spare"] == 1000
    assert 60 <= seen["shadow sql"] <= 140
    assert drill.steer("sql").breaker == "shadow_only"
    # a caller that names it gets it
    assert drill.steer("sql", is_named=True).specialist == "sql"
    drill.rates["sql"] = 1.0
    drill.traffic("sql", 3000)
    assert drill.audit() == [("breaker_reset", "sql")]
    assert drill.traffic("sql", 50)["sql"] == 50


def test_recovery_needs_the_sample_that_spikes_do_not_cut() -> None:
    drill = three(breach_s=10, recovery_s=60, shadow_sample=0.2, spike_s=5)
    drill.traffic("spare", 100)
    drill.rates["sql"] = 0.0
    drill.traffic("sql", 100)
    assert ("breaker_tripped", "sql") in drill.audit()
    drill.rates["sql"] = 1.0
    # the fallback is under a spike at its last step
    for _ in range(40):
        drill.now += 1
        drill.control.loaded("spare", 3.0)
        drill.control.loaded("sql", 3.0)
    assert drill.control.watches["spare"].spike.level == 3
    seen = drill.traffic("sql", 400)
    assert seen["shadow sql"] > 40
    assert ("breaker_reset", "sql") in drill.audit()


def test_an_unknown_fallback_is_none_and_gets_shadows_until_it_is_known() -> None:
    drill = three(fresh_shadow=0.5, breach_s=10)
    drill.traffic("sql", 10)
    drill.control.demote("sql", "operator")
    # nothing is known about `spare`: the base answers
    assert drill.steer("sql").specialist == "base"
    drill.control.restore("sql", "operator")
    seen = drill.traffic("sql", 100)
    assert seen["shadow spare"] >= 12
    drill.control.demote("sql", "operator")
    assert drill.steer("sql").specialist == "spare"


def test_a_tripped_or_full_fallback_yields_the_base_then_an_error() -> None:
    drill = three()
    drill.traffic("spare", 30)
    drill.control.demote("sql", "operator", "a bad release")
    assert drill.steer("sql").specialist == "spare"
    drill.control.loaded("spare", 1.0, is_full=True)
    assert drill.steer("sql").specialist == "base"
    drill.control.loaded("spare", 0.0)
    drill.control.demote("spare", "operator")
    assert drill.steer("sql").specialist == "base"
    drill.control.loaded("base", 1.0, is_full=True)
    with pytest.raises(Saturated) as caught:
        drill.steer("sql")
    assert caught.value.retry_after_s
    # a tenant that may not use the base gets the error too
    drill.control.loaded("base", 0.0)
    with pytest.raises(Saturated):
        drill.steer("sql", allowed=frozenset({"sql"}))


def test_a_base_without_fallback_goes_on_and_cannot_be_demoted() -> None:
    drill = Drill(WatchedSpecialist("base", "", FLOOR, has_checks=True), breach_s=10)
    drill.rates["base"] = 0.1
    assert drill.traffic("base", 200)["base"] == 200
    assert drill.steer("base").breaker == "shadow_only"
    assert "no fallback" in drill.steer("base").reasons[0]
    with pytest.raises(Conflict):
        drill.control.demote("base", "operator")


def test_flapping_answers_change_little() -> None:
    drill = three(breach_s=60, recovery_s=300, shadow_sample=0.5)
    drill.traffic("spare", 100)
    for _ in range(6):
        drill.rates["sql"] = 0.2
        drill.traffic("sql", 240)
        drill.rates["sql"] = 1.0
        drill.traffic("sql", 240)
    assert len(drill.audit()) <= 4


def test_fresh_lanes_are_shadowed_until_their_window_fills() -> None:
    drill = three(fresh_shadow=0.3, min_judged=50)
    drill.traffic("spare", 60)
    seen = drill.traffic("sql", 45)
    assert 5 <= seen["shadow spare"] <= 25
    drill.traffic("sql", 20)
    # known now, and sure: no more shadows
    assert not drill.traffic("sql", 200)["shadow spare"]
    # an adapter without history is fresh although its specialist is known
    adapters = (AdapterChoice("sql@2", "d" * 64),)
    drill.control._steering._outcomes = lambda digest: (0, 0)
    assert 40 <= drill.traffic("sql", 200, adapters=adapters)["shadow spare"] <= 80


def test_unsure_requests_are_shadowed_by_intent() -> None:
    drill = Drill(
        WatchedSpecialist("base"),
        WatchedSpecialist("sql"),
        WatchedSpecialist("far", may_shadow=False),
        intents=[
            IntentSettings("query", shadow_below=0.4),
            IntentSettings("review", shadow_below=0.4, high_stakes=True),
        ],
    )
    also = (AlternateSpecialist("far", 0.3, True), AlternateSpecialist("base", 0.2, True))
    unsure: dict[str, Any] = {"confidence": 0.35, "alternates": also}
    # a remote server that did not opt in is passed over
    assert drill.steer("sql", intent="query", **unsure).shadow == "base"
    assert not drill.steer("sql", intent="query", confidence=0.45, alternates=also).shadow
    # high stakes: shadowed at a confidence at which others are not
    assert drill.steer("sql", intent="review", confidence=0.6, alternates=also).shadow == "base"
    assert not drill.steer("sql", intent="", **unsure).shadow
    assert not drill.steer("sql", intent="query", allowed=frozenset({"sql"}), **unsure).shadow


def test_a_spike_sheds_in_order_and_returns() -> None:
    drill = three(spike_s=10)
    drill.traffic("spare", 30)
    drill.traffic("sql", 30)
    also = (AlternateSpecialist("spare", 0.3, True), AlternateSpecialist("base", 0.2, False))
    unsure: dict[str, Any] = {"intent": "query", "confidence": 0.4, "alternates": also}
    assert drill.steer("sql", **unsure).shadow == "spare"

    def under(load: float, seconds: int) -> None:
        for _ in range(seconds):
            drill.now += 1
            drill.control.loaded("sql", load)
            drill.control.loaded("spare", 0.05)

    under(2.0, 11)
    step1 = drill.steer("sql", **unsure)
    assert step1.specialist == "sql" and not step1.shadow
    under(2.0, 10)
    step2 = drill.steer("sql", **unsure)
    assert step2.specialist == "spare" and "too much to do" in step2.reasons[0]
    # of those that the router is sure of, what exceeds the capacity
    sure = [drill.steer("sql", intent="query", alternates=also) for _ in range(200)]
    moved = [item for item in sure if item.specialist == "spare"]
    assert 70 < len(moved) < 130
    assert moved[0].reasons[0].endswith("too much to do: 50% of its requests go to an alternate")
    under(2.0, 10)
    refused: Counter[int] = Counter()
    for priority in [3, 5] * 100:
        try:
            assert drill.steer("sql", priority, intent="query", tenant="t").specialist == "sql"
        except Overloaded as error:
            refused[priority] += 1
            assert "of priority" in error.message and error.param == "priority"
    # a full queue: nine of ten, the low ones first
    assert refused[3] > 95 > refused[5] > 60
    # a job was accepted before
    assert drill.steer("sql", 3, intent="query").specialist == "sql"
    kinds = [change.details["step"] for change in drill.control.changes.take()]
    assert kinds == ["fewer_shadows", "spill", "priority_floor"]
    under(0.1, 6)
    assert drill.steer("sql", 3, intent="query").specialist == "sql"
    assert drill.steer("sql", **unsure).specialist == "spare"
    under(0.1, 11)
    kinds = [change.details["step"] for change in drill.control.changes.take()]
    assert kinds == ["spill", "fewer_shadows", "normal"]
    assert drill.steer("sql", **unsure).shadow == "spare"


def test_ejected_replicas() -> None:
    drill = Drill(
        WatchedSpecialist("base", replicas=("b0",)),
        WatchedSpecialist("sql", replicas=("s0", "s1")),
    )
    for _ in range(5):
        drill.control.replica_failed("sql", "s0")
    assert drill.control.ejected("sql") == {"s0"} and drill.steer("sql").breaker == "closed"
    for _ in range(5):
        drill.control.replica_failed("base", "b0")
    # the only replica: out, and yet used where nobody else can answer
    assert drill.control.watches["base"].state(drill.now) == "ejected"
    assert drill.control.ejected("base") == frozenset()
    assert drill.steer("base").specialist == "base"
    drill.now += 31
    assert not drill.control.ejected("sql") and drill.steer("base").breaker == "closed"
    assert [kind for kind, _ in drill.audit()] == ["replica_ejected"] * 2


def test_an_ejected_specialist_falls_back() -> None:
    drill = Drill(
        WatchedSpecialist("base", replicas=("b0",)), WatchedSpecialist("far", replicas=("f0",))
    )
    for _ in range(5):
        drill.control.replica_failed("far", "f0")
    steered = drill.steer("far")
    assert (steered.specialist, steered.breaker, steered.shadow) == ("base", "ejected", "")
    drill.now += 30
    assert drill.steer("far").specialist == "far"


def test_a_specialist_without_a_worker_falls_back_at_once() -> None:
    drill = Drill(WatchedSpecialist("base"), WatchedSpecialist("far"))
    drill.control.reachable("far", False)
    assert drill.steer("far").specialist == "base"
    assert drill.steer("far", is_named=True).specialist == "far"
    drill.control.reachable("base", False)
    with pytest.raises(Saturated):
        drill.steer("far")
    # nobody could take its place: the error comes from the attempt to reach it
    assert drill.steer("base").specialist == "base"
    drill.control.reachable("far", True)
    assert drill.steer("far").specialist == "far"


def test_the_operator_overrides_and_takes_back() -> None:
    drill = three()
    control = drill.control
    drill.traffic("spare", 30)
    control.demote("sql", "ann", "bad release")
    with pytest.raises(Conflict):
        control.demote("sql", "ann")
    assert drill.steer("sql").specialist == "spare"
    # a held specialist is not restored by good answers
    for _ in range(500):
        drill.now += 10
        drill.judge("sql")
    assert drill.steer("sql").specialist == "spare"
    control.restore("sql", "ann")
    assert drill.steer("sql").specialist == "sql"
    with pytest.raises(Conflict):
        control.restore("sql", "ann")
    with pytest.raises(NotFound):
        control.demote("nobody", "ann")
    control.set_thresholds("query", "ann", priority_floor=7)
    with pytest.raises(Overloaded):
        drill.steer("sql", 5, intent="query")
    assert drill.steer("sql", 5, intent="").specialist == "sql"
    with pytest.raises(InvalidRequest):
        control.set_thresholds("query", "ann", shadow_below=1.5)
    with pytest.raises(NotFound):
        control.set_thresholds("other", "ann", shadow_below=0.5)
    control.clear_thresholds("query", "ann")
    assert drill.steer("sql", 5, intent="query").specialist == "sql"
    with pytest.raises(Conflict):
        control.clear_thresholds("query", "ann")
    changes = control.changes.take()
    assert [(change.actor, change.kind) for change in changes] == [
        ("ann", "demoted"),
        ("ann", "restored"),
        ("ann", "thresholds_set"),
        ("ann", "thresholds_cleared"),
    ]
    assert changes[0].details["reason"] == "bad release"


def test_a_drained_specialist_gets_nothing_until_it_is_undrained() -> None:
    drill = three()
    control = drill.control
    drill.traffic("spare", 30)
    control.drain("sql", "ann", "new weights")
    with pytest.raises(Conflict, match="already"):
        control.drain("sql", "ann")
    steered = drill.steer("sql")
    # not even a shadow, although it is a sample of what it would have answered
    assert (steered.specialist, steered.breaker) == ("spare", "draining")
    assert all(drill.steer("sql").shadow != "sql" for _ in range(200))
    with pytest.raises(Saturated, match="draining") as refused:
        drill.steer("sql", is_named=True)
    assert refused.value.retry_after_s
    # a restart keeps it; a restored breaker does not end it
    other = three()
    other.control.restore_saved(control.saved())
    assert other.control.watches["sql"].is_draining
    control.demote("sql", "ann")
    control.restore("sql", "ann")
    with pytest.raises(Conflict):
        control.restore("sql", "ann")
    assert drill.steer("sql").specialist == "spare"
    control.undrain("sql", "ann")
    assert drill.steer("sql").specialist == "sql"
    with pytest.raises(Conflict, match="not draining"):
        control.undrain("sql", "ann")
    # the base has nobody behind it: a typed error
    control.drain("base", "ann")
    with pytest.raises(Saturated, match="base is draining"):
        drill.steer("base")
    kinds = [change.kind for change in control.changes.take()]
    assert kinds == ["drained", "demoted", "restored", "undrained", "drained"]


def test_a_drained_replica_leaves_the_others() -> None:
    drill = Drill(
        WatchedSpecialist("base", replicas=("a", "b")), WatchedSpecialist("sql", replicas=("b",))
    )
    control = drill.control
    with pytest.raises(NotFound, match="a, b"):
        control.drain_replica("c", "ann")
    # it serves another specialist too, which has no other
    with pytest.raises(Conflict, match="drain the specialist sql"):
        control.drain_replica("b", "ann")
    control.drain_replica("a", "ann", "a fan is broken")
    assert control.drained == {"a"}
    with pytest.raises(Conflict, match="already"):
        control.drain_replica("a", "ann")
    saved = control.saved()
    other = Drill(WatchedSpecialist("base", replicas=("a", "b"))).control
    other.restore_saved(saved)
    assert other.drained == {"a"}
    # it is the only one by now, or not there any more
    for replicas in (("a",), ("b", "c")):
        other = Drill(WatchedSpecialist("base", replicas=replicas)).control
        other.restore_saved(saved)
        assert not other.drained
    control.undrain_replica("a", "ann")
    assert not control.drained
    with pytest.raises(Conflict):
        control.undrain_replica("a", "ann")


OLD, NEW = AdapterChoice("sql@1", "o" * 64), AdapterChoice("sql@2", "n" * 64)
ADAPTER = CanarySpec("adapter", "sql", NEW.digest, OLD.digest, 0.2, "sql@2")


@pytest.mark.parametrize(("rate", "kind"), [(1.0, "canary_promoted"), (0.3, "canary_rolled_back")])
def test_a_canary_of_an_adapter_decides_by_itself(rate: float, kind: str) -> None:
    drill = Drill(WatchedSpecialist("base"))
    drill.control.start_canary(ADAPTER, "ann")
    with pytest.raises(Conflict):
        drill.control.start_canary(ADAPTER, "ann")
    assert drill.steer("base", adapters=(OLD,), is_pinned=True).adapters is None
    taken = 0
    for _ in range(3000):
        drill.now += 1
        steered = drill.steer("base", adapters=(OLD,))
        stack = steered.adapters or (OLD,)
        taken += stack == (NEW,)
        assert (steered.canary == "sql@2") == (stack == (NEW,))
        told = steered.reasons == ("sql@2 is a canary, in place of sql@1",)
        assert told == (stack == (NEW,))
        drill.rates["base"] = rate if stack == (NEW,) else 0.95
        drill.judge("base", adapters=stack)
        if not drill.control.canaries.figures():
            break
    started, ended = drill.control.changes.take()
    assert (started.kind, ended.kind, ended.subject) == ("canary_started", kind, "sql@2")
    assert ended.details["candidate_judged"] == taken
    assert ended.details["current_judged"] > taken
    assert drill.steer("base", adapters=(OLD,)).adapters is None


def test_a_canary_compares_only_requests_that_were_drawn_for_a_side() -> None:
    """A caller that names a version, or a specialist, chooses the prompts of one side."""
    drill = three(min_judged=5)
    control = drill.control
    control.start_canary(ADAPTER, "ann")
    control.start_canary(CanarySpec("specialist", "query", "spare", "sql", 0.3), "ann")

    def judged(specialist: str, stack: tuple[AdapterChoice, ...], **asked: Any) -> list[int]:
        """After an answer of either side of both canaries, by what its request was drawn for."""
        for number in range(200):
            plan = drill.plan(specialist, adapters=stack, intent="query")
            control.judged(plan, whole(True), SteerRequest(f"{number}", 5, **asked), alone=True)
        sides = ("candidate_judged", "current_judged")
        return [figures[side] for figures in control.canaries.figures() for side in sides]

    for stack, specialist in (((OLD,), "sql"), ((NEW,), "spare")):
        assert judged(specialist, stack, is_pinned=True, is_named=True) == [0, 0, 0, 0]
    # each side counts the answers of those that were drawn for it, and no others: 200 of each
    new, old, spare, sql = judged("sql", (OLD,))
    assert new == spare == 0 and 0 < old < 200 and 0 < sql < 200
    after = judged("spare", (NEW,))
    assert after == [200 - old, old, 200 - sql, sql]
    rate = control.watches["sql"].breaker.window.rate(control.now)
    assert rate.judged == 0


def test_a_canary_that_nothing_judges_ends_undecided() -> None:
    drill = Drill(WatchedSpecialist("base"), canary_s=3600.0)
    control = drill.control
    figures = control.start_canary(ADAPTER, "ann")
    assert figures["ends_at"] == drill.now + 3600
    for step in range(30):
        drill.now += 100
        plan = drill.plan("base", adapters=(NEW,))
        control.judged(plan, JudgedAnswer("", max_tokens=100), SteerRequest(f"{step}", 5))
        control.look()
    saved = control.saved()
    drill.now += 599
    control.look()
    assert [item["ends_at"] for item in control.canaries.figures()] == [drill.now + 1]
    drill.now += 1
    control.look()
    started, ended = control.changes.take()
    assert (started.kind, ended.kind, ended.actor) == (
        "canary_started", "canary_rolled_back", "control",
    )  # fmt: skip
    assert (ended.subject, ended.details["why"]) == ("sql@2", "undecided")
    assert ended.details["candidate_judged"] == 0
    assert drill.steer("base", adapters=(OLD,)).adapters is None
    # also over a restart, on a clock that was set back
    drill.now -= 10_000
    control.restore_saved(saved)
    assert control.canaries.figures()[0]["ends_at"] == drill.now + 3600


def test_a_canary_specialist_takes_over_its_intent_and_gives_it_back() -> None:
    drill = three(min_judged=5)
    spec = CanarySpec("specialist", "query", "spare", "sql", 0.3)
    with pytest.raises(NotFound):
        drill.control.start_canary(CanarySpec("specialist", "none", "spare", "sql", 0.3), "ann")
    drill.control.start_canary(spec, "ann")
    seen = drill.traffic("sql", 2000, intent="query")
    assert ("canary_promoted", "spare") in drill.audit()
    assert seen["spare"] > seen["sql"]
    assert drill.steer("sql", intent="query").specialist == "spare"
    assert drill.steer("sql", intent="").specialist == "sql"
    assert drill.steer("sql", intent="query", is_named=True).specialist == "sql"
    drill.control.canaries.stop("query", "ann")
    assert drill.steer("sql", intent="query").specialist == "sql"
    assert drill.audit() == [("canary_undone", "spare")]


def test_everything_survives_a_restart() -> None:
    drill = three()
    drill.traffic("spare", 50)
    drill.rates["sql"] = 0.3
    drill.traffic("sql", 200)
    drill.control.demote("spare", "ann")
    drill.control.set_thresholds("query", "ann", spill_below=0.7)
    drill.control.start_canary(ADAPTER, "ann")
    other = three()
    other.now = drill.now
    other.control.restore_saved(drill.control.saved())
    assert other.control.saved() == drill.control.saved()
    assert other.steer("sql").breaker == "shadow_only"
    assert other.control.thresholds("query").spill_below == 0.7
    # a specialist that is gone takes nothing with it
    fewer = Drill(WatchedSpecialist("base"))
    fewer.control.restore_saved(drill.control.saved())
    assert fewer.steer("base").specialist == "base"


def test_changed_settings_keep_what_is_known() -> None:
    drill = three()
    drill.traffic("sql", 100)
    drill.control.demote("sql", "ann")
    settings = EnsembleSettings(min_judged=30)
    new = [WatchedSpecialist("base"), WatchedSpecialist("sql", "", FLOOR, has_checks=True)]
    drill.control.reconfigure(new, settings, [])
    assert drill.steer("sql").specialist == "base"
    assert drill.control.watches["sql"].breaker.window.rate(drill.now).judged == 100
    assert drill.control.intents() == {}


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["judge", "load", "fail", "demote", "restore", "steer"]),
            st.sampled_from(["base", "sql", "spare", "nobody"]),
            st.floats(0, 2),
        ),
        max_size=120,
    )
)
def test_a_decision_names_a_specialist_that_may_answer(
    steps: list[tuple[str, str, float]],
) -> None:
    drill = three(breach_s=5, recovery_s=20, spike_s=4)
    control = drill.control
    for action, name, amount in steps:
        drill.now += amount * 10
        if action == "judge":
            control.judged(drill.plan(name, intent="query"), whole(amount > 1), drill.asked)
        elif action == "load":
            control.loaded(name, amount, is_full=amount > 1.8)
        elif action == "fail":
            control.replica_failed(name, f"{name}0")
        elif action in ("demote", "restore"):
            try:
                getattr(control, action)(name, "ann")
            except (Conflict, NotFound):
                continue
        else:
            also = (AlternateSpecialist("spare", 0.4, True),)
            try:
                steered = drill.steer(name, intent="query", confidence=amount / 2, alternates=also)
            except Overloaded:
                continue
            assert steered.shadow != steered.specialist
            if name == "nobody":
                assert steered == SteeredPlan("nobody", alternates=also, at=steered.at)
                continue
            chosen = control.watches[steered.specialist]
            is_last = steered.specialist == "base"
            assert is_last or not chosen.is_demoted
            if steered.specialist != name and not is_last:
                assert not chosen.is_full
                if steered.breaker != "closed":
                    assert chosen.is_known(drill.now)
            for item in steered.alternates:
                assert item.viable == (not control.watches[item.specialist].is_demoted)
    assert control.saved() == control.saved()


def test_a_decision_takes_microseconds_and_does_not_depend_on_history() -> None:
    names = [f"s{number}" for number in range(64)]
    drill = Drill(*(WatchedSpecialist(name, "s0", FLOOR, has_checks=True) for name in names))
    plan = drill.plan("s7")
    for _ in range(3000):
        drill.now += 1
        drill.judge("s7")

    def cost_s() -> float:
        began = time.thread_time()
        for number in range(300):
            drill.control.steer(plan, SteerRequest(f"q{number}", 5))
        return (time.thread_time() - began) / 300

    assert min(cost_s() for _ in range(5)) < 200e-6


@dataclass
class Crowd:
    """Requests of one priority and tenant: so many a second, and what became of them."""

    rate: float
    priority: int
    tenant: str
    share: float = 1.0
    asked: int = 0
    accepted: int = 0
    moved: int = 0

    @property
    def accepted_rate(self) -> float:
        return self.accepted / self.asked


class BusyLanes:
    """Two specialists that end so many requests a second, with a queue each. Virtual time."""

    ROOM = 60
    TICK_S = 0.25

    def __init__(self, drill: Drill, capacity: float) -> None:
        self.drill, self.capacity = drill, capacity
        self.queued = {"busy": 0.0, "spare": 0.0}
        self.ended = {"busy": 0.0, "spare": 0.0}
        self.owed: Counter[int] = Counter()

    def run(self, crowds: list[Crowd], seconds: float, *, has_alternate: bool) -> None:
        for crowd in crowds:
            crowd.asked = crowd.accepted = crowd.moved = 0
        for _ in range(int(seconds / self.TICK_S)):
            self.drill.now += self.TICK_S
            for name in self.queued:
                done = min(self.queued[name], self.capacity * self.TICK_S)
                self.queued[name] -= done
                self.ended[name] += done
                load = 2 * self.queued[name] / self.ROOM
                self.drill.control.loaded(name, load, is_full=self.queued[name] >= self.ROOM)
            arrivals = [crowd for crowd in crowds for _ in range(self._num_arrivals(crowd))]
            self.drill.rng.shuffle(arrivals)
            for crowd in arrivals:
                self._arrive(crowd, has_alternate)

    def _num_arrivals(self, crowd: Crowd) -> int:
        rate = crowd.rate * self.TICK_S
        return int(rate) + (self.drill.rng.random() < rate % 1)

    def _arrive(self, crowd: Crowd, has_alternate: bool) -> None:
        crowd.asked += 1
        alternates = (AlternateSpecialist("spare", 0.4, True),) if has_alternate else ()
        try:
            steered = self.drill.steer(
                "busy", crowd.priority, tenant=crowd.tenant, share=crowd.share,
                alternates=alternates,
            )  # fmt: skip
        except Overloaded as refused:
            assert refused.param == "priority" and refused.retry_after_s
            return
        if self.queued[steered.specialist] >= self.ROOM:
            # a full queue: admission refuses
            return
        self.queued[steered.specialist] += 1
        crowd.accepted += 1
        crowd.moved += steered.specialist == "spare"


def test_three_times_the_load_is_refused_from_the_lowest_priority_upwards() -> None:
    """Of 30 requests a second 10 can be answered: all urgent ones, and of those at the default
    priority each tenant's share; nobody below."""
    drill = Drill(WatchedSpecialist("base"), WatchedSpecialist("busy"), WatchedSpecialist("spare"))
    lanes = BusyLanes(drill, capacity=10.0)
    urgent, low = Crowd(4.0, 8, "urgent"), Crowd(9.0, 2, "cheap")
    small, double = Crowd(1.0, 5, "small"), Crowd(8.0, 5, "double", share=2.0)
    single = Crowd(8.0, 5, "single")
    crowds = [urgent, low, small, double, single]
    # until the third step is taken, and the queue has found its length
    lanes.run(crowds, 60.0, has_alternate=False)
    assert drill.control.watches["busy"].spike.level == 3
    before = lanes.ended["busy"]
    # so long that chance is small beside the limits below
    lanes.run(crowds, 480.0, has_alternate=False)
    shown = {crowd.tenant: round(crowd.accepted_rate, 3) for crowd in crowds}
    # no more than what exceeds the capacity: it is used up
    assert lanes.ended["busy"] - before > 0.99 * 480 * lanes.capacity, shown
    assert urgent.accepted_rate > 0.99, shown
    assert low.accepted_rate < 0.05, shown
    # who asks for less than its share gets it; of the rest a double share is the double
    assert small.accepted_rate > 0.95, shown
    assert 1.6 < double.accepted / single.accepted < 2.4, shown
    assert sum(crowd.accepted for crowd in crowds) == pytest.approx(4800, rel=0.05), shown
    # the load goes: everybody is accepted again
    lanes.run([Crowd(2.0, 2, "cheap")], 60.0, has_alternate=False)
    last = Crowd(2.0, 2, "cheap")
    lanes.run([last], 20.0, has_alternate=False)
    assert last.accepted_rate == 1.0 and drill.control.watches["busy"].spike.level == 0


def test_three_times_the_load_moves_requests_that_have_an_alternate() -> None:
    drill = Drill(WatchedSpecialist("base"), WatchedSpecialist("busy"), WatchedSpecialist("spare"))
    lanes = BusyLanes(drill, capacity=10.0)
    # the router was sure of each of them
    crowd = Crowd(30.0, 5, "t")
    lanes.run([crowd], 120.0, has_alternate=True)
    lanes.run([crowd], 60.0, has_alternate=True)
    share = crowd.moved / crowd.asked
    assert share >= 0.1, share
    # both are used up, and nothing is moved to one that has more to do
    assert lanes.ended["spare"] > 0.8 * 150 * lanes.capacity, lanes.ended
    # who named the specialist stays there
    for _ in range(50):
        with suppress(Overloaded):
            assert drill.steer("busy", 9, is_named=True, tenant="t").specialist == "busy"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("abcd"), st.integers(1, 30)), max_size=12
    ),
    st.floats(0, 1),
)
def test_what_is_refused_is_what_exceeds(asked: list[tuple[int, str, int]], surplus: float) -> None:
    shares = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0}
    demand = DemandShares()
    for priority, tenant, count in asked:
        for _ in range(count):
            demand.add(priority, tenant, shares[tenant], 0.0)
    total, accepted = 0, 0.0
    rates: dict[int, list[float]] = {}
    for priority, tenant, count in asked:
        rate = demand.accepted(priority, tenant, surplus)
        assert 0.0 <= rate <= 1.0
        total, accepted = total + count, accepted + rate * count
        rates.setdefault(priority, []).append(rate)
    assert accepted == pytest.approx((1.0 - surplus) * total, abs=1e-6)
    # nobody is refused while somebody of a lower priority is accepted
    for priority, found in rates.items():
        below = [rate for level, some in rates.items() if level < priority for rate in some]
        assert min(found) == 1.0 or not any(below)


def test_a_changed_share_counts_at_once() -> None:
    demand = DemandShares()
    for share in (1.0, 3.0):
        for tenant, its_share in (("a", share), ("b", 1.0)):
            for _ in range(30):
                demand.add(5, tenant, its_share, 0.0)
        # half of it is refused
        one, other = (demand.accepted(5, tenant, 0.5) for tenant in "ab")
        assert one == pytest.approx(share * other)
