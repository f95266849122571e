"""All encoders of a server: starts them, finds them by name, and takes requests through them.

A request: check the number of inputs, take a place and the tenant's quota, tokenise, compute, shape
the vectors. Refusals are typed and change nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.core.encoders import EncoderSettings
from coterie.core.ensemble import TenantSettings
from coterie.core.errors import (
    CoterieError,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from coterie.core.request import AUTO
from coterie.models.encoder.tokens import (
    EncoderTokens,
    InputTruncation,
    TextInput,
    check_ids,
    check_length,
)
from coterie.obs.metrics import MetricRegistry
from coterie.service.encoders.queue import EncoderQueue
from coterie.service.encoders.served import ServedEncoder
from coterie.service.encoders.start import EncoderStart
from coterie.service.quotas import TenantQuotas
from coterie.service.receipts.encoding import EncodingReceipt
from coterie.workers.encoder.replica import ComputedVectors

# texts with so few characters are tokenised at once: a thread would take longer
INLINE_CHARS, INLINE_TEXTS = 4000, 16
Vectors = NDArray[np.float32]
T = TypeVar("T")
MAX_NAMED = 12
HOW_TO = (
    "this server has no encoder; start it with --encoder MODEL (`static` is shipped), or add a "
    '[[specialists]] table with kind = "encoder"'
)


@dataclass(frozen=True, slots=True)
class EncodeCaller:
    """Who asks: the tenant with its settings, what it may use, and until when it waits. `job_id`
    is unique: no caller can choose it."""

    job_id: str
    tenant: str
    receipt: EncodingReceipt
    settings: TenantSettings | None = None
    # empty = all
    allowed: tuple[str, ...] = ()
    # time.monotonic()
    deadline: float | None = None

    @property
    def owner(self) -> str:
        """Whose part of a queue it uses: all keys of a tenant have one."""
        return self.tenant if self.settings is None else self.settings.name

    @property
    def share(self) -> float:
        """Its share among tenants that wait."""
        return 1.0 if self.settings is None else self.settings.share


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Texts, or token ids of the encoder's own vocabulary with the field that each came from.
    `param`: the field with most of them."""

    texts: tuple[TextInput, ...] = ()
    token_lists: tuple[tuple[Sequence[int], str], ...] = ()
    special: bool = True
    cut: InputTruncation | None = None
    param: str = "input"

    @property
    def num_inputs(self) -> int:
        return len(self.texts) + len(self.token_lists)


@dataclass(frozen=True, slots=True)
class EncodeAnswer:
    """One row for each input, and the tokens of each."""

    vectors: Vectors
    num_tokens: tuple[int, ...]

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


@dataclass(slots=True)
class OpenEncoding:
    """A request in flight. Times are time.monotonic()."""

    caller: EncodeCaller
    served: ServedEncoder
    num_inputs: int
    # 0 until it is tokenised
    num_tokens: int = 0
    # when it got a place among those that wait and run, and by when it should be done
    placed_at: float | None = None
    due_at: float = 0.0


class EncoderService:
    """For one event loop."""

    def __init__(
        self, starts: Sequence[EncoderStart], max_queue: int, drain_s: float = 30.0
    ) -> None:
        self._starts, self._max_queue, self._drain_s = tuple(starts), max_queue, drain_s
        self._served: dict[str, ServedEncoder] = {}
        self._quotas = TenantQuotas()
        self._registry: MetricRegistry | None = None
        # one thread: tokenising is short, and large requests wait for each other
        self._thread = ThreadPoolExecutor(1, "encoder-tokens")
        self._queues: dict[str, EncoderQueue] = {}
        # by the job's id
        self.open: dict[str, OpenEncoding] = {}
        self._closed = False

    def bind(self, registry: MetricRegistry, quotas: TenantQuotas) -> None:
        """The metrics and quotas of the server, shared with the other endpoints."""
        self._registry, self._quotas = registry, quotas

    @property
    def served(self) -> Mapping[str, ServedEncoder]:
        return self._served

    def names(self) -> tuple[str, ...]:
        """The names of all encoders, also of those that still load."""
        return tuple(item.name for item in self._starts)

    async def start(self) -> None:
        tasks = [asyncio.ensure_future(item.start()) for item in self._starts]
        try:
            served = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            raise
        self._served = {item.name: item for item in served}

    async def drain(self) -> None:
        self._closed = True
        waits = [item.replica.drain(self._drain_s) for item in self._starts if item.replica]
        await asyncio.gather(*waits)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(item.replica.close() for item in self._starts if item.replica))
        self._thread.shutdown(wait=False)

    def refuse_generation(self, *models: str | None) -> None:
        """Raises InvalidRequest if a request for text names an encoder. `models`: the name that was
        sent, and what it means."""
        for model in set(models) & set(self.names()):
            raise InvalidRequest(
                f"`{model}` is an encoder and writes no text: it answers /v1/embeddings, "
                "/v1/rerank and /v1/score; GET /v1/models lists the others",
                param="model",
            )

    def find(
        self,
        model: str | None,
        caller: EncodeCaller,
        writes_text: Callable[[str], bool],
        *,
        ranks: bool,
    ) -> ServedEncoder:
        """The encoder of that name. None and `auto`: the first that fits. `ranks`: a cross-encoder
        is welcome; otherwise vectors are needed. `writes_text`: whether a name means a model of
        another kind."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        if not self._starts:
            raise InvalidRequest(HOW_TO, param="model")
        if not self._served:
            raise Unavailable("the encoders are still loading", retry_after_s=2.0)
        usable = [
            item
            for item in self._served.values()
            if not caller.allowed or item.name in caller.allowed
        ]
        if model in (None, AUTO):
            fitting = [item for item in usable if ranks or not item.is_cross]
            fitting.sort(key=lambda item: ranks and not item.is_cross)
            if not fitting:
                raise _none_fits(bool(caller.allowed))
            return fitting[0]
        found = self._served.get(model or "")
        if found is None:
            raise _unknown(str(model), writes_text(str(model)), [item.name for item in usable])
        if caller.allowed and found.name not in caller.allowed:
            raise Forbidden(f"this key may not use the encoder `{found.name}`", param="model")
        if found.is_cross and not ranks:
            raise InvalidRequest(
                f"`{found.name}` scores pairs of texts and makes no embeddings: it answers "
                "/v1/rerank and /v1/score",
                param="model",
            )
        return found

    async def encode(
        self, served: ServedEncoder, request: EncodeRequest, caller: EncodeCaller
    ) -> EncodeAnswer:
        """Raises a typed error before any work for what does not fit."""
        begun, receipt = time.monotonic(), caller.receipt
        item = OpenEncoding(caller, served, request.num_inputs)
        self.open[caller.job_id] = item
        try:
            _check_number(request, served.limits)
            queue, share = self._queue(served), caller.share
            with (
                queue.enter(caller.owner, share),
                self._quotas.enter(caller.settings) as quota,
            ):
                inputs = await _until(caller.deadline, self._tokens_of(served, request))
                total = sum(len(item.ids) for item in inputs)
                quota.reserve(total, 0)
                with queue.place(caller.owner, share, total):
                    item.num_tokens, item.placed_at = total, time.monotonic()
                    item.due_at = item.placed_at + queue.expected_s()
                    receipt.admitted(total)
                    work = served.source.encode(caller.job_id, caller.tenant, inputs)
                    try:
                        computed = await _until(caller.deadline, work)
                    except asyncio.CancelledError:
                        # the caller has left: what was begun for it counts
                        quota.settle(total)
                        raise
                _check_finite(computed, served.name)
                quota.settle(total)
        except CoterieError as error:
            self._count_refusal(served.name, error)
            receipt.failed(error)
            raise
        except asyncio.CancelledError:
            receipt.left()
            raise
        except Exception:
            receipt.failed(InternalError("the server failed to answer"))
            raise
        finally:
            self.open.pop(caller.job_id, None)
        receipt.finished(computed.compute_s)
        self._count(served.name, request.num_inputs, total, time.monotonic() - begun)
        return EncodeAnswer(computed.rows, tuple(len(item.ids) for item in inputs))

    def waiting_beside(self, item: OpenEncoding) -> int:
        """Tokens of other requests that wait or run at the same encoder."""
        return max(self._queue(item.served).tokens.used - item.num_tokens, 0)

    def _queue(self, served: ServedEncoder) -> EncoderQueue:
        queue = self._queues.get(served.name)
        if queue is None:
            most = served.limits.max_waiting_tokens
            queue = self._queues[served.name] = EncoderQueue(served.name, self._max_queue, most)
        return queue

    async def _tokens_of(
        self, served: ServedEncoder, request: EncodeRequest
    ) -> list[EncoderTokens]:
        chars = sum(len(item.text) + len(item.second or "") for item in request.texts)
        ids = sum(len(item) for item, _ in request.token_lists)
        if chars + ids <= INLINE_CHARS and request.num_inputs <= INLINE_TEXTS:
            return _tokenised(served, request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _tokenised, served, request)

    def _count(self, name: str, num_inputs: int, tokens: int, seconds: float) -> None:
        if self._registry is not None:
            self._registry.value("coterie_encoder_inputs", name).add(num_inputs)
            self._registry.value("coterie_encoder_tokens", name).add(tokens)
            self._registry.histogram("coterie_encoder_request_seconds", name).observe(seconds)

    def _count_refusal(self, name: str, error: CoterieError) -> None:
        if self._registry is not None:
            self._registry.value("coterie_rejections", name, error.code).add()

    def measure(self) -> None:
        """Update the gauges."""
        if self._registry is None:
            return
        for name, item in self._served.items():
            self._registry.value("coterie_encoder_waiting_tokens", name).set(
                self._queue(item).tokens.used
            )
            if item.replica is not None:
                stats = item.replica.stats()
                restarts = stats.pop("restarts")
                replica = item.replica.name
                self._registry.value("coterie_worker_restarts", replica).set(restarts)
                up = float(item.replica.healthy())
                self._registry.value("coterie_worker_up", replica).set(up)
                self._registry.engine_stats(replica, stats)

    def health(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, item in self._served.items():
            replicas = [] if item.replica is None else [item.replica]
            found[name] = {
                "ready": all(one.healthy() for one in replicas),
                "kind": "encoder",
                "replicas": {one.name: one.healthy() for one in replicas},
                "states": {one.name: one.state() for one in replicas},
                "queued": self._queue(item).requests.used,
                "max_model_len": item.context,
                "dimensions": None if item.is_cross else item.dim,
                **dict(item.details),
            }
        return found


async def _until(deadline: float | None, work: Awaitable[T]) -> T:
    """The result of `work`. Raises DeadlineExceeded at the deadline, a time.monotonic()."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the vectors were ready") from None


def _check_number(request: EncodeRequest, limits: EncoderSettings) -> None:
    if request.num_inputs > limits.max_inputs:
        raise InvalidRequest(
            f"{request.num_inputs} inputs are more than the limit of {limits.max_inputs} for one "
            "request; send several requests",
            param=request.param,
        )


def _check_finite(computed: ComputedVectors, name: str) -> None:
    """JSON has no form for other values, and an order by them means nothing."""
    if not np.isfinite(computed.rows).all():
        raise InternalError(f"the encoder `{name}` computed values that are no numbers")


def _tokenised(served: ServedEncoder, request: EncodeRequest) -> list[EncoderTokens]:
    """The tokens of all inputs; stops as soon as they are too many."""
    limits = served.limits
    found: list[EncoderTokens] = []
    total = 0
    for tokens in _each(served, request):
        total += len(tokens.ids)
        if total > limits.max_request_tokens:
            raise InvalidRequest(
                f"the inputs have more than {limits.max_request_tokens} tokens together, the limit "
                "for one request; send several requests",
                param=request.param,
            )
        found.append(tokens)
    return found


def _each(served: ServedEncoder, request: EncodeRequest) -> Iterator[EncoderTokens]:
    tokenizer, cut = served.tokenizer, request.cut
    for ids, param in request.token_lists:
        limit = tokenizer.limit if cut is None else min(cut.most, tokenizer.limit)
        if cut is not None:
            ids = ids[-limit:] if cut.side == "left" else ids[:limit]
        check_length(len(ids), limit, param)
        known = check_ids(ids, tokenizer.vocab_size, param)
        yield EncoderTokens(known, len(known))
    yield from tokenizer.encode(request.texts, request.special, cut)


def _none_fits(is_limited: bool) -> CoterieError:
    if is_limited:
        return Forbidden("this key may use no encoder that does this", param="model")
    return InvalidRequest(
        "every encoder of this server scores pairs of texts, and none makes embeddings",
        param="model",
    )


def _unknown(model: str, writes_text: bool, encoders: Sequence[str]) -> CoterieError:
    there = ", ".join(f"`{name}`" for name in encoders[:MAX_NAMED]) or "none"
    if writes_text:
        return InvalidRequest(
            f"`{model}` writes text and is no encoder; there is: {there}", param="model"
        )
    return NotFound(f"The encoder `{model[:80]}` does not exist; there is: {there}", param="model")


def shaped(vectors: Vectors, normalise: bool, dimensions: int | None) -> NDArray[np.float32]:
    """The first `dimensions` numbers, of unit length where the model or a cut asks for it. A vector
    of zeros stays zeros."""
    if dimensions is not None and dimensions < vectors.shape[1]:
        vectors, normalise = vectors[:, :dimensions], True
    if not normalise:
        return np.ascontiguousarray(vectors)
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    lengths = np.maximum(lengths, 1e-12)[:, None].astype(np.float32)
    return np.ascontiguousarray(vectors / lengths)
