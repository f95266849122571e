"""aider, one text turn: OPENAI_API_BASE, OPENAI_API_KEY and the model as `openai/MODEL`."""

from __future__ import annotations

import sys
from pathlib import Path

from tried import LONG_MODEL, LONG_URL, SENTENCE, program, tried

AIDER = Path(sys.executable).with_name("aider")
FLAGS = [
    "--message", "What is the capital of France?", "--chat-mode", "ask", "--no-git",
    "--yes-always", "--no-check-update", "--no-analytics", "--no-show-model-warnings",
    "--no-pretty", "--map-tokens", "0", "--no-detect-urls",
]  # fmt: skip


def aider(model: str, *flags: str, **environment: str) -> str:
    command = [str(AIDER), "--model", model, "--weak-model", model, *FLAGS, *flags]
    return program(command, LITELLM_LOCAL_MODEL_COST_MAP="True", **environment)


for way in ("--stream", "--no-stream"):

    @tried(f"turn (openai, {way})")
    def _(way: str = way) -> str:
        named = {"OPENAI_API_BASE": f"{LONG_URL}/v1", "OPENAI_API_KEY": "none"}
        printed = aider(f"openai/{LONG_MODEL}", way, **named)
        assert SENTENCE in printed, printed
        return SENTENCE


@tried("turn (anthropic)")
def _() -> str:
    named = {"ANTHROPIC_API_BASE": LONG_URL, "ANTHROPIC_API_KEY": "none"}
    printed = aider(f"anthropic/{LONG_MODEL}", **named)
    assert SENTENCE in printed, printed
    return SENTENCE
