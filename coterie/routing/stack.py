"""Which adapters may run together: what each requires, what it cannot bear, how long a chain it
takes. Names and profiles only; who is wanted is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from coterie.core.adapters import MAX_STACK, AdapterProfile

# name or name@version -> its profile, None where it is not installed
Lookup = Callable[[str], AdapterProfile | None]


def full_name(profile: AdapterProfile) -> str:
    return f"{profile.card.name}@{profile.card.version}"


def means(name: str, profile: AdapterProfile) -> bool:
    """Whether `name` or `name@version` stands for this adapter."""
    return name == profile.card.name or name == full_name(profile)


def with_required(wanted: Sequence[AdapterProfile], find: Lookup) -> list[AdapterProfile] | str:
    """`wanted` and behind them all that they require, each once; or why that cannot be."""
    stack = list(wanted)
    known = {profile.card.digest for profile in stack}
    # grows while it is walked
    for profile in stack:
        for name in profile.requires:
            needed = find(name)
            if needed is None:
                return f"{full_name(profile)} requires {name}, which is not installed"
            if needed.card.digest in known:
                continue
            if len(stack) == MAX_STACK:
                return f"with all that is required, more than {MAX_STACK} would run together"
            known.add(needed.card.digest)
            stack.append(needed)
    return stack


def same_purpose(one: Collection[str], other: Collection[str]) -> bool:
    """Whether two adapters' examples say that they are for the same prompts: half of those of the
    one that has fewer are the other's too."""
    return 2 * len(set(one) & set(other)) >= max(1, min(len(one), len(other)))


def conflict(one: AdapterProfile, others: Sequence[AdapterProfile]) -> AdapterProfile | None:
    """The first of `others` that cannot run beside `one`, whichever of them says so."""
    for other in others:
        if other.card.digest == one.card.digest:
            continue
        if any(means(name, other) for name in one.incompatible_with):
            return other
        if any(means(name, one) for name in other.incompatible_with):
            return other
    return None


def first_conflict(
    stack: Sequence[AdapterProfile],
) -> tuple[AdapterProfile, AdapterProfile] | None:
    for index, profile in enumerate(stack):
        other = conflict(profile, stack[index + 1 :])
        if other is not None:
            return profile, other
    return None


def too_long(stack: Sequence[AdapterProfile]) -> AdapterProfile | None:
    """One that takes fewer beside it than there are."""
    for profile in stack:
        if 0 < profile.max_chain < len(stack):
            return profile
    return None
