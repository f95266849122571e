"""Claude Code, one text turn: as it is with a long context, and small on the default model.

The long server's context is chosen so that Claude Code's 32,000 tokens of output do not fit beside
its prompt: it must understand the refusal and ask again with less.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tried import LONG_MODEL, LONG_URL, MODEL, QUESTION, SENTENCE, URL, program, tried

CLAUDE = Path(os.environ["CLIENT_HOME"]) / "node_modules" / ".bin" / "claude"


def claude(url: str, model: str, *flags: str, **environment: str) -> dict[str, Any]:
    quiet = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "CLAUDE_CODE_MAX_RETRIES": "1",
    }
    named = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
    }
    command = [str(CLAUDE), "-p", QUESTION, "--model", model, "--output-format", "json", *flags]
    printed = program(command, passing=(0, 1), **quiet, **named, **environment)
    found: dict[str, Any] = json.loads(printed)
    return found


def read(usage: dict[str, Any]) -> int:
    """Tokens of all prompts, also those that the prefix cache held or took."""
    return sum(usage[name] for name in usage if name.endswith("input_tokens"))


def statuses() -> list[int]:
    """Of what the long server was asked so far, by its log."""
    lines = Path(os.environ["COTERIE_LONG_LOG"]).read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["status"] for event in events if event.get("route") == "/v1/messages"]


@tried("turn, default prompt, retry with fewer max_tokens (long context)")
def _() -> str:
    before = len(statuses())
    result = claude(LONG_URL, LONG_MODEL)
    assert not result["is_error"], result["result"]
    assert result["result"].strip() == SENTENCE, result["result"]
    assert statuses()[before:] == [400, 200], statuses()[before:]
    return f"{read(result['usage'])} tokens in, {result['result']}"


@tried("own prompt without tools fits (default model)")
def _() -> str:
    flags = ["--system-prompt", "You answer in one word.", "--tools", ""]
    result = claude(URL, MODEL, *flags, CLAUDE_CODE_MAX_OUTPUT_TOKENS="64")
    # a model this small seldom ends by itself, and Claude Code takes a cut answer for an error
    assert not result["is_error"] or "output token maximum" in result["result"], result["result"]
    used = result["usage"]
    assert used["output_tokens"] > 0
    return f"{read(used)} tokens in, {used['output_tokens']} out, ended: {not result['is_error']}"


@tried("default prompt is too long (default model)")
def _() -> str:
    result = claude(URL, MODEL, CLAUDE_CODE_MAX_OUTPUT_TOKENS="64")
    assert result["is_error"]
    assert "too long" in result["result"].lower(), result["result"]
    return str(result["result"])
