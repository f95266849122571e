"""Turns a body of /v1/infer into an `InferenceRequest`: checks which fields exclude each other,
makes the final text of the prompt, and translates "expert" (on the wire) to "adapter" (in the
code).
"""

from __future__ import annotations

import difflib
import re
import time
import uuid
from itertools import pairwise
from typing import Annotated, Any, Literal
from unicodedata import combining, is_normalized, normalize

from pydantic import BeforeValidator, ConfigDict, Field

from coterie.api.body import RequestBody, aside, check, decode
from coterie.api.body_fields import Intent, Name, bounds, sampling_field, seed_of
from coterie.api.dialect import CallerInfo, ParsedRequest
from coterie.api.openai.types import StopString, StopStrings
from coterie.api.response_format import response_format_of
from coterie.core.adapters import MAX_STACK
from coterie.core.errors import InvalidRequest
from coterie.core.request import (
    AUTO,
    AdapterHint,
    Chat,
    InferenceRequest,
    Limits,
    Message,
    RouteHints,
    Sampling,
)
from coterie.core.sampling import MAX_TOKENS
from coterie.obs.metrics import Histogram
from coterie.service.request_limits import UserRate

MAX_PROMPT = 500_000
MAX_BODY = 2_000_000
MAX_TEMPLATE = 20_000
MAX_OUTPUT = 200_000
MAX_GRAMMAR = 100_000
MAX_REGEX = 10_000
MAX_TIMEOUT_MS = 24 * 3600 * 1000


def _normal(value: Any) -> Any:
    return nfc(value) if isinstance(value, str) else value


def _trimmed(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _few_fields(value: Any) -> Any:
    """Refuse many fields at once: pydantic would make one error for each unknown field."""
    if isinstance(value, dict) and len(value) > 2:
        raise ValueError("must be a text, or type and text alone")
    return value


Template = Annotated[
    str,
    Field(max_length=MAX_TEMPLATE, json_schema_extra={"pattern": r"\{prompt\}"}),
    BeforeValidator(_normal),
]
OutputTokens = Annotated[int, Field(**bounds(MAX_TOKENS.narrowed(high=MAX_OUTPUT)))]
Document = Annotated[str, Field(max_length=MAX_BODY), BeforeValidator(_normal)]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
Key = Annotated[str, Field(min_length=1, max_length=256)]


class GrammarItem(RequestBody):
    """A grammar's text and the language it is written in."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["lark", "gbnf"]
    text: Grammar


class InferBody(RequestBody):
    """A prompt and optionally a document. The router chooses everything else that is left out."""

    model_config = ConfigDict(extra="forbid")

    # pydantic runs the last validator first, so lengths are checked on the normalised text
    prompt: Annotated[
        str,
        Field(min_length=1, max_length=MAX_PROMPT),
        BeforeValidator(_trimmed),
        BeforeValidator(_normal),
    ] = Field(
        description="Unicode-normalised (NFC) and trimmed before it is counted.",
        # at least one character that is not white space
        json_schema_extra={"pattern": r"\S"},
    )
    template: Template | None = Field(
        None, description="Text with `{prompt}`, and with `{body}` where the body belongs."
    )
    body: Document | None = Field(
        None, description="The document or data that the prompt is about."
    )
    temperature: float | None = sampling_field("temperature", high=2)
    max_tokens: OutputTokens | None = None
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k", low=0, description="0 = off.")
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repetition_penalty: float | None = sampling_field("repetition_penalty", low=1, high=2)
    force_experts: Annotated[list[Name], Field(max_length=MAX_STACK)] | None = Field(
        None, description="Exactly these, in this order: `name` or `name@version`."
    )
    exclude_experts: Annotated[list[Name], Field(max_length=100)] | None = Field(
        None, description="Never chosen by the router."
    )
    max_experts: int | None = Field(None, ge=1, le=MAX_STACK)
    intent: Intent | None = Field(
        None, description='With model "auto", a specialist that serves this intent answers.'
    )
    context_size: int | None = Field(
        None, ge=16, le=2**31 - 1, description="Most tokens of prompt plus output."
    )
    user_id: Key | None = Field(None, description="Whose rate limit this counts against.")
    priority: int = Field(5, ge=0, le=9, description="Higher is sooner.")
    timeout_ms: int | None = Field(
        None, ge=1, le=MAX_TIMEOUT_MS, description="The answer is cut there and says so."
    )
    model: str = Field("auto", min_length=1, max_length=512)
    stream: bool = False
    seed: int | None = sampling_field("seed")
    num_beams: int | None = sampling_field(
        "num_beams", description="More than 1 searches instead of drawing."
    )
    length_penalty: float | None = sampling_field(
        "length_penalty", description="Of a beam search: above 0 favours long answers."
    )
    stop: StopString | StopStrings | None = None
    response_format: dict[str, Any] | None = Field(
        None, description="OpenAI's: `json_object`, or `json_schema` with a schema."
    )
    grammar: Annotated[Grammar | GrammarItem, BeforeValidator(_few_fields)] | None = Field(
        None, description="Lark or GBNF; told apart by their first rules where only a text is sent."
    )
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX)] | None = None
    session_id: Key | None = Field(None, description="The conversation this belongs to.")
    explain: bool = Field(False, description="Answer with the router's plan too.")


FIELDS = tuple(InferBody.model_fields)


# NFC takes quadratic time on a long run of combining marks. A run of at most this many marks is
# never called long, a run of twice as many always is.
STEP = 64
# characters that decompose into marks but have no combining class themselves
_HIDDEN = frozenset("\u0f73\u0f75\u0f81")


def nfc(text: str) -> str:
    if is_normalized("NFC", text) or _has_long_run(text):
        return text
    return normalize("NFC", text)


def _has_long_run(text: str) -> bool:
    """Whether there is a long run of marks. Looks at every `STEP`th character: two neighbours of
    these lie inside every long run."""
    return any(
        _is_mark(one) and _is_mark(other) and all(map(_is_mark, text[i * STEP : (i + 1) * STEP]))
        for i, (one, other) in enumerate(pairwise(text[::STEP]))
    )


def _is_mark(char: str) -> bool:
    return combining(char) != 0 or char in _HIDDEN


_HOLES = re.compile(r"\{(prompt|body)\}")
MAX_SHOWN = 64
# characters that the model reads, not counting the template's own words
MAX_TEXT = MAX_PROMPT + MAX_BODY


class InferBodyReader:
    """Parses, checks and normalises a body, and applies the user's rate limit."""

    def __init__(self, rate: UserRate, seconds: Histogram) -> None:
        """`seconds` observes how long each body took to parse."""
        self.rate = rate
        self.seconds = seconds

    async def receive(
        self, raw: bytes | dict[str, Any], caller: CallerInfo, size: int
    ) -> ParsedRequest:
        """`size`: bytes of the body on the wire."""
        started_at = time.perf_counter()
        parsed = await aside(size, read_body, raw, caller)
        self.seconds.observe(time.perf_counter() - started_at)
        self.rate.take(caller.tenant, parsed.request.user_id)
        return parsed


def read_body(raw: bytes | dict[str, Any], caller: CallerInfo) -> ParsedRequest:
    body = checked_body(decode(raw) if isinstance(raw, bytes) else raw)
    return ParsedRequest(
        _request(body, caller),
        body.stream,
        format_field=_format_field(body),
        explain=body.explain,
    )


def checked_body(payload: Any) -> InferBody:
    if isinstance(payload, dict):
        for name in payload:
            if name not in InferBody.model_fields:
                raise _unknown(name)
    body = check(InferBody, payload)
    _check_together(body)
    return body


def _unknown(name: str) -> InvalidRequest:
    # the name may be any text, even a prompt in the wrong place: do not repeat it
    shown = name if name.isidentifier() and len(name) <= MAX_SHOWN else ""
    near = difflib.get_close_matches(shown, FIELDS, n=1, cutoff=0.5)
    hint = f"; did you mean `{near[0]}`?" if near else f"; there is: {', '.join(FIELDS)}"
    return InvalidRequest(f"unknown field `{shown}`{hint}", param=shown or None)


def _check_together(body: InferBody) -> None:
    if body.template is not None and "{prompt}" not in body.template:
        raise InvalidRequest("template: must contain {prompt}", param="template")
    if body.length_penalty is not None and (body.num_beams or 1) == 1:
        raise InvalidRequest("length_penalty: needs num_beams", param="length_penalty")
    forced, excluded = body.force_experts or [], body.exclude_experts or []
    for name in forced:
        if name in excluded or name.partition("@")[0] in excluded:
            raise InvalidRequest(
                f"force_experts: `{name}` is in exclude_experts too", param="force_experts"
            )
    if body.max_experts is not None and len(forced) > body.max_experts:
        raise InvalidRequest(
            f"force_experts names {len(forced)} experts, max_experts allows {body.max_experts}",
            param="force_experts",
        )


def _format_field(body: InferBody) -> str:
    if body.regex is not None:
        return "regex"
    return "response_format" if body.grammar is None else "grammar"


def full_text(body: InferBody) -> str:
    """The text that the model reads. One pass: a `{body}` inside the prompt stays."""
    document = body.body or ""
    template = body.template or ("{prompt}\n\n{body}" if document else "{prompt}")
    if document and "{body}" not in template:
        template += "\n\n{body}"
    # a template may repeat both: 20,000 characters of placeholders would make gigabytes
    size = template.count("{prompt}") * len(body.prompt) + template.count("{body}") * len(document)
    if size > MAX_TEXT:
        raise InvalidRequest(
            f"template: with prompt and body it makes more than {MAX_TEXT} characters",
            param="template",
        )
    return _HOLES.sub(lambda hole: body.prompt if hole[1] == "prompt" else document, template)


def _request(body: InferBody, caller: CallerInfo) -> InferenceRequest:
    timeout_s = None if body.timeout_ms is None else body.timeout_ms / 1000
    grammar = body.grammar
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return InferenceRequest(
        id=str(uuid.uuid4()),
        prompt=Chat((Message("user", full_text(body)),), may_be_text=True),
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            typical_p=body.typical_p,
            repetition_penalty=body.repetition_penalty,
            num_beams=body.num_beams,
            length_penalty=body.length_penalty,
            seed=seed_of(body.seed),
        ),
        limits=Limits(
            max_tokens=body.max_tokens,
            stop=tuple(stop),
            priority=body.priority,
            timeout_s=caller.timeout_s if timeout_s is None else timeout_s,
            context_size=body.context_size,
        ),
        hints=_hints(body, caller),
        response_format=response_format_of(
            body.response_format,
            grammar.model_dump() if isinstance(grammar, GrammarItem) else grammar,
            body.regex,
        ),
        session=caller.session_key(body.session_id, body.user_id),
        tenant=caller.tenant,
        arrived_at=caller.arrived_at,
        user_id=body.user_id or "",
    )


def _hints(body: InferBody, caller: CallerInfo) -> RouteHints:
    return RouteHints(
        model=None if body.model == AUTO else body.model,
        adapters=tuple(AdapterHint(name) for name in body.force_experts or ()),
        exclude=tuple(body.exclude_experts or ()),
        max_adapters=body.max_experts,
        tune=True,
        instruction=body.prompt,
        document=body.body or "",
        intent=body.intent or caller.intent,
    )
