"""The process that tests untrusted grammars: `python -m coterie.models.grammar.child`.

Compiling one may take any time and memory, or overflow the stack. Here that harms only this
process: each check has a limit of CPU time, and the process one of memory. It gets a vocabulary
first, then response formats, and answers for each what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from coterie.core.child_protocol import serve
from coterie.core.errors import CoterieError
from coterie.core.request import ResponseFormat
from coterie.models.grammar.grammar import GrammarVocabulary, probe

# for one check; a worker will also spend that much on it, while other requests wait
MAX_CPU_S = 0.5
MAX_MEMORY_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class VocabularyWords:
    """The part of a tokenizer that `GrammarVocabulary` needs."""

    words: tuple[bytes, ...]
    specials: frozenset[int]
    eos_ids: tuple[int, ...]
    bos_id: int | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.specials

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        """No tokens: the caller then finds tokens by itself."""
        return ()


def main() -> None:
    serve(_judge, memory_bytes=MAX_MEMORY_BYTES, cpu_s=MAX_CPU_S)


def _judge(first: bytes) -> Callable[[bytes], bytes]:
    words = msgspec.msgpack.decode(first, type=VocabularyWords)
    vocabulary = GrammarVocabulary(words, words.vocab_size, words.eos_ids)
    decode = msgspec.msgpack.Decoder(ResponseFormat).decode
    return lambda question: _fault(vocabulary, decode(question)).encode()


def _fault(vocabulary: GrammarVocabulary, wanted: ResponseFormat) -> str:
    try:
        probe(wanted, vocabulary.compile(wanted))
    except CoterieError as error:
        return error.message
    return ""


if __name__ == "__main__":
    main()
