"""Responses that are kept: the conversation before a request, and the end of background responses.

A background response is a job with the same id. Its row is open until the job has ended and
somebody asks for it, or the store looks through its open rows: then the job's answer is split into
items and written. Jobs are kept for less long than responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from coterie.api.body import aside
from coterie.api.dialect import CollectedChoice, DialectPipeline
from coterie.api.door import new_id
from coterie.api.errors import encode
from coterie.api.openai.types import MAX_MESSAGES
from coterie.api.responses.parse import reference_ids, resolved
from coterie.api.responses.render import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    ResponseFields,
    ResponseShape,
    error_fields,
    read_whole,
)
from coterie.api.responses.tools import response_tools
from coterie.api.responses.types import MAX_ID, ResponseItem, ResponsePrompt
from coterie.api.tools.base import ToolSet
from coterie.api.tools.read import TEXT_ONLY, AnswerSyntax, local_syntax, remote_syntax
from coterie.core import job as job_states
from coterie.core.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    RequestTooLarge,
    UnknownResponse,
    UnsupportedFeature,
    from_code,
)
from coterie.core.events import Delta, InferenceResult, Usage
from coterie.core.job import Job
from coterie.service.jobs.service import JobService
from coterie.service.responses.store import MAX_CHAIN, ResponseStore, StoredResponse

Body = TypeVar("Body", bound=ResponsePrompt)
# items of an input that may refer to kept ones
MAX_REFERENCES = 1000
_ITEM_IDS = {
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    "additional_tools": "at_",
}
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode


class OpenRequest(msgspec.Struct, omit_defaults=True):
    """What is needed to read the answer of a background response."""

    # the fields of the body that describe its tools
    tools: dict[str, Any]
    # who was expected to answer, and whether the prompt opened a thought for it
    specialist: str
    thought: bool | None = None


_decode_open = msgspec.json.Decoder(OpenRequest).decode


class KeptResponses:
    def __init__(
        self, service: DialectPipeline, store: ResponseStore, jobs: JobService, max_bytes: int
    ) -> None:
        """`max_bytes`: of one conversation."""
        self._service, self._store, self._jobs = service, store, jobs
        self._max_bytes = max_bytes

    async def history(self, body: ResponsePrompt, tenant: str) -> list[ResponseItem]:
        """The items of the conversation that the body continues."""
        if body.previous_response_id is None:
            return []
        rows = await self._chain(body.previous_response_id, tenant)
        last = await self._settled(rows[-1])
        if last["status"] not in (COMPLETED, INCOMPLETE):
            raise InvalidRequest(
                f"previous_response_id: that response is {last['status']}",
                param="previous_response_id",
            )
        size = sum(row.num_bytes for row in rows)
        return await aside(size, lambda: _read(_conversation(rows, last)))

    async def with_references(self, body: Body, tenant: str) -> Body:
        """The body with kept items in place of references to them."""
        ids = reference_ids(body)
        if not isinstance(body.input, list) or not ids:
            return body
        if len(ids) > MAX_REFERENCES:
            raise InvalidRequest(f"input: at most {MAX_REFERENCES} references", param="input")
        answers: list[bytes] = []
        if self._store.keeps:
            answers = await self._store.answers_with(ids, tenant, self._max_bytes)
        size = sum(map(len, answers))
        kept = await aside(size, _items_by_id, answers)
        # one item may be referred to often
        if size + sum(kept[one].num_bytes for one in ids if one in kept) > self._max_bytes:
            raise RequestTooLarge(
                f"the items that input refers to have more than {self._max_bytes} bytes",
                param="input",
            )
        items = {item_id: one.item for item_id, one in kept.items()}
        return body.model_copy(update={"input": resolved(body.input, items)})

    async def keep(
        self, response: ResponseFields, items: Sequence[ResponseFields], tenant: str, size: int
    ) -> ResponseFields:
        """Write a response that has ended. The result says whether it was kept. `size`: about how
        large its input is."""

        def row() -> StoredResponse:
            previous = response["previous_response_id"]
            return StoredResponse(response["id"], tenant, previous, encode(items), encode(response))

        ids = [item["id"] for item in response["output"]]
        kept = await self._store.keep(await aside(size, row), ids)
        return response if kept else response | {"store": False}

    async def open(
        self, response: ResponseFields, items: Sequence[ResponseFields], tenant: str,
        request: OpenRequest,
    ) -> None:  # fmt: skip
        """Write a background response before its job is accepted."""
        previous = response["previous_response_id"]
        await self._store.add(
            StoredResponse(
                response["id"], tenant, previous, encode(items), encode(response), encode(request)
            )
        )

    async def find(self, response_id: str, tenant: str) -> ResponseFields:
        """The response as it is now."""
        return await self._settled(await self._row(response_id, tenant))

    async def settle(self, response_id: str, tenant: str) -> None:
        """Write the end of a background response if its job has ended."""
        try:
            job = await self._jobs.get(response_id, tenant)
            if not job.active:
                await self.find(response_id, tenant)
        except NotFound:
            # its job is not written yet, or the response was deleted
            return

    async def delete(self, response_id: str, tenant: str) -> None:
        """Remove it. A background response that has not ended is cancelled first."""
        row = await self._row(response_id, tenant)
        if row.request is not None:
            await self._end_job(row)
        await self._store.remove(response_id, tenant)

    async def cancel(self, response_id: str, tenant: str) -> ResponseFields:
        row = await self._row(response_id, tenant)
        if not _decode_fields(row.response).get("background"):
            raise InvalidRequest(
                "Cannot cancel a synchronous response. Close its connection instead; only a "
                "response with background can be cancelled.",
                param="response_id",
            )
        if row.request is not None:
            await self._cancel_job(row)
        return await self.find(response_id, tenant)

    async def input_items(self, response_id: str, tenant: str) -> list[ResponseFields]:
        """All items that the model read, oldest first."""
        await self._row(response_id, tenant)
        rows = await self._chain(response_id, tenant)
        size = sum(row.num_bytes for row in rows)
        return await aside(size, _input_items, rows)

    async def _row(self, response_id: str, tenant: str) -> StoredResponse:
        row = await self._store.find(response_id, tenant) if self._store.keeps else None
        if row is None:
            raise NotFound(
                f"Response with id '{response_id[:MAX_ID]}' not found.", param="response_id"
            )
        return row

    async def _chain(self, response_id: str, tenant: str) -> list[StoredResponse]:
        rows = None
        if self._store.keeps:
            rows = await self._store.chain(response_id, tenant, self._max_bytes)
        if rows is None:
            raise UnknownResponse(
                f"Previous response with id '{response_id[:MAX_ID]}' not found.",
                param="previous_response_id",
            )
        if len(rows) > MAX_CHAIN or sum(row.num_bytes for row in rows) > self._max_bytes:
            raise RequestTooLarge(
                f"the conversation is longer than {MAX_CHAIN} responses or {self._max_bytes} bytes",
                param="previous_response_id",
            )
        return rows

    async def _settled(self, row: StoredResponse) -> ResponseFields:
        """The response of a row; if it is open and its job has ended, its end is written first."""
        fields = await aside(len(row.response), _decode_fields, row.response)
        if row.request is None:
            return fields
        try:
            job = await self._jobs.get(row.id, row.tenant)
        except NotFound:
            lost = InternalError("the job of this response is not kept any more")
            ended = fields | {"status": FAILED, "error": error_fields(lost)}
        else:
            if job.active:
                status = IN_PROGRESS if job.status == job_states.PROCESSING else QUEUED
                return fields | {"status": status}
            ended = await self._ended(fields, row.request, job)
        ids = [item["id"] for item in ended["output"]]
        if await self._store.finish(replace(row, response=encode(ended), request=None), ids):
            return ended
        # another request was first
        return _decode_fields((await self._row(row.id, row.tenant)).response)

    async def _ended(self, fields: ResponseFields, request: bytes, job: Job) -> ResponseFields:
        if job.result is not None:
            size = len(request) + len(job.text)
            return await aside(size, self._answered, fields, _decode_open(request), job.result)
        if job.status == job_states.CANCELLED or job.error is None:
            return fields | {"status": CANCELLED}
        error = from_code(job.error.code, job.error.message)
        return fields | {"status": FAILED, "error": error_fields(error)}

    def _answered(
        self, fields: ResponseFields, open_: OpenRequest, result: InferenceResult
    ) -> ResponseFields:
        telemetry = dict(result.telemetry or {})
        deltas = msgspec.convert(telemetry.pop("deltas"), list[Delta])
        usage = msgspec.convert(telemetry.pop("usage"), Usage)
        choice = CollectedChoice()
        for delta in deltas:
            choice.add(delta)
        tools = response_tools(ResponsePrompt.model_validate(open_.tools))
        shape = ResponseShape(
            fields["id"],
            {},
            tools,
            fields["created_at"],
            syntax=self._syntax(result.model, open_, tools.tool_set),
        )
        ended = shape.ended(read_whole(shape, choice), usage)
        new = ("status", "completed_at", "incomplete_details", "output", "usage")
        return fields | {name: ended[name] for name in new} | {"coterie": telemetry}

    def _syntax(self, specialist: str, open_: OpenRequest, tools: ToolSet | None) -> AnswerSyntax:
        try:
            tokenizer = self._service.tokenizer(specialist)
        except UnsupportedFeature:
            return remote_syntax(tools)
        except NotFound:
            # this server does not have the model any more
            return TEXT_ONLY
        thought = open_.thought if specialist == open_.specialist else None
        return local_syntax(tools, tokenizer, thought)

    async def _end_job(self, row: StoredResponse) -> None:
        """Cancel the job if it runs, and remove it."""
        try:
            _, removed = await self._jobs.delete(row.id, row.tenant)
            if not removed:
                await self._jobs.delete(row.id, row.tenant)
        except NotFound:
            return

    async def _cancel_job(self, row: StoredResponse) -> None:
        try:
            await self._jobs.cancel(row.id, row.tenant)
        except NotFound:
            return


def stored_items(body: ResponsePrompt) -> list[ResponseFields]:
    """The body's own items as they are kept and shown: with ids, messages with a list of parts."""
    if isinstance(body.input, str):
        return [_with_id({"type": "message", "role": "user", "content": _parts(body.input)})]
    return [_with_id(_shown(item)) for item in body.input or ()]


def _shown(item: ResponseItem) -> ResponseFields:
    fields = item.fields()
    if item.type is None:
        fields["type"] = "message"
    if isinstance(item.content, str):
        fields["content"] = _parts(item.content, item.role == "assistant")
    return fields


def _parts(text: str, is_output: bool = False) -> list[ResponseFields]:
    if is_output:
        return [{"type": "output_text", "text": text, "annotations": []}]
    return [{"type": "input_text", "text": text}]


def _with_id(fields: ResponseFields) -> ResponseFields:
    if not fields.get("id"):
        fields["id"] = new_id(_ITEM_IDS.get(fields.get("type", ""), "msg_"))
    return fields


def _conversation(rows: Sequence[StoredResponse], last: ResponseFields) -> Iterable[ResponseFields]:
    for row in rows:
        yield from _decode_items(row.items)
        fields = last if row is rows[-1] else _decode_fields(row.response)
        yield from fields["output"]


def _read(items: Iterable[ResponseFields]) -> list[ResponseItem]:
    read = [ResponseItem.model_validate(item) for item in islice(items, MAX_MESSAGES + 1)]
    if len(read) > MAX_MESSAGES:
        raise RequestTooLarge(
            f"the conversation has more than {MAX_MESSAGES} items", param="previous_response_id"
        )
    return read


def _input_items(rows: Sequence[StoredResponse]) -> list[ResponseFields]:
    items: list[ResponseFields] = []
    for row in rows:
        items += _decode_items(row.items)
        if row is not rows[-1]:
            items += _decode_fields(row.response)["output"]
    return items


class _KeptItem(NamedTuple):
    item: ResponseItem
    num_bytes: int


def _items_by_id(answers: Iterable[bytes]) -> dict[str, _KeptItem]:
    return {
        item["id"]: _KeptItem(ResponseItem.model_validate(item), len(encode(item)))
        for answer in answers
        for item in _decode_fields(answer)["output"]
    }
