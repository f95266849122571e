"""Turns the tokens of one choice into text that can be sent: whole characters, and no text that may
belong to a stop string.

The sent text plus the result of `flush` equals `tokenizer.decode` of the tokens, cut at the stop
string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer


class TokenPieces(dict[int, str | None]):
    """The text of each token inside a longer text; shared by all choices.

    None: bytes that are no characters by themselves. Special tokens have the text "" if they are
    skipped.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self._spoils: bool | None = None
        self._names: dict[int, tuple[str, bytes]] = {}

    def __missing__(self, token: int) -> str | None:
        piece = self[token] = self._read(token)
        return piece

    def name(self, token: int) -> tuple[str, bytes]:
        """See `token_name`."""
        found = self._names.get(token)
        if found is None:
            found = self._names[token] = token_name(self.tokenizer, token)
        return found

    def decode(self, ids: Sequence[int], before: int | None) -> str:
        """The text of `ids` after the token `before` (None: at the start of the output)."""
        if before is None:
            return self.text(ids)
        lead = self.text([before])
        return self.text([before, *ids])[len(lead) :]

    def text(self, ids: Sequence[int]) -> str:
        """The text of all tokens of a whole text."""
        return self.tokenizer.decode(ids, skip_special=self.skip_special)

    def spoils(self, run: Sequence[int], text: str) -> bool:
        """Whether an invalid byte after `run`, whose text is `text`, would change that text.

        This is so for byte-fallback decoders, and not for byte-level ones.
        """
        if self._spoils is None:
            self._spoils = self._is_spoiled(run, text)
        return self._spoils

    @cached_property
    def _bad_byte(self) -> int | None:
        """A token that is one byte and not a character."""
        for token in range(self.tokenizer.vocab_size):
            data = self.tokenizer.token_bytes(token)
            if len(data) == 1 and data[0] >= 0x80 and not self.tokenizer.is_special(token):
                return token
        return None

    def _read(self, token: int) -> str | None:
        # a model may have more rows than its tokenizer has tokens
        if token >= self.tokenizer.vocab_size:
            return ""
        if self.skip_special and self.tokenizer.is_special(token):
            return ""
        data = self.tokenizer.token_bytes(token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        # the text of a byte-fallback token for a plain character depends on its run. The token is
        # tried twice in a row, because a space at the start of a text may be dropped.
        if len(data) == 1 and self._is_spoiled([token, token], text):
            return None
        return text

    def _is_spoiled(self, ids: Sequence[int], text: str) -> bool:
        bad = self._bad_byte
        return bad is not None and not self.text([*ids, bad]).startswith(text)


@lru_cache(maxsize=32)
def pieces_of(tokenizer: Tokenizer, skip_special: bool = True) -> TokenPieces:
    return TokenPieces(tokenizer, skip_special)


def token_name(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """A unique name for a token in lists, and its bytes.

    A part of a character is named as OpenAI does: `bytes:` and its bytes.
    """
    data = tokenizer.token_bytes(token)
    if not data:
        # a model may have more rows than its tokenizer has tokens
        return f"token_id:{token}", data
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class TextOffsets:
    """The offset of each token in one text. Feed every token once.

    A token in the middle of a character has the offset of that character. A token without text has
    the offset of the next one.
    """

    def __init__(self, pieces: TokenPieces, start: int = 0) -> None:
        self._pieces = pieces
        self._text = Detokenizer(pieces)
        # length of the text before the tokens whose bytes are no characters yet
        self._length = start
        self._run = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_run = 0

    def push(self, token: int) -> int:
        at = self._length + self._num_run
        text = self._text.push(token)
        assert isinstance(text, str)
        self._length += len(text)
        if self._text.is_whole:
            self._run.reset()
            self._num_run = 0
        elif self._pieces[token] != "":
            self._num_run += len(self._run.decode(self._pieces.tokenizer.token_bytes(token)))
        return at


class StopMatch(NamedTuple):
    """A stop string was completed; `text` is the text before it that can be sent."""

    text: str
    match: str


class Detokenizer:
    """Feed every token once. Sent text is never taken back."""

    __slots__ = (
        "_firsts", "_held", "_include_stop", "_longest", "_run", "_stops", "last", "pieces",
    )  # fmt: skip

    def __init__(
        self, pieces: TokenPieces, stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        """With `include_stop` the stop string is part of the text."""
        self.pieces = pieces
        self._include_stop = include_stop
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        # text that may be the start of a stop string
        self._held = ""
        # tokens whose bytes are no characters yet
        self._run: list[int] = []
        # the last token that had text by itself; None before the first
        self.last: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no token waits for the rest of its character."""
        return not self._run

    def push(self, token: int, may_stop: bool = True) -> str | StopMatch:
        """The text that can be sent now, or the stop string that this token completed."""
        text = self.pieces[token]
        if text and self.last is not None and not self._run:
            self.last = token
        else:
            text = self._text(token)
        return self._hold(text, may_stop) if self._stops else text

    def push_whole(self, token: int) -> str | None:
        """The same as `push` for a known token that is whole characters behind whole ones, with no
        text in which a stop string may begin; otherwise None, and nothing changes."""
        text = self.pieces.get(token)
        if not text or self._run or self.last is None:
            return None
        if self._stops and (self._held or not self._firsts.isdisjoint(text)):
            return None
        self.last = token
        return text

    @property
    def sends_whole(self) -> bool:
        """Whether the next token, if it has a text of whole characters, is sent as that text; then
        `last` need only be set to it instead of `push`."""
        return not self._stops and not self._run and self.last is not None

    def flush(self) -> str:
        """All text that was kept back. Called when the choice ended without a stop string."""
        text = self._held + (self._end_run() if self._run else "")
        self._held = ""
        return text

    def _text(self, token: int) -> str:
        piece = self.pieces[token]
        if piece is None:
            self._run.append(token)
            return self._whole_run()
        if not piece:
            return ""
        if self._run:
            self._run.append(token)
            text = self._end_run()
        elif self.last is None:
            # the space of the first word may not belong to the text: the tokenizer decides
            text = self.pieces.decode([token], None)
        else:
            text = piece
        self.last = token
        return text

    def _whole_run(self) -> str:
        """The text of the run, if its bytes are characters that no later byte can change."""
        data = b"".join(map(self.pieces.tokenizer.token_bytes, self._run))
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return ""
        if self.pieces.spoils(self._run, text):
            return ""
        if self.last is None:
            self.last = self._run[-1]
        self._run = []
        return text

    def _end_run(self) -> str:
        text = self.pieces.decode(self._run, self.last)
        self._run = []
        return text

    def _hold(self, text: str, may_stop: bool) -> str | StopMatch:
        window = self._held + text
        if may_stop and text:
            match = self._find(window, len(self._held))
            if match is not None:
                self._held, self._run = "", []
                return match
        keep = self._num_held(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def _find(self, window: str, old: int) -> StopMatch | None:
        """The stop string that would be completed first if the text came character by character."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        return StopMatch(window[: best[0] if self._include_stop else best[1]], best[2])

    def _num_held(self, window: str) -> int:
        """Length of the longest suffix of `window` that is the start of a stop string."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
