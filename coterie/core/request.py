"""What a caller asks for, as frozen values. `None` always means "not given".

A dialect in `api/` parses a body into an `InferenceRequest`; the router resolves what is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# the model name that leaves the choice to the router
AUTO = "auto"
DEFAULT_PRIORITY, MAX_PRIORITY = 5, 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    # only of an assistant's turn
    tool_calls: tuple[ToolCall, ...] = ()
    # only of a turn with role "tool": the call that it answers
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's own chat template."""

    messages: tuple[Message, ...]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    # False when the last message is an assistant turn that the model is to continue
    add_generation_prompt: bool = True
    # without a new turn the assistant's last one is closed too, not to be continued
    closes_last: bool = False
    # functions the model may call: {"name", "description", "parameters"}
    tools: tuple[dict[str, Any], ...] = ()
    # the caller's own in place of the model's
    template: str | None = None
    # put BOS and the like in front of what the template wrote
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Raw text, tokenised without a template."""

    text: str
    # with BOS and the like, as the tokenizer says
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, used as they are."""

    ids: tuple[int, ...]


Prompt = Chat | Text | Tokens


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What every answer must look like, enforced while tokens are drawn.

    `kind` is json_object, json_schema, lark, gbnf or regex; `text` is the schema as JSON, the
    grammar or the pattern.
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens may be drawn at all."""

    # only these; None = all
    allowed_ids: tuple[int, ...] | None = None
    # never as the model's tokenizer writes them, at the start of a word or inside
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. After routing (`RoutePlan.sampling`) temperature, top_p, n, num_beams
    and seed are never None."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    # number of alternatives per token; 0 = only the chosen token's own; None = no logprobs
    logprobs: int | None = None
    # the same for the prompt's tokens (completions with echo)
    prompt_logprobs: int | None = None
    # the request's response_format, put here for the engine: only tokens that keep to it are drawn
    constraint: ResponseFormat | None = None
    rules: TokenRules | None = None


@dataclass(frozen=True, slots=True)
class TextRules:
    """How an answer's tokens become its text."""

    # special tokens are no text
    skip_special: bool = True
    # the stop string or token that ends an answer is its last text
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class PromptTruncation:
    """Shortens a prompt that has more tokens."""

    # None = as many as fit beside max_tokens
    max_tokens: int | None
    # the beginning is kept, not the end
    keeps_start: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request stops, and how urgent it is."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # 0 to 9, higher is more urgent
    priority: int = DEFAULT_PRIORITY
    timeout_s: float | None = None
    # cap on prompt plus output
    context_size: int | None = None
    # of its tenant, that run at once; 0 = as many as the others leave. By the tenant's rights
    max_running: int = 0
    # it was refused before and comes when it was told to: some room is beyond a full queue
    is_expected: bool = False
    text: TextRules = TextRules()
    # None = a prompt that is too long is refused
    truncation: PromptTruncation | None = None


@dataclass(frozen=True, slots=True)
class AdapterHint:
    """An adapter as a caller names it, `name` or `name@version`."""

    name: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RouteHints:
    """What the caller said about who should answer."""

    # `base`, `adapter`, `base:adapter`, `adapter@version`, `a+b`, or None
    model: str | None = None
    # behind those that `model` names; where any is named, the router adds none by content
    adapters: tuple[AdapterHint, ...] = ()
    # never chosen by content
    exclude: tuple[str, ...] = ()
    # most that are chosen by content; None = MAX_STACK
    max_adapters: int | None = None
    # values left open are tuned by task type, whoever was named
    tune: bool = False
    # the caller's own words and the document beside them, where the prompt holds both
    instruction: str = ""
    document: str = ""


@dataclass(frozen=True, slots=True)
class KeyRights:
    """What one key may ask of the scheduler."""

    # its requests run at this priority at most
    priority: int = DEFAULT_PRIORITY
    # sequences of it that run at once; 0 = as many as the others leave
    max_running: int = 0


# without keys everybody is the operator
EVERY_RIGHT = KeyRights(MAX_PRIORITY)


def own_tenant(tenant: str) -> str:
    """Whose key it is. A salt isolates a tenant's prefix blocks, nothing else of it."""
    return tenant.partition("+")[0]


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    id: str
    prompt: Prompt
    sampling: Sampling
    limits: Limits
    hints: RouteHints
    response_format: ResponseFormat | None
    # key of a conversation whose blocks are kept longest; None = the tenant's default session
    session: str | None
    # who asks; prefix blocks never cross tenants
    tenant: str
    # time.monotonic() at reception, of a job: when it was begun
    arrived_at: float
    # of a job: when it was accepted, in seconds since 1970
    submitted_at: float | None = None
    # as the caller named its own user; only for the log
    user_id: str = ""
