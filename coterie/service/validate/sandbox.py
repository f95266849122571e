"""Runs an operator's command on a text, with limits on time, memory, disk, processes and output.

Starts `launch.py`, which sets up the isolation. The command gets the text, and a limited part of
its output is read. It has no shell, no environment and no open files of the server.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coterie
from coterie.core.errors import CoterieError, Unavailable
from coterie.core.own_folder import make_own_folder, remove_own_folder
from coterie.core.spawn import PIPE, AsyncProcess, start

MAX_OUTPUT_BYTES = 64 * 1024
MAX_REPORT_BYTES = 4096
# time for starting and ending on a busy machine, in addition to the command's time limit
GRACE_S = 15.0
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from coterie.service.validate.launch import main; main()"
)


@dataclass(frozen=True, slots=True)
class CommandLimits:
    timeout_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended: exit, signal, timeout, memory, disk, output or start; `detail` is the
    number or text for it."""

    how: str
    detail: Any
    output: str
    # active isolation measures, of: network, processes, user, files, calls
    walls: tuple[str, ...] = ()


async def run(command: Sequence[str], text: str, bounds: CommandLimits) -> CommandResult:
    """Run the command on the text. Raises if it could not be started: then nothing is known about
    the text."""
    temporary = Path(tempfile.gettempdir())
    folder = await asyncio.to_thread(make_own_folder, temporary, "coterie-check-")
    try:
        return await _run(command, text, bounds, str(folder))
    except OSError as error:
        raise Unavailable(f"a command could not be started: {error.strerror}") from error
    finally:
        await asyncio.shield(asyncio.to_thread(remove_own_folder, folder))


async def _run(
    command: Sequence[str], text: str, bounds: CommandLimits, folder: str
) -> CommandResult:
    settings = {
        "command": list(command),
        "folder": folder,
        "timeout_s": bounds.timeout_s,
        "memory_bytes": bounds.memory_bytes,
        "number": secrets.randbelow(10**8),
    }
    root = str(Path(coterie.__file__).resolve().parent.parent)
    boot = [sys.executable, "-I", "-S", "-c", _BOOT, root, json.dumps(settings)]
    process = await start(boot, {}, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    feeding = asyncio.ensure_future(_feed(process, text.encode("utf-8", "replace")))
    try:
        async with asyncio.timeout(bounds.timeout_s + GRACE_S):
            return await _read(process)
    except TimeoutError:
        return CommandResult("timeout", bounds.timeout_s, "")
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await asyncio.shield(_end(process))


async def _feed(process: AsyncProcess, data: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        # the command may end without reading all of its input
        return


async def _read(process: AsyncProcess) -> CommandResult:
    assert process.stdout is not None and process.stderr is not None
    chunks: list[bytes] = []
    size = 0
    while chunk := await process.stdout.read(16 * 1024):
        size += len(chunk)
        if size > MAX_OUTPUT_BYTES:
            return CommandResult("output", MAX_OUTPUT_BYTES, _text(chunks))
        chunks.append(chunk)
    report = await process.stderr.read(MAX_REPORT_BYTES)
    try:
        fields = json.loads(report)
        how, detail = fields["end"]
    except (ValueError, KeyError, TypeError) as error:
        raise _broken(process, report) from error
    return CommandResult(how, detail, _text(chunks), tuple(fields["walls"]))


def _broken(process: AsyncProcess, report: bytes) -> CoterieError:
    last = report.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return Unavailable(f"the sandbox could not be set up: {last or process.returncode}")


def _text(chunks: Sequence[bytes]) -> str:
    return b"".join(chunks).decode("utf-8", "replace").strip()


async def _end(process: AsyncProcess) -> None:
    """Kill the launcher and its process group. All processes in the sandbox end with it."""
    process.kill(group=True)
    await process.wait()
    process.close()
