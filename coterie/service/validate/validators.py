"""Validates every answer: first the built-in validator for it, then the operator's commands.

    validators = AnswerValidators(config.validators)               # build.py
    result = await validators.validate(text, AnswerContext(...))   # pipeline, before Finished
    await validators.close()                                       # Pipeline.close

None means that it is not known which form the answer should have; that is no failure. A check that
may take more than a millisecond runs in another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

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
from coterie.service.slo.evidence import BROKEN, OPEN, UNFORMED
from coterie.service.validate.base import EXHAUSTED, MAX_CHARACTERS, AnswerContext
from coterie.service.validate.child import ValidationTask
from coterie.service.validate.command import ValidatorCommands
from coterie.service.validate.generic import GenericValidator
from coterie.service.validate.health import CheckHealth, good_answer
from coterie.service.validate.json_schema import JsonSchemaValidator
from coterie.service.validate.pattern import PatternValidator
from coterie.service.validate.pattern_cost import is_fast
from coterie.service.validate.table import SAFE, VALIDATORS, picks

# a JSON decoder needs about a millisecond for this many
MAX_INLINE_CHARACTERS = 50_000


class AnswerValidators:
    def __init__(
        self,
        commands: Sequence[ValidatorSettings] = (),
        on_killed: Callable[[], None] | None = None,
    ) -> None:
        """Raises if the program of a command does not exist. `on_killed` is called when a process
        was killed from outside and is started again."""
        self.health = CheckHealth()
        self._processes = ValidatorProcesses(self.health, on_killed=on_killed)
        self._commands = ValidatorCommands(tuple(commands))

    async def validate(
        self, text: str, context: AnswerContext, commands: ValidatorCommands | None = None
    ) -> ValidationResult | None:
        """The first fault. If there is none, the result names all validators that checked.
        `commands` replace those that this object was made with."""
        result = await self._built_in(text, context)
        if len(text) > MAX_CHARACTERS or (result is not None and not result.valid):
            return result
        results = await (commands or self._commands).check(text, context, self.health)
        if not results:
            return result
        if not results[-1].valid:
            return results[-1]
        # `generic` checks so little that it is not named beside a command
        if result is not None and result.validator != GenericValidator.name:
            results.insert(0, result)
        spent_ms = round(sum(item.duration_ms for item in results), 3)
        return ValidationResult(True, "+".join(item.validator for item in results), None, spent_ms)

    async def prefix_kind(self, text: str, context: AnswerContext) -> str:
        """What an answer that was cut, and is not valid, could still become: open, unformed or
        broken. Commands judge complete answers alone."""
        kinds = [
            await self._processes.prefix_kind(ValidationTask(name, argument, text, is_prefix=True))
            for name, argument in picks(text, context)
        ]
        return next((kind for kind in (BROKEN, UNFORMED) if kind in kinds), OPEN)

    async def close(self) -> None:
        await self._processes.close()

    async def _built_in(self, text: str, context: AnswerContext) -> ValidationResult | None:
        result: ValidationResult | None = None
        for name, argument in picks(text, context):
            if _runs_here(name, argument, text):
                found: ValidationResult | None = VALIDATORS[name](argument).check(text)
            else:
                is_enforced = context.is_enforced and name == JsonSchemaValidator.name
                task = ValidationTask(name, argument, text)
                found = await self._processes.check(task, is_enforced=is_enforced)
            if found is not None:
                result = found if result is None else _both(result, found)
            if result is not None and not result.valid:
                break
        return result


def _runs_here(name: str, argument: str, text: str) -> bool:
    """Whether it takes less time than to ask another process."""
    if name == PatternValidator.name:
        return is_fast(argument, text)
    return name in SAFE and len(text) <= MAX_INLINE_CHARACTERS


def _both(one: ValidationResult, other: ValidationResult) -> ValidationResult:
    """The result of two checks, of which the first found no fault."""
    names = f"{one.validator}+{other.validator}"
    spent_ms = round(one.duration_ms + other.duration_ms, 3)
    if other.valid:
        return ValidationResult(True, names, None, spent_ms)
    return replace(other, duration_ms=spent_ms)


CHECK_S = 2.0
START_S = 30.0
MAX_PROCESSES = 2
# answers that may wait for a validator process; further answers are not validated
MAX_WAITING = 256
# None = what the caller demands of an answer cannot be checked
_result_decoder: msgspec.msgpack.Decoder[ValidationResult | None] = msgspec.msgpack.Decoder(
    ValidationResult | None
)
_kind_decoder = msgspec.msgpack.Decoder(str)
_encode = msgspec.msgpack.Encoder().encode


class ValidatorProcesses:
    def __init__(
        self,
        health: CheckHealth,
        check_s: float = CHECK_S,
        on_killed: Callable[[], None] | None = None,
    ) -> None:
        self._health, self._check_s = health, check_s
        program = ChildProgram(
            "coterie.service.validate.child",
            bare_environment(),
            START_S,
            MAX_PROCESSES,
            stderr=None,
        )
        self._children: ChildPool[None] = ChildPool(program, on_killed=on_killed)

    async def check(
        self, task: ValidationTask, *, is_enforced: bool = False
    ) -> ValidationResult | None:
        """None if too many answers wait, or the check does not work: then nothing is known about
        the answer. Neither if a caller's schema, which the answer was drawn by, takes too long or
        too much memory: the answer is not what makes it slow."""
        name = task.argument if task.validator == "code" else task.validator
        if self._children.num_waiting >= MAX_WAITING or self._health.rests(name):
            return None
        began = time.perf_counter()
        found = await self._asked(task)
        if isinstance(found, str) and not await self._works(task, name):
            return None
        if is_enforced and (isinstance(found, str) or (found and found.error in EXHAUSTED)):
            return None
        if isinstance(found, str):
            spent_ms = round((time.perf_counter() - began) * 1000, 3)
            return ValidationResult(False, task.validator, found, spent_ms)
        if found is not None and not found.validator:
            self._health.is_broken(name, found.error or "it does not work")
            return None
        return found

    async def _works(self, task: ValidationTask, name: str) -> bool:
        """Whether the check accepts a known good answer, after it failed on another one."""
        argument, text = good_answer(task.validator, task.argument)
        found = await self._asked(ValidationTask(task.validator, argument, text))
        if isinstance(found, ValidationResult) and found.valid:
            return True
        reason = found if isinstance(found, str) else "a good answer could not be checked"
        self._health.is_broken(name, reason)
        return False

    async def _asked(self, task: ValidationTask) -> ValidationResult | str | None:
        """The result; or what the answer did to the check. None if no process can be asked."""
        try:
            # a process may die for another reason than this answer, so there are two attempts
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
            return f"checking it took longer than {self._check_s:g} s"
        except ChildDied:
            return "checking it takes more than a parser can bear"

    async def prefix_kind(self, task: ValidationTask) -> str:
        """Open if it cannot be found out."""
        if self._children.num_waiting >= MAX_WAITING:
            return OPEN
        try:
            answer = await self._children.ask(
                _encode(task), None, answer_s=self._check_s, attempts=2
            )
        except (Unavailable, ChildNotStarted):
            return OPEN
        except (TimeoutError, ChildDied):
            # an answer does not escape by what it does to its check
            return UNFORMED
        return _kind_decoder.decode(answer)

    async def close(self) -> None:
        await self._children.close()
