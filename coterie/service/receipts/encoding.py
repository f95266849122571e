"""The receipt of a request to an encoder: stamped before it is computed, completed at its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coterie.core.errors import CoterieError
from coterie.core.receipt import CLOSED, OPEN, Receipt, ReceiptPlan, ReceiptTimings, reason_of
from coterie.core.request import AUTO, own_tenant
from coterie.service.receipts.stamp import shown_model, slowest

if TYPE_CHECKING:
    from coterie.obs.tracing.spans import InferenceTrace
    from coterie.service.receipts.stamp import OnReceipt, ReceiptWriter

# outcomes: the vectors were sent, the caller left
DONE, LEFT = "stop", "abort"


@dataclass(frozen=True, slots=True)
class EncodingAsked:
    """A request to an encoder as it arrived. `request_id` is unique: no caller can choose it."""

    request_id: str
    tenant: str
    # as the caller sent it
    model: str
    # what the caller wants, as traces name it: embeddings, rerank or score
    operation: str
    # time.monotonic()
    arrived_at: float


class EncodingReceipt:
    """The receipt of one request while it is computed; its trace notes the same moments."""

    __slots__ = ("_on_receipt", "_plan", "_receipt", "_trace", "_writer", "asked")

    def __init__(
        self,
        writer: ReceiptWriter,
        asked: EncodingAsked,
        on_receipt: OnReceipt | None = None,
    ) -> None:
        self._writer, self.asked, self._on_receipt = writer, asked, on_receipt
        self._trace: InferenceTrace | None = None
        if writer.tracer is not None:
            self._trace = writer.tracer.encoding(asked.operation, asked.model, asked.arrived_at)
        # None until the encoder is found, and until the request is admitted or refused
        self._plan: ReceiptPlan | None = None
        self._receipt: Receipt | None = None

    def found(self, specialist: str, replica: str) -> None:
        asked = self.asked
        is_named = asked.model not in ("", AUTO)
        self._plan = ReceiptPlan(
            model=shown_model(asked.model),
            specialist=specialist,
            replica=replica,
            adapters=(),
            intent="",
            confidence=1.0,
            reasons=("named by the caller" if is_named else "the first encoder that fits",),
            breaker=CLOSED,
            shadow="",
            router_version="",
            config_digest=self._writer.config_digest(),
        )
        if self._trace is not None:
            self._trace.planned()

    def admitted(self, num_tokens: int) -> None:
        """Call it before the tokens are handed to the encoder."""
        self._change(replace(self._made("admitted", OPEN), prompt_tokens=num_tokens))
        if self._trace is not None:
            self._trace.admitted()

    def finished(self, compute_s: float) -> None:
        """The vectors are there; they were computed for so long."""
        ended = time.monotonic()
        total_s = ended - self.asked.arrived_at
        compute_s = min(compute_s, total_s)
        timings = ReceiptTimings(
            queue_ms=_ms(total_s - compute_s), prefill_ms=_ms(compute_s), total_ms=_ms(total_s)
        )
        opened = self._receipt or self._made("admitted", OPEN)
        receipt = replace(opened, outcome=DONE, timings=timings, slowest=slowest(timings))
        self._change(receipt)
        if self._trace is not None:
            self._trace.encoded(ended - compute_s, ended, receipt)
            self._end_own_trace()

    def failed(self, error: CoterieError) -> None:
        """It was refused, or failed while it was computed. One whose encoder was not found gets
        its receipt from where its answer is written."""
        if self._plan is not None:
            receipt = self._receipt or self._made("refused", OPEN)
            plan = replace(receipt.plan, reasons=(*receipt.plan.reasons, reason_of(error)))
            self._stopped(replace(receipt, plan=plan, outcome=error.code))
        if self._trace is not None:
            self._trace.refused(error.code, self._receipt)
            self._end_own_trace()

    def left(self) -> None:
        """The caller has left."""
        self._stopped(replace(self._receipt or self._made("refused", OPEN), outcome=LEFT))
        if self._trace is not None:
            self._trace.refused(LEFT, self._receipt)
            self._end_own_trace()

    def _stopped(self, receipt: Receipt) -> None:
        total_ms = _ms(time.monotonic() - self.asked.arrived_at)
        self._change(replace(receipt, timings=ReceiptTimings(total_ms=total_ms)))

    def _made(self, admission: str, outcome: str) -> Receipt:
        assert self._plan is not None
        asked = self.asked
        return Receipt(
            request_id=asked.request_id,
            tenant=own_tenant(asked.tenant),
            arrived_at=time.time() - (time.monotonic() - asked.arrived_at),
            plan=self._plan,
            admission=admission,
            outcome=outcome,
        )

    def _change(self, receipt: Receipt) -> None:
        self._receipt = receipt
        self._writer.keep(receipt)
        if self._on_receipt is not None:
            self._on_receipt(receipt)

    def _end_own_trace(self) -> None:
        if self._trace is not None and self._trace.owns_root:
            self._trace.root.end(self.asked.request_id)


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)
