"""Checks whether a response format can be enforced, before a request is admitted. Without torch.

The check runs in a separate process (`child.py`), which a hostile grammar may hang or kill; results
are cached. The event loop never waits, and too many new grammars at once are refused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from coterie.core.child_protocol import (
    ChildDied,
    ChildNotStarted,
    ChildPool,
    ChildProgram,
    bare_environment,
)
from coterie.core.errors import InternalError, InvalidRequest, Overloaded
from coterie.core.lru import LruCache
from coterie.core.request import ResponseFormat
from coterie.models.grammar.child import VocabularyWords
from coterie.models.grammar.grammar import NAMES, check_size

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

# cached results, and checks that may wait
MAX_VERDICTS = 512
MAX_WAITING = 32
# of these, of one tenant
MAX_TENANT_WAITING = 24
# the child has a limit of CPU time; this one is for a child that sleeps
MAX_WALL_S = 20.0

# a tokenizer is equal only to itself
Key = tuple["Tokenizer", ResponseFormat]


class GrammarCheck:
    """Starts its process at the first check; call `close`."""

    def __init__(self, on_killed: Callable[[], None] | None = None) -> None:
        """`on_killed` is called when the process was killed from outside and is started again."""
        env = bare_environment(RAYON_NUM_THREADS="1")
        program = ChildProgram("coterie.models.grammar.child", env, start_s=MAX_WALL_S)
        self._children: ChildPool[Tokenizer] = ChildPool(program, _vocabulary, on_killed)
        # what is wrong; empty = nothing is wrong
        self._verdicts: LruCache[Key, str] = LruCache(MAX_VERDICTS)
        # tenant -> its checks; the first one is run, so that tenants take turns
        self._tenants: dict[str, deque[asyncio.Future[None]]] = {}

    async def check(
        self,
        wanted: ResponseFormat,
        tokenizer: Tokenizer,
        tenant: str,
        param: str = "response_format",
    ) -> None:
        """Raise InvalidRequest that says what is wrong with `wanted`, or Overloaded."""
        if wanted.kind == "json_object":
            return
        check_size(wanted)
        key = (tokenizer, wanted)
        fault = self._verdicts.get(key)
        if fault is None:
            async with self._turn(tenant):
                # another request may have asked the same meanwhile
                fault = self._verdicts.get(key)
                if fault is None:
                    fault = await self._fault(key)
                    self._verdicts.put(key, fault)
        if fault:
            raise InvalidRequest(fault, param=param)

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """One check of a tenant at a time; the others of the tenant wait in order."""
        waiting = self._tenants.get(tenant, ())
        num_waiting = sum(map(len, self._tenants.values()))
        if num_waiting >= MAX_WAITING or len(waiting) >= MAX_TENANT_WAITING:
            raise Overloaded("too many new grammars are being read", retry_after_s=1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._tenants.setdefault(tenant, deque())
        queue.append(turn)
        try:
            if queue[0] is not turn:
                await turn
            yield
        finally:
            queue.remove(turn)
            if not queue:
                del self._tenants[tenant]
            elif not queue[0].done():
                queue[0].set_result(None)

    async def close(self) -> None:
        """Close at once: checks that still wait are refused. A second call does nothing."""
        await self._children.close()

    async def _fault(self, key: Key) -> str:
        tokenizer, wanted = key
        question = msgspec.msgpack.encode(wanted)
        try:
            return (await self._children.ask(question, tokenizer, answer_s=MAX_WALL_S)).decode()
        except ChildNotStarted as error:
            raise InternalError("the process that tries out grammars does not start") from error
        except (ChildDied, TimeoutError):
            return f"the {NAMES[wanted.kind]} takes too long or too much to compile; simplify it"


def _vocabulary(tokenizer: Tokenizer) -> bytes:
    known = range(tokenizer.vocab_size)
    words = VocabularyWords(
        tuple(tokenizer.token_bytes(token) for token in known),
        frozenset(filter(tokenizer.is_special, known)),
        tokenizer.eos_ids,
    )
    return msgspec.msgpack.encode(words)
