"""OpenAI's files: upload, list, show, read, delete."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.api.batches.receive import LargeBody
from coterie.api.batches.types import FileBody, FileQuery
from coterie.api.body import check, query_of
from coterie.api.door import exchange_of
from coterie.api.errors import encode
from coterie.api.transport.multipart import (
    MultipartParser,
    PartData,
    PartEvent,
    PartStart,
    boundary_of,
)
from coterie.api.transport.sse import WhileConnected
from coterie.core.batch import StoredFile
from coterie.core.errors import InvalidRequest, NotFound, RequestTooLarge
from coterie.service.batches.files import FileStore, FileUpload

JSON = "application/json"
# the fields of a form beside the file, and the boundaries around the parts
MAX_FIELDS_BYTES, MAX_FORM_BYTES = 16_000, 200_000
FILE = "file"
_EXPIRES = "expires_after"


class FileEndpoints:
    def __init__(self, files: FileStore) -> None:
        self.files = files

    async def upload_file(self, request: Request) -> Response:
        """Upload a file of requests: multipart/form-data with `purpose` and `file`."""
        tenant = exchange_of(request.scope).tenant
        async with LargeBody(request) as sent:
            boundary = boundary_of(request.headers.get("content-type", ""))
            async with self.files.receive(tenant) as upload:
                form = _Form(upload)
                limit = upload.limit + MAX_FORM_BYTES
                parser = MultipartParser(boundary)
                async for piece in sent.pieces(limit):
                    for event in parser.feed(piece):
                        await form.take(event)
                parser.finish()
                body = form.checked()
                keep_s = None if body.expires_after is None else body.expires_after.seconds
                file = await upload.keep(body.purpose, form.filename, keep_s)
        return Response(encode(file_fields(file)), media_type=JSON)

    async def list_files(self, request: Request) -> Response:
        """List your files."""
        query = query_of(request, FileQuery)
        page = await self.files.page(
            exchange_of(request.scope).tenant,
            query.purpose,
            query.after,
            query.limit,
            query.order == "desc",
        )
        data = [file_fields(file) for file in page.files]
        return Response(encode(list_fields(data, page.has_more)), media_type=JSON)

    async def get_file(self, request: Request) -> Response:
        """Show a file."""
        return Response(encode(file_fields(await self._find(request))), media_type=JSON)

    async def file_content(self, request: Request) -> Response:
        """Read a file."""
        file = await self._find(request)
        return FileContent(await self.files.content(file), file.num_bytes)

    async def delete_file(self, request: Request) -> Response:
        """Delete a file. A batch that was created from it is not affected."""
        file_id = request.path_params["file_id"]
        await self.files.remove(file_id, exchange_of(request.scope).tenant)
        body = {"id": file_id, "object": "file", "deleted": True}
        return Response(encode(body), media_type=JSON)

    async def _find(self, request: Request) -> StoredFile:
        tenant = exchange_of(request.scope).tenant
        file = await self.files.find(request.path_params["file_id"], tenant)
        if not file.purpose.startswith("batch"):
            raise NotFound("there is no file with this id", param="file_id")
        return file


class _Form:
    """The parts of an upload. The file goes to disk as it arrives, the fields are collected."""

    def __init__(self, upload: FileUpload) -> None:
        self._upload = upload
        self._fields: dict[str, str] = {}
        self._part: PartStart | None = None
        self._value = bytearray()
        self._num_field_bytes = 0
        self._has_file = False
        self.filename = FILE

    async def take(self, event: PartEvent) -> None:
        if isinstance(event, PartStart):
            self._begin(event)
        elif isinstance(event, PartData):
            if self._is_file:
                await self._upload.write(event.data)
                return
            self._num_field_bytes += len(event.data)
            if self._num_field_bytes > MAX_FIELDS_BYTES:
                raise RequestTooLarge(f"the fields hold more than {MAX_FIELDS_BYTES} bytes")
            self._value += event.data
        elif self._part is not None and not self._is_file:
            self._end_field(self._part.name)

    @property
    def _is_file(self) -> bool:
        return self._part is not None and self._part.name == FILE

    def _begin(self, part: PartStart) -> None:
        self._part = part
        self._value.clear()
        if part.name == FILE:
            if self._has_file:
                raise InvalidRequest("file: send one file", param=FILE)
            self._has_file = True
            self.filename = part.filename or FILE
        elif part.filename is not None:
            raise InvalidRequest("send the file in the part `file`, and no other", param=FILE)
        elif part.name in self._fields:
            raise InvalidRequest("a field of the form is given twice")

    def _end_field(self, name: str) -> None:
        try:
            self._fields[name] = self._value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("a field of the form is not valid UTF-8") from None
        if name == "purpose":
            # before a large file is received for nothing
            check(FileBody, {"purpose": self._fields[name]})

    def checked(self) -> FileBody:
        fields: dict[str, Any] = {}
        expires: dict[str, Any] = {}
        for name, value in self._fields.items():
            if name == "purpose":
                fields[name] = value
            elif name == _EXPIRES:
                # as OpenAPI writes objects in forms
                fields[name] = _json_or_text(value)
            elif name.startswith(_EXPIRES + "[") and name.endswith("]"):
                inner = name[len(_EXPIRES) + 1 : -1]
                is_number = inner == "seconds" and value.isascii() and value.isdigit()
                expires[inner] = int(value[:12]) if is_number else value
        if expires and _EXPIRES in fields:
            raise InvalidRequest("a field of the form is given twice", param=_EXPIRES)
        if expires:
            fields[_EXPIRES] = expires
        body = check(FileBody, fields)
        if not self._has_file:
            raise InvalidRequest("file: is required", param=FILE)
        if not self._upload.writer.num_bytes:
            raise InvalidRequest("file: is empty", param=FILE)
        return body


def _json_or_text(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value


def file_fields(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_fields(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """One page as both vendors write it."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


class FileContent(Response):
    """The bytes of a file, sent as they are read."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        num_bytes: int,
        media_type: str = "application/octet-stream",
    ) -> None:
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        super().__init__(headers=headers, media_type=media_type)
        self.headers["content-length"] = str(num_bytes)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with WhileConnected(receive):
                async for piece in self._pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await self._pieces.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
