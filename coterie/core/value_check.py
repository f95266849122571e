"""Checks that a value has the type it declares, at every level, before it leaves its process.

Values are sent as msgpack, which accepts only Python's own numbers and texts: a numpy float works
like a float everywhere else. One check is made per type, from its annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

Look = Callable[[Any], str | None]


class ValueCheck(NamedTuple):
    """A value whose type is in `plain` is correct. Any other is inspected: the result is None, or
    the path to the first wrong value and the name of its type."""

    plain: frozenset[type]
    look: Look

    def __call__(self, value: Any) -> str | None:
        return None if type(value) in self.plain else self.look(value)


def fault_of(value: Any, kind: Any) -> str | None:
    """For instance `usage.prompt_tokens: int64`; None if every value has its declared plain
    type."""
    fault = check_of(kind)(value)
    return None if fault is None else fault.lstrip(".")


@cache
def check_of(kind: Any) -> ValueCheck:
    if is_dataclass(kind):
        return ValueCheck(frozenset(), _dataclass_fields(kind))
    if kind in _SCALARS:
        return ValueCheck(_SCALARS[kind], _named)
    if kind is Any:
        return ValueCheck(frozenset(), lambda value: None)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _either([check_of(one) for one in arguments])
    if origin is tuple and arguments[-1:] != (...,):
        return ValueCheck(frozenset(), _fixed_tuple([check_of(one) for one in arguments]))
    if origin in (tuple, list, frozenset):
        return ValueCheck(frozenset(), _collection(origin, check_of(arguments[0])))
    if origin is dict:
        return ValueCheck(frozenset(), _mapping(check_of(arguments[0]), check_of(arguments[1])))
    raise TypeError(f"{kind} is no type of a value that travels")


# an int is accepted for a float, as everywhere in Python; no other type replaces another
_SCALARS: dict[Any, frozenset[type]] = {
    kind: frozenset({kind}) for kind in (int, str, bool, bytes, NoneType)
} | {float: frozenset({float, int})}


def _named(value: Any) -> str:
    return f": {type(value).__name__}"


def _dataclass_fields(kind: Any) -> Look:
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    checks = [check_of(hints[name]) for name in names]
    # attrgetter with one name would return no tuple
    values_of = attrgetter(*names, names[0])
    parts = [*zip(names, *zip(*checks, strict=True), strict=True)]

    def look(value: Any) -> str | None:
        if type(value) is not kind:
            return _named(value)
        for item, (name, plain, deeper) in zip(values_of(value), parts, strict=False):
            if type(item) not in plain and (fault := deeper(item)) is not None:
                return f".{name}{fault}"
        return None

    return look


def _either(checks: list[ValueCheck]) -> ValueCheck:
    plain = frozenset[type]().union(*(check.plain for check in checks))
    deeper = [check.look for check in checks if check.look is not _named]

    def look(value: Any) -> str | None:
        faults = [one(value) for one in deeper]
        # the longest path belongs to the type that fitted best
        return None if None in faults else max((one or "" for one in faults), key=len, default="")

    return ValueCheck(plain, look if deeper else _named)


def _fixed_tuple(checks: list[ValueCheck]) -> Look:
    def look(value: Any) -> str | None:
        if type(value) is not tuple or len(value) != len(checks):
            return _named(value)
        for position, (item, check) in enumerate(zip(value, checks, strict=True)):
            if (fault := check(item)) is not None:
                return f"[{position}]{fault}"
        return None

    return look


def _collection(kind: type, check: ValueCheck) -> Look:
    plain, deeper = check
    accepted = frozenset({kind})

    def look(value: Any) -> str | None:
        if type(value) not in accepted:
            return _named(value)
        for position, item in enumerate(value):
            if type(item) not in plain and (fault := deeper(item)) is not None:
                return f"[{position}]{fault}"
        return None

    return look


def _mapping(key: ValueCheck, check: ValueCheck) -> Look:
    def look(value: Any) -> str | None:
        if type(value) is not dict:
            return _named(value)
        for name, item in value.items():
            if (fault := key(name) or check(item)) is not None:
                return f"[{name!r}]{fault}"
        return None

    return look


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        layer = [
            item
            for part in layer
            if isinstance(part, (dict, list))
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        if not layer:
            return False
    return True
