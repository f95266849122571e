"""Which answers say something about who wrote them.

Callers choose the limit of an answer, so an answer that its limit cut counts by its kind, and only
under a limit that whole answers need. A tenant supplies at most half of what counts.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from coterie.core.quick_init import quick_init
from coterie.service.slo.correctness import CorrectnessRate, RecentOutcomes, rate_of, wilson

# a whole answer
VALID, INVALID = "valid", "invalid"
# An answer that its caller cut. Open: it could still become valid. Unformed: nothing of the form
# that its check demands has begun. Broken: no continuation could make it valid.
OPEN, UNFORMED, BROKEN = "open", "unformed", "broken"
CUT_KINDS = frozenset({OPEN, UNFORMED, BROKEN})
# the newest answers that are looked at, and the fewest from which anything follows
NEWEST, LEAST = 200, 20
# of them, those that are compared with the ones before
NEWEST_ENDED = 50
# a lower limit selects short answers: their lengths are no sample; and while too few lengths are
# known, answers count under this limit or a higher one, if there are such answers
MIN_LIMIT = 16
# a limit is low if a cut answer had less room than this share of the whole answers needed; a whole
# answer under a limit that half of them exceed was selected for being short
CUT_QUANTILE, WHOLE_QUANTILE = 0.95, 0.5
# a tenant's own lengths are no selection if its limits are this many times as high
ROOM = 2
# the tenants of which few lengths are known; no tenant has this name
_OTHERS = "\0"
# a tenant is alone while all others supplied fewer of the newest answers
FEW = 10


@quick_init
@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """What is known about an answer that has ended."""

    # one of the kinds above; empty = no check judged it
    kind: str
    tenant: str = ""
    # 0 = not known
    num_tokens: int = 0
    # the most that it could have had; 0 = not known
    max_tokens: int = 0
    # it ended at that limit
    is_cut: bool = False


class WholeLengths:
    """Lengths of the newest whole answers in tokens, and which limits are high enough for them.

    A tenant is measured by its own lengths where these were not selected by low limits; otherwise
    by the median tenant: no tenant decides alone how much room the others need. Tenants of which
    few lengths are known are one.
    """

    __slots__ = ("_by_tenant", "_lengths", "_share")

    def __init__(self) -> None:
        # of `_lengths`; None = they have changed
        self._by_tenant: dict[str, list[tuple[int, int]]] | None = None
        # (tenant, tokens, the limit; 0 = not known)
        self._lengths: deque[tuple[str, int, int]] = deque(maxlen=NEWEST)
        self._share = JudgedShare()

    def add(self, answer: JudgedAnswer) -> None:
        if answer.is_cut or not answer.num_tokens or 0 < answer.max_tokens < MIN_LIMIT:
            return
        if self._share.admits(answer.tenant):
            self._lengths.append((answer.tenant, answer.num_tokens, answer.max_tokens))
            self._by_tenant = None

    def quantile(self, share: float, tenant: str | None = None) -> int | None:
        """How many tokens this share of the whole answers needs at most: of this tenant, or, if it
        is None, of the median one. None while too few are known."""
        if len(self._lengths) < LEAST:
            return None
        if self._by_tenant is None:
            self._by_tenant = self._groups()
        groups = self._by_tenant
        own = [] if tenant is None else groups.get(tenant) or groups.get(_OTHERS, [])
        if len(own) >= LEAST and _had_room(own):
            return _quantile([length for length, _ in own], share)
        each = [_quantile([length for length, _ in group], share) for group in groups.values()]
        return _quantile(each, 0.5)

    def _groups(self) -> dict[str, list[tuple[int, int]]]:
        """(length, limit) by tenant."""
        groups: dict[str, list[tuple[int, int]]] = {}
        counts = Counter(tenant for tenant, _, _ in self._lengths)
        for tenant, length, limit in self._lengths:
            name = tenant if counts[tenant] >= FEW else _OTHERS
            groups.setdefault(name, []).append((length, limit))
        if len(groups.get(_OTHERS, ())) < FEW:
            groups.pop(_OTHERS, None)
        return groups

    def shows_runaway(self, answer: JudgedAnswer) -> bool:
        """Whether an answer under this limit shows if its writer comes to an end."""
        needed = self.quantile(CUT_QUANTILE, answer.tenant) if answer.num_tokens else None
        return needed is not None and answer.max_tokens >= needed

    def counts(self, answer: JudgedAnswer) -> bool:
        """Whether its limit left enough room for the answer to be judged."""
        if not answer.max_tokens:
            return True
        is_cut = answer.kind in CUT_KINDS
        needed = self.quantile(CUT_QUANTILE if is_cut else WHOLE_QUANTILE, answer.tenant)
        if needed is None:
            needed = MIN_LIMIT if is_cut or self._lengths else 0
        return answer.max_tokens >= needed

    def state(self) -> dict[str, Any]:
        return {"lengths": [list(row) for row in self._lengths], "share": self._share.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._by_tenant = None
        self._lengths.clear()
        for row in state["lengths"]:
            # an earlier release saved only the length
            tenant, length, limit = row if isinstance(row, list) else (_OTHERS, row, 0)
            self._lengths.append((str(tenant), int(length), int(limit)))
        self._share.restore(state["share"])


def _quantile(values: list[int], share: float) -> int:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _had_room(lengths: list[tuple[int, int]]) -> bool:
    """Whether nearly all limits were far above nearly all lengths: then no limit selected them."""
    needed = _quantile([length for length, _ in lengths], CUT_QUANTILE)
    limits = [limit or sys.maxsize for _, limit in lengths]
    return _quantile(limits, 1 - CUT_QUANTILE) >= ROOM * needed


class JudgedShare:
    """Admits at most as many answers of a tenant as of all others, among the newest; all of them
    while the tenant is alone."""

    __slots__ = ("_admitted", "_newest", "_offered")

    def __init__(self) -> None:
        # (tenant, whether it was admitted)
        self._newest: deque[tuple[str, bool]] = deque()
        self._offered: Counter[str] = Counter()
        self._admitted: Counter[str] = Counter()

    def admits(self, tenant: str) -> bool:
        others_offered = len(self._newest) - self._offered[tenant]
        others_admitted = self._admitted.total() - self._admitted[tenant]
        admitted = others_offered < FEW or self._admitted[tenant] < others_admitted
        self._add(tenant, admitted)
        return admitted

    def _add(self, tenant: str, admitted: bool) -> None:
        self._newest.append((tenant, admitted))
        self._offered[tenant] += 1
        self._admitted[tenant] += admitted
        if len(self._newest) > NEWEST:
            oldest, was_admitted = self._newest.popleft()
            self._offered[oldest] -= 1
            self._admitted[oldest] -= was_admitted
            if not self._offered[oldest]:
                del self._offered[oldest], self._admitted[oldest]

    def state(self) -> list[list[Any]]:
        return [[tenant, int(admitted)] for tenant, admitted in self._newest]

    def restore(self, state: list[list[Any]]) -> None:
        self._newest.clear()
        self._offered.clear()
        self._admitted.clear()
        for tenant, admitted in state[-NEWEST:]:
            self._add(str(tenant), bool(admitted))


class EndedAnswers:
    """Of answers whose limit left room: how many came to an end by themselves, the newest and
    those before them."""

    __slots__ = ("_newest", "usual")

    def __init__(self) -> None:
        self._newest: deque[bool] = deque()
        self.usual = RecentOutcomes(NEWEST, LEAST)

    def add(self, ended: bool, *, is_usual: bool) -> None:
        """`is_usual`: what leaves the newest may become what is usual; not during a breach, and not
        while demoted: a specialist that still runs away would become its own measure."""
        self._newest.append(ended)
        if len(self._newest) > NEWEST_ENDED:
            oldest = self._newest.popleft()
            if is_usual:
                self.usual.add(oldest)

    @property
    def newest(self) -> CorrectnessRate:
        return rate_of(sum(self._newest), len(self._newest), LEAST)

    def clear_newest(self) -> None:
        self._newest.clear()

    def runs_away(self, z: float) -> bool:
        return runs_away(self.newest, self.usual.rate(), z)

    def state(self) -> dict[str, str]:
        newest = "".join("1" if ended else "0" for ended in self._newest)
        return {"newest": newest, "usual": self.usual.state()}

    def restore(self, state: dict[str, str]) -> None:
        self._newest = deque(mark == "1" for mark in state["newest"])
        self.usual.restore(state["usual"])


def runs_away(newest: CorrectnessRate, usual: CorrectnessRate, z: float) -> bool:
    """Whether the share of answers that did not end by themselves is above the usual one, by
    intervals of `z` standard deviations that do not meet. Both rates are of answers that did."""
    if not newest.is_known or not usual.is_known:
        return False
    _, highest = wilson(newest.valid, newest.judged, z)
    lowest, _ = wilson(usual.valid, usual.judged, z)
    return highest < lowest


def whole(valid: bool) -> JudgedAnswer:
    """A whole answer of which only that is known."""
    return JudgedAnswer(VALID if valid else INVALID)
