"""What an embedded model answers with: whole, or as a stream that knows at its end what it cost."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from coterie.core.dispatch import ExpertUsage
from coterie.core.errors import from_code
from coterie.core.events import Delta, Event, Failed, Finished, Timings, TokenLogprob, Usage
from coterie.core.plan import Assignment

Events = Generator[Event | None, None, None]


@dataclass(frozen=True, slots=True)
class Choice:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_match: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer. `text` and `token_ids` are those of the first choice."""

    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_token_ids: tuple[int, ...]
    # only of a model with routed experts
    experts: ExpertUsage | None = None
    # the caller's own, or the one that was drawn
    seed: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids


class Stream(Iterator[Delta]):
    """Deltas as they come; `finished` is there when the last one was taken."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.finished: Finished | None = None

    def __next__(self) -> Delta:
        for event in self._events:
            if isinstance(event, Failed):
                raise from_code(event.code, event.message)
            if isinstance(event, Delta):
                return event
            if isinstance(event, Finished):
                self.finished = event
        raise StopIteration

    def close(self) -> None:
        """Abort, when it has not ended."""
        self._events.close()


def collect(assignment: Assignment, events: Events) -> Completion:
    """Everything up to the end; a failure is raised as the error it stands for."""
    deltas: list[list[Delta]] = [[] for _ in range(assignment.sampling.n or 1)]
    stream = Stream(events)
    for delta in stream:
        deltas[delta.choice].append(delta)
    end = stream.finished
    if end is None:
        raise from_code("internal_error", "the engine ended a request without a word")
    choices = tuple(
        _choice(items, reason) for items, reason in zip(deltas, end.choices, strict=True)
    )
    return Completion(
        choices,
        end.usage,
        end.timings,
        assignment.prompt_ids,
        end.experts,
        assignment.sampling.seed or 0,
    )


def _choice(deltas: list[Delta], reason: str) -> Choice:
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(item for delta in deltas for item in delta.logprobs or ())
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=reason,
        stop_match=deltas[-1].stop_match if deltas else None,
        logprobs=logprobs,
    )
