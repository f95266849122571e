"""Whether a response format can be enforced, told before anything is admitted. No torch.

Compiles on its own thread, within the limits of `models/grammar.py`; verdicts are remembered. The
event loop never waits, and a flood of new grammars is refused, not queued without end.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from coterie.core.errors import InvalidRequest, Overloaded
from coterie.core.request import ResponseFormat
from coterie.models.grammar import GrammarVocabulary

if TYPE_CHECKING:
    from coterie.models.tokenizer import Tokenizer

# verdicts remembered, and checks that may wait
MAX_VERDICTS = 512
MAX_WAITING = 64

Key = tuple[str, ResponseFormat]


class GrammarCheck:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        # by the tokenizer's fingerprint; only the thread touches it
        self._vocabularies: dict[str, GrammarVocabulary] = {}
        # None = it can be enforced
        self._verdicts: OrderedDict[Key, InvalidRequest | None] = OrderedDict()
        self._waiting = 0

    async def check(self, wanted: ResponseFormat, tokenizer: Tokenizer) -> None:
        """Raises InvalidRequest that says what is wrong with `wanted`, or Overloaded."""
        key = (tokenizer.fingerprint(), wanted)
        if key not in self._verdicts:
            if self._waiting >= MAX_WAITING:
                raise Overloaded("too many new grammars are being read", retry_after_s=1.0)
            self._waiting += 1
            try:
                loop = asyncio.get_running_loop()
                verdict = await loop.run_in_executor(self._thread, self._judge, key, tokenizer)
            finally:
                self._waiting -= 1
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        verdict = self._verdicts[key]
        if verdict is not None:
            raise InvalidRequest(verdict.message, param=verdict.param)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _judge(self, key: Key, tokenizer: Tokenizer) -> InvalidRequest | None:
        fingerprint, wanted = key
        vocabulary = self._vocabularies.get(fingerprint)
        if vocabulary is None:
            vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
            self._vocabularies[fingerprint] = vocabulary
        try:
            vocabulary.compile(wanted)
        except InvalidRequest as error:
            return error
        return None
