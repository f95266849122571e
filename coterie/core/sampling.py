"""Which values a sampling field may have; fills in missing values and refuses wrong ones.

One table for all APIs, packages and the engine. Its ranges are the widest that the engine computes
correctly: an API, a package or a flag may accept less (`SamplingField.narrowed`), never more.

Order for a sampling value: the request, what the router tuned, the model's generation_config, what
the model's authors recommend, the dialect's defaults. A missing seed is drawn here, once, so that a
retry on another replica draws the same numbers.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from coterie.core.errors import ContextExcess, ContextLengthExceeded, InvalidRequest
from coterie.core.quick_init import quick_init
from coterie.core.request import Chat, Limits, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class SamplingField:
    """Accepts `low` to `high`, both included; a field whose `low` is an int holds whole numbers."""

    low: float
    high: float
    # for a request that does not give the field; None = no default
    default: float | None = None
    # `low` itself is excluded
    above_low: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int)

    def narrowed(self, low: float | None = None, high: float | None = None) -> SamplingField:
        """The same field with a smaller range; ValueError if the range would be larger."""
        if (low is not None and low < self.low) or (high is not None and high > self.high):
            raise ValueError(f"{low} to {high} is wider than {self.low} to {self.high}")
        return SamplingField(
            self.low if low is None else low,
            self.high if high is None else high,
            self.default,
            # a raised `low` is included
            self.above_low and (low is None or low == self.low),
        )

    def takes(self, value: float) -> bool:
        # a nan fails both comparisons
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above_low else 'from'} {self.low} to {self.high}"


SAMPLING_FIELDS: dict[str, SamplingField] = {
    "temperature": SamplingField(0.0, 100.0, 1.0),
    "top_p": SamplingField(0.0, 1.0, 1.0, above_low=True),
    # -1 and 0 = off
    "top_k": SamplingField(-1, 2**31 - 1, 0),
    "min_p": SamplingField(0.0, 1.0, 0.0),
    "typical_p": SamplingField(0.0, 1.0, 1.0, above_low=True),
    "repetition_penalty": SamplingField(0.0, 100.0, 1.0, above_low=True),
    "presence_penalty": SamplingField(-2.0, 2.0, 0.0),
    "frequency_penalty": SamplingField(-2.0, 2.0, 0.0),
    "penalty_window": SamplingField(1, 2**31 - 1),
    # an exponent of the output's length: a larger value overflows
    "length_penalty": SamplingField(-10.0, 10.0, 1.0),
    "n": SamplingField(1, 128, 1),
    "num_beams": SamplingField(1, 64, 1),
    "logprobs": SamplingField(0, 100),
    "prompt_logprobs": SamplingField(0, 100),
    # drawn if it is not given
    "seed": SamplingField(-(2**63), 2**63 - 1),
}
# for each token; added in float32, so a finite number may still be too large
LOGIT_BIAS = SamplingField(-1e9, 1e9)
# fields of `Limits`, not of `Sampling`; the context limits the length of an output
MAX_TOKENS = SamplingField(1, 2**63 - 1)
MIN_TOKENS = SamplingField(0, 2**63 - 1, 0)

# what a package or a task type may set
TUNED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# what a model's generation_config may set
GENERATION_FIELDS = (*TUNED_FIELDS, "typical_p")
# what every request that runs has
FILLED_FIELDS = (*GENERATION_FIELDS, "n", "num_beams")


_all_fields = attrgetter(*SAMPLING_FIELDS)
_filled_in = attrgetter(*FILLED_FIELDS)


def value_of(sampling: Sampling, name: str) -> float:
    """The given value, or the default of a field that has one."""
    given: float | None = getattr(sampling, name)
    default = SAMPLING_FIELDS[name].default
    assert default is not None, name
    return default if given is None else given


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest for the first value that is out of its range."""
    for (name, bounds), value in zip(SAMPLING_FIELDS.items(), _all_fields(sampling), strict=True):
        # most values are inside of their range, which `takes` would find in more time
        if value is None or bounds.low < value < bounds.high:
            continue
        if not bounds.takes(value):
            raise InvalidRequest(f"{name} is {value}; it must be {bounds}", param=name)
    for _, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequest(
                "logit_bias holds a value that is not a number", param="logit_bias"
            )
        if not LOGIT_BIAS.takes(bias):
            raise InvalidRequest(
                f"logit_bias holds {bias}; it must be {LOGIT_BIAS}", param="logit_bias"
            )


# What OpenAI and Anthropic document for a request that says nothing.
_OPEN = Sampling()
VENDOR_DEFAULTS = Sampling(
    temperature=value_of(_OPEN, "temperature"),
    top_p=value_of(_OPEN, "top_p"),
    n=int(value_of(_OPEN, "n")),
    num_beams=int(value_of(_OPEN, "num_beams")),
)

_NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class ModelRecommendation:
    """What the authors of a model recommend, from the table in `models/recommended.toml`."""

    # the model as the table names it; "" = the table does not have it
    name: str = ""
    # where the recommendation is from, in words
    source: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    # for a chat that switches thinking off; empty = as `sampling`
    without_thinking: Mapping[str, float] = field(default_factory=dict)
    # for a chat without a system message, if the model's template writes none by itself
    system_prompt: str = ""

    def sampling_for(self, prompt: Prompt) -> Mapping[str, float]:
        if self.without_thinking and isinstance(prompt, Chat):
            thinks = prompt.template_kwargs.get("enable_thinking")
            if thinks is None:
                thinks = prompt.template_defaults.get("enable_thinking")
            if thinks is False:
                return self.without_thinking
        return self.sampling


NO_RECOMMENDATION = ModelRecommendation()


@quick_init
@dataclass(frozen=True, slots=True)
class SampledWith:
    """A sampling value that a request ran with. `source`: request, tuned, generation_config,
    recommended or default."""

    value: float
    source: str


def sampling_sources(
    resolved: Sampling,
    requested: Sampling,
    generation: Mapping[str, Any],
    recommended: Mapping[str, float],
    tuned: Mapping[str, float] = _NOTHING,
) -> dict[str, SampledWith]:
    """Where each value of `resolved` comes from; the arguments are those that `resolve_sampling`
    made it from. Values that nobody set are not listed."""
    found: dict[str, SampledWith] = {}
    for name in GENERATION_FIELDS:
        value = getattr(resolved, name)
        if value is None:
            continue
        if getattr(requested, name) is not None:
            source = "request"
        elif name in TUNED_FIELDS and tuned.get(name) is not None:
            source = "tuned"
        elif generation.get(name) is not None:
            source = "generation_config"
        else:
            source = "recommended" if name in recommended else "default"
        found[name] = SampledWith(value, source)
    return found


_SEED_MASK = 2**63 - 1
# a drawn seed is sent to the caller, and many JSON readers keep only 53 bits of a number
_DRAWN_BITS = 53


class _DrawnSeeds:
    """Random numbers of the system, drawn many at once: a system call for each takes longer."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def take(self) -> int:
        if not self._left:
            words = struct.unpack(f"<{_SEEDS_AT_ONCE}Q", os.urandom(8 * _SEEDS_AT_ONCE))
            self._left = [word >> (64 - _DRAWN_BITS) for word in words]
        return self._left.pop()


_SEEDS_AT_ONCE = 64
_seeds = _DrawnSeeds()


def draw_seed() -> int:
    """For a request without a seed."""
    return _seeds.take()


def resolve_sampling(
    requested: Sampling,
    generation: Mapping[str, Any],
    vendor: Sampling = VENDOR_DEFAULTS,
    tuned: Mapping[str, float] = _NOTHING,
    recommended: Mapping[str, float] = _NOTHING,
) -> Sampling:
    """`requested` with every value filled in that the engine needs; refuses values out of range.
    `tuned`: values of the router for `TUNED_FIELDS` that the request leaves out. `recommended`: of
    the model's authors, for what generation_config leaves out."""
    values: list[Any] = []
    given = zip(FILLED_FIELDS, _filled_in(requested), _filled_in(vendor), strict=True)
    for name, value, default in given:
        if value is None and tuned and name in TUNED_FIELDS:
            value = tuned.get(name)
            if value is not None and name == "top_k":
                value = int(value)
        if value is None and name in GENERATION_FIELDS:
            value = generation.get(name)
            if value is None and recommended:
                value = recommended.get(name)
        values.append(default if value is None else value)
    temperature, top_p, top_k, min_p, repetition_penalty, typical_p, n, num_beams = values
    # as `replace`, in less time
    resolved = Sampling(
        temperature,
        top_p,
        top_k,
        min_p,
        typical_p,
        repetition_penalty,
        requested.presence_penalty,
        requested.frequency_penalty,
        requested.logit_bias,
        draw_seed() if requested.seed is None else requested.seed & _SEED_MASK,
        n,
        num_beams,
        requested.length_penalty,
        requested.logprobs,
        requested.prompt_logprobs,
        requested.constraint,
        requested.rules,
        requested.penalty_window,
    )
    check_sampling(resolved)
    return resolved


def default_sampling(
    generation: Mapping[str, Any], recommended: Mapping[str, float]
) -> dict[str, SampledWith]:
    """What a request runs with that sets nothing and is not tuned."""
    nothing = Sampling(seed=0)
    resolved = resolve_sampling(nothing, generation, recommended=recommended)
    return sampling_sources(resolved, nothing, generation, recommended)


def truncated(
    ids: Sequence[int], limits: Limits, context: int, virtual_tokens: int = 0
) -> Sequence[int]:
    """The prompt, shortened as its caller requested."""
    rule = limits.truncation
    if rule is None:
        return ids
    max_prompt_tokens = rule.max_tokens
    if max_prompt_tokens is None:
        available = min(context, limits.context_size or context) - virtual_tokens
        # an empty prompt is refused later, with its own message
        max_prompt_tokens = max(available - (limits.max_tokens or 1), 0)
    if len(ids) <= max_prompt_tokens:
        return ids
    return ids[:max_prompt_tokens] if rule.keeps_start else ids[len(ids) - max_prompt_tokens :]


def check_tokens(ids: Sequence[int], sampling: Sampling, vocab_size: int) -> None:
    """Checks that token ids sent by a caller exist."""
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if not 0 <= worst < vocab_size:
        raise InvalidRequest(
            f"token id {worst} is not in the vocabulary of {vocab_size}", param="prompt"
        )
    rules = sampling.rules
    for token in () if rules is None else rules.allowed_ids or ():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"allowed_token_ids names token {token}; the vocabulary has {vocab_size}",
                param="allowed_token_ids",
            )
    for token, _ in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}; the vocabulary has {vocab_size}",
                param="logit_bias",
            )


def resolve_limits(
    limits: Limits, prompt_tokens: int, context: int, virtual_tokens: int = 0, clamp: bool = False
) -> Limits:
    """`limits` with max_tokens set: the requested number, or all that is left of the context.

    An explicit max_tokens that does not fit is refused; with `clamp` it is lowered to what is left.
    `virtual_tokens` are the positions that soft prompts add before the prompt.
    """
    context = min(context, limits.context_size or context)
    tokens_left = context - prompt_tokens - virtual_tokens
    max_tokens = limits.max_tokens
    if max_tokens is not None and max_tokens < MAX_TOKENS.low:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}; it must be at least 1", param="max_tokens"
        )
    if clamp and max_tokens is not None and tokens_left >= 1:
        max_tokens = min(max_tokens, tokens_left)
    if tokens_left < 1 or (max_tokens is not None and max_tokens > tokens_left):
        raise _too_long(limits, prompt_tokens, virtual_tokens, context)
    tokens = tokens_left if max_tokens is None else max_tokens
    if not 0 <= limits.min_tokens <= tokens:
        raise InvalidRequest(
            f"min_tokens is {limits.min_tokens}; it must be from 0 to max_tokens ({tokens})",
            param="min_tokens",
        )
    if not 0 <= limits.priority <= 9:
        raise InvalidRequest("priority must be from 0 to 9", param="priority")
    if limits.timeout_s is not None and not 0 < limits.timeout_s < math.inf:
        raise InvalidRequest("timeout must be above 0", param="timeout")
    return limits if limits.max_tokens == tokens else replace(limits, max_tokens=tokens)


def prompt_too_long(prompt_tokens: int, context: int, qualifier: str = "") -> ContextLengthExceeded:
    """`qualifier` is written before a number that is not exact."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens. However, the prompt has "
        f"{qualifier}{prompt_tokens} tokens. Please shorten it.",
        excess=ContextExcess(prompt_tokens, None, context),
    )


def _too_long(
    limits: Limits, prompt_tokens: int, virtual_tokens: int, context: int
) -> ContextLengthExceeded:
    used, max_tokens = prompt_tokens + virtual_tokens, limits.max_tokens
    soft = f", and its adapters put {virtual_tokens} in front" if virtual_tokens else ""
    if max_tokens is None or used >= context:
        excess = ContextExcess(used, None, context)
        why = f"the prompt has {prompt_tokens} tokens{soft}. Please shorten it."
    else:
        excess = ContextExcess(used, max_tokens, context)
        why = (
            f"you requested {used + max_tokens} tokens ({prompt_tokens} in the prompt{soft}, "
            f"{max_tokens} in the completion). Please reduce the prompt or max_tokens."
        )
    is_own_limit = limits.context_size == context
    limit_name = "context_size" if is_own_limit else "This model's maximum context length"
    message = f"{limit_name} is {context} tokens. However, {why}"
    return ContextLengthExceeded(
        message, param="context_size" if is_own_limit else None, excess=excess
    )
