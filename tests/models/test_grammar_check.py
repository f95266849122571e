"""What the process that tries out grammars spends on a long text, and the tokens it takes."""

from __future__ import annotations

import json
import random

import msgspec

from coterie.core.request import ResponseFormat
from coterie.models.grammar.check import _vocabulary
from coterie.models.grammar.child import MAX_CPU_S, VocabularyWords, _judge
from coterie.models.grammar.grammar import _Words
from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.cpu_speed import usual_cpu_s
from tests.helpers.models.tiny import tiny_checkpoint


def test_a_long_text_is_no_long_work() -> None:
    """A text of 600 characters took 1.4 s of CPU and was refused as too much to compile."""
    answer = _judge(_vocabulary(load_tokenizer(tiny_checkpoint("llama"))))
    draw = random.Random()

    def check() -> None:
        # a new one each time: texts are remembered
        text = "".join(draw.choice("abcdefgh ijklmno\npqrst<>") for _ in range(2000))
        wanted = ResponseFormat("lark", f"start: {json.dumps(text)}")
        assert answer(msgspec.msgpack.encode(wanted)) == b""

    # 0.1 s
    assert usual_cpu_s(check) < MAX_CPU_S / 2


def longest_first(words: list[bytes], data: bytes) -> list[int]:
    """The plain twin: every end of the text is tried."""
    ids, start = [], 0
    while start < len(data):
        ends = (end for end in range(len(data), start, -1) if data[start:end] in words)
        end = next(ends, None)
        if end is None:
            break
        ids.append(words.index(data[start:end]))
        start = end
    return ids


def test_the_longest_word_is_taken() -> None:
    draw = random.Random()
    for _ in range(300):
        spelled = {bytes(draw.choices(b"abc", k=draw.randint(1, 5))) for _ in range(12)}
        words = sorted(spelled, key=lambda _: draw.random())
        vocabulary = _Words(VocabularyWords(tuple(words), frozenset(), ()), len(words) + 1, [99])
        data = bytes(draw.choices(b"abcd", weights=(9, 9, 9, 1), k=draw.randint(0, 40)))
        assert vocabulary(data) == longest_first(words, data)
