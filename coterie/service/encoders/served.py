"""One encoder as requests see it: its tokens, its limits, and where its vectors are computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from coterie.core.encoders import STATIC, EncoderSettings
from coterie.models.encoder.tokens import (
    LEFT,
    EncoderTokenizer,
    EncoderTokens,
    InputTruncation,
    TextInput,
    check_length,
    check_size,
)
from coterie.routing.match.embed import StaticEmbedder, static
from coterie.workers.encoder.contract import EncodeJob
from coterie.workers.encoder.replica import ComputedVectors, EncoderReplica

# tokens of one input of the static table: it has no positions
STATIC_TOKENS = 8192


class VectorSource(Protocol):
    """Computes one row for each input."""

    async def encode(
        self, job_id: str, owner: str, inputs: Sequence[EncoderTokens]
    ) -> ComputedVectors: ...


@dataclass(frozen=True, slots=True)
class EncoderPrompts:
    """Texts that the model wants before its input: always, before a query, before a document."""

    always: str = ""
    query: str = ""
    document: str = ""


@dataclass(frozen=True, slots=True)
class ServedEncoder:
    name: str
    model: str
    created: int
    # of its vectors; 1 for a cross-encoder
    dim: int
    limits: EncoderSettings
    tokenizer: EncoderTokenizer
    source: VectorSource
    normalise: bool
    # it scores pairs and makes no vectors
    is_cross: bool = False
    prompts: EncoderPrompts = EncoderPrompts()
    # None = it is computed in this process
    replica: EncoderReplica | None = None
    # the kind of network, and what names its weights
    family: str = STATIC
    fingerprint: str = ""
    weight_bytes: int = 0
    # what /health says about it
    details: tuple[tuple[str, Any], ...] = ()

    @property
    def context(self) -> int:
        return self.tokenizer.limit


class ProcessVectors:
    """Vectors of an encoder in a process of its own."""

    def __init__(self, replica: EncoderReplica) -> None:
        self._replica = replica

    async def encode(
        self, job_id: str, owner: str, inputs: Sequence[EncoderTokens]
    ) -> ComputedVectors:
        lengths = np.asarray([len(item.ids) for item in inputs], np.int32)
        splits = np.asarray([item.split for item in inputs], np.int32)
        is_paired = bool((splits != lengths).any())
        ids = np.concatenate([item.ids for item in inputs])
        job = EncodeJob(
            job_id, owner, ids.tobytes(), lengths.tobytes(), splits.tobytes() if is_paired else b""
        )
        return await self._replica.encode(job)


class StaticVectors:
    """Vectors of the shipped table: a sum of word vectors, made in this process without torch."""

    def __init__(self, table: StaticEmbedder | None = None) -> None:
        self.table = table or static()

    async def encode(
        self, job_id: str, owner: str, inputs: Sequence[EncoderTokens]
    ) -> ComputedVectors:
        if sum(len(item.ids) for item in inputs) <= _INLINE_TOKENS:
            return self._sum(inputs)
        return await asyncio.to_thread(self._sum, inputs)

    def _sum(self, inputs: Sequence[EncoderTokens]) -> ComputedVectors:
        begun = time.monotonic()
        rows = np.stack([self.table.embed_rows(item.ids) for item in inputs])
        return ComputedVectors(rows, time.monotonic() - begun)


# so few that a thread would take longer
_INLINE_TOKENS = 512


class StaticTokenizer:
    """Words and pieces of words of the shipped table. Words that are not in it have no token."""

    def __init__(self, table: StaticEmbedder, limit: int) -> None:
        self._table, self.limit = table, limit
        self.vocab_size = table.num_rows

    def encode(
        self, inputs: Sequence[TextInput], special: bool, cut: InputTruncation | None
    ) -> Iterator[EncoderTokens]:
        limit = self.limit if cut is None else min(cut.most, self.limit)
        for item in inputs:
            check_size(item, limit)
            is_left = cut is not None and cut.side == LEFT
            rows = self._table.rows(item.text, _ALL if is_left else limit)
            if cut is not None:
                rows = rows[-limit:] if is_left else rows[:limit]
            check_length(len(rows), limit, item.param)
            yield EncoderTokens(np.asarray(rows, np.int32), len(rows))


_ALL = 10**9
