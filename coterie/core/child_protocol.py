"""Questions to a process of our own that may hang or die of one: a stranger's grammar, an answer.

    children = ChildPool(ChildProgram(module, env, start_s=30.0))      # in the server
    answer = await children.ask(question, None, answer_s=2.0)
    await children.close()

    serve(prepare, memory_bytes=1 << 30)                               # the program's main()

A frame is four bytes of length and so many bytes. The program reads frames on its standard input
and answers each on its standard output. The first one sets it up (empty where there is nothing to
say) and is answered with an empty frame once the program is ready.

A process takes one question at a time. One that died or took too long is replaced when the next
question comes. What is asked, and how much time and memory it may cost, is each use's own.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Generic, TypeVar

from coterie.core.errors import Unavailable
from coterie.core.spawn import DEVNULL, PIPE, AsyncProcess, Stream, environment, start

LENGTH = struct.Struct("<I")
# a question to its answer, in the process
Answer = Callable[[bytes], bytes]
# what processes differ by; equal ones are interchangeable
Setup = TypeVar("Setup")


class ChildNotStarted(Exception):
    """No process could be made ready for questions."""


class ChildDied(Exception):
    """The process ended in the middle of a question, once or as often as that was allowed."""


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """`python -m module`, with this environment and nothing else of the server's."""

    module: str
    env: Mapping[str, str]
    # until it is ready
    start_s: float
    max_children: int = 1
    # None = the server's own
    stderr: Stream = DEVNULL


def bare_environment(**more: str) -> dict[str, str]:
    """What our own modules need to be found, and no secret."""
    kept = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
    return environment({**kept, **more})


class ChildPool(Generic[Setup]):
    """Starts nothing until it is asked. For one event loop."""

    def __init__(
        self, program: ChildProgram, greet: Callable[[Setup], bytes] | None = None
    ) -> None:
        """`greet` makes the first frame of a setup, on a thread."""
        self._program, self._greet = program, greet
        self._places = asyncio.Semaphore(program.max_children)
        # alive, and those of them that nobody asks now, longest free first
        self._children: set[_Child[Setup]] = set()
        self._free: list[_Child[Setup]] = []
        self._answering: set[asyncio.Task[bytes]] = set()
        self._closed = False
        # questions that have no answer yet
        self.num_waiting = 0

    async def ask(
        self, question: bytes, setup: Setup, *, answer_s: float | None, attempts: int = 1
    ) -> bytes:
        """Raises TimeoutError, ChildDied (a process that died may have died of something else: with
        two `attempts` the question gets a second one), ChildNotStarted, or Unavailable once closed.

        Whoever is cancelled leaves a process that ends what it began and is then used again.
        """
        self.num_waiting += 1
        try:
            await self._places.acquire()
            work = asyncio.ensure_future(self._answered(question, setup, answer_s, attempts))
            self._answering.add(work)
            work.add_done_callback(self._leave)
            return await asyncio.shield(work)
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        """At once: whoever still waits is refused."""
        self._closed = True
        for child in self._children:
            child.process.kill()
        await asyncio.gather(*self._answering, return_exceptions=True)
        while self._free:
            await self._end(self._free.pop())

    def _leave(self, work: asyncio.Task[bytes]) -> None:
        self._answering.discard(work)
        self._places.release()

    async def _answered(
        self, question: bytes, setup: Setup, answer_s: float | None, attempts: int
    ) -> bytes:
        for _ in range(attempts):
            child = await self._take(setup)
            try:
                async with asyncio.timeout(answer_s):
                    answer = await child.exchange(question)
            except TimeoutError:
                await self._end(child)
                raise
            except (asyncio.IncompleteReadError, OSError):
                await self._end(child)
                self._refuse_closed()
            except BaseException:
                await self._end(child)
                raise
            else:
                self._free.append(child)
                return answer
        raise ChildDied(f"{self._program.module} ended")

    async def _take(self, setup: Setup) -> _Child[Setup]:
        """One that is free and set up so, else a new one."""
        self._refuse_closed()
        for child in self._free[::-1]:
            if child.process.returncode is not None:
                self._free.remove(child)
                await self._end(child)
            elif child.setup == setup:
                self._free.remove(child)
                return child
        if self._free and len(self._children) >= self._program.max_children:
            await self._end(self._free.pop(0))
        return await self._start(setup)

    async def _start(self, setup: Setup) -> _Child[Setup]:
        program = self._program
        first = b"" if self._greet is None else await asyncio.to_thread(self._greet, setup)
        self._refuse_closed()
        command = [sys.executable, "-m", program.module]
        try:
            process = await start(
                command, program.env, stdin=PIPE, stdout=PIPE, stderr=program.stderr
            )
        except OSError as error:
            raise ChildNotStarted(f"{program.module}: {error}") from error
        child = _Child(process, setup)
        self._children.add(child)
        try:
            self._refuse_closed()
            async with asyncio.timeout(program.start_s):
                await child.exchange(first)
        except TimeoutError as error:
            await self._end(child)
            raise ChildNotStarted(
                f"{program.module} is not ready after {program.start_s:g} s"
            ) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            await self._end(child)
            self._refuse_closed()
            raise ChildNotStarted(f"{program.module} ended before it was ready") from error
        except BaseException:
            await self._end(child)
            raise
        return child

    async def _end(self, child: _Child[Setup]) -> None:
        child.process.kill()
        self._children.discard(child)
        child.process.close()
        await child.process.wait()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down")


class _Child(Generic[Setup]):
    def __init__(self, process: AsyncProcess, setup: Setup) -> None:
        self.process, self.setup = process, setup

    async def exchange(self, question: bytes) -> bytes:
        writer, reader = self.process.stdin, self.process.stdout
        assert writer is not None and reader is not None
        writer.write(LENGTH.pack(len(question)) + question)
        await writer.drain()
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(size)


def serve(prepare: Callable[[bytes], Answer], *, memory_bytes: int = 0, cpu_s: float = 0.0) -> None:
    """The program's side: `prepare` takes the first frame and returns what answers the others.

    Past `memory_bytes` in all or `cpu_s` for one answer (0 = no limit) the system ends the process;
    so does the end of its input, in the middle of an answer too.
    """
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # whatever a library prints must not look like an answer
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    first = _receive(questions)
    if first is None:
        return
    answer = prepare(first)
    _send(answers, b"")
    while (question := _receive(questions)) is not None:
        # Python would not get to a handler of its own: the signal's default ends the process
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        found = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(answers, found)


def _end_with_parent() -> None:
    """Its input has no writer any more once the server is gone."""
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.poll()
    os._exit(1)


def _receive(stream: BinaryIO) -> bytes | None:
    """None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _send(stream: BinaryIO, data: bytes) -> None:
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()
