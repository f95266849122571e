"""Parts an answer's text into words and calls of tools, also while it streams.

Reads what `tools_grammar` lets a model write. Marks never reach the words, and words in which no
call is opened come out as they went in. White space before a call belongs to neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from coterie.api.tools.reasoning import CONTENT, Piece, overlap
from coterie.models.text.tool_format import ToolFormat

# a call begins: the piece's text is the tool's name; then come its arguments, as JSON text
CALL, ARGUMENTS = "call", "arguments"


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How to find calls in the answers to one request."""

    format: ToolFormat
    names: frozenset[str]
    # the mark's token where it is a special one, which has no text
    mark_id: int | None = None
    # an answer is nothing but calls
    required: bool = False

    def splitter(self) -> ToolSplitter:
        return ToolSplitter(self)


class ToolSplitter:
    """Feeds on deltas of one choice and gives back pieces: CONTENT, CALL and ARGUMENTS."""

    def __init__(self, marks: CallMarks) -> None:
        self.marks = marks
        form = marks.format
        names = "|".join(re.escape(name) for name in sorted(marks.names))
        self._head = re.compile(
            rf'\{{\s*"name"\s*:\s*"({names})"\s*,\s*"{form.key}"\s*:\s*(?=\S)', re.ASCII
        )
        self._heads = [f'{{"name":"{name}","{form.key}":' for name in marks.names]
        self._scanner = _Value()
        self._step = self._first if form.bare else self._words
        self.held = ""
        self.num_calls = 0
        # it ended where a call was about to be opened
        self.is_cut = False

    def feed(self, text: str, token_ids: tuple[int, ...] = ()) -> list[Piece]:
        marked = self.marks.mark_id is not None and self.marks.mark_id in token_ids
        if marked and self._step in (self._first, self._words):
            self._step = self._opening
        self.held += text
        pieces: list[Piece] = []
        while self.held and self._step(pieces):
            continue
        return pieces

    def finish(self) -> list[Piece]:
        """What is left when the choice has ended. The smaller half of a mark is text, unless a call
        had to come; the larger one is a call for which there were no tokens left."""
        text, self.held = self.held, ""
        if self._step not in (self._first, self._words):
            return []
        begun = len(text) if self.marks.required else self._begun(text)
        if begun:
            self.is_cut = True
            text = text[:-begun].rstrip()
        return [(CONTENT, text)] if text else []

    def _begun(self, text: str) -> int:
        """Length of the larger half of a mark, or of a call that needs none, at the end."""
        if self._step == self._first:
            bare = "".join(text.split())
            parts = (head for head in self._heads if head.startswith(bare))
            return len(text) if any(2 * len(bare) > len(head) for head in parts) else 0
        mark = self.marks.format.mark
        size = overlap(text, mark) if self.marks.mark_id is None else 0
        return size if 2 * size > len(mark) else 0

    def _first(self, pieces: list[Piece]) -> bool:
        """The start of an answer, where a call needs no mark."""
        found = self._head.match(self.held.lstrip())
        if found is not None:
            self.held = self.held.lstrip()
            self._step = self._opening
            return True
        bare = "".join(self.held.split())
        if any(head.startswith(bare) for head in self._heads):
            return False
        self._step = self._words
        return True

    def _words(self, pieces: list[Piece]) -> bool:
        mark = self.marks.format.mark
        at = self.held.find(mark) if self.marks.mark_id is None else -1
        if at >= 0:
            self._say(pieces, self.held[:at].rstrip())
            self.held = self.held[at + len(mark) :]
            self._step = self._opening
            return True
        end = len(self.held)
        if self.marks.mark_id is None:
            end -= overlap(self.held, mark)
        # white space is given back as soon as words follow it
        end = len(self.held[:end].rstrip())
        self._say(pieces, self.held[:end])
        self.held = self.held[end:]
        return False

    def _opening(self, pieces: list[Piece]) -> bool:
        found = self._head.search(self.held)
        if found is None:
            return False
        # a mark without text may stand behind words that were held back
        self._say(pieces, self.held[: found.start()].rstrip())
        pieces.append((CALL, found[1]))
        self.num_calls += 1
        self.held = self.held[found.end() :]
        self._scanner = _Value()
        self._step = self._arguments
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        size = self._scanner.feed(self.held)
        pieces.append((ARGUMENTS, self.held[:size]))
        self.held = self.held[size:]
        if self._scanner.ended:
            self._step = self._between
        return self._scanner.ended

    def _between(self, pieces: list[Piece]) -> bool:
        """Behind a call stand its end and further calls, nothing else."""
        if self._head.search(self.held) is None:
            return False
        self.held = self.held[self.held.index("{") :]
        self._step = self._opening
        return True

    def _say(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append((CONTENT, text))


class _Value:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.escaped = False
        self.ended = False

    def feed(self, text: str) -> int:
        """How many of the characters belong to the value."""
        for at, character in enumerate(text):
            if self.in_string:
                self._quote(character)
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.ended = True
                    return at + 1
        return len(text)

    def _quote(self, character: str) -> None:
        if self.escaped:
            self.escaped = False
        elif character == "\\":
            self.escaped = True
        elif character == '"':
            self.in_string = False
