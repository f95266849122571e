"""From a plan to what a replica is asked to run: tokens, limits that fit, a checked grammar.

Everything that takes long is done on a thread: the event loop serves everybody.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from coterie.core.errors import InvalidRequest, MissingDependency
from coterie.core.plan import Assignment
from coterie.core.request import Limits, Prompt, ResponseFormat, Sampling, Tokens
from coterie.core.resolve import check_tokens, prompt_too_long, resolve_limits, truncated
from coterie.models.text.tokenizer import is_long
from coterie.obs.trace import log

if TYPE_CHECKING:
    from coterie.models.grammar.check import GrammarCheck
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.service.run import RequestRun


async def assignment(run: RequestRun, virtual_tokens: int, grammars: GrammarCheck) -> Assignment:
    """Refuses what can never run. `virtual_tokens` are put in front by soft prompts."""
    request, plan, served = run.request, run.plan, run.served
    prompt = plan.tuned.prompt or request.prompt
    # what is to be shortened may be longer than what fits
    room = None if request.limits.truncation is not None else served.context
    prompt_ids = await tokenise(served.tokenizer, prompt, room)
    prompt_ids = list(truncated(prompt_ids, request.limits, served.context, virtual_tokens))
    check_tokens(prompt_ids, plan.sampling, served.tokenizer.vocab_size)
    _check_choices(run)
    limits = _limits(run, len(prompt_ids), virtual_tokens)
    run.max_tokens, run.prompt_ids = limits.max_tokens, tuple(prompt_ids)
    if (plan.sampling.num_beams or 1) > 1 and request.response_format is None:
        # a search keeps to no grammar; nobody asked for the package's own
        run.response_format = None
    if run.response_format is not None:
        await _check_format(run, run.response_format, grammars)
    return Assignment(
        request_id=request.id,
        lane=served.name,
        prompt_ids=run.prompt_ids,
        sampling=_constrained(plan.sampling, run.response_format),
        limits=limits,
        adapters=plan.adapters,
        session=request.session or "",
        tenant=request.tenant,
        deadline=None if limits.timeout_s is None else request.arrived_at + limits.timeout_s,
        arrived_at=request.arrived_at,
    )


async def tokenise(
    tokenizer: Tokenizer, prompt: Prompt, context: int | None = None, times: int = 1
) -> list[int]:
    """Refuses a prompt that is longer than `times` the `context` before reading it, where its
    length tells."""
    if is_long(prompt):
        return await asyncio.to_thread(_encode, tokenizer, prompt, context, times)
    return _encode(tokenizer, prompt, context, times)


def _encode(tokenizer: Tokenizer, prompt: Prompt, context: int | None, times: int) -> list[int]:
    if isinstance(prompt, Tokens):
        if context is not None and len(prompt.ids) >= context:
            raise prompt_too_long(len(prompt.ids), context)
        return tokenizer.encode_prompt(prompt)
    text = tokenizer.text_of(prompt)
    if context is not None and len(text) >= times * context:
        least = tokenizer.least_tokens(text)
        if least >= times * context:
            raise prompt_too_long(least, context, "at least ")
    return tokenizer.encode_text(prompt, text)


def _constrained(sampling: Sampling, wanted: ResponseFormat | None) -> Sampling:
    return sampling if wanted is None else replace(sampling, constraint=wanted)


def _check_choices(run: RequestRun) -> None:
    for name in ("n", "num_beams"):
        asked = getattr(run.plan.sampling, name) or 1
        most = min(
            run.served.max_sequences, run.request.limits.max_running or run.served.max_sequences
        )
        if asked > most:
            whose = " of this key" if most < run.served.max_sequences else ""
            raise InvalidRequest(
                f"{name} is {asked}; at most {most} sequences{whose} run together",
                param=name,
            )


def _limits(run: RequestRun, prompt_tokens: int, virtual_tokens: int) -> Limits:
    """A number of ours is cut to the room that is left; a caller's own is kept or refused."""
    limits = resolve_limits(
        run.request.limits,
        prompt_tokens,
        run.served.context,
        virtual_tokens,
        clamp=run.served.clamp_max_tokens,
    )
    tuned = run.plan.tuned.max_tokens
    if run.request.limits.max_tokens is not None or tuned is None:
        return limits
    assert limits.max_tokens is not None
    return replace(limits, max_tokens=max(limits.min_tokens, min(tuned, limits.max_tokens)))


async def _check_format(run: RequestRun, wanted: ResponseFormat, grammars: GrammarCheck) -> None:
    """Before anything is reserved. A caller's own is refused; a package's is left out, as nobody
    asked for it."""
    begun = time.monotonic()
    try:
        await grammars.check(wanted, run.served.tokenizer)
    except (InvalidRequest, MissingDependency) as error:
        if run.request.response_format is not None:
            raise
        run.response_format = None
        names = ", ".join(adapter.name for adapter in run.plan.adapters)
        run.served.series.registry.value(
            "coterie_recoveries", run.served.name, "format_left_out"
        ).add()
        log("format_unusable", level="warning", model=names, reason=error.message)
    finally:
        run.grammar_s += time.monotonic() - begun
