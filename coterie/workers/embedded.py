"""`from coterie import LLM`: an engine inside a Python program.

There is no server, event loop or other process: a thread runs the engine's steps while others wait
for tokens. Several threads and streams may use one LLM; each step serves all of them
(`shared_engine`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from coterie.core.adapters import DEFAULTS, AdapterSettings
from coterie.core.config import check_capture, moe_settings
from coterie.core.errors import ConfigError, InvalidRequest, from_code
from coterie.core.events import Delta, Event, Failed, Finished, Timings, TokenLogprob, Usage
from coterie.core.lane import LaneConfig
from coterie.core.moe import AUTOMATIC, MoeSettings, MoeUsage
from coterie.core.plan import AdapterChoice, Assignment
from coterie.core.request import Chat, Limits, Message, Prompt, Sampling, Text, Tokens
from coterie.core.sampling import check_tokens, resolve_limits, resolve_sampling
from coterie.moe.runtime.trace import Trace
from coterie.weights.sources.source import resolve
from coterie.workers.adapter_names import AdapterNames, Named
from coterie.workers.contract import WorkerSpec
from coterie.workers.shared_engine import RequestEntry, SharedEngine

LANE = "embedded"
_SAMPLING = frozenset(item.name for item in fields(Sampling))
_LIMITS = frozenset(item.name for item in fields(Limits))
_MOE = frozenset(item.name for item in fields(MoeSettings))

# a prompt is text, or token ids
PromptLike = str | Sequence[int]


class CallOptions(NamedTuple):
    """The options of one call, for all of its prompts."""

    sampling: Sampling
    limits: Limits
    adapters: tuple[AdapterChoice, ...]
    virtual_tokens: int


class LLM:
    """A loaded model.

    `moe` says where a mixture-of-experts model keeps its experts: `MoeSettings`, or a mapping with
    its fields, {"strategy": "lru", "device_budget": "6GB"}.
    `capture_graphs` says when steps are captured on a GPU: "start", "lazy" or "off".
    `library` is the folder where adapters are installed (None = the folder of this user),
    `adapters` their memory; AdapterSettings(device_bytes=0) = no adapters. `options` of the calls
    are the fields of `Sampling` and `Limits`: temperature, top_p, max_tokens, stop, seed, n,
    logprobs ..., and `experts=["name", "name@1.0=0.5", "./folder"]`: adapters for this call, in
    order, each installed, a package or a PEFT directory.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 0,
        kv_bytes: int = 0,
        capture_graphs: str = "lazy",
        context: int = 0,
        max_sequences: int = 64,
        max_step_tokens: int = 0,
        max_mixed_tokens: int = 0,
        library: Path | None = None,
        adapters: AdapterSettings = DEFAULTS,
        allow_unsigned: bool = False,
        moe: MoeSettings | Mapping[str, Any] = AUTOMATIC,
        **unknown: Any,
    ) -> None:
        from coterie.workers.host import build_engine

        _refuse_arguments(unknown)
        check_capture(capture_graphs)
        lane = LaneConfig(
            LANE,
            context=context,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_mixed_tokens=max_mixed_tokens,
        )
        self.adapters = AdapterNames(library, allow_unsigned=allow_unsigned)
        spec = WorkerSpec(
            name="embedded",
            model=str(resolve(model)),
            lanes=(lane,),
            dtype=dtype,
            device=device,
            threads=threads,
            kv_bytes=kv_bytes,
            capture_graphs=capture_graphs,
            dispatch=moe_settings(moe),
            adapters=adapters,
            library=str(self.adapters.library),
        )
        host = build_engine(spec)
        self._host = host
        self._engine, self.tokenizer, self.info = host.engine, host.tokenizer, host.info
        self._shared = SharedEngine(host.engine)

    def generate(
        self, prompts: PromptLike | Sequence[PromptLike], **options: Any
    ) -> list[Completion]:
        """Answer all prompts; they run together."""
        # make all assignments first: an invalid prompt is refused before anything runs
        call = self._call_options(options)
        assignments = [self._assignment(item, call) for item in _listed(prompts)]
        entries = [self._shared.enter(assignment) for assignment in assignments]
        try:
            for entry in entries:
                self._shared.admit(entry)
            return [self._collect(entry) for entry in entries]
        finally:
            for assignment in assignments:
                self._shared.remove(assignment.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Completion:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`."""
        assignment = self._assignment(_chat(messages, template_kwargs), self._call_options(options))
        entry = self._shared.enter(assignment)
        try:
            self._shared.admit(entry)
            return self._collect(entry)
        finally:
            self._shared.remove(assignment.request_id)

    def stream(
        self, prompt: PromptLike | Sequence[Mapping[str, str]], **options: Any
    ) -> CompletionStream:
        """The deltas of an answer to a prompt or a conversation. Closing the iterator aborts."""
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        value = _chat(prompt, None) if chat else _prompt(prompt)  # type: ignore[arg-type]
        assignment = self._assignment(value, self._call_options(options))
        events = self._run(assignment)
        next(events)
        return CompletionStream(events)

    def prepare(self, experts: Sequence[Named] | str) -> None:
        """Check adapters and start to load them, before they are used."""
        stack, _ = self.adapters.choose(experts, self.info.fingerprint)
        pool = self._host.adapters
        if stack and pool is None:
            raise ConfigError("there is no room for adapters", param="adapters.device_bytes")
        if stack and pool is not None:
            self._shared.call(lambda: pool.pool.want(stack))

    def close(self) -> None:
        """Abort running requests, save the heatmap of a MoE model and free its memory."""

        def end() -> None:
            self._shared.abort_all()
            self._host.close()
            self.adapters.close()

        try:
            self._shared.call(end)
        finally:
            self._shared.close()

    def graph_stats(self) -> dict[str, float]:
        """How many steps are captured, and their memory; empty where none are."""
        return self._engine.graph_stats()

    def moe_report(self) -> dict[str, Any] | None:
        """State of the MoE expert tiers and their counters since start; None for a dense model."""
        return self._shared.call(self._host.moe_report)

    @contextmanager
    def traced(self, path: Path | None = None) -> Iterator[Trace]:
        """Record which MoE experts are used inside the `with` block; `path` is for
        `coterie plan --trace`."""
        experts = self._host.experts
        if experts is None:
            raise ConfigError(
                f"{self.info.architecture} has no routed experts to trace", param="trace"
            )
        yield experts.record()
        if path is not None:
            self._shared.call(lambda: experts.save_trace(path))

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call_options(self, options: Mapping[str, Any]) -> CallOptions:
        given = dict(options)
        named = given.pop("experts", None) or ()
        adapters, virtual_tokens = self.adapters.choose(named, self.info.fingerprint)
        sampling, limits = _split(given)
        return CallOptions(sampling, limits, adapters, virtual_tokens)

    def _assignment(self, prompt: Prompt, call: CallOptions) -> Assignment:
        tokenizer = self.tokenizer
        readable = tokenizer.readable(prompt, with_adapters=bool(call.adapters))
        ids = tokenizer.encode_prompt(readable)
        recommended = tokenizer.recommended.sampling_for(prompt)
        generation = self.info.generation
        sampling = resolve_sampling(call.sampling, generation, recommended=recommended)
        check_tokens(ids, sampling, tokenizer.vocab_size)
        context = self.info.contexts[LANE]
        limits = resolve_limits(call.limits, len(ids), context, call.virtual_tokens)
        now = time.monotonic()
        return Assignment(
            request_id=uuid.uuid4().hex,
            lane=LANE,
            prompt_ids=tuple(ids),
            sampling=sampling,
            limits=limits,
            adapters=call.adapters,
            session="",
            tenant="",
            deadline=None if limits.timeout_s is None else now + limits.timeout_s,
            arrived_at=now,
        )

    def _collect(self, entry: RequestEntry) -> Completion:
        self._shared.wait(entry.inbox)
        return collect(entry.assignment, self._shared.events(entry.inbox))

    def _run(self, assignment: Assignment) -> Events:
        """Yields None when the request is queued, then its events."""
        shared = self._shared
        try:
            entry = shared.enter(assignment)
            shared.admit(entry)
            yield None
            yield from shared.events(entry.inbox)
        finally:
            shared.remove(assignment.request_id)


def _refuse_arguments(unknown: Mapping[str, Any]) -> None:
    """Refuse unknown arguments. In earlier versions the fields of `MoeSettings` were arguments."""
    for name in unknown:
        if name in _MOE:
            raise ConfigError(
                f"LLM({name}=...) is now LLM(moe={{{name!r}: ...}})", param=f"moe.{name}"
            )
        raise TypeError(f"LLM() has no argument {name!r}")


def _split(options: Mapping[str, Any]) -> tuple[Sampling, Limits]:
    unknown = options.keys() - _SAMPLING - _LIMITS
    if unknown:
        raise InvalidRequest(f"unknown option: {', '.join(sorted(unknown))}")
    values = dict(options)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    for name in ("stop", "stop_token_ids"):
        if name in values:
            values[name] = tuple(values[name])
    sampling = Sampling(**{name: values[name] for name in values.keys() & _SAMPLING})
    return sampling, Limits(**{name: values[name] for name in values.keys() & _LIMITS})


def _listed(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [Text(prompts)]
    numbers = [item for item in prompts if isinstance(item, int)]
    if numbers:
        return [Tokens(tuple(numbers))]
    return [_prompt(item) for item in prompts if not isinstance(item, int)]


def _prompt(value: PromptLike) -> Prompt:
    return Text(value) if isinstance(value, str) else Tokens(tuple(value))


def _chat(messages: Sequence[Mapping[str, str]], template_kwargs: Mapping[str, Any] | None) -> Chat:
    turns = tuple(Message(item["role"], item["content"]) for item in messages)
    # if the last message is the assistant's, the model continues it
    new_turn = not turns or turns[-1].role != "assistant"
    return Chat(turns, dict(template_kwargs or {}), add_generation_prompt=new_turn)


Events = Generator[Event | None, None, None]


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_match: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt. `text` and `token_ids` are those of the first choice."""

    choices: tuple[CompletionChoice, ...]
    usage: Usage
    timings: Timings
    prompt_token_ids: list[int]
    # only for a mixture-of-experts model
    moe: MoeUsage | None = None
    # given by the caller, or chosen at random
    seed: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """New text and tokens of one choice; see `Delta`."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    stop_match: str | int | None


class CompletionStream(Iterator[CompletionDelta]):
    """An iterator of deltas; `finished` is set after the last one."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.finished: Finished | None = None

    def __next__(self) -> CompletionDelta:
        for event in self._events:
            if isinstance(event, Failed):
                raise from_code(event.code, event.message)
            if isinstance(event, Delta):
                return CompletionDelta(
                    event.choice,
                    event.text,
                    list(event.token_ids),
                    event.logprobs,
                    event.finish_reason,
                    event.stop_match,
                )
            if isinstance(event, Finished):
                self.finished = event
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it has not ended."""
        self._events.close()


def collect(assignment: Assignment, events: Events) -> Completion:
    """Read all events and return the answer. Raises the error of a failed request."""
    deltas: list[list[CompletionDelta]] = [[] for _ in range(assignment.sampling.n or 1)]
    stream = CompletionStream(events)
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
        list(assignment.prompt_ids),
        end.moe,
        assignment.sampling.seed or 0,
    )


def _choice(deltas: list[CompletionDelta], reason: str) -> CompletionChoice:
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(item for delta in deltas for item in delta.logprobs or ())
    return CompletionChoice(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        finish_reason=reason,
        stop_match=deltas[-1].stop_match if deltas else None,
        logprobs=logprobs,
    )
