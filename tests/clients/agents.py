"""Whole turns of coding agents that use their tools, against a real server with a scripted model.

A turn reads a file, edits it, runs it and ends with a sentence: four requests. It is run as it is,
with the agent stopped in the middle of the edit and started again, and with the worker killed
there, which the agent must not notice.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.clients.agent_scripts import (
    AFTER,
    BEFORE,
    DONE,
    FILE,
    PRINTED,
    TASK,
    UNTOOLED,
    claude_code_script,
    codex_patch_script,
    codex_script,
    scratch_repository,
)
from tests.clients.clients import CLIENTS, Client
from tests.helpers.models.scripted import ScriptedAnswer, scripted_checkpoint
from tests.helpers.serving.server_process import Served

MODEL = "scripted"
# a name in the list of models that Codex brings
KNOWN = "gpt-5.5"
CONTEXT = 100_000
TURN_S = 240
# tokens of the edit's answer that must have been said before something happens to it
MIDDLE = 100
KEPT = ("PATH", "LANG", "TMPDIR")
CODEX_SETTINGS = """\
model = "{model}"
model_provider = "coterie"
model_context_window = {context}
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.coterie]
name = "Coterie"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@dataclass(frozen=True, slots=True)
class Agent:
    """`run`: its command and environment for one turn, in a home of its own."""

    client: Client
    route: str
    script: Callable[[Path], list[ScriptedAnswer]]
    run: Callable[[Path, str], tuple[list[str], dict[str, str]]]
    # what it prints for a piece of a call's arguments; None if it prints whole calls alone
    delta: str | None = None
    # the name by which the scripted model is served
    model: str = MODEL


def claude_code(_: Path, url: str) -> tuple[list[str], dict[str, str]]:
    named = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), MODEL)
    quiet = dict.fromkeys(
        (
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
            "DISABLE_AUTOUPDATER",
            "DISABLE_TELEMETRY",
            "DISABLE_ERROR_REPORTING",
        ),
        "1",
    )
    own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", **named, **quiet}
    # a failed request is to fail the turn
    own |= {"CLAUDE_CODE_MAX_RETRIES": "0", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8000"}
    words = ["-p", TASK, "--allowedTools", "Read,Edit,Bash", "--verbose"]
    shown = ["--output-format", "stream-json", "--include-partial-messages"]
    return [program("claude-code", "claude"), *words, *shown], own


def codex(home: Path, url: str, model: str = MODEL) -> tuple[list[str], dict[str, str]]:
    text = CODEX_SETTINGS.format(model=model, url=url, context=CONTEXT)
    (home / "config.toml").write_text(text)
    return [program("codex", "codex"), "exec", "--json", TASK], {"CODEX_HOME": str(home)}


def program(client: str, name: str) -> str:
    return str(named(client).home / "node_modules" / ".bin" / name)


def named(name: str) -> Client:
    return next(client for client in CLIENTS if client.name == name)


AGENTS = {
    "claude-code": Agent(
        named("claude-code"), "/v1/messages", claude_code_script, claude_code, "input_json_delta"
    ),
    "codex": Agent(named("codex"), "/v1/responses", codex_script, codex),
    # a model whose name it knows is given a tool for patches
    "codex-patch": Agent(
        named("codex"),
        "/v1/responses",
        codex_patch_script,
        partial(codex, model=KNOWN),
        model=KNOWN,
    ),
}


TURNS = ("whole", "aborted", "killed")


class AgentTurns:
    """One server whose model speaks one agent's script, and the repository it is about. Each of
    TURNS returns how it went."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self.agent, self.folder = agent, folder
        self.repository = scratch_repository(folder / "repository")
        script = agent.script(self.repository)
        model = scripted_checkpoint(folder / "model", script, UNTOOLED)
        self.num_answers = len(script)
        self.served = Served(str(model), "--name", agent.model, "--context", str(CONTEXT))

    def close(self) -> None:
        self.served.stop()

    def whole(self) -> str:
        """The turn as it is."""
        before = len(self.asked())
        with self.started() as turn:
            self.ended_well(turn)
        self.answered_once(self.asked()[before:])
        return f"{FILE} edited and run in {self.num_answers} requests"

    def aborted(self) -> str:
        """The agent is interrupted in the middle of its edit: nothing was changed, the server stops
        working on it, and the turn can be run again."""
        before = len(self.asked())
        with self.started() as turn:
            self.wait_for_middle(turn)
            os.killpg(turn.process.pid, signal.SIGINT)
            turn.process.wait(30)
        assert (self.repository / FILE).read_text() == BEFORE
        # the reading, and what was cut
        self.wait_until("the answer does not end", lambda: len(self.asked()) == before + 2)
        assert [event["status"] for event in self.asked()[before:]] == [200, 499]
        cut = self.num_said() - turn.said_before
        self.whole()
        said = sum(event["completion_tokens"] for event in self.asked()[-self.num_answers :][:2])
        assert MIDDLE <= cut < said, (cut, said)
        return f"interrupted at token {cut:.0f} of {said}; then run again"

    def killed(self) -> str:
        """The worker dies in the middle of the edit. The agent sees a pause: it neither fails nor
        asks again."""
        before = len(self.asked())
        restarts, continued = self.num_restarts(), self.num_continued()
        with self.started() as turn:
            self.wait_for_middle(turn)
            assert self.served.kill_workers() == 1
            assert (self.repository / FILE).read_text() == BEFORE
            self.ended_well(turn)
        self.answered_once(self.asked()[before:])
        assert self.num_restarts() == restarts + 1
        assert self.num_continued() == continued + 1
        return "one restart, one request continued, none asked again"

    @contextmanager
    def started(self) -> Iterator[Turn]:
        """A turn of the agent, on the repository as it was at first."""
        scratch_repository(self.repository)
        home = Path(tempfile.mkdtemp(prefix="home-", dir=self.folder))
        command, own = self.agent.run(home, self.served.url)
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        out = home / "printed"
        with out.open("wb") as handle:
            process = subprocess.Popen(
                command,
                cwd=self.repository,
                env={**kept, "HOME": str(home), **own},
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Turn(process, out, self.num_said())
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
            shutil.rmtree(home, ignore_errors=True)

    def ended_well(self, turn: Turn) -> None:
        code = turn.process.wait(TURN_S)
        assert code == 0, f"exit status {code}: {turn.printed()}"
        assert (self.repository / FILE).read_text() == AFTER, turn.printed()
        printed = turn.printed()
        assert PRINTED in printed and DONE in printed, printed
        if self.agent.delta is not None:
            assert printed.count(self.agent.delta) > MIDDLE, printed

    def wait_for_middle(self, turn: Turn) -> None:
        """Until the edit is being said: the first answer is shorter than MIDDLE."""

        def is_there() -> bool:
            assert turn.process.poll() is None, f"the agent ended: {turn.printed()}"
            return self.num_said() >= turn.said_before + MIDDLE

        self.wait_until("the edit did not begin", is_there)

    def wait_until(self, failure: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TURN_S
        while not is_so():
            assert time.monotonic() < deadline, f"{failure}: {self.served.log()[-3000:]}"
            time.sleep(0.02)

    def num_said(self) -> float:
        """Tokens of all answers so far."""
        return self.served.metric("vllm:generation_tokens_total")

    def num_restarts(self) -> float:
        return self.served.metric("coterie_worker_restarts_total")

    def num_continued(self) -> float:
        return self.served.metric("coterie_recoveries_total", kind="request_continued")

    def asked(self) -> list[dict[str, Any]]:
        """What the agent asked the server so far, by its log."""
        events = [json.loads(line) for line in self.served.log().splitlines() if line[:1] == "{"]
        return [event for event in events if event.get("route") == self.agent.route]

    def answered_once(self, events: list[dict[str, Any]]) -> None:
        """Each answer of the script was asked for once, and none failed."""
        statuses = [event["status"] for event in events]
        assert statuses == [200] * self.num_answers, events


@dataclass(frozen=True, slots=True)
class Turn:
    """A running agent."""

    process: subprocess.Popen[bytes]
    out: Path
    # tokens that the server had said before it
    said_before: float

    def printed(self) -> str:
        return self.out.read_text(errors="replace")
