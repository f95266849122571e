"""What of a plan's adapters the engine has room for, by the bytes that they take there and their KV
tokens.

Only what might never run is left out: a stack that fits and finds others in its place waits. Knows
no scheduling; values in, values out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from coterie.core.adapters import AdapterProfile
from coterie.core.plan import AdapterChoice, Candidate, RoutePlan
from coterie.core.request import AdapterHint, InferenceRequest
from coterie.packages.device_size import is_exact

# a prompt and an answer need a place behind the soft tokens
MIN_TOKENS = 2


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """For the adapters of one request."""

    nbytes: int
    # positions of the context, of which soft prompts take some
    tokens: int
    # of the base's modules
    has_bias: bool = True


@dataclass(frozen=True, slots=True)
class LeftOutAdapter:
    """An adapter that was left out, and why."""

    adapter: AdapterChoice
    why: str


def left_out(
    plan: RoutePlan, room: AdapterLimits, profile: Callable[[str], AdapterProfile | None]
) -> list[LeftOutAdapter]:
    """Which of the plan's adapters find no room, the better scored ones served first.

    One that requires others is kept together with them, or not at all.
    """
    known = {item.digest: found for item in plan.adapters if (found := profile(item.digest))}
    if not all(is_exact(item.weight) for item in plan.adapters):
        known = {digest: replace(found, narrow_bytes=0) for digest, found in known.items()}
    if _fits(known.values(), room):
        return []
    scores = {} if plan.trace is None else {c.digest: c.score for c in plan.trace.candidates}
    kept: dict[str, AdapterProfile] = {}
    for digest in sorted(known, key=lambda digest: -scores.get(digest, 0.0)):
        wider = kept | _with_required(digest, known)
        if _fits(wider.values(), room):
            kept = wider
    return [
        LeftOutAdapter(item, _why(known[item.digest], room))
        for item in plan.adapters
        if item.digest in known and item.digest not in kept
    ]


def without(
    request: InferenceRequest, plan: RoutePlan, left: Sequence[LeftOutAdapter]
) -> InferenceRequest:
    """The request that asks for what is left of its plan."""
    hints = request.hints
    dropped = {item.adapter.digest for item in left}
    if plan.trace is not None and plan.trace.candidates:
        names = tuple(item.adapter.name.partition("@")[0] for item in left)
        return replace(request, hints=replace(hints, exclude=hints.exclude + names))
    kept = tuple(
        AdapterHint(item.name, item.weight) for item in plan.adapters if item.digest not in dropped
    )
    return replace(request, hints=replace(hints, model=plan.specialist, adapters=kept))


def base_alone(request: InferenceRequest, plan: RoutePlan) -> InferenceRequest:
    hints = replace(request.hints, model=plan.specialist, adapters=())
    return replace(request, hints=hints)


def with_left_out(plan: RoutePlan, left: Sequence[LeftOutAdapter]) -> RoutePlan:
    """`plan` that says what was left out of it."""
    trace = plan.trace
    if trace is None or not left:
        return plan
    why = {item.adapter.digest: item.why for item in left}
    said = tuple(f"dropped {item.adapter.name}: {item.why}" for item in left)

    def judged(candidate: Candidate) -> Candidate:
        reason = why.get(candidate.digest)
        if reason is None:
            return candidate
        return replace(candidate, chosen=False, why=f"does not fit: {reason}")

    candidates = tuple(judged(candidate) for candidate in trace.candidates)
    return replace(
        plan,
        reasons=plan.reasons + said,
        trace=replace(trace, candidates=candidates, degraded=trace.degraded + said),
    )


def _fits(profiles: Iterable[AdapterProfile], room: AdapterLimits) -> bool:
    stack = list(profiles)
    nbytes = _nbytes(stack, room)
    tokens = sum(profile.card.num_virtual_tokens for profile in stack)
    return nbytes <= room.nbytes and (not tokens or tokens + MIN_TOKENS <= room.tokens)


def _nbytes(stack: Sequence[AdapterProfile], room: AdapterLimits) -> int:
    """As the pool composes it: one part in fp32 makes the others so."""
    if all(profile.narrow_bytes for profile in stack):
        return sum(profile.narrow_bytes for profile in stack)
    shifts = sum(profile.shift_bytes for profile in stack) if room.has_bias else 0
    return shifts + sum(profile.device_bytes or profile.card.nbytes for profile in stack)


def _with_required(digest: str, known: dict[str, AdapterProfile]) -> dict[str, AdapterProfile]:
    """`digest` and, of the others in the stack, all that it stands on."""
    by_name = {profile.card.name: key for key, profile in known.items()}
    found: dict[str, AdapterProfile] = {}
    wanted = [digest]
    while wanted:
        key = wanted.pop()
        if key in found:
            continue
        found[key] = known[key]
        names = (name.partition("@")[0] for name in known[key].requires)
        wanted += [by_name[name] for name in names if name in by_name]
    return found


def _why(profile: AdapterProfile, room: AdapterLimits) -> str:
    card = profile.card
    if card.num_virtual_tokens and card.num_virtual_tokens + MIN_TOKENS > room.tokens:
        return f"its {card.num_virtual_tokens} soft tokens leave no place in {room.tokens}"
    nbytes = _nbytes([profile], room)
    alone = "" if nbytes > room.nbytes else " beside the others"
    return f"its {nbytes / 1e6:.1f} MB do not fit{alone} in {room.nbytes / 1e6:.1f} MB"
