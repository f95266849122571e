"""The clients, at the versions that docs/clients.md was written for, and their environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
FOLDER = ROOT / ".cache" / "clients"
INSTALL_S = 1800


class NotInstalled(Exception):
    """This client does not install on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Client:
    """`packages`: pip's or npm's words; the first one's version is the client's."""

    name: str
    script: str
    packages: tuple[str, ...]
    npm: bool = False

    @property
    def home(self) -> Path:
        return FOLDER / self.name

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("@" if self.npm else "==")[2]

    def command(self) -> list[str]:
        """What runs its script. Node finds packages beside the script, so that is copied there."""
        script = SCRIPTS / self.script
        if not self.npm:
            return [str(self.home / "bin" / "python"), str(script)]
        if script.suffix == ".py":
            return [str(ROOT / ".venv" / "bin" / "python"), str(script)]
        for name in (script.name, "tried.mjs"):
            shutil.copy(SCRIPTS / name, self.home / name)
        return [_found("node"), str(self.home / script.name)]

    def install(self) -> None:
        stamp = self.home / ".installed"
        wanted = " ".join(self.packages)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        if self.npm:
            (self.home / "package.json").write_text(json.dumps({"private": True}))
            command = [_found("npm"), "install", "--no-audit", "--no-fund", "--loglevel=error"]
        else:
            venv.create(self.home, with_pip=True)
            pip = [str(self.home / "bin" / "python"), "-m", "pip", "install", "-q"]
            command = [*pip, "--disable-pip-version-check", "--prefer-binary"]
        done = subprocess.run(
            [*command, *self.packages],
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
        if done.returncode != 0:
            raise NotInstalled(_reason(done.stderr or done.stdout))
        stamp.write_text(wanted)

    def npm_answers(self) -> bool:
        """Whether the registry can be asked for the client at all."""
        try:
            command = [_found("npm"), "view", self.packages[0].rpartition("@")[0], "name"]
        except NotInstalled:
            return False
        done = subprocess.run(command, capture_output=True, timeout=INSTALL_S)
        return done.returncode == 0


def _found(program: str) -> str:
    """The system's, or the one that `make` put into the virtual environment."""
    places = [str(ROOT / ".venv" / "bin"), os.environ.get("PATH", os.defpath)]
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is None:
        raise NotInstalled(f"{program} is not on this machine")
    return found


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if "error" in line.lower()]
    said = next((line for line in lines if "No matching" in line), lines[-1] if lines else output)
    return said[-200:]


CLIENTS = (
    Client("openai", "openai_sdk.py", ("openai==3.49.0",)),
    Client("anthropic", "anthropic_sdk.py", ("anthropic==2.8.0",)),
    Client("litellm", "litellm_sdk.py", ("litellm==1.106.2", "mcp==2.3.0")),
    Client(
        "langchain",
        "langchain_sdk.py",
        ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    ),
    Client("langchain-rag", "langchain_rag.py", ("langchain-openai==1.7.3", "numpy==2.4.6")),
    Client(
        "llama-index",
        "llama_index_rag.py",
        (
            "llama-index-core==0.14.25",
            "llama-index-embeddings-openai-like==0.4.0",
            "llama-index-llms-openai-like==0.8.1",
        ),
    ),
    Client(
        "ai-sdk",
        "ai_sdk.mjs",
        (
            "ai@6.0.326",
            "@ai-sdk/openai@3.0.139",
            "@ai-sdk/anthropic@3.0.138",
            "@ai-sdk/openai-compatible@2.0.87",
            "zod@4.6.7",
        ),
        npm=True,
    ),
    Client("claude-code", "claude_code.py", ("@anthropic-ai/claude-code@2.1.197",), npm=True),
    Client("openai-agents", "openai_agents_sdk.py", ("openai-agents==0.24.0", "openai==3.49.0")),
    Client("codex", "codex_agent.py", ("@openai/codex@0.166.0",), npm=True),
    Client("ollama", "ollama_sdk.py", ("ollama==0.6.3",)),
    Client("ollama-js", "ollama_js.mjs", ("ollama@0.6.4",), npm=True),
    Client("continue", "continue_agent.py", ("@continuedev/cli@1.5.47",), npm=True),
    Client("aider", "aider_agent.py", ("aider-chat==0.86.2",)),
    Client("opencode", "opencode_agent.py", ("opencode-ai@1.18.18",), npm=True),
)
