"""Gathers a request's events into one answer, and several requests' events into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

from coterie.api.transport.sse import Events, refuse
from coterie.core.errors import InternalError, from_code
from coterie.core.events import (
    Delta,
    Event,
    Failed,
    Finished,
    Started,
    TokenLogprob,
    Usage,
    metadata,
)

# events of all sources that wait for a slow reader; past it each source's own mailbox folds them
MAX_WAITING = 64


@dataclass(slots=True)
class CollectedChoice:
    """One finished choice, as the dialects render it."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # number of token ids behind each text
    sizes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_match: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.sizes.append(len(delta.token_ids))
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_match = delta.stop_match


@dataclass(frozen=True, slots=True)
class CollectedAnswer:
    choices: list[CollectedChoice]
    # one per prompt of the request
    started: list[Started]
    finished: Finished

    @property
    def usage(self) -> Usage:
        return self.finished.usage

    @property
    def metadata(self) -> dict[str, Any]:
        return metadata(self.finished)


async def collect(events: Events, num_choices: int) -> CollectedAnswer:
    """Every event up to the last one. A failure is raised as the error it stands for."""
    choices = [CollectedChoice() for _ in range(num_choices)]
    started: list[Started] = []
    is_first = True
    async with aclosing(events):
        async for event in events:
            if is_first:
                refuse(event)
                is_first = False
            match event:
                case Delta():
                    choices[event.choice].add(event)
                case Started():
                    started.append(event)
                case Finished():
                    return CollectedAnswer(choices, started, event)
                case Failed():
                    raise from_code(event.code, event.message, retry_after_s=event.retry_after_s)
    raise InternalError("the answer ended without a result")


async def merged(sources: Sequence[Events], num_choices: int) -> Events:
    """The events of several requests as if they were one with `len(sources) * num_choices` choices.

    Closing it closes every source. The first failure ends all.
    """
    inbox: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(MAX_WAITING)
    pumps = [asyncio.ensure_future(_pump(inbox, i, source)) for i, source in enumerate(sources)]
    ends: dict[int, Finished] = {}
    try:
        while len(ends) < len(sources):
            index, item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Finished):
                ends[index] = item
            elif isinstance(item, Delta):
                yield replace(item, choice=index * num_choices + item.choice)
            else:
                yield item
        yield _sum([ends[index] for index in range(len(sources))])
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    inbox: asyncio.Queue[tuple[int, Event | Exception]], index: int, source: Events
) -> None:
    async with aclosing(source):
        event: Event | None = None
        try:
            async for event in source:
                await inbox.put((index, event))
            if not isinstance(event, (Finished, Failed)):
                raise InternalError("the answer ended without a result")
        except Exception as error:
            await inbox.put((index, error))


def _sum(ends: Sequence[Finished]) -> Finished:
    usages, timings = [end.usage for end in ends], [end.timings for end in ends]
    experts = [end.experts for end in ends if end.experts is not None]
    return Finished(
        request_id=ends[0].request_id,
        choices=tuple(reason for end in ends for reason in end.choices),
        unfinished=tuple(
            place * len(end.choices) + choice
            for place, end in enumerate(ends)
            for choice in end.unfinished
        ),
        usage=Usage(
            prompt_tokens=sum(u.prompt_tokens for u in usages),
            completion_tokens=sum(u.completion_tokens for u in usages),
            cached_tokens=sum(u.cached_tokens for u in usages),
            reasoning_tokens=sum(u.reasoning_tokens for u in usages),
            stored_tokens=sum(u.stored_tokens for u in usages),
        ),
        # of the one that took longest: parts of several would not add up to its time
        timings=replace(
            max(timings, key=lambda t: t.total_s),
            first_token_s=min(t.first_token_s for t in timings),
            num_preemptions=sum(t.num_preemptions for t in timings),
        ),
        experts=reduce(add, experts) if experts else None,
        adapter_bytes=max(end.adapter_bytes for end in ends),
        # all parts of one request were planned together
        adapters=ends[0].adapters,
    )
