"""Fills in values that a caller did not give, and refuses wrong ones. Values in, values out.

Order for a sampling value: the request, the model's generation_config, the dialect's defaults. A
missing seed is drawn here, once, so that a retry on another replica draws the same numbers.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.core.errors import ContextExcess, ContextLengthExceeded, InvalidRequest
from coterie.core.request import Limits, Sampling
from coterie.core.sampling import GENERATION_FIELDS, MAX_TOKENS, check_sampling, value_of

# What OpenAI and Anthropic document for a request that says nothing.
_OPEN = Sampling()
VENDOR_DEFAULTS = Sampling(
    temperature=value_of(_OPEN, "temperature"),
    top_p=value_of(_OPEN, "top_p"),
    n=int(value_of(_OPEN, "n")),
    num_beams=int(value_of(_OPEN, "num_beams")),
)

_SEED_MASK = 2**63 - 1
# a drawn seed is sent to the caller, and many JSON readers keep only 53 bits of a number
_DRAWN_BITS = 53


def draw_seed() -> int:
    """For a request without a seed."""
    return secrets.randbits(_DRAWN_BITS)


def resolve_sampling(
    asked: Sampling, generation: Mapping[str, Any], vendor: Sampling = VENDOR_DEFAULTS
) -> Sampling:
    """`asked` with every value filled in that the engine needs; refuses values out of range."""
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
    """The prompt, shortened as its caller requested."""
    rule = limits.truncation
    if rule is None:
        return ids
    most = rule.max_tokens
    if most is None:
        room = min(context, limits.context_size or context) - virtual_tokens
        # an empty prompt is refused later, with its own message
        most = max(room - (limits.max_tokens or 1), 0)
    if len(ids) <= most:
        return ids
    return ids[:most] if rule.keeps_start else ids[len(ids) - most :]


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
    """`least` is written before a number that is not exact."""
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
