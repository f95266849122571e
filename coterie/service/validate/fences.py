"""Code blocks in an answer: what stands between lines of three backticks or tildes.

One pass over the lines. A block that the answer ends in counts as closed there.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARKS = ("```", "~~~")
# blocks that hold no program
_PLAIN = frozenset({"text", "txt", "plain", "plaintext", "output", "console", "log", "markdown"})


@dataclass(frozen=True, slots=True)
class Block:
    # lower case; empty = not said
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    mark, language, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if not mark:
            if bare.startswith(_MARKS):
                run = len(bare) - len(bare.lstrip(bare[0]))
                mark, said = bare[0] * run, bare[run:].split()
                language, lines = said[0].lower().strip("{}.") if said else "", []
        elif bare.startswith(mark) and not bare.strip(mark[0]):
            found.append(Block(language, "".join(lines)))
            mark = ""
        else:
            lines.append(line)
    if mark:
        found.append(Block(language, "".join(lines)))
    return found


def programs(text: str) -> list[Block]:
    return [block for block in blocks(text) if block.language not in _PLAIN]
