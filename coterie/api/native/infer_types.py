"""Body of /v1/infer: the seed's fields and ours, with their ranges. Shapes only.

What a field means is `infer_parse.py`'s business. An unknown field is refused: on this API a
mistyped name would otherwise change an answer in silence.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal
from unicodedata import combining, is_normalized, normalize

from pydantic import BeforeValidator, ConfigDict, Field

from coterie.api.admin.experts import Name
from coterie.api.body import RequestBody
from coterie.api.openai.types import StopString, StopStrings
from coterie.core.adapters import MAX_STACK

MAX_PROMPT = 500_000
MAX_BODY = 2_000_000
MAX_TEMPLATE = 20_000
MAX_TOKENS = 200_000
MAX_GRAMMAR = 100_000
MAX_REGEX = 10_000
MAX_BEAMS = 64
MAX_TIMEOUT_MS = 24 * 3600 * 1000
_INT64 = 2**63 - 1


def _normal(value: Any) -> Any:
    return nfc(value) if isinstance(value, str) else value


def _trimmed(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _few_fields(value: Any) -> Any:
    """Each that is unknown would be an error of its own."""
    if isinstance(value, dict) and len(value) > 2:
        raise ValueError("must be a text, or type and text alone")
    return value


Template = Annotated[
    str,
    Field(max_length=MAX_TEMPLATE, json_schema_extra={"pattern": r"\{prompt\}"}),
    BeforeValidator(_normal),
]
Document = Annotated[str, Field(max_length=MAX_BODY), BeforeValidator(_normal)]
Share = Annotated[float, Field(ge=0, le=1)]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
Key = Annotated[str, Field(min_length=1, max_length=256)]


class GrammarItem(RequestBody):
    """A grammar's text and the language it is written in."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["lark", "gbnf"]
    text: Grammar


class InferBody(RequestBody):
    """A prompt, perhaps a document beside it; everything else may be left to the router."""

    model_config = ConfigDict(extra="forbid")

    # the last validator comes first: lengths are counted on what is left
    prompt: Annotated[
        str,
        Field(min_length=1, max_length=MAX_PROMPT),
        BeforeValidator(_trimmed),
        BeforeValidator(_normal),
    ] = Field(
        description="Unicode-normalised (NFC) and trimmed before it is counted.",
        # more than blanks
        json_schema_extra={"pattern": r"\S"},
    )
    template: Template | None = Field(
        None, description="Text with `{prompt}`, and with `{body}` where the body belongs."
    )
    body: Document | None = Field(
        None, description="The document or data that the prompt is about."
    )
    temperature: float | None = Field(None, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1, description="0 = off.")
    min_p: Share | None = None
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1, le=2)
    force_experts: Annotated[list[Name], Field(max_length=MAX_STACK)] | None = Field(
        None, description="Exactly these, in this order: `name` or `name@version`."
    )
    exclude_experts: Annotated[list[Name], Field(max_length=100)] | None = Field(
        None, description="Never chosen by the router."
    )
    max_experts: int | None = Field(None, ge=1, le=MAX_STACK)
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
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    num_beams: int | None = Field(
        None, ge=1, le=MAX_BEAMS, description="More than 1 searches instead of drawing."
    )
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="Of a beam search: above 0 favours long answers."
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


# a run of up to this many is never taken for a long one, one of twice as many always is
STEP = 64
# these decompose into marks without being one
_HIDDEN = frozenset("\u0f73\u0f75\u0f81")


def nfc(text: str) -> str:
    if is_normalized("NFC", text) or _has_long_run(text):
        return text
    return normalize("NFC", text)


def _has_long_run(text: str) -> bool:
    """Two of every `STEP`th character in a row lie in a long run, if there is one."""
    return any(
        _is_mark(one) and _is_mark(other) and all(map(_is_mark, text[i * STEP : (i + 1) * STEP]))
        for i, (one, other) in enumerate(pairwise(text[::STEP]))
    )


def _is_mark(char: str) -> bool:
    return combining(char) != 0 or char in _HIDDEN
