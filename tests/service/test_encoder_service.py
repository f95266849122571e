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
OTHER = TenantSettings("other")
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
        both = (callers.caller(), replace(callers.caller(), tenant="other", settings=OTHER))
        running = [asyncio.ensure_future(encode(served, WORDS, one)) for one in both]
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
        assert callers.left() == [9, 97]
        source.gate.set()
        for answer in await asyncio.gather(*running):
            assert answer.total_tokens == 3 and np.isfinite(answer.vectors).all()
        ended = [item for item in callers.receipts if item.outcome == "stop"]
        assert {item.request_id for item in ended} == {"embd-1", "embd-2"}
        assert all(item.prompt_tokens == 3 and item.slowest for item in ended)
        assert (await encode(served, WORDS, callers.caller())).total_tokens == 3

    asyncio.run(test())


def test_one_tenant_does_not_fill_the_queue() -> None:
    """Neither by requests nor by tokens; who is alone on a server without keys may."""

    async def test() -> None:
        callers, source = Callers(max_queue=16), HeldVectors()
        served = await callers.start(source=source)
        encode, made = callers.service.encode, list[asyncio.Future[Any]]()

        async def fill(tenant: str, request: EncodeRequest = WORDS, share: float = 1.0) -> int:
            """How many are taken until one is refused."""
            settings = TenantSettings(tenant, share=share)
            for count in range(100):
                caller = replace(callers.caller(), tenant=tenant, settings=settings)
                task = asyncio.ensure_future(encode(served, request, caller))
                await asyncio.sleep(0)
                if task.done():
                    with pytest.raises(Overloaded) as refused:
                        await task
                    assert refused.value.retry_after_s
                    is_full = callers.service.health()[STATIC]["queued"] == 16
                    assert is_full or "of yours wait" in refused.value.message
                    return count
                made.append(task)
            raise AssertionError("nothing was refused")

        assert await fill("greedy") == 12
        assert await fill("second") == 3
        # there is room for one who comes then
        assert await fill("third") == 1
        assert callers.service.health()[STATIC]["queued"] == 16
        source.gate.set()
        await asyncio.gather(*made)
        made.clear()
        source.gate.clear()
        # by their shares
        assert await fill("greedy", share=0.25) == 6
        assert await fill("second") == 7
        source.gate.set()
        await asyncio.gather(*made)
        made.clear()
        source.gate.clear()
        limits = replace(served.limits, max_waiting_tokens=40)
        callers.service._queues.clear()
        served = replace(served, limits=limits)
        # three tokens each
        assert await fill("greedy") == 10
        await encode_now(callers, served, source, "second")
        source.gate.set()
        await asyncio.gather(*made)

    async def encode_now(
        callers: Callers, served: ServedEncoder, source: HeldVectors, tenant: str
    ) -> None:
        caller = replace(callers.caller(), tenant=tenant, settings=None)
        task = asyncio.ensure_future(callers.service.encode(served, WORDS, caller))
        await asyncio.sleep(0.01)
        assert not task.done()
        source.gate.set()
        assert (await task).total_tokens == 3

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
