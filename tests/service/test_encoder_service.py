"""service/encoders: places, quotas and receipts of requests that are refused, left or go wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from coterie.core.config import SpecialistSettings
from coterie.core.encoders import ENCODER, STATIC, EncoderSettings
from coterie.core.ensemble import TenantSettings
from coterie.core.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded
from coterie.core.receipt import Receipt
from coterie.models.encoder.tokens import EncoderTokens, TextInput
from coterie.obs.metrics import MetricRegistry
from coterie.routing.match.embed import StaticEmbedder
from coterie.service.encoders.served import ServedEncoder, StaticVectors
from coterie.service.encoders.service import EncodeCaller, EncodeRequest, EncoderService
from coterie.service.encoders.start import EncoderStart
from coterie.service.quotas import TenantQuotas
from coterie.service.receipts.encoding import EncodingAsked, EncodingReceipt
from coterie.service.receipts.stamp import ReceiptWriter
from coterie.service.records.log import InferenceRecords
from coterie.workers.encoder.replica import ComputedVectors

ACME = TenantSettings("acme", requests_per_minute=10, tokens_per_minute=100)
WORDS = EncodeRequest((TextInput("the quick fox", "input"),))


class HeldVectors(StaticVectors):
    """The shipped table, behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def encode(
        self, job_id: str, owner: str, inputs: Sequence[EncoderTokens]
    ) -> ComputedVectors:
        await self.gate.wait()
        return await super().encode(job_id, owner, inputs)


class Callers:
    """A service with one encoder; what its callers were told is in `receipts`."""

    def __init__(self, max_queue: int = 8) -> None:
        settings = SpecialistSettings(ENCODER, model=STATIC, encoder=EncoderSettings(max_inputs=4))
        self.service = EncoderService([EncoderStart(STATIC, settings)], max_queue)
        self.quotas = TenantQuotas(lambda: 100.0)
        self.service.bind(MetricRegistry(), self.quotas)
        self.receipts: list[Receipt] = []
        self._writer = ReceiptWriter(InferenceRecords(None))
        self._number = 0

    async def start(self, **changes: Any) -> ServedEncoder:
        await self.service.start()
        return replace(self.service.served[STATIC], **changes)

    def caller(self, deadline: float | None = None) -> EncodeCaller:
        self._number += 1
        name = f"embd-{self._number}"
        asked = EncodingAsked(name, "acme", STATIC, "embeddings", time.monotonic())
        receipt = EncodingReceipt(self._writer, asked, self.receipts.append)
        receipt.found(STATIC, "")
        return EncodeCaller(name, "acme", receipt, ACME, deadline=deadline)

    def left(self) -> list[int]:
        return [item.remaining for item in self.quotas.state(ACME)]


def test_requests_are_bounded_before_any_work() -> None:
    async def test() -> None:
        callers, source = Callers(max_queue=2), HeldVectors()
        served = await callers.start(source=source)
        encode = callers.service.encode
        running = [asyncio.ensure_future(encode(served, WORDS, callers.caller())) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="2 requests wait") as full:
            await encode(served, WORDS, callers.caller())
        assert full.value.retry_after_s and callers.receipts[-1].outcome == "overloaded"
        assert callers.receipts[-1].admission == "refused"
        many = EncodeRequest((TextInput("a", "documents.0"),) * 5, param="documents")
        with pytest.raises(InvalidRequest, match="5 inputs are more") as refused:
            await encode(served, many, callers.caller())
        assert refused.value.param == "documents"
        # none of the refused took anything
        assert callers.left() == [8, 94]
        source.gate.set()
        for answer in await asyncio.gather(*running):
            assert answer.total_tokens == 3 and np.isfinite(answer.vectors).all()
        ended = [item for item in callers.receipts if item.outcome == "stop"]
        assert {item.request_id for item in ended} == {"embd-1", "embd-2"}
        assert all(item.prompt_tokens == 3 and item.slowest for item in ended)
        assert (await encode(served, WORDS, callers.caller())).total_tokens == 3

    asyncio.run(test())


def test_a_caller_who_leaves_pays_and_one_whose_deadline_passed_does_not() -> None:
    async def test() -> None:
        callers, source = Callers(), HeldVectors()
        served = await callers.start(source=source)
        leaving = asyncio.ensure_future(callers.service.encode(served, WORDS, callers.caller()))
        await asyncio.sleep(0.01)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert callers.receipts[-1].outcome == "abort" and callers.left() == [9, 97]
        late = callers.caller(deadline=time.monotonic() + 0.01)
        with pytest.raises(DeadlineExceeded):
            await callers.service.encode(served, WORDS, late)
        assert callers.receipts[-1].outcome == "deadline_exceeded"
        assert callers.receipts[-1].admission == "admitted" and callers.left() == [9, 97]
        assert callers.service.health()[STATIC]["queued"] == 0

    asyncio.run(test())


def test_values_that_are_no_numbers_are_an_error() -> None:
    async def test() -> None:
        callers, table = Callers(), StaticEmbedder()
        (row, *_) = table.rows("fox", 8)
        table._vectors = table._vectors.copy()
        table._vectors[row, 0] = np.nan
        served = await callers.start(source=StaticVectors(table))
        with pytest.raises(InternalError, match="no numbers"):
            await callers.service.encode(served, WORDS, callers.caller())
        assert callers.left() == [10, 100]
        assert callers.receipts[-1].outcome == "internal_error"
        assert b"fox" not in msgspec.json.encode(callers.receipts)
        good = EncodeRequest((TextInput("a dog", "input"),))
        assert np.isfinite(
            (await callers.service.encode(served, good, callers.caller())).vectors
        ).all()

    asyncio.run(test())


def test_long_words_do_not_stay_in_memory() -> None:
    table = StaticEmbedder()
    for letter in "abcdefgh":
        assert table.rows(letter * 5000, 64)
    assert table.rows("fox", 64)
    assert all(len(word) <= 40 for word in table._word_rows)
