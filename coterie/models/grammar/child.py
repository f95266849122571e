"""The process in which strangers' grammars are tried out: `python -m coterie.models.grammar.child`.

Compiling one may take any time, any memory, or the process's stack. Here that costs this process
alone: each try has a limit of CPU time, all of it one of memory. Reads a vocabulary, then response
formats, from standard input until its end; answers each with what is wrong with it.
"""

from __future__ import annotations

import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from coterie.core.errors import CoterieError
from coterie.core.request import ResponseFormat
from coterie.models.grammar.grammar import GrammarVocabulary, probe

# of one try; what a worker will spend on it too, while others wait
MAX_CPU_S = 0.5
MAX_MEMORY_BYTES = 3 << 30
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class VocabularyWords:
    """As much of a tokenizer as a `GrammarVocabulary` asks for."""

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
        """None that add up: whoever asks finds tokens by itself."""
        return ()


def send(stream: IO[bytes], value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes], kind: type[Any]) -> Any:
    """None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data = stream.read(LENGTH.unpack(head)[0])
    return msgspec.msgpack.decode(data, type=kind)


def main() -> int:
    _limit_memory()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    words: VocabularyWords | None = receive(stdin, VocabularyWords)
    if words is None:
        return 0
    vocabulary = GrammarVocabulary(words, words.vocab_size, words.eos_ids)
    send(stdout, "")
    while True:
        wanted: ResponseFormat | None = receive(stdin, ResponseFormat)
        if wanted is None:
            return 0
        _limit_cpu(MAX_CPU_S)
        answer = _fault(vocabulary, wanted)
        _limit_cpu(0)
        send(stdout, answer)


def _limit_memory() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """Past them the system ends the process: Python would not get to a handler of its own."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _fault(vocabulary: GrammarVocabulary, wanted: ResponseFormat) -> str:
    try:
        probe(wanted, vocabulary.compile(wanted))
    except CoterieError as error:
        return error.message
    return ""


if __name__ == "__main__":
    sys.exit(main())
