"""Chat templates: Jinja programs that come with a model and turn messages into one text.

Renders as transformers does; an error says whether the conversation or the template is at fault. A
template is untrusted code: it runs with transformers' settings and helpers inside Jinja's immutable
sandbox, with a budget of steps. Every loop, every call and every text that is built costs steps, so
that a hostile template ends soon and uses little memory.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from coterie.core.errors import CoterieError, InvalidRequest, WeightsError

# transformers adds this to a message that is to be continued, to find its end again
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


# characters of a template in a request; the largest template of a known model has 20,000
MAX_REQUEST_TEMPLATE = 64_000


class ChatTemplate:
    """One template, compiled on first use. `tokens`: bos_token, eos_token and the like."""

    # the owner of the template, for error messages
    whose = "the model's chat template"

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        self.source = source
        self._tokens = tokens
        self._compiled: jinja2.Template | None = None
        self._takes_systems: dict[bool, bool] = {}

    def broken(self, reason: str) -> CoterieError:
        """The error when the template is at fault."""
        return WeightsError(f"{self.whose} {reason}. Use another one.")

    def render(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
        """Raise InvalidRequest when the template refuses these messages, WeightsError when the
        template is broken or exceeds its budget."""
        template = self._template()
        values = {"tools": None, "documents": None, **self._tokens, **_plain(options)}
        values["messages"] = [_plain(message) for message in messages]
        token = current_budget.set(TemplateBudget())
        try:
            # as `generate`, without what it does to an error's traceback
            return _joined(template.root_render_func(template.new_context(values)))
        except TemplateRefusal as error:
            raise InvalidRequest(
                f"{self.whose} refuses this conversation: {error}", param="messages"
            ) from error
        except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
            raise self.broken(f"was stopped ({error})") from error
        except Exception as error:
            raise InvalidRequest(
                f"{self.whose} cannot render this conversation ({type(error).__name__}: {error})",
                param="messages",
            ) from error
        finally:
            current_budget.reset(token)

    def render_open(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
        """Up to the end of the last message, without what the template writes after it."""
        last = str(messages[-1]["content"])
        marked = [*messages[:-1], {**messages[-1], "content": last + _CONTINUE}]
        text = self.render(marked, options)
        tag = _CONTINUE.strip()
        if tag not in text or last.strip() not in text:
            raise InvalidRequest(
                f"{self.whose} drops the last message, so it cannot be continued",
                param="messages",
            )
        at = text.rindex(tag)
        # a template that trims its messages also trims the space after the tag
        return text[:at] if text[at : at + len(_CONTINUE)] == _CONTINUE else text[:at].rstrip()

    def takes_systems(self, *, in_between: bool) -> bool:
        """Whether it writes several system messages at the start, or also one among the turns.
        Some refuse them, some leave all but the first out."""
        if in_between not in self._takes_systems:
            roles = ["system", "system", "user"]
            if in_between:
                roles = ["system", "user", "assistant", "system", "user"]
            # words that no template has
            turns = [{"role": role, "content": f"zq{at}qz"} for at, role in enumerate(roles)]
            try:
                text = self.render(turns, {"add_generation_prompt": True})
            except CoterieError:
                text = ""
            found = [text.find(turn["content"]) for turn in turns]
            self._takes_systems[in_between] = found[0] >= 0 and found == sorted(found)
        return self._takes_systems[in_between]

    @cached_property
    def system_default(self) -> bool | None:
        """Whether it writes a system prompt of its own where a chat has no system message; None if
        it takes no system messages."""
        # words that no template has
        system, user = "zq0qz", "zq1qz"
        turns = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            given = self.render(turns, {"add_generation_prompt": True})
            alone = self.render(turns[1:], {"add_generation_prompt": True})
        except CoterieError:
            return None
        before, _, rest = given.partition(system)
        between, found, _ = rest.partition(user)
        if not found:
            return None
        # what stands before the user's message, with and without the system message
        head = alone.partition(user)[0]
        frames = head.startswith(before) and head.endswith(between)
        return frames and len(head) > len(before) + len(between)

    def _template(self) -> jinja2.Template:
        if self._compiled is None:
            try:
                self._compiled = TemplateSandbox().from_string(self.source)
                # nothing changes them from now on; a chain of dicts takes longer to copy
                self._compiled.globals = dict(self._compiled.globals)
            except _UNREADABLE as error:
                raise self.broken(f"is not valid Jinja ({error})") from error
        return self._compiled


class RequestTemplate(ChatTemplate):
    """A template from a request: in the same sandbox; its errors are the caller's."""

    whose = "chat_template"

    def broken(self, reason: str) -> CoterieError:
        return InvalidRequest(f"chat_template {reason}", param="chat_template")


@lru_cache(maxsize=16)
def request_template(source: str, tokens: tuple[tuple[str, str], ...]) -> RequestTemplate:
    """Compiled once for clients that always send the same template."""
    if len(source) > MAX_REQUEST_TEMPLATE:
        raise InvalidRequest(
            f"chat_template has more than {MAX_REQUEST_TEMPLATE} characters", param="chat_template"
        )
    return RequestTemplate(source, dict(tokens))


_UNREADABLE = (TemplateSyntaxError, RecursionError, SyntaxError, ValueError, MemoryError)


def _joined(pieces: Iterable[str]) -> str:
    found, total = [], 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_TEXT_CHARS:
            raise SecurityError("its text is too long")
        found.append(piece)
    return "".join(found)


def _plain(value: Any) -> Any:
    """A copy of plain JSON types, so that the template gets no object with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


_LOOP_NUMBERS = frozenset({"first", "last", "index", "index0"})
# They can build something huge in one step, and no chat needs them.
_REMOVED_FILTERS = ("batch", "slice", "wordwrap", "urlize", "center", "xmlattr")
_REMOVED_GLOBALS = ("lipsum",)


class TemplateRefusal(TemplateError):
    """The template called raise_exception."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Render only while `template_budget.current` is set."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        for name in _REMOVED_GLOBALS:
            self.globals.pop(name, None)
        for name, check in FILTER_CHECKS.items():
            self.filters[name] = _guarded(self.filters[name], check)
        self.filters.update(tojson=_tojson, _charged=_charged, _bounded=_bounded)
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_Dict(),
            namespace=_Namespace,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Budgeted().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in _LOOP_NUMBERS:
            # almost every loop asks; the checks of the base would allow it, in more time
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        charge(CALL_STEPS)
        # Jinja passes str.format inside a wrapper
        method = obj if hasattr(obj, "__self__") else getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = checked_method(owner, getattr(method, "__name__", ""), args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            # almost every step of a template
            pay_for(len(left) + len(right))
            return left + right
        if operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            check_format([left, *values], 0, {})
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, Sized):
            pay_for(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _Budgeted(NodeTransformer):
    """Adds the budget to a template's code: to loops, and to texts that `~` builds."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_charged", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, "_bounded", [], [], None, None)


def _charged(value: Any) -> Any:
    """The items of a loop; each step is charged to the budget."""
    return _Metered(value) if isinstance(value, Sized) else counted(value)


class _Metered:
    """Keeps the length, which `loop.length` needs."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return counted(self._value)


def _bounded(value: str) -> str:
    """One `~` makes a text longer by a bounded factor, so charging afterwards is enough."""
    pay_for(len(value))
    return value


def _guarded(original: Any, check: Check) -> Any:
    at = int(hasattr(original, "jinja_pass_arg"))

    def guarded(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        check(arguments, at, kwargs)
        return original(*arguments, **kwargs)

    if at:
        guarded.jinja_pass_arg = original.jinja_pass_arg  # type: ignore[attr-defined]
    return guarded


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """`dict` without its attributes, which would give access to objects outside the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it stores the attribute {name!r}")


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's filter, it does not escape HTML."""
    pay_for(text_size(value) * (1 if indent is None else 1 + bounded_width(indent)))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


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
    """The steps and CPU time that one rendering may still use."""

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
    """Charge a text or list of that size before it is built."""
    if size > MAX_TEXT_CHARS:
        raise SecurityError("it builds a value that is too large")
    current_budget.get().charge(1 + size // _CHARS_PER_STEP)


def counted(value: Iterable[Any]) -> Iterator[Any]:
    charge(1)
    for item in value:
        charge(1)
        yield item


# A check gets the arguments, the position of the value among them (a filter may have the
# environment before it) and the keyword arguments. It may replace one that it had to iterate over.
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
    """The length of a value as text: an estimate, exact for texts."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return 2 + sum(text_size(item) + 4 for item in counted(pairs))
    return 64
