"""A canary: a new adapter version or specialist gets a share of the traffic until a sequential
test has decided that it is no worse, or that it is.

It is worse if more of its answers are invalid, or if more of them do not end by themselves. Of
answers that their callers cut, only what no continuation could mend is invalid, and they are no
evidence that it is not worse.

Both errors are controlled however often one looks: each hypothesis is tested with an e-process
for two proportions (Turner, Ly and Gruenwald). Answers are taken in blocks of one judged answer of
the canary and the judged answers of the current one since. A block multiplies the evidence by how
much more likely it is under the estimate so far than under the nearest point of the hypothesis. By
Ville's inequality the evidence against a true hypothesis ever reaches 1/alpha with a probability
of at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coterie.core.errors import Conflict, InvalidRequest, NotFound
from coterie.core.plan import AdapterChoice
from coterie.service.shadow.policy import draw
from coterie.service.slo.correctness import Z95, RecentOutcomes
from coterie.service.slo.evidence import (
    BROKEN,
    CUT_KINDS,
    INVALID,
    LEAST,
    NEWEST,
    OPEN,
    UNFORMED,
    VALID,
    JudgedAnswer,
    JudgedShare,
    WholeLengths,
    runs_away,
)

RUNNING, PROMOTED, ROLLED_BACK = "running", "promoted", "rolled_back"
# probability to roll back a canary that is as good, and to promote one that is worse by `MARGIN`
ALPHA = 0.05
# a canary whose rate is lower by this much must not be promoted
MARGIN = 0.05
# judged answers of the canary after which an undecided test ends with a rollback
MAX_JUDGED = 2000
# answers of the current one in a block; further ones wait for the next
MAX_BLOCK = 64
MAX_SHARE = 0.5
_SEARCH_STEPS = 32
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class CanarySpec:
    """What is compared. `candidate` and `current` are digests of adapters, or specialists."""

    # "adapter" or "specialist"
    kind: str
    # the adapter's name, or the intent
    subject: str
    candidate: str
    current: str
    # of the traffic, 0 to 1
    share: float
    # as the operator knows the candidate, such as `name@2.0.0`
    label: str = ""

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.subject}"

    def takes(self, request_id: str) -> bool:
        """Whether the canary answers this request."""
        return draw(request_id, f"c{self.candidate[-14:]}") < self.share


@dataclass(slots=True)
class _SideCounts:
    valid: int = 0
    judged: int = 0

    def add(self, valid: bool) -> None:
        self.valid += valid
        self.judged += 1

    def estimate(self) -> float:
        """Between 0 and 1, never one of them."""
        return (self.valid + 0.5) / (self.judged + 1)


class _Evidence:
    """The e-process against one hypothesis: that the canary's rate is at least the current one's;
    or, with a `margin`, that it is lower by the margin or more."""

    __slots__ = ("_is_promotion", "_offset", "candidate", "current", "log", "open")

    def __init__(self, margin: float | None = None) -> None:
        self._is_promotion, self._offset = margin is not None, -(margin or 0.0)
        self.candidate, self.current = _SideCounts(), _SideCounts()
        # the current one's answers since the last block
        self.open = _SideCounts()
        self.log = 0.0

    def add(self, is_candidate: bool, valid: bool) -> None:
        if is_candidate:
            self._close_block(valid)
        elif self.open.judged < MAX_BLOCK:
            self.open.add(valid)

    def _close_block(self, valid: bool) -> None:
        block, self.open = self.open, _SideCounts()
        # estimates from earlier blocks only: the evidence is then valid
        new, old = self.candidate.estimate(), self.current.estimate()
        if new > old + self._offset if self._is_promotion else new < old:
            found = _Block(int(valid), block.valid, block.judged)
            self.log += found.gain(new, old, self._offset)
        self.candidate.add(valid)
        self.current.valid += block.valid
        self.current.judged += block.judged

    def strength(self) -> float:
        return round(math.exp(min(self.log, 50.0)), 3)

    def state(self) -> list[float]:
        sides = (self.candidate, self.current, self.open)
        return [self.log, *(count for side in sides for count in (side.valid, side.judged))]

    def restore(self, state: Sequence[float]) -> None:
        self.log = float(state[0])
        counts = [int(count) for count in state[1:]]
        self.candidate, self.current, self.open = (
            _SideCounts(*counts[at : at + 2]) for at in (0, 2, 4)
        )


class _CanarySide:
    """The candidate's or the current one's answers."""

    __slots__ = ("ended", "kinds", "share")

    def __init__(self) -> None:
        self.share = JudgedShare()
        # how many of each kind
        self.kinds: dict[str, int] = dict.fromkeys((VALID, INVALID, OPEN, UNFORMED, BROKEN), 0)
        # of those whose limit left room: whether they ended by themselves
        self.ended = RecentOutcomes(NEWEST, LEAST)

    @property
    def counted(self) -> int:
        return sum(self.kinds.values())

    def state(self) -> dict[str, Any]:
        return {
            "share": self.share.state(),
            "kinds": dict(self.kinds),
            "ended": self.ended.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.share.restore(state["share"])
        self.kinds |= {kind: int(count) for kind, count in state["kinds"].items()}
        self.ended.restore(state["ended"])


class CanaryTest:
    def __init__(
        self,
        spec: CanarySpec,
        started_at: float,
        *,
        alpha: float = ALPHA,
        margin: float = MARGIN,
        max_judged: int = MAX_JUDGED,
    ) -> None:
        self.spec, self.started_at = spec, started_at
        self.outcome = RUNNING
        # why it was rolled back: invalid, runaway, undecided
        self.why = ""
        self.ended_at = 0.0
        self._limit = math.log(1 / alpha)
        self._margin, self._max_judged = margin, max_judged
        self._sides = {True: _CanarySide(), False: _CanarySide()}
        # of the current one: they say which limits leave room
        self._lengths = WholeLengths()
        # that the canary is worse; that its answers do not end; that it is not worse by `margin`
        self._worse, self._longer, self._good = _Evidence(), _Evidence(), _Evidence(margin)

    def judged(self, is_candidate: bool, answer: JudgedAnswer, now: float) -> bool:
        """Add an answer, if its limit and the share of its tenant let it count. Returns whether it
        ended the test."""
        if self.outcome != RUNNING:
            return False
        side, lengths = self._sides[is_candidate], self._lengths
        if not is_candidate:
            lengths.add(answer)
        has_room = lengths.shows_runaway(answer)
        if not lengths.counts(answer) or not (answer.kind or has_room):
            return False
        if not side.share.admits(answer.tenant):
            return False
        if has_room:
            side.ended.add(not answer.is_cut)
            self._longer.add(is_candidate, not answer.is_cut)
        if answer.kind:
            side.kinds[answer.kind] += 1
            self._worse.add(is_candidate, answer.kind in (VALID, OPEN))
            if answer.kind not in CUT_KINDS:
                self._good.add(is_candidate, answer.kind == VALID)
        return is_candidate and self._is_over(now)

    def _is_over(self, now: float) -> bool:
        candidate, current = self._sides[True], self._sides[False]
        if self._worse.log >= self._limit:
            self._end(ROLLED_BACK, now, "invalid")
        elif self._longer.log >= self._limit and runs_away(
            candidate.ended.rate(), current.ended.rate(), Z95
        ):
            self._end(ROLLED_BACK, now, "runaway")
        elif self._good.log >= self._limit:
            self._end(PROMOTED, now)
        elif candidate.counted >= self._max_judged:
            self._end(ROLLED_BACK, now, "undecided")
        return self.outcome != RUNNING

    def stop(self, outcome: str, now: float, why: str = "") -> None:
        """By an operator, or because its time is over."""
        self._end(outcome, now, why)

    def _end(self, outcome: str, now: float, why: str = "") -> None:
        self.outcome, self.ended_at, self.why = outcome, now, why

    def figures(self) -> dict[str, Any]:
        """For the audit log and the operator. Cut answers that may become valid are `open`, and
        not among the judged ones."""
        shown: dict[str, Any] = {**asdict(self.spec), "outcome": self.outcome, "why": self.why}
        for name, is_candidate in (("candidate", True), ("current", False)):
            side = self._sides[is_candidate]
            shown |= {
                f"{name}_valid": side.kinds[VALID],
                f"{name}_judged": side.counted - side.kinds[OPEN],
                f"{name}_open": side.kinds[OPEN],
                f"{name}_cut_invalid": side.kinds[BROKEN] + side.kinds[UNFORMED],
                f"{name}_ended": side.ended.rate().valid,
                f"{name}_ended_of": side.ended.rate().judged,
            }
        return shown | {
            "evidence_worse": self._worse.strength(),
            "evidence_longer": self._longer.strength(),
            "evidence_not_worse": self._good.strength(),
            "needed": round(math.exp(self._limit), 3),
            "margin": self._margin,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
        }

    def saved(self) -> dict[str, Any]:
        return {
            "spec": asdict(self.spec),
            "started_at": self.started_at,
            "candidate": self._sides[True].state(),
            "current": self._sides[False].state(),
            "lengths": self._lengths.state(),
            "worse": self._worse.state(),
            "longer": self._longer.state(),
            "good": self._good.state(),
            "rules": [math.exp(-self._limit), self._margin, self._max_judged],
        }

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> CanaryTest:
        """One that an earlier release saved starts anew."""
        alpha, margin, most = saved["rules"]
        test = cls(
            CanarySpec(**saved["spec"]),
            saved["started_at"],
            alpha=alpha,
            margin=margin,
            max_judged=int(most),
        )
        if "worse" in saved:
            test._sides[True].restore(saved["candidate"])
            test._sides[False].restore(saved["current"])
            test._lengths.restore(saved["lengths"])
            test._worse.restore(saved["worse"])
            test._longer.restore(saved["longer"])
            test._good.restore(saved["good"])
        return test


@dataclass(frozen=True, slots=True)
class _Block:
    """One outcome of the canary and some of the current one."""

    new_valid: int
    old_valid: int
    old_judged: int

    def gain(self, new: float, old: float, offset: float) -> float:
        """Logarithm of: likelihood under the estimates over that under the nearest point of the
        hypothesis, which lies on the line new = old + `offset`."""
        new_null, old_null = self._nearest(new, old, offset)
        return self._log_likelihood(new, old) - self._log_likelihood(new_null, old_null)

    def _nearest(self, new: float, old: float, offset: float) -> tuple[float, float]:
        """The point of the line with the least Kullback-Leibler divergence from the estimates,
        where the current one counts as often as it is in the block."""
        low, high = max(0.0, -offset), min(1.0, 1.0 - offset)
        times = self.old_judged

        def divergence(old_null: float) -> float:
            return _divergence(new, old_null + offset) + times * _divergence(old, old_null)

        # golden section: the function is convex
        left, right = low, high
        a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        at_a, at_b = divergence(a), divergence(b)
        for _ in range(_SEARCH_STEPS):
            if at_a < at_b:
                right, b, at_b = b, a, at_a
                a = right - _GOLDEN * (right - left)
                at_a = divergence(a)
            else:
                left, a, at_a = a, b, at_b
                b = left + _GOLDEN * (right - left)
                at_b = divergence(b)
        old_null = (left + right) / 2
        return old_null + offset, old_null

    def _log_likelihood(self, new: float, old: float) -> float:
        return _log_share(new, self.new_valid, 1) + _log_share(old, self.old_valid, self.old_judged)


def _log_share(share: float, valid: int, judged: int) -> float:
    share = min(max(share, 1e-12), 1 - 1e-12)
    return valid * math.log(share) + (judged - valid) * math.log1p(-share)


def _divergence(p: float, q: float) -> float:
    """From a coin that shows heads with probability p to one with q."""
    q = min(max(q, 1e-12), 1 - 1e-12)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


Note = Callable[[str, str, str, Mapping[str, Any]], None]
MAX_CANARIES = 16
# who decided: the test itself
_TEST = "control"


class CanarySet:
    """The running canaries, and the intents that specialists took over after one."""

    def __init__(self, clock: Callable[[], float], note: Note) -> None:
        """`note` takes actor, kind, subject and details for the audit log."""
        self._clock, self._note = clock, note
        self._tests: dict[str, CanaryTest] = {}
        # how long one may be undecided
        self.longest_s = math.inf
        # by intent
        self._owners: dict[str, str] = {}

    def check(self, subject: str, share: float) -> None:
        """Refuse a canary that cannot start. Changes nothing."""
        if not 0 < share <= MAX_SHARE:
            raise InvalidRequest("a canary takes more than 0% and at most 50%", param="share")
        if any(test.spec.subject == subject for test in self._tests.values()):
            raise Conflict(f"a canary for {subject} is running: stop it first")
        if len(self._tests) >= MAX_CANARIES:
            raise Conflict(f"{MAX_CANARIES} canaries are running: stop one first")

    def start(self, spec: CanarySpec, actor: str) -> dict[str, Any]:
        self.check(spec.subject, spec.share)
        if spec.candidate == spec.current:
            raise Conflict(f"{spec.label or spec.candidate} is the current one already")
        test = self._tests[spec.key] = CanaryTest(spec, self._clock())
        figures = self._figures(test)
        self._note(actor, "canary_started", spec.label or spec.candidate, figures)
        return figures

    def stop(self, subject: str, actor: str) -> dict[str, Any]:
        """End it without a decision: the current one stays. `subject`: an adapter or an intent.
        An intent that was taken over goes back."""
        test = next((item for item in self._tests.values() if item.spec.subject == subject), None)
        if test is None:
            return self._give_back(subject, actor)
        del self._tests[test.spec.key]
        test.stop(ROLLED_BACK, self._clock())
        self._note(actor, "canary_stopped", test.spec.label, test.figures())
        return test.figures()

    def look(self) -> None:
        """End what is undecided for too long: perhaps nothing judges its answers, or nobody asks
        for it."""
        now = self._clock()
        for key, test in list(self._tests.items()):
            if now - test.started_at >= self.longest_s:
                test.stop(ROLLED_BACK, now, "undecided")
                self._end(key, test)

    def adapters(
        self, adapters: Sequence[AdapterChoice], request_id: str
    ) -> tuple[tuple[AdapterChoice, ...] | None, str]:
        """The stack with the canary in it, and the canary's name; None if none takes it."""
        label, stack = "", list[AdapterChoice]()
        for choice in adapters if self._tests else ():
            test = self._tests.get(f"adapter:{_bare(choice.name)}")
            spec = None if test is None else test.spec
            if spec and spec.current == choice.digest and spec.takes(request_id):
                label = spec.label
                choice = replace(choice, name=spec.label, digest=spec.candidate)
            stack.append(choice)
        return (tuple(stack), label) if label else (None, "")

    def specialist(self, intent: str, current: str, request_id: str) -> str:
        """The specialist that takes this request as a canary; empty = none."""
        test = self._tests.get(f"specialist:{intent}") if intent else None
        if test is None or test.spec.current != current or not test.spec.takes(request_id):
            return ""
        return test.spec.candidate

    def owner(self, intent: str) -> str:
        """The specialist that took over the intent; empty = as it is configured."""
        return self._owners.get(intent, "")

    def judged(
        self,
        specialist: str,
        adapters: Sequence[AdapterChoice],
        intent: str,
        answer: JudgedAnswer,
        request_id: str,
    ) -> None:
        """An answer counts on the side for which its request was drawn. One that another side gave,
        as a fallback does, says nothing: its requests are not like the others."""
        if not self._tests:
            return
        for choice in adapters:
            self._judged(f"adapter:{_bare(choice.name)}", choice.digest, answer, request_id)
        if intent:
            self._judged(f"specialist:{intent}", specialist, answer, request_id)

    def figures(self) -> list[dict[str, Any]]:
        return [self._figures(test) for test in self._tests.values()]

    def saved(self) -> dict[str, Any]:
        tests = [test.saved() for test in self._tests.values()]
        return {"tests": tests, "owners": dict(self._owners)}

    def restore_saved(self, saved: Mapping[str, Any], specialists: Collection[str]) -> None:
        self._tests = {}
        for state in saved.get("tests", ()):
            test = CanaryTest.restored(state)
            # of a clock that was set back since
            test.started_at = min(test.started_at, self._clock())
            spec = test.spec
            if spec.kind == "adapter" or {spec.candidate, spec.current} <= set(specialists):
                self._tests[spec.key] = test
        owners = saved.get("owners", {})
        self._owners = {key: name for key, name in owners.items() if name in specialists}

    def _judged(self, key: str, who: str, answer: JudgedAnswer, request_id: str) -> None:
        test = self._tests.get(key)
        if test is None or who not in (test.spec.candidate, test.spec.current):
            return
        spec = test.spec
        if spec.takes(request_id) != (who == spec.candidate):
            return
        if test.judged(who == spec.candidate, answer, self._clock()):
            self._end(key, test)

    def _figures(self, test: CanaryTest) -> dict[str, Any]:
        """Of a running one, with the time at which it ends at the latest."""
        return test.figures() | {"ends_at": test.started_at + self.longest_s}

    def _end(self, key: str, test: CanaryTest) -> None:
        del self._tests[key]
        spec, is_good = test.spec, test.outcome == PROMOTED
        if is_good and spec.kind == "specialist":
            self._owners[spec.subject] = spec.candidate
        kind = "canary_promoted" if is_good else "canary_rolled_back"
        self._note(_TEST, kind, spec.label or spec.candidate, test.figures())

    def _give_back(self, intent: str, actor: str) -> dict[str, Any]:
        owner = self._owners.pop(intent, None)
        if owner is None:
            running = ", ".join(test.spec.subject for test in self._tests.values()) or "none"
            raise NotFound(f"no canary for {intent!r}; running: {running}", param="subject")
        details = {"intent": intent, "specialist": owner}
        self._note(actor, "canary_undone", owner, details)
        return details


def _bare(name: str) -> str:
    return name.partition("@")[0]
