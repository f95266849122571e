"""Which values a sampling field may have, what a caller left open filled in, what is wrong refused.

One table, which every way in derives from. Its ranges are the widest that the engine computes
correctly: an API, a package or a flag may take less (`SamplingField.narrowed`), never more.

Order of a sampling value: the request, the model's generation_config, the dialect's defaults. A
missing seed is drawn here, once, so that a retry on another replica draws the same noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.core.errors import ContextExcess, ContextLengthExceeded, InvalidRequest
from coterie.core.request import Limits, Sampling


@dataclass(frozen=True, slots=True)
class SamplingField:
    """From `low` to `high`, both taken; a field whose `low` is an int holds whole numbers."""

    low: float
    high: float
    # of a request that says nothing; None = there is none
    default: float | None = None
    # `low` itself is not taken
    above_low: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int)

    def narrowed(self, low: float | None = None, high: float | None = None) -> SamplingField:
        """The same field where less is taken; ValueError where that would be more."""
        if (low is not None and low < self.low) or (high is not None and high > self.high):
            raise ValueError(f"{low} to {high} is wider than {self.low} to {self.high}")
        return SamplingField(
            self.low if low is None else low,
            self.high if high is None else high,
            self.default,
            # a `low` that was moved up is taken itself
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
    # an exponent of the output's length: a larger one overflows
    "length_penalty": SamplingField(-10.0, 10.0, 1.0),
    "n": SamplingField(1, 128, 1),
    "num_beams": SamplingField(1, 64, 1),
    "logprobs": SamplingField(0, 100),
    "prompt_logprobs": SamplingField(0, 100),
    # one is drawn where none is given
    "seed": SamplingField(-(2**63), 2**63 - 1),
}
# of each token; added in float32, so that a finite number may still be too large
LOGIT_BIAS = SamplingField(-1e9, 1e9)
# not of `Sampling` but of `Limits`; how long an output may be is the context's matter
MAX_TOKENS = SamplingField(1, 2**63 - 1)
MIN_TOKENS = SamplingField(0, 2**63 - 1, 0)

# what a package or a task type may set
TUNED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# what a model's generation_config may set
GENERATION_FIELDS = (*TUNED_FIELDS, "typical_p")


def value_of(sampling: Sampling, name: str) -> float:
    """What was given, or the default of a field that has one."""
    given: float | None = getattr(sampling, name)
    default = SAMPLING_FIELDS[name].default
    assert default is not None, name
    return default if given is None else given


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest for the first value that is out of its range."""
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(sampling, name)
        if value is not None and not field.takes(value):
            raise InvalidRequest(f"{name} is {value}; it must be {field}", param=name)
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

_SEED_MASK = 2**63 - 1
# a seed of ours is told to the caller, and JSON's readers keep 53 bits of a number
_DRAWN_BITS = 53


def draw_seed() -> int:
    """For a request that brings none."""
    return secrets.randbits(_DRAWN_BITS)


def resolve_sampling(
    asked: Sampling, generation: Mapping[str, Any], vendor: Sampling = VENDOR_DEFAULTS
) -> Sampling:
    """`asked` with nothing left open that the engine needs; refuses values out of range."""
    values: dict[str, Any] = {}
    for name in (*GENERATION_FIELDS, "n", "num_beams"):
        given = getattr(asked, name)
        if given is None and name in GENERATION_FIELDS:
            given = generation.get(name)
        values[name] = getattr(vendor, name) if given is None else given
    seed = draw_seed() if asked.seed is None else asked.seed & _SEED_MASK
    resolved = replace(asked, **values, seed=seed)
    check_sampling(resolved)
    return resolved


def truncated(
    ids: Sequence[int], limits: Limits, context: int, virtual_tokens: int = 0
) -> Sequence[int]:
    """The prompt as short as its caller wants it."""
    rule = limits.truncation
    if rule is None:
        return ids
    most = rule.max_tokens
    if most is None:
        room = min(context, limits.context_size or context) - virtual_tokens
        # a prompt of nothing is refused for what it is
        most = max(room - (limits.max_tokens or 1), 0)
    if len(ids) <= most:
        return ids
    return ids[:most] if rule.keeps_start else ids[len(ids) - most :]


def check_tokens(ids: Sequence[int], sampling: Sampling, vocab_size: int) -> None:
    """Token ids a caller sent must exist."""
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
    """`limits` with max_tokens set: what was asked, or all that is left of the context.

    An explicit max_tokens that cannot be kept is refused; with `clamp` it becomes what is left.
    `virtual_tokens` are those that soft prompts put in front of the prompt's own.
    """
    context = min(context, limits.context_size or context)
    room = context - prompt_tokens - virtual_tokens
    asked = limits.max_tokens
    if asked is not None and asked < MAX_TOKENS.low:
        raise InvalidRequest(f"max_tokens is {asked}; it must be at least 1", param="max_tokens")
    if clamp and asked is not None and room >= 1:
        asked = min(asked, room)
    if room < 1 or (asked is not None and asked > room):
        raise _too_long(limits, prompt_tokens, virtual_tokens, context)
    tokens = room if asked is None else asked
    if not 0 <= limits.min_tokens <= tokens:
        raise InvalidRequest(
            f"min_tokens is {limits.min_tokens}; it must be from 0 to max_tokens ({tokens})",
            param="min_tokens",
        )
    if not 0 <= limits.priority <= 9:
        raise InvalidRequest("priority must be from 0 to 9", param="priority")
    if limits.timeout_s is not None and not 0 < limits.timeout_s < math.inf:
        raise InvalidRequest("timeout must be above 0", param="timeout")
    return replace(limits, max_tokens=tokens)


def prompt_too_long(prompt_tokens: int, context: int, least: str = "") -> ContextLengthExceeded:
    """`least` is put before a number that is not exact."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {context} tokens. However, the prompt has "
        f"{least}{prompt_tokens} tokens. Please shorten it.",
        excess=ContextExcess(prompt_tokens, None, context),
    )


def _too_long(
    limits: Limits, prompt_tokens: int, virtual_tokens: int, context: int
) -> ContextLengthExceeded:
    used, asked = prompt_tokens + virtual_tokens, limits.max_tokens
    soft = f", and its adapters put {virtual_tokens} in front" if virtual_tokens else ""
    if asked is None or used >= context:
        excess = ContextExcess(used, None, context)
        why = f"the prompt has {prompt_tokens} tokens{soft}. Please shorten it."
    else:
        excess = ContextExcess(used, asked, context)
        why = (
            f"you requested {used + asked} tokens ({prompt_tokens} in the prompt{soft}, {asked} "
            "in the completion). Please reduce the prompt or max_tokens."
        )
    own = limits.context_size == context
    whose = "context_size" if own else "This model's maximum context length"
    message = f"{whose} is {context} tokens. However, {why}"
    return ContextLengthExceeded(message, param="context_size" if own else None, excess=excess)
