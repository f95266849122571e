"""A job's text while it comes, for all who watch: kept once, read at each one's own pace."""

from __future__ import annotations

import asyncio

from coterie.core.plan import RoutePlan


class LiveJob:
    """A run that is repeated draws the same text: it only ever gets longer."""

    def __init__(self) -> None:
        self.plan: RoutePlan | None = None
        self.ended = False
        self.followers = 0
        self._parts: list[str] = []
        self._length = 0
        self._changed = asyncio.Event()

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def since(self, count: int) -> tuple[str, int]:
        """What came behind the first `count` parts, and how many parts there are."""
        return "".join(self._parts[count:]), len(self._parts)

    def feed(self, offset: int, text: str) -> None:
        """`text` stands at this offset of the answer."""
        new = text[max(0, self._length - offset) :]
        if new:
            self._parts.append(new)
            self._length += len(new)
            self.tell()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> bool:
        """Whether anything is new; at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
