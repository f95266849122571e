"""Leaves out the oldest turns of a conversation that does not fit the context, for the dialects
that let a request ask for it.

A turn is a message of the user and all that follows it up to the next one. System messages at the
start and the last turn stay.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from coterie.api.dialect import DialectPipeline
from coterie.api.response_format import with_param_name
from coterie.core.errors import ContextLengthExceeded, UnsupportedFeature
from coterie.core.request import Chat, InferenceRequest

# if the request does not say how long the answer may be, this part of the context is left for it
ANSWER_SHARE = 8


async def fitted(
    service: DialectPipeline, request: InferenceRequest, field: str = "truncation"
) -> InferenceRequest:
    """The request without the turns that do not fit. If its last turn alone is too long, nothing
    else is left, and the request is refused as any other that is too long. `field`: what asked for
    it in the body."""
    chat = request.prompt
    assert isinstance(chat, Chat)
    specialist = service.resolve(request.hints, chat, request.tenant)
    context = service.model(specialist).max_model_len
    context = min(context, request.limits.context_size or context)
    room = context - (request.limits.max_tokens or context // ANSWER_SHARE)
    starts = _turns(chat)

    async def fits(num_dropped: int) -> bool:
        try:
            kept = _without(chat, starts, num_dropped)
            return len(await service.tokenise(specialist, kept, request.hints)) <= room
        except ContextLengthExceeded:
            # it is so long that it was not counted
            return False
        except UnsupportedFeature as error:
            raise with_param_name(error, error.param or "", field) from None

    if not starts or await fits(0):
        return request
    # the smallest number of dropped turns that fits
    low, high = 1, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return replace(request, prompt=_without(chat, starts, high))


def _turns(chat: Chat) -> list[int]:
    """Where the turns start."""
    return [at for at, message in enumerate(chat.messages) if message.role == "user"]


def _without(chat: Chat, starts: list[int], num_dropped: int) -> Chat:
    if num_dropped <= 0:
        return chat
    system = tuple(takewhile(lambda message: message.role == "system", chat.messages))
    return replace(chat, messages=system + chat.messages[starts[num_dropped] :])
