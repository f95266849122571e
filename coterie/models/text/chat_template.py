"""Chat templates: Jinja programs that come with a model and turn messages into one text.

Renders as transformers does. A template is untrusted code and runs in `template_sandbox`; this file
says whose fault a failure is: the conversation's or the template's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from coterie.core.errors import CoterieError, InvalidRequest, WeightsError
from coterie.models.text.template_sandbox import (
    MAX_TEXT_CHARS,
    TemplateBudget,
    TemplateRefusal,
    TemplateSandbox,
    current_budget,
)

# what transformers puts behind a message that is to be continued, to find its end again
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


# of a template that comes with a request; the largest of a known model has 20,000
MAX_REQUEST_TEMPLATE = 64_000


class ChatTemplate:
    """One template, compiled on first use. `tokens`: bos_token, eos_token and the like."""

    # whose template it is, in the words of its errors
    whose = "the model's chat template"

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        self.source = source
        self._tokens = tokens
        self._compiled: jinja2.Template | None = None

    def broken(self, reason: str) -> CoterieError:
        """The error for a template that is at fault itself."""
        return WeightsError(f"{self.whose} {reason}. Use another one.")

    def render(self, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
        """Raises InvalidRequest when the template refuses these messages, WeightsError when the
        template itself is broken or misbehaves."""
        template = self._template()
        values = {"tools": None, "documents": None, **self._tokens, **_plain(options)}
        values["messages"] = [_plain(message) for message in messages]
        token = current_budget.set(TemplateBudget())
        try:
            return _joined(template.generate(**values))
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
        """Up to the end of the last message, without what the template writes behind it."""
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
        # a template that trims its messages also trims the space behind the tag
        return text[:at] if text[at : at + len(_CONTINUE)] == _CONTINUE else text[:at].rstrip()

    def _template(self) -> jinja2.Template:
        if self._compiled is None:
            try:
                self._compiled = TemplateSandbox().from_string(self.source)
            except _UNREADABLE as error:
                raise self.broken(f"is not valid Jinja ({error})") from error
        return self._compiled


class RequestTemplate(ChatTemplate):
    """One that came with a request: in the same sandbox, and its faults are its caller's."""

    whose = "chat_template"

    def broken(self, reason: str) -> CoterieError:
        return InvalidRequest(f"chat_template {reason}", param="chat_template")


@lru_cache(maxsize=16)
def request_template(source: str, tokens: tuple[tuple[str, str], ...]) -> RequestTemplate:
    """Compiled once for the requests of a client that always sends the same."""
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
    """Rebuilt out of plain JSON types, so that the template meets no object with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
