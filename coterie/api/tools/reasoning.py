"""Parts a thinking model's text into reasoning and answer, also while it streams.

Works on text alone: the marks come from the tokenizer. White space around the marks belongs to
neither part.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coterie.core.request import Chat
from coterie.models.text.tokenizer import is_long

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

REASONING, CONTENT = "reasoning", "content"
Piece = tuple[str, str]


class ReasoningSplitter:
    """Feeds on deltas of one choice and gives back (kind, text) pieces.

    Holds back what may still become a mark, and white space that may stand before one.
    """

    def __init__(self, marks: tuple[str, str], inside: bool) -> None:
        self.opening, self.closing = marks
        # None: nothing but white space so far, so the opening mark may still come
        self.kind: str | None = REASONING if inside else None
        self.held = ""
        self.fresh = True
        self.reasoning_tokens = 0

    def feed(self, text: str, num_tokens: int = 0) -> list[Piece]:
        if self.kind != CONTENT:
            self.reasoning_tokens += num_tokens
        self.held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            continue
        return pieces

    def finish(self) -> list[Piece]:
        """What is left when the choice has ended: a mark that never completed is text."""
        kind, text = self.kind or CONTENT, self.held
        self.held = ""
        if kind == REASONING:
            text = text.rstrip()
        return [(kind, text)] if text else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """One decision; True when there may be another."""
        if self.fresh:
            self.held = self.held.lstrip()
        if not self.held:
            return False
        if self.kind is None:
            return self._begin()
        if self.kind == REASONING:
            return self._reason(pieces)
        self._give(pieces, CONTENT, len(self.held))
        return False

    def _begin(self) -> bool:
        if self.held.startswith(self.opening):
            self.kind, self.held = REASONING, self.held[len(self.opening) :]
            return True
        if self.opening.startswith(self.held):
            return False
        self.kind, self.reasoning_tokens = CONTENT, 0
        return True

    def _reason(self, pieces: list[Piece]) -> bool:
        end = self.held.find(self.closing)
        if end >= 0:
            self._give(pieces, REASONING, len(self.held[:end].rstrip()))
            self.held = self.held.lstrip()[len(self.closing) :]
            self.kind, self.fresh = CONTENT, True
            return True
        safe = self.held[: len(self.held) - overlap(self.held, self.closing)].rstrip()
        self._give(pieces, REASONING, len(safe))
        return False

    def _give(self, pieces: list[Piece], kind: str, size: int) -> None:
        if size:
            pieces.append((kind, self.held[:size]))
            self.held = self.held[size:]
            self.fresh = False


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


async def opened_thought(tokenizer: Tokenizer, chat: Chat) -> bool | None:
    """Whether the prompt ends inside a thought (True) or before one (False); None when the model
    does not think, or not any more."""
    if tokenizer.reasoning is None:
        return None
    if is_long(chat):
        text = await asyncio.to_thread(tokenizer.render, chat)
    else:
        text = tokenizer.render(chat)
    opening, closing = tokenizer.reasoning
    end = text.rstrip()
    return None if end.endswith(closing) else end.endswith(opening)
