"""Every answer's judgement: the validator that fits it, then the operator's commands.

    validators = Validators(config.validators)                     # build.py
    result = await validators.validate(text, Context(...))         # pipeline, before Finished
    await validators.close()                                       # Pipeline.close

None means that nobody knows what this answer should look like, which is not a failure. Off the
event loop where it may take more than a millisecond.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from coterie.core.events import ValidationResult
from coterie.core.settings import ValidatorSettings
from coterie.core.spawn import PIPE, AsyncProcess, environment, start
from coterie.obs.log import log
from coterie.service.validate.base import MAX_CHARACTERS, AnswerContext
from coterie.service.validate.child import LENGTH, READY, ValidationTask
from coterie.service.validate.command import ValidatorCommands
from coterie.service.validate.generic import GenericValidator
from coterie.service.validate.table import SAFE, VALIDATORS, pick

# a decoder's millisecond
MAX_INLINE_CHARACTERS = 50_000


class AnswerValidators:
    def __init__(self, commands: Sequence[ValidatorSettings] = ()) -> None:
        """Refuses a command whose program is not there."""
        self._judge = ValidatorProcesses()
        self._commands = ValidatorCommands(tuple(commands))

    async def validate(self, text: str, context: AnswerContext) -> ValidationResult | None:
        """The first fault; where there is none, everybody who looked is named."""
        result = await self._built_in(text, context)
        if len(text) > MAX_CHARACTERS or (result is not None and not result.valid):
            return result
        results = await self._commands.check(text, context)
        if not results:
            return result
        if not results[-1].valid:
            return results[-1]
        # that there is an answer at all needs no mention beside a real check
        told = [] if result is None or result.validator == GenericValidator.name else [result]
        everyone = [*told, *results]
        spent_ms = round(sum(item.duration_ms for item in everyone), 3)
        return ValidationResult(True, "+".join(item.validator for item in everyone), None, spent_ms)

    async def close(self) -> None:
        await self._judge.close()

    async def _built_in(self, text: str, context: AnswerContext) -> ValidationResult | None:
        picked = pick(text, context)
        if picked is None:
            return None
        name, argument = picked
        if name in SAFE and len(text) <= MAX_INLINE_CHARACTERS:
            return VALIDATORS[name](argument).check(text)
        return await self._judge.check(ValidationTask(name, argument, text))


CHECK_S = 2.0
START_S = 30.0
MAX_PROCESSES = 2
# answers that wait for a judge; further ones are not judged
MAX_WAITING = 256
_result_decoder = msgspec.msgpack.Decoder(ValidationResult)
_encode = msgspec.msgpack.Encoder().encode


class ValidatorProcesses:
    def __init__(self, check_s: float = CHECK_S) -> None:
        self._check_s = check_s
        self._free: list[AsyncProcess] = []
        self._places = asyncio.Semaphore(MAX_PROCESSES)
        self._waiting = 0
        self._closed = False

    async def check(self, task: ValidationTask) -> ValidationResult | None:
        """None when too many wait, or no process can be started."""
        if self._waiting >= MAX_WAITING or self._closed:
            return None
        self._waiting += 1
        try:
            async with self._places:
                return await self._checked(task)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        self._closed = True
        free, self._free = self._free, []
        await asyncio.gather(*(_end(process) for process in free))

    async def _checked(self, task: ValidationTask) -> ValidationResult | None:
        """One that died may have died of something else: the answer gets a second one."""
        began = time.perf_counter()
        for _ in range(2):
            process = self._free.pop() if self._free else await self._start()
            if process is None:
                return None
            try:
                return await self._told(process, task)
            except TimeoutError:
                fault = f"checking it took longer than {self._check_s:g} s"
                break
            except (asyncio.IncompleteReadError, OSError):
                fault = "checking it takes more than a parser can bear"
        spent_ms = round((time.perf_counter() - began) * 1000, 3)
        return ValidationResult(False, task.validator, fault, spent_ms)

    async def _told(self, process: AsyncProcess, task: ValidationTask) -> ValidationResult:
        whole = False
        try:
            async with asyncio.timeout(self._check_s):
                result = _result_decoder.decode(await _asked(process, _encode(task)))
            whole = True
            return result
        finally:
            if whole and not self._closed:
                self._free.append(process)
            else:
                await asyncio.shield(_end(process))

    async def _start(self) -> AsyncProcess | None:
        command = [sys.executable, "-m", "coterie.service.validate.child"]
        # nothing else of the server's environment
        env = environment({"PATH": os.environ.get("PATH", "")})
        try:
            process = await start(command, env, stdin=PIPE, stdout=PIPE)
        except OSError as error:
            log("judge_failed_to_start", level="warning", error=error)
            return None
        try:
            async with asyncio.timeout(START_S):
                if await _read(process) == READY:
                    return process
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            log("judge_failed_to_start", level="warning", error=error)
        except BaseException:
            await asyncio.shield(_end(process))
            raise
        await _end(process)
        return None


async def _asked(process: AsyncProcess, payload: bytes) -> bytes:
    assert process.stdin is not None
    process.stdin.write(LENGTH.pack(len(payload)) + payload)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: AsyncProcess) -> bytes:
    assert process.stdout is not None
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(size)


async def _end(process: AsyncProcess) -> None:
    process.kill()
    process.close()
    await process.wait()
