"""Every answer's judgement: the validator that fits it, then the operator's commands.

    validators = Validators(config.validators)                     # build.py
    result = await validators.validate(text, Context(...))         # pipeline, before Finished
    await validators.close()                                       # Pipeline.close

None means that nobody knows what this answer should look like, which is not a failure. Off the
event loop where it may take more than a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from coterie.core.child_protocol import (
    ChildDied,
    ChildNotStarted,
    ChildPool,
    ChildProgram,
    bare_environment,
)
from coterie.core.errors import Unavailable
from coterie.core.events import ValidationResult
from coterie.core.settings import ValidatorSettings
from coterie.obs.log import log
from coterie.service.validate.base import MAX_CHARACTERS, AnswerContext
from coterie.service.validate.child import ValidationTask
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
        program = ChildProgram(
            "coterie.service.validate.child",
            bare_environment(),
            START_S,
            MAX_PROCESSES,
            stderr=None,
        )
        self._children: ChildPool[None] = ChildPool(program)

    async def check(self, task: ValidationTask) -> ValidationResult | None:
        """None when too many wait, or no process can be started."""
        if self._children.num_waiting >= MAX_WAITING:
            return None
        began = time.perf_counter()
        try:
            # one that died may have died of something else: the answer gets a second one
            answer = await self._children.ask(
                _encode(task), None, answer_s=self._check_s, attempts=2
            )
            return _result_decoder.decode(answer)
        except Unavailable:
            return None
        except ChildNotStarted as error:
            log("judge_failed_to_start", level="warning", error=error)
            return None
        except TimeoutError:
            fault = f"checking it took longer than {self._check_s:g} s"
        except ChildDied:
            fault = "checking it takes more than a parser can bear"
        spent_ms = round((time.perf_counter() - began) * 1000, 3)
        return ValidationResult(False, task.validator, fault, spent_ms)

    async def close(self) -> None:
        await self._children.close()
