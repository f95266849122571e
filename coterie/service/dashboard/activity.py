"""The requests in flight and the newest receipts, in memory.

On the path of every request, so it only keeps references; `stage.py` reads them when somebody
looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from coterie.core.receipt import OPEN, Receipt
from coterie.service.meter import RequestMeter
from coterie.service.plan import RequestRun

# receipts that are kept in memory
MAX_RECENT = 256


@dataclass(frozen=True, slots=True)
class RecentReceipt:
    """`number` grows with every receipt; `receipt` is JSON."""

    number: int
    tenant: str
    receipt: bytes


class RequestActivity:
    """Used from one event loop."""

    def __init__(self) -> None:
        # by request id
        self.open: dict[str, FollowedRequest] = {}
        self.newest = 0
        self._recent: deque[RecentReceipt] = deque(maxlen=MAX_RECENT)

    def follow(self, run: RequestRun, meter: RequestMeter) -> FollowedRequest:
        """For a `with` statement around the run."""
        return FollowedRequest(self, run, meter)

    def ended(self, receipt: Receipt, encoded: bytes) -> None:
        """A receipt was written; one that is still open is in `open`."""
        if receipt.outcome != OPEN:
            self.newest += 1
            self._recent.append(RecentReceipt(self.newest, receipt.tenant, encoded))

    def since(self, number: int, tenant: str | None) -> Iterator[RecentReceipt]:
        """The receipts behind `number`, oldest first; of every tenant if `tenant` is None."""
        for item in self._recent:
            if item.number > number and tenant in (None, item.tenant):
                yield item


class FollowedRequest:
    """One request while it runs."""

    __slots__ = ("_activity", "meter", "run")

    def __init__(self, activity: RequestActivity, run: RequestRun, meter: RequestMeter) -> None:
        self._activity, self.run, self.meter = activity, run, meter

    def __enter__(self) -> None:
        self._activity.open[self.run.request.id] = self

    def __exit__(self, *_: object) -> None:
        self._activity.open.pop(self.run.request.id, None)
