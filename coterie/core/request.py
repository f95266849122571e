"""A caller's request, as frozen values. `None` always means "not given".

A dialect in `api/` parses a body into an `InferenceRequest`; the router fills in what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coterie.core.quick_init import quick_init

# this model name lets the router choose
AUTO = "auto"
DEFAULT_PRIORITY, MAX_PRIORITY = 5, 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; `arguments` is JSON text, exactly as the model wrote it."""

    id: str
    name: str
    arguments: str


@quick_init
@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    # only in a message of the assistant
    tool_calls: tuple[ToolCall, ...] = ()
    # only in a message with role "tool": the call that it answers
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolRules:
    """Which of a chat's tools may be called, and how."""

    names: tuple[str, ...]
    # the answer must be a call
    required: bool = False
    # it may be several calls
    parallel: bool = True
    # tools of which every keyword of the schema must be enforced
    strict: tuple[str, ...] = ()


@quick_init
@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's chat template."""

    messages: tuple[Message, ...]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    # False when the last message is an assistant turn that the model is to continue
    add_generation_prompt: bool = True
    # if no new turn is added, the assistant's last turn is closed instead of continued
    closes_last: bool = False
    # functions the model may call: {"name", "description", "parameters"}
    tools: tuple[dict[str, Any], ...] = ()
    # for a remote server; an engine here gets them as a grammar
    tool_rules: ToolRules | None = None
    # a template of the caller instead of the model's
    template: str | None = None
    # put BOS and other special tokens before what the template wrote
    add_special_tokens: bool = False
    # what a template here reads where the caller gave nothing; a remote server is not told
    template_defaults: dict[str, Any] = field(default_factory=dict)
    # a chat without a system message gets the system prompt of the model's card, if it has one
    adds_system: bool = True
    # a model without a chat template reads the last message as plain text
    may_be_text: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Raw text, tokenised without a template."""

    text: str
    # with BOS and other special tokens, as the tokenizer defines
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, used as they are."""

    ids: tuple[int, ...]


Prompt = Chat | Text | Tokens


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form of every answer, enforced while tokens are drawn.

    `kind` is json_object, json_schema, lark, gbnf or regex; `text` is the schema as JSON, the
    grammar or the pattern. `closed`: where the schema says nothing of further properties, `text`
    forbids them.
    """

    kind: str
    text: str = ""
    closed: bool = False


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens may be drawn at all."""

    # only these; None = all
    allowed_ids: tuple[int, ...] | None = None
    # these are never drawn in the form that the tokenizer writes them, at the start of a word or
    # inside
    bad_words: tuple[str, ...] = ()


@quick_init
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
    # number of alternatives per token; 0 = only the chosen token; None = no logprobs
    logprobs: int | None = None
    # the same for the prompt's tokens (completions with echo)
    prompt_logprobs: int | None = None
    # the request's response_format, copied here for the engine: other tokens are not drawn
    constraint: ResponseFormat | None = None
    rules: TokenRules | None = None
    # penalties count this many of the last tokens, of prompt and output together; None = all
    penalty_window: int | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class TextRules:
    """How an answer's tokens become its text."""

    # special tokens are left out of the text
    skip_special: bool = True
    # the stop string or token that ends an answer is included in its text
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class PromptTruncation:
    """Shortens a prompt that has more tokens than this."""

    # None = as many as fit together with max_tokens
    max_tokens: int | None
    # the beginning is kept, not the end
    keeps_start: bool = False


@quick_init
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
    # most sequences of its tenant that run at once; 0 = no limit. Comes from the tenant's rights
    max_running: int = 0
    # its tenant's share among tenants that wait; from its rights too
    share: float = 1.0
    # it was refused before and comes back at the announced time: a full queue still has places for
    # it
    is_expected: bool = False
    # most tokens of its prompt in one step; 0 = as many as fit. Others wait for the end of a step
    step_tokens: int = 0
    text: TextRules = TextRules()
    # None = a prompt that is too long is refused
    truncation: PromptTruncation | None = None


@dataclass(frozen=True, slots=True)
class AdapterHint:
    """An adapter as a caller names it, `name` or `name@version`."""

    name: str
    weight: float = 1.0


@quick_init
@dataclass(frozen=True, slots=True)
class RouteHints:
    """What the caller says about who should answer."""

    # `base`, `adapter`, `base:adapter`, `adapter@version`, `a+b`, or None
    model: str | None = None
    # added after those that `model` names; if any is named, the router chooses none by content
    adapters: tuple[AdapterHint, ...] = ()
    # never chosen by content
    exclude: tuple[str, ...] = ()
    # most that are chosen by content; None = MAX_STACK
    max_adapters: int | None = None
    # missing values are set by task type, also if the caller named adapters
    tune: bool = False
    # the caller's instruction and the document, if the prompt holds both
    instruction: str = ""
    document: str = ""
    # what the caller says that the request is for; a specialist that serves it answers
    intent: str = ""
    # specialists, and names of experts, that its tenant may use; empty = all. Come from the
    # tenant's rights
    allowed: tuple[str, ...] = ()
    allowed_experts: tuple[str, ...] = ()

    @property
    def names_answerer(self) -> bool:
        """Whether the caller named a specialist or an adapter."""
        return bool(self.adapters) or self.model not in (None, "", AUTO)


@dataclass(frozen=True, slots=True)
class KeyRights:
    """What the scheduler allows to one key."""

    # highest priority of its requests
    priority: int = DEFAULT_PRIORITY
    # most of its sequences that run at once; 0 = no limit
    max_running: int = 0
    # its share of tokens among tenants that wait
    share: float = 1.0


# without keys everybody has the operator's rights
EVERY_RIGHT = KeyRights(MAX_PRIORITY)


# everybody's, on a server without keys
OPEN_TENANT = "local"


def own_tenant(tenant: str) -> str:
    """The tenant without its salt. A salt separates a tenant's prefix blocks and nothing else."""
    return tenant.partition("+")[0] if "+" in tenant else tenant


@quick_init
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
    # who sends the request; prefix blocks are never shared between tenants
    tenant: str
    # time.monotonic() when it was received; for a job: when it was started
    arrived_at: float
    # only for a job: when it was accepted, in seconds since 1970
    submitted_at: float | None = None
    # the user's name as the caller sent it; only for the log
    user_id: str = ""
