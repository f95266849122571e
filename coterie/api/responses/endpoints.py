"""The endpoints of the Responses API: parse the body, run it through the pipeline, write the answer
and keep it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import MAX_INLINE_BYTES, aside, parse, query_of
from coterie.api.dialect import (
    CollectedAnswer,
    DialectPipeline,
    ParsedRequest,
    WholeAnswer,
    answering_name,
    caller_of,
    planned_answer,
)
from coterie.api.door import Exchange, exchange_of, new_id
from coterie.api.errors import encode
from coterie.api.response_format import FORMAT, with_param_name
from coterie.api.responses.follow import BackgroundEvents
from coterie.api.responses.kept import KeptResponses, OpenRequest, stored_items
from coterie.api.responses.parse import (
    LOGPROBS,
    parse_response,
    prompt_of,
    refuse_fields_here,
)
from coterie.api.responses.render import (
    QUEUED,
    ResponseFields,
    ResponseShape,
    ResponseStream,
    whole,
)
from coterie.api.responses.tools import ResponseTools, response_tools
from coterie.api.responses.types import (
    ItemQuery,
    ResponseBody,
    ResponseCountBody,
    RetrieveQuery,
)
from coterie.api.tools.read import (
    AnswerSyntax,
    answer_syntax_of,
    blamed,
    tool_events,
    with_answer_grammar,
)
from coterie.api.transport.sse import Events, EventStream
from coterie.api.truncate import fitted
from coterie.core.errors import InvalidRequest, UnsupportedFeature
from coterie.core.events import Finished
from coterie.core.job import JobSpec
from coterie.core.request import AUTO, InferenceRequest, RouteHints, Sampling
from coterie.models.text.tokenizer import Tokenizer
from coterie.service.jobs.service import JobService
from coterie.service.responses.store import ResponseStore

JSON = "application/json"
# writes a response that has ended, and returns it as it is sent
Keep = Callable[[ResponseFields], Coroutine[Any, Any, ResponseFields]]


@dataclass(frozen=True, slots=True)
class _Received:
    """A body of a caller, with all that it refers to."""

    body: ResponseBody
    parsed: ParsedRequest
    tools: ResponseTools
    tenant: str
    # about the size of the input
    size: int
    is_kept: bool


class ResponsesDialect:
    def __init__(
        self,
        service: DialectPipeline,
        store: ResponseStore,
        jobs: JobService,
        max_body_bytes: int,
    ) -> None:
        self.service, self.store, self.jobs = service, store, jobs
        self.max_body_bytes = max_body_bytes
        self.kept = KeptResponses(service, store, jobs, max_body_bytes)

    async def create_response(self, request: Request) -> Response:
        """Create a response: whole, as a stream of events, or in the background."""
        received = await self._receive(request)
        if received.body.background:
            return await self._submit(received, exchange_of(request.scope))
        return await self._run(received, exchange_of(request.scope))

    async def get_response(self, request: Request) -> Response:
        """Show a response that is kept, or send its events again."""
        query, exchange = query_of(request, RetrieveQuery), exchange_of(request.scope)
        response_id = request.path_params["response_id"]
        found = await self.kept.find(response_id, exchange.tenant)
        if not query.stream:
            return Response(encode(found), media_type=JSON)
        return self._events(found, exchange, query.starting_after)

    async def delete_response(self, request: Request) -> Response:
        """Remove a response that is kept; a background response is cancelled first."""
        response_id = request.path_params["response_id"]
        await self.kept.delete(response_id, exchange_of(request.scope).tenant)
        body = {"id": response_id, "object": "response", "deleted": True}
        return Response(encode(body), media_type=JSON)

    async def cancel_response(self, request: Request) -> Response:
        """Cancel a background response; one that has ended stays as it is."""
        tenant = exchange_of(request.scope).tenant
        found = await self.kept.cancel(request.path_params["response_id"], tenant)
        return Response(encode(found), media_type=JSON)

    async def list_input_items(self, request: Request) -> Response:
        """List the items that the model read for a response."""
        query, tenant = query_of(request, ItemQuery), exchange_of(request.scope).tenant
        items = await self.kept.input_items(request.path_params["response_id"], tenant)
        return Response(encode(_page(items, query)), media_type=JSON)

    async def count_input_tokens(self, request: Request) -> Response:
        """Count the tokens that a response's prompt would have."""
        body = await parse(request, ResponseCountBody, self.max_body_bytes)
        refuse_fields_here(body.model_extra)
        tenant = exchange_of(request.scope).tenant
        history = await self.kept.history(body, tenant)
        whole_body = await self.kept.with_references(body, tenant)
        size = _size(request, is_larger=bool(history) or whole_body is not body)
        chat = await aside(
            size, lambda: prompt_of(whole_body, response_tools(whole_body, history), history)
        )
        hints = RouteHints(body.model)
        specialist = self.service.resolve(hints, chat, tenant)
        ids = await self.service.tokenise(specialist, chat, hints)
        counted = {"object": "response.input_tokens", "input_tokens": len(ids)}
        return Response(encode(counted), media_type=JSON)

    async def _receive(self, request: Request) -> _Received:
        body = await parse(request, ResponseBody, self.max_body_bytes)
        exchange, caller = exchange_of(request.scope), caller_of(request)
        exchange.model = body.model
        is_kept = self._is_kept(body)
        history = await self.kept.history(body, exchange.tenant)
        whole_body = await self.kept.with_references(body, exchange.tenant)
        size = _size(request, is_larger=whole_body is not body)
        body = whole_body
        read = partial(parse_response, body, caller, new_id("resp_"), history)
        found = await aside(size + MAX_INLINE_BYTES * bool(history), read)
        parsed = found.parsed
        if body.truncation == "auto":
            parsed = replace(parsed, request=await fitted(self.service, parsed.request))
        return _Received(body, parsed, found.tools, exchange.tenant, size, is_kept)

    def _is_kept(self, body: ResponseBody) -> bool:
        if not self.store.keeps and (body.store or body.background):
            name = "store" if body.store else "background"
            raise UnsupportedFeature(f"{name}: this server keeps no responses", param=name)
        return self.store.keeps and body.store is not False

    async def _run(self, received: _Received, exchange: Exchange) -> Response:
        parsed = received.parsed
        planned = planned_answer(self.service, parsed.request, exchange)
        syntax = await answer_syntax_of(parsed, planned.tokenizer)
        name = answering_name(planned.hints, planned.plan)
        shape = _shape(received, name, planned.plan.sampling, syntax)
        parsed = await with_answer_grammar(parsed, planned.tokenizer, syntax)
        events = tool_events(self.service, parsed, planned, exchange, shape)
        keep = partial(self._keep, received) if received.is_kept else _unchanged
        if parsed.stream:
            stream = ResponseStream(shape)
            return EventStream(_keeping(events, stream, keep), stream, exchange)
        return WholeAnswer(events, 1, partial(_written, shape, keep), exchange)

    async def _keep(self, received: _Received, response: ResponseFields) -> ResponseFields:
        items = await aside(received.size, stored_items, received.body)
        return await self.kept.keep(response, items, received.tenant, received.size)

    async def _submit(self, received: _Received, exchange: Exchange) -> Response:
        """Accept the request as a job with the id of the response."""
        hints = self.service.named(received.parsed.request.hints)
        request = replace(received.parsed.request, hints=hints)
        parsed = replace(received.parsed, request=request)
        specialist = self.service.resolve(request.hints, request.prompt, request.tenant)
        tokenizer = self._tokenizer(specialist)
        syntax = await answer_syntax_of(parsed, tokenizer)
        parsed = await with_answer_grammar(parsed, tokenizer, syntax)
        if parsed.request.response_format is not None:
            # the grammar is written for this one
            parsed = replace(parsed, request=_pinned(parsed.request, specialist))
        name = request.hints.model if request.hints.model not in (None, AUTO) else specialist
        shape = _shape(received, name or specialist, request.sampling, syntax)
        response = shape.response(QUEUED)
        items = await aside(received.size, stored_items, received.body)
        told = received.body.model_dump(include=_TOOL_FIELDS, exclude_unset=True)
        told["tools"] = [tool.fields() for tool in received.tools.given]
        opened = OpenRequest(told, specialist, syntax.thought)
        await self.kept.open(response, items, received.tenant, opened)
        try:
            await self.jobs.submit(JobSpec(parsed.request, keeps_deltas=True))
        except BaseException as error:
            await self.store.remove(shape.id, received.tenant)
            raise _named(error, parsed) from None
        if parsed.stream:
            return self._events(response, exchange, None)
        return Response(encode(response), media_type=JSON)

    def _tokenizer(self, specialist: str) -> Tokenizer | None:
        """None for a specialist on another server."""
        try:
            return self.service.tokenizer(specialist)
        except UnsupportedFeature:
            return None

    def _events(
        self, response: ResponseFields, exchange: Exchange, after: int | None
    ) -> BackgroundEvents:
        tenant = exchange.tenant
        find = partial(self.kept.find, response["id"], tenant)
        follow = partial(self.jobs.follow, response["id"], tenant)
        return BackgroundEvents(response, find, follow, after, exchange)


def _size(request: Request, *, is_larger: bool) -> int:
    """About how large the input is; `is_larger` than the body, which refers to kept items."""
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdigit() else MAX_INLINE_BYTES + 1
    return size + MAX_INLINE_BYTES * is_larger


# the fields that say which tools there are
_TOOL_FIELDS = {"tool_choice", "parallel_tool_calls"}


def _named(error: BaseException, parsed: ParsedRequest) -> BaseException:
    """The error with the names of the caller's fields."""
    if not isinstance(error, InvalidRequest) or error.param != FORMAT:
        return error
    grammar = parsed.request.response_format
    if parsed.tools is None or grammar is None:
        return with_param_name(error, FORMAT, parsed.format_field)
    return blamed(error.message, parsed.tools, grammar, parsed.format_field)


def _pinned(request: InferenceRequest, specialist: str) -> InferenceRequest:
    if request.hints.model not in (None, AUTO):
        return request
    return replace(request, hints=replace(request.hints, model=specialist))


async def _unchanged(response: ResponseFields) -> ResponseFields:
    return response


async def _keeping(events: Events, stream: ResponseStream, keep: Keep) -> Events:
    """The same events. The response is kept before the last one: a client that has seen it may
    continue the response at once."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finished):
                stream.final = await keep(stream.ended(event))
            yield event


async def _written(shape: ResponseShape, keep: Keep, answer: CollectedAnswer) -> bytes:
    return encode(await keep(whole(shape, answer)))


def _shape(
    received: _Received, model: str, sampling: Sampling, syntax: AnswerSyntax
) -> ResponseShape:
    return ResponseShape(
        received.parsed.request.id,
        repeated_fields(received.body, model, sampling, received.is_kept),
        received.tools,
        logprobs=LOGPROBS in (received.body.include or ()),
        syntax=syntax,
    )


def repeated_fields(
    body: ResponseBody, model: str, sampling: Sampling, is_kept: bool
) -> ResponseFields:
    """The fields of a request that its response repeats, with the values that hold."""
    text, reasoning, choice = body.text, body.reasoning, body.tool_choice
    return {
        "model": model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_kept,
        "temperature": sampling.temperature,
        "text": {
            "format": (text.format if text is not None else None) or {"type": "text"},
            "verbosity": (text.verbosity if text is not None else None) or "medium",
        },
        "tool_choice": choice if isinstance(choice, str) else _dumped(choice) or "auto",
        "tools": [tool.fields() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _dumped(choice: Any) -> Mapping[str, Any] | None:
    return None if choice is None else choice.model_dump(exclude_unset=True)


def _page(items: list[ResponseFields], query: ItemQuery) -> ResponseFields:
    ordered = items if query.order == "asc" else items[::-1]
    if query.after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == query.after]
        if not places:
            raise InvalidRequest("after: no item has this id", param="after")
        ordered = ordered[places[0] + 1 :]
    data = ordered[: query.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": len(ordered) > len(data),
    }
