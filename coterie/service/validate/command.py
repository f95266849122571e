"""Validators that are commands of the operator. A command gets the answer on its standard input;
exit status 0 means valid; its output is the error. Only the configuration can name a command, never
a request or a package."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from pathlib import Path

from coterie.core.errors import ConfigError, CoterieError
from coterie.core.events import ValidationResult
from coterie.core.settings import ValidatorSettings
from coterie.obs.log import log
from coterie.service.validate.base import AnswerContext, cut
from coterie.service.validate.health import CheckHealth
from coterie.service.validate.sandbox import CommandLimits, CommandResult, run

# the isolation that a command must have. "network" is not needed: "calls" already refuses every
# kind of socket.
WALLS = ("processes", "files", "calls")
# why the command was killed -> the message for the caller
_KILLED = {
    "timeout": "took longer than {} s",
    "memory": "took more than {} bytes of memory",
    "disk": "wrote more than {} bytes",
    "output": "printed more than {} bytes",
    "signal": "was ended by signal {}",
}

# an answer that took longer than this share of the time limit may take all of it the next time: it
# is not kept as a good one
QUICK_SHARE = 0.5
_NOT_RUN = "it could not run"


class ValidatorCommand:
    def __init__(self, settings: ValidatorSettings) -> None:
        self.name = settings.name
        self._settings = settings
        self._command = (_program(settings), *settings.command[1:])
        self._warned = False

    def wants(self, context: AnswerContext) -> bool:
        settings = self._settings
        by_task = context.task_type in settings.task_types
        by_name = settings.name in context.checks
        return by_name or by_task or not set(settings.experts).isdisjoint(context.experts)

    async def check(self, text: str, health: CheckHealth) -> ValidationResult | None:
        """None if the command does not work: then nothing is known about the answer."""
        if health.rests(self.name):
            return None
        began = time.perf_counter()
        ran = await self.run(text)
        if ran is None:
            health.is_broken(self.name, _NOT_RUN)
            return None
        if ran.how in _KILLED and not await self._works(_fault(ran), health):
            return None
        spent_s = time.perf_counter() - began
        fault = _fault(ran)
        if fault is None:
            is_quick = spent_s <= QUICK_SHARE * self._settings.timeout_s
            health.accepted(self.name, text if is_quick else None)
        return ValidationResult(fault is None, self.name, cut(fault), round(spent_s * 1000, 3))

    async def run(self, text: str) -> CommandResult | None:
        """None if it could not run."""
        settings = self._settings
        try:
            ran = await run(
                self._command, text, CommandLimits(settings.timeout_s, settings.memory_bytes)
            )
        except CoterieError as error:
            log("validator_failed", level="error", reason=f"{self.name}: {error.message}")
            return None
        if ran.how == "start":
            log("validator_failed", level="error", reason=f"{self.name}: {ran.detail}")
            return None
        self._warn(ran)
        return ran

    async def _works(self, fault: str | None, health: CheckHealth) -> bool:
        """Whether it accepts a known good answer, after it was killed on another one."""
        reason = await self.fault_on_good_answer(health.last_accepted(self.name))
        if reason is not None:
            health.is_broken(self.name, f"{fault}; on a good answer: {reason}")
        return reason is None

    async def fault_on_good_answer(self, accepted: str | None = None) -> str | None:
        """Why it is broken: it refuses the answer that its settings call good, or one that it
        `accepted` before; without either, it is killed on an empty answer, which it may refuse.
        None if nothing is wrong."""
        good = self._settings.known_good or accepted
        if good:
            return await self._fault_on(good)
        ran = await self.run("")
        if ran is None:
            return _NOT_RUN
        return _fault(ran) if ran.how in _KILLED else None

    async def _fault_on(self, good: str) -> str | None:
        ran = await self.run(good)
        return _NOT_RUN if ran is None else _fault(ran)

    def _warn(self, ran: CommandResult) -> None:
        missing = [wall for wall in WALLS if ran.walls and wall not in ran.walls]
        if missing and not self._warned:
            self._warned = True
            reason = f"this system has no wall against {', '.join(missing)}"
            log("validator_exposed", level="warning", reason=f"{self.name}: {reason}")


def _fault(ran: CommandResult) -> str | None:
    if ran.how in _KILLED:
        return "the validator " + _KILLED[ran.how].format(ran.detail)
    if ran.detail == 0:
        return None
    return ran.output or f"the validator's exit status is {ran.detail}"


def _program(settings: ValidatorSettings) -> str:
    """The path of the program. Looked up once with the server's PATH: the command runs without a
    PATH."""
    name = settings.command[0]
    path = shutil.which(name)
    param = "validators.command"
    if sys.platform == "win32":
        raise ConfigError("commands as validators need a POSIX system", param=param)
    if path is None:
        raise ConfigError(f"{settings.name}: there is no program {name!r} to run", param=param)
    return str(Path(path).absolute())


class ValidatorCommands:
    """All commands of the configuration; few run at a time."""

    MAX_RUNNING = 2
    # answers that may wait for a command; further answers are not checked by it
    MAX_WAITING = 64

    def __init__(self, settings: tuple[ValidatorSettings, ...]) -> None:
        self._commands = tuple(ValidatorCommand(item) for item in settings)
        self._places = asyncio.Semaphore(self.MAX_RUNNING)
        self._waiting = 0

    async def check(
        self, text: str, context: AnswerContext, health: CheckHealth
    ) -> list[ValidationResult]:
        """The results of all commands that apply, up to the first that finds a fault."""
        results: list[ValidationResult] = []
        for command in self._commands:
            if not command.wants(context):
                continue
            result = await self._one(command, text, health)
            if result is not None:
                results.append(result)
                if not result.valid:
                    break
        return results

    async def _one(
        self, command: ValidatorCommand, text: str, health: CheckHealth
    ) -> ValidationResult | None:
        if self._waiting >= self.MAX_WAITING:
            log("validators_busy", level="warning", reason=command.name)
            return None
        self._waiting += 1
        try:
            async with self._places:
                return await command.check(text, health)
        finally:
            self._waiting -= 1
