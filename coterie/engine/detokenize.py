"""Tokens of one choice to text that can be sent: whole characters, nothing a stop might take back.

What was sent plus what `flush` gives equals `tokenizer.decode` of the tokens, cut at the stop.
Knows token ids and strings, nothing of sequences or events.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from coterie.models.tokenizer import Tokenizer


class Pieces(dict[int, str | None]):
    """What each token adds to a text in the middle of which it stands; shared by all choices.

    None: bytes that are no text by themselves. Special tokens are no text: "".
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._spoils: bool | None = None

    def __missing__(self, token: int) -> str | None:
        piece = self[token] = self._read(token)
        return piece

    def decode(self, ids: Sequence[int], before: int | None) -> str:
        """The text of `ids` behind the token `before` (None: at the start of the output)."""
        if before is None:
            return self.tokenizer.decode(ids)
        lead = self.tokenizer.decode([before])
        return self.tokenizer.decode([before, *ids])[len(lead) :]

    def spoils(self, run: Sequence[int], text: str) -> bool:
        """A bad byte behind `run`, which reads `text`, would make all of it unreadable.

        Byte-fallback decoders are so, byte-level ones are not: a trait of the tokenizer.
        """
        if self._spoils is None:
            self._spoils = self._is_spoiled(run, text)
        return self._spoils

    @cached_property
    def _bad_byte(self) -> int | None:
        """A token that is one byte and no character."""
        for token in range(self.tokenizer.vocab_size):
            data = self.tokenizer.token_bytes(token)
            if len(data) == 1 and data[0] >= 0x80 and not self.tokenizer.is_special(token):
                return token
        return None

    def _read(self, token: int) -> str | None:
        # a model may have more rows than its tokenizer has tokens
        if token >= self.tokenizer.vocab_size or self.tokenizer.is_special(token):
            return ""
        data = self.tokenizer.token_bytes(token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        # a byte-fallback token of a plain character stands or falls with its run; twice, because
        # a space at the start of a text may be dropped
        if len(data) == 1 and self._is_spoiled([token, token], text):
            return None
        return text

    def _is_spoiled(self, ids: Sequence[int], text: str) -> bool:
        bad = self._bad_byte
        return bad is not None and not self.tokenizer.decode([*ids, bad]).startswith(text)


class Stop(NamedTuple):
    """A stop string was completed; `text` is what may still be sent before it."""

    text: str
    match: str


class Detokenizer:
    """Feed every token once. Sent text is never taken back."""

    __slots__ = ("_before", "_held", "_longest", "_pieces", "_run", "_stops")

    def __init__(self, pieces: Pieces, stops: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        # text that may turn out to be the start of a stop string
        self._held = ""
        # tokens whose bytes do not yet make characters
        self._run: list[int] = []
        # the last token that was text by itself; None before the first
        self._before: int | None = None

    def push(self, token: int, may_stop: bool = True) -> str | Stop:
        """Text that can be sent now, or the stop string that this token completed."""
        text = self._pieces[token]
        if text and self._before is not None and not self._run:
            self._before = token
        else:
            text = self._text(token)
        return self._hold(text, may_stop) if self._stops else text

    def flush(self) -> str:
        """Everything held back: the choice ended for another reason than a stop string."""
        text = self._held + (self._end_run() if self._run else "")
        self._held = ""
        return text

    def _text(self, token: int) -> str:
        piece = self._pieces[token]
        if piece is None:
            self._run.append(token)
            return self._whole_run()
        if not piece:
            return ""
        if self._run:
            self._run.append(token)
            text = self._end_run()
        elif self._before is None:
            # the first word's space may not belong to the text: the tokenizer knows
            text = self._pieces.decode([token], None)
        else:
            text = piece
        self._before = token
        return text

    def _whole_run(self) -> str:
        """The run's text once its bytes are characters that nothing behind them can spoil."""
        data = b"".join(map(self._pieces.tokenizer.token_bytes, self._run))
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return ""
        if self._pieces.spoils(self._run, text):
            return ""
        if self._before is None:
            self._before = self._run[-1]
        self._run = []
        return text

    def _end_run(self) -> str:
        text = self._pieces.decode(self._run, self._before)
        self._run = []
        return text

    def _hold(self, text: str, may_stop: bool) -> str | Stop:
        window = self._held + text
        if may_stop and text:
            found = self._find(window, len(self._held))
            if found is not None:
                self._held, self._run = "", []
                return found
        keep = self._num_held(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def _find(self, window: str, old: int) -> Stop | None:
        """The stop completed first, had the text come one character at a time."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return Stop(window[: best[1]], best[2]) if best else None

    def _num_held(self, window: str) -> int:
        """Length of the longest end of `window` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
