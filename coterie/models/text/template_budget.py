"""What a chat template may spend: steps, processor time, and the size of what it builds.

Each operation that can make something large in one step is paid for before it runs. Knows nothing
of Jinja but its error; `template_sandbox` puts these checks where they belong.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

# A loop step costs one, a call ten. A chat of 10,000 messages costs less than half of this.
MAX_STEPS = 1_500_000
CALL_STEPS = 10
MAX_TEXT_CHARS = 32_000_000
_CHARS_PER_STEP = 64
_MAX_WIDTH = 1_000

# The last resort against single steps that are slow; a long chat takes a fifth of it.
MAX_CPU_S = 3.0
_CHARGES_PER_LOOK = 16

_REFUSED_METHODS = frozenset({"expandtabs", "translate"})
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})

# a width of five digits, a width taken from an argument
_WILD_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{")


class TemplateBudget:
    """What one rendering has left."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._charges = 0
        self._deadline_s = time.thread_time() + MAX_CPU_S

    def charge(self, steps: int) -> None:
        self._steps -= steps
        self._charges += 1
        late = self._charges % _CHARGES_PER_LOOK == 0 and time.thread_time() > self._deadline_s
        if self._steps < 0 or late:
            raise SecurityError("it runs too long")


current_budget: ContextVar[TemplateBudget] = ContextVar("current")


def charge(steps: int) -> None:
    current_budget.get().charge(steps)


def pay_for(size: int) -> None:
    """Before a text or list of that size is built."""
    if size > MAX_TEXT_CHARS:
        raise SecurityError("it builds a value that is too large")
    charge(1 + size // _CHARS_PER_STEP)


def counted(value: Iterable[Any]) -> Iterator[Any]:
    charge(1)
    for item in value:
        charge(1)
        yield item


# A check gets the arguments, the position of the value among them (a filter may have the
# environment before it) and the keyword arguments. It may replace one that it had to walk through.
Check = Callable[[list[Any], int, dict[str, Any]], None]


def _argument(
    arguments: list[Any], at: int, kwargs: dict[str, Any], name: str, default: Any
) -> Any:
    return arguments[at] if len(arguments) > at else kwargs.get(name, default)


def _check_indent(arguments: list[Any], at: int, kwargs: dict[str, Any]) -> None:
    width = _argument(arguments, at + 1, kwargs, "width", 4)
    size = bounded_width(len(width) if isinstance(width, str) else width)
    text = str(arguments[at])
    pay_for(len(text) + (text.count("\n") + 1) * size)


def _check_replace(arguments: list[Any], at: int, kwargs: dict[str, Any]) -> None:
    text = str(arguments[at])
    old = str(_argument(arguments, at + 1, kwargs, "old", ""))
    new = str(_argument(arguments, at + 2, kwargs, "new", ""))
    pay_for(len(text) + text.count(old) * len(new))


def _check_join(arguments: list[Any], at: int, kwargs: dict[str, Any]) -> None:
    items = list(counted(arguments[at]))
    between = str(_argument(arguments, at + 1, kwargs, "d", ""))
    pay_for(sum(text_size(item) for item in items) + len(items) * len(between))
    arguments[at] = items


def check_format(arguments: list[Any], at: int, kwargs: dict[str, Any]) -> None:
    text = str(arguments[at])
    if _WILD_FORMAT.search(text):
        raise SecurityError("it formats text to an unbounded width")
    largest = max((text_size(item) for item in [*arguments[at + 1 :], *kwargs.values()]), default=0)
    pay_for(len(text) + (text.count("%") + text.count("{")) * (largest + 10_000))


FILTER_CHECKS: dict[str, Check] = {
    "indent": _check_indent,
    "replace": _check_replace,
    "join": _check_join,
    "format": check_format,
}


def checked_method(
    owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments for a method of str, after the same checks that filters get."""
    if name in _REFUSED_METHODS:
        raise SecurityError(f"it calls str.{name}")
    if name in _PADDING_METHODS:
        bounded_width(args[0] if args else 0)
    elif name in ("format", "format_map"):
        check_format([owner, *args], 0, kwargs)
    elif name == "replace":
        _check_replace([owner, *args], 0, kwargs)
    elif name == "join" and args:
        arguments = [args[0], owner]
        _check_join(arguments, 0, {})
        return (arguments[0],)
    return args


def check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            pay_for(len(value) * max(times, 0))
    _check_numbers(left, right)


def check_power(left: Any, right: Any) -> None:
    _check_numbers(left, right)
    if isinstance(right, int) and abs(right) > 64:
        raise SecurityError("it computes a number that is too large")


def _check_numbers(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > 1 << 64 for value in values):
        raise SecurityError("it computes a number that is too large")


def bounded_width(value: Any) -> int:
    if not isinstance(value, int) or value > _MAX_WIDTH:
        raise SecurityError("it pads or indents too far")
    return max(value, 0)


def text_size(value: Any) -> int:
    """How long a value is as text, roughly; texts exactly."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return 2 + sum(text_size(item) + 4 for item in counted(pairs))
    return 64
