"""Whether a response format can be enforced, told before anything is admitted. No torch.

Tried out in a process of its own (`grammar_child.py`), which a hostile grammar may hang or kill;
verdicts are remembered. The event loop never waits, and a flood of new grammars is refused.
"""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import TYPE_CHECKING

from coterie.core.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from coterie.core.lru import LruCache
from coterie.core.request import ResponseFormat
from coterie.core.spawn import DEVNULL, PIPE, ChildProcess, environment, spawn
from coterie.models.grammar.child import VocabularyWords, receive, send
from coterie.models.grammar.grammar import NAMES, check_size

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

# verdicts remembered, and checks that may wait
MAX_VERDICTS = 512
MAX_WAITING = 32
# the child ends itself by its CPU time; this is for one that sleeps
MAX_WALL_S = 20.0

# a tokenizer is equal only to itself
Key = tuple["Tokenizer", ResponseFormat]


class GrammarCheck:
    """Start nothing until it is asked; `close` it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        # of one tokenizer; only the thread touches it
        self._child: tuple[Tokenizer, ChildProcess] | None = None
        # what is wrong; empty = nothing
        self._verdicts: LruCache[Key, str] = LruCache(MAX_VERDICTS)
        self._waiting = 0
        self._closed = False

    async def check(
        self, wanted: ResponseFormat, tokenizer: Tokenizer, param: str = "response_format"
    ) -> None:
        """Raises InvalidRequest that says what is wrong with `wanted`, or Overloaded."""
        if wanted.kind == "json_object":
            return
        check_size(wanted)
        key = (tokenizer, wanted)
        fault = self._verdicts.get(key)
        if fault is None:
            if self._waiting >= MAX_WAITING:
                raise Overloaded("too many new grammars are being read", retry_after_s=1.0)
            self._waiting += 1
            try:
                loop = asyncio.get_running_loop()
                fault = await loop.run_in_executor(self._thread, self._judge, key)
            finally:
                self._waiting -= 1
            self._verdicts.put(key, fault)
        if fault:
            raise InvalidRequest(fault, param=param)

    def close(self) -> None:
        """At once: whoever still waits is refused. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        child = self._child
        if child is not None:
            child[1].kill()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _judge(self, key: Key) -> str:
        tokenizer, wanted = key
        if self._closed:
            raise Unavailable("the server is shutting down")
        if self._child is None or self._child[0] is not tokenizer:
            self._end()
            self._child = tokenizer, _start(tokenizer)
        child = self._child[1]
        fault = _ask(child, wanted)
        if fault is None and not self._closed:
            self._end()
            return f"the {NAMES[wanted.kind]} takes too long or too much to compile; simplify it"
        return fault or ""

    def _end(self) -> None:
        if self._child is None:
            return
        child = self._child[1]
        self._child = None
        _end(child)


def _start(tokenizer: Tokenizer) -> ChildProcess:
    known = range(tokenizer.vocab_size)
    words = VocabularyWords(
        tuple(tokenizer.token_bytes(token) for token in known),
        frozenset(filter(tokenizer.is_special, known)),
        tokenizer.eos_ids,
    )
    kept = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    env = environment({**kept, "PATH": os.defpath, "RAYON_NUM_THREADS": "1"})
    command = [sys.executable, "-m", "coterie.models.grammar.child"]
    child = spawn(command, env, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    if _ask(child, words) is None:
        _end(child)
        raise InternalError("the process that tries out grammars does not start")
    return child


def _end(child: ChildProcess) -> None:
    child.kill()
    child.wait()
    child.close()


def _ask(child: ChildProcess, question: ResponseFormat | VocabularyWords) -> str | None:
    """Its answer; None when it died of the question."""
    assert child.stdin is not None and child.stdout is not None
    watch = Timer(MAX_WALL_S, child.kill)
    watch.start()
    try:
        send(child.stdin, question)
        answer: str | None = receive(child.stdout, str)
        return answer
    except BrokenPipeError:
        return None
    finally:
        watch.cancel()
