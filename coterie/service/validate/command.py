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

    async def check(self, text: str) -> ValidationResult | None:
        """None if the command could not run: then nothing is known about the answer."""
        settings = self._settings
        began = time.perf_counter()
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
        spent_ms = round((time.perf_counter() - began) * 1000, 3)
        fault = _fault(ran)
        return ValidationResult(fault is None, self.name, cut(fault), spent_ms)

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

    async def check(self, text: str, context: AnswerContext) -> list[ValidationResult]:
        """The results of all commands that apply, up to the first that finds a fault."""
        results: list[ValidationResult] = []
        for command in self._commands:
            if not command.wants(context):
                continue
            result = await self._one(command, text)
            if result is not None:
                results.append(result)
                if not result.valid:
                    break
        return results

    async def _one(self, command: ValidatorCommand, text: str) -> ValidationResult | None:
        if self._waiting >= self.MAX_WAITING:
            log("validators_busy", level="warning", reason=command.name)
            return None
        self._waiting += 1
        try:
            async with self._places:
                return await command.check(text)
        finally:
            self._waiting -= 1
