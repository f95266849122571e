"""Codex, one text turn and one that goes on, with a provider of its configuration file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tried import LONG_MODEL, LONG_URL, MODEL, SENTENCE, URL, program, tried

CODEX = Path(os.environ["CLIENT_HOME"]) / "node_modules" / ".bin" / "codex"
SETTINGS = """\
model = "{model}"
model_provider = "coterie"
model_context_window = {context}
approval_policy = "never"
sandbox_mode = "read-only"
[model_providers.coterie]
name = "Coterie"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def codex(folder: str, *words: str, passing: tuple[int, ...] = (0,)) -> str:
    command = [str(CODEX), "exec", "--skip-git-repo-check", *words]
    return program(command, passing=passing, CODEX_HOME=folder)


def configured(folder: str, model: str, url: str, context: int) -> None:
    text = SETTINGS.format(model=model, url=url, context=context)
    (Path(folder) / "config.toml").write_text(text)


with tempfile.TemporaryDirectory(prefix="codex-home-", dir=os.environ["CLIENT_HOME"]) as home:
    configured(home, LONG_MODEL, LONG_URL, 80_000)

    @tried("turn")
    def _() -> str:
        printed = codex(home, "What is the capital of France?")
        assert SENTENCE in printed, printed
        return SENTENCE

    @tried("second turn of a session")
    def _() -> str:
        printed = codex(home, "resume", "--last", "And of Italy?")
        assert SENTENCE in printed, printed
        return SENTENCE

    @tried("too long")
    def _() -> str:
        # Codex's own prompt does not fit the default model
        configured(home, MODEL, URL, 80_000)
        printed = codex(home, "--json", "What is the capital of France?", passing=(1,))
        assert "context_length_exceeded" in printed, printed
        return "context_length_exceeded"
