"""Codex, one text turn and one that goes on, with a provider of its configuration file."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from tried import LONG_MODEL, LONG_URL, MODEL, SENTENCE, URL, client_config, program, tried

CODEX = Path(os.environ["CLIENT_HOME"]) / "node_modules" / ".bin" / "codex"
# before and after what `coterie client-config` prints
BEFORE = 'approval_policy = "never"\nsandbox_mode = "read-only"\n'
# names of models that it has a list of: a tool for patches by a grammar, tools as an item of input
KNOWN = ("gpt-5.5", "gpt-6.1-sol")
AFTER = "request_max_retries = 0\nstream_max_retries = 0\n"


def codex(folder: str, *words: str, passing: tuple[int, ...] = (0,)) -> str:
    command = [str(CODEX), "exec", "--skip-git-repo-check", *words]
    return program(command, passing=passing, CODEX_HOME=folder)


def configured(folder: str, model: str, url: str, name: str = "") -> None:
    """`name`: the one to ask for, if it is not the model's."""
    text = BEFORE + client_config("codex", url, model) + AFTER
    text = text.replace(f'model = "{model}"', f'model = "{name or model}"')
    # of the default model Codex is told more than it has: its own prompt does not fit
    text = re.sub(r"model_context_window = \d+", "model_context_window = 80000", text)
    (Path(folder) / "config.toml").write_text(text)


with tempfile.TemporaryDirectory(prefix="codex-home-", dir=os.environ["CLIENT_HOME"]) as home:
    configured(home, LONG_MODEL, LONG_URL)

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

    @tried("a turn as models whose names it knows, by an alias")
    def _() -> str:
        for name in KNOWN:
            configured(home, LONG_MODEL, LONG_URL, name)
            printed = codex(home, "What is the capital of France?")
            assert SENTENCE in printed and "metadata" not in printed, printed
        return ", ".join(KNOWN)

    @tried("too long")
    def _() -> str:
        # Codex's own prompt does not fit the default model
        configured(home, MODEL, URL)
        printed = codex(home, "--json", "What is the capital of France?", passing=(1,))
        assert "context_length_exceeded" in printed, printed
        return "context_length_exceeded"
