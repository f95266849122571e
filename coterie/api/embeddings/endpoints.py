"""The endpoints of encoders: parse the body, encode within the limits, write the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import parse
from coterie.api.dialect import caller_of
from coterie.api.door import exchange_of, new_id, note_receipt, note_specialist
from coterie.api.embeddings.render import INLINE_VALUES, embedding_list, rerank_list, score_list
from coterie.api.embeddings.types import (
    REFUSED,
    UNCHANGED,
    EmbeddingBody,
    EncodeFields,
    RerankBody,
    ScoreBody,
    TextDocument,
)
from coterie.api.transport.sse import WhileConnected
from coterie.core.errors import CoterieError, InvalidRequest, UnsupportedFeature
from coterie.models.encoder.tokens import LEFT, RIGHT, InputTruncation, TextInput
from coterie.service.encoders.served import ServedEncoder
from coterie.service.encoders.service import (
    EncodeAnswer,
    EncodeCaller,
    EncodeRequest,
    EncoderService,
    shaped,
)
from coterie.service.receipts.encoding import EncodingAsked
from coterie.service.receipts.stamp import OnReceipt

JSON = "application/json"
EMBEDDINGS, RERANK, SCORE = "embeddings", "rerank", "score"
# by operation; an answer without an id has a receipt with one
_ID_PREFIXES = {EMBEDDINGS: "embd-", RERANK: "rerank-", SCORE: "score-"}


class EncoderPipeline(Protocol):
    """The part of `service.pipeline.Pipeline` that these endpoints use."""

    @property
    def encoders(self) -> EncoderService: ...
    def encoder_name(self, model: str | None) -> str | None: ...
    def encode_caller(
        self, asked: EncodingAsked, deadline: float | None, on_receipt: OnReceipt | None = None
    ) -> EncodeCaller: ...
    def writes_text(self, model: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _ScoredTexts:
    """Both sides of the pairs: `first` has one text, or as many as `second`; and the fields that
    they came from."""

    first: Sequence[str]
    second: Sequence[str]
    first_field: str = "query"
    second_field: str = "documents"

    def paired(self) -> tuple[TextInput, ...]:
        """For a cross-encoder, which reads both texts together."""
        queries = self.first if len(self.first) > 1 else [self.first[0]] * len(self.second)
        return tuple(
            TextInput(query, f"{self.second_field}.{index}", text)
            for index, (query, text) in enumerate(zip(queries, self.second, strict=True))
        )

    def _field_of_first(self, index: int) -> str:
        return self.first_field if len(self.first) == 1 else f"{self.first_field}.{index}"

    def apart(self, served: ServedEncoder) -> tuple[TextInput, ...]:
        """For an encoder that makes vectors: the texts of one side, then those of the other."""
        prompts = served.prompts
        return (
            *(
                TextInput(prompts.query + text, self._field_of_first(index))
                for index, text in enumerate(self.first)
            ),
            *(
                TextInput(prompts.document + text, f"{self.second_field}.{index}")
                for index, text in enumerate(self.second)
            ),
        )


class EmbeddingEndpoints:
    def __init__(self, pipeline: EncoderPipeline, max_body_bytes: int) -> None:
        self._pipeline, self._max_body_bytes = pipeline, max_body_bytes

    async def embeddings(self, request: Request) -> Response:
        """Embed texts or token ids: one vector each."""
        body = await parse(request, EmbeddingBody, self._max_body_bytes)
        served, answer = await self.encoded(request, body)
        as_base64 = body.encoding_format == "base64"

        def written() -> bytes:
            vectors = shaped(answer.vectors, served.normalise, body.dimensions)
            return embedding_list(vectors, as_base64, served.name, answer.total_tokens)

        return Response(await off_loop_if_large(answer, written), media_type=JSON)

    async def encoded(
        self, request: Request, body: EmbeddingBody
    ) -> tuple[ServedEncoder, EncodeAnswer]:
        """The encoder that the body names, and its vectors of all inputs."""
        _refuse_fields(body.model_extra)
        served, caller = self._find(request, body.model, EMBEDDINGS)
        if body.dimensions is not None and body.dimensions > served.dim:
            raise InvalidRequest(
                f"dimensions: the vectors of `{served.name}` have {served.dim}", param="dimensions"
            )
        wanted = _embedding_inputs(body, served)
        return served, await self._encode(request, served, wanted, caller)

    async def rerank(self, request: Request) -> Response:
        """Rank documents by how well they answer a query."""
        body = await parse(request, RerankBody, self._max_body_bytes)
        _refuse_fields(body.model_extra)
        served, caller = self._find(request, body.model, RERANK)
        pairs = _ScoredTexts([_text(body.query)], [_text(item) for item in body.documents])
        cut = _cut(body, served, body.max_tokens_per_doc)
        scores, total = await self._scores(request, served, caller, pairs, cut)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        ranked = [(index, scores[index]) for index in order[: body.top_n]]
        shown = None if body.return_documents is False else [_shown(it) for it in body.documents]
        raw = rerank_list(caller.job_id, served.name, ranked, shown, total)
        return Response(raw, media_type=JSON)

    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        body = await parse(request, ScoreBody, self._max_body_bytes)
        _refuse_fields(body.model_extra)
        served, caller = self._find(request, body.model, SCORE)
        pairs, cut = _score_texts(body), _cut(body, served)
        scores, total = await self._scores(request, served, caller, pairs, cut)
        raw = score_list(caller.job_id, int(time.time()), served.name, scores, total)
        return Response(raw, media_type=JSON)

    def _find(
        self, request: Request, model: str | None, operation: str
    ) -> tuple[ServedEncoder, EncodeCaller]:
        """`operation`: embeddings, rerank or score."""
        exchange, about, pipeline = exchange_of(request.scope), caller_of(request), self._pipeline
        exchange.model = model or ""
        deadline = None if about.timeout_s is None else about.arrived_at + about.timeout_s
        asked = EncodingAsked(
            new_id(_ID_PREFIXES[operation]),
            about.tenant,
            exchange.model,
            operation,
            about.arrived_at,
        )
        caller = pipeline.encode_caller(asked, deadline, partial(note_receipt, exchange))
        try:
            served = pipeline.encoders.find(
                pipeline.encoder_name(model),
                caller,
                pipeline.writes_text,
                ranks=operation != EMBEDDINGS,
            )
        except CoterieError as error:
            caller.receipt.failed(error)
            raise
        caller.receipt.found(served.name, "" if served.replica is None else served.replica.name)
        note_specialist(exchange, served.name)
        return served, caller

    async def _encode(
        self, request: Request, served: ServedEncoder, wanted: EncodeRequest, caller: EncodeCaller
    ) -> EncodeAnswer:
        async with WhileConnected(request.receive):
            answer = await self._pipeline.encoders.encode(served, wanted, caller)
        exchange_of(request.scope).prompt_tokens = answer.total_tokens
        return answer

    async def _scores(
        self,
        request: Request,
        served: ServedEncoder,
        caller: EncodeCaller,
        pairs: _ScoredTexts,
        cut: InputTruncation | None,
    ) -> tuple[list[float], int]:
        """One score for each pair, and the tokens of all."""
        texts = pairs.paired() if served.is_cross else pairs.apart(served)
        wanted = EncodeRequest(texts, cut=cut, param=pairs.second_field)
        answer = await self._encode(request, served, wanted, caller)
        if served.is_cross:
            return answer.vectors[:, 0].tolist(), answer.total_tokens
        vectors = shaped(answer.vectors, True, None)
        left, right = np.split(vectors, [len(pairs.first)])
        cosines = np.einsum("ij,ij->i", np.broadcast_to(left, right.shape), right)
        return cosines.tolist(), answer.total_tokens


async def off_loop_if_large(answer: EncodeAnswer, written: Callable[[], bytes]) -> bytes:
    """What `written` gives; on a thread where it takes long."""
    if answer.vectors.size <= INLINE_VALUES:
        return written()
    return await asyncio.to_thread(written)


def _embedding_inputs(body: EmbeddingBody, served: ServedEncoder) -> EncodeRequest:
    cut, given = _cut(body, served), body.input
    special, prompt = body.add_special_tokens is not False, served.prompts.always
    if isinstance(given, str):
        return EncodeRequest((TextInput(prompt + given, "input"),), special=special, cut=cut)
    texts: list[TextInput] = []
    lists: list[tuple[Sequence[int], str]] = []
    ids = [item for item in given if isinstance(item, int)]
    if ids:
        lists.append((ids, "input"))
    for index, item in enumerate(given):
        if isinstance(item, str):
            texts.append(TextInput(prompt + item, f"input.{index}"))
        elif isinstance(item, list):
            lists.append((item, f"input.{index}"))
    return EncodeRequest(tuple(texts), tuple(lists), special, cut)


def _cut(
    body: EncodeFields, served: ServedEncoder, most: int | None = None
) -> InputTruncation | None:
    """How the caller wants inputs to be cut that are too long; None = not at all."""
    side = LEFT if body.truncation_side == "left" or body.truncate == "START" else RIGHT
    kept = body.truncate_prompt_tokens
    if kept == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens: must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    limits = [value for value in (kept, most) if value is not None and value > 0]
    asks = kept is not None or most is not None or body.truncate not in (None, False, "NONE")
    return InputTruncation(min([*limits, served.context]), side) if asks else None


def _text(item: str | TextDocument) -> str:
    return item if isinstance(item, str) else item.text


def _shown(item: str | TextDocument) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    return {"text": item.text, **(item.model_extra or {})}


def _score_texts(body: ScoreBody) -> _ScoredTexts:
    sides, fields = list[list[str]](), list[str]()
    for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")):
        given = [name for name in names if getattr(body, name) is not None]
        if len(given) != 1:
            shown = " or ".join(names[:2])
            raise InvalidRequest(f"give {shown}, and one of them", param=names[0])
        value = getattr(body, given[0])
        sides.append([value] if isinstance(value, str) else value)
        fields.append(given[0])
    first, second = sides
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; give one in text_1, or as "
            "many as in text_2",
            param="text_1",
        )
    return _ScoredTexts(first, second, *fields)


def _refuse_fields(extra: Mapping[str, Any] | None) -> None:
    for name, value in (extra or {}).items():
        why = REFUSED.get(name)
        if why is not None and value and value not in UNCHANGED.get(name, ()):
            raise UnsupportedFeature(f"{name}: {why}", param=name)
        if name in ("normalize", "normalized") and value is False:
            raise UnsupportedFeature(f"{name}: {why}", param=name)
