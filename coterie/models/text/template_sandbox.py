"""The Jinja environment in which chat templates run.

transformers' settings and helpers inside Jinja's immutable sandbox, plus a budget: every loop,
every call and every text that is built costs steps, so that a hostile template ends soon and stays
small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sized
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from coterie.models.text.template_budget import (
    CALL_STEPS,
    FILTER_CHECKS,
    Check,
    bounded_width,
    charge,
    check_format,
    check_power,
    check_product,
    checked_method,
    counted,
    pay_for,
    text_size,
)

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

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        charge(CALL_STEPS)
        # Jinja hands out str.format inside a wrapper
        method = obj if hasattr(obj, "__self__") else getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = checked_method(owner, getattr(method, "__name__", ""), args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
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
    """Puts the budget into a template's own code: what loops run over, and what `~` builds."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_charged", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, "_bounded", [], [], None, None)


def _charged(value: Any) -> Any:
    """What a loop runs over, each step paid for."""
    return _Metered(value) if isinstance(value, Sized) else counted(value)


class _Metered:
    """Keeps the length, which `loop.length` asks for."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return counted(self._value)


def _bounded(value: str) -> str:
    """One `~` grows a text by a bounded factor, so paying behind it is enough."""
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
    """`dict` without its attributes, which would lead out of the sandbox."""

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
    """Unlike Jinja's own, it escapes no HTML."""
    pay_for(text_size(value) * (1 if indent is None else 1 + bounded_width(indent)))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
