"""opencode, one text turn with a provider of its configuration file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tried import LONG_MODEL, LONG_URL, SENTENCE, program, tried

OPENCODE = Path(os.environ["CLIENT_HOME"]) / "node_modules" / ".bin" / "opencode"


def settings(package: str) -> str:
    provider = {
        "npm": package,
        "name": "Coterie",
        "options": {"baseURL": f"{LONG_URL}/v1", "apiKey": "none"},
        "models": {LONG_MODEL: {"limit": {"context": 80000, "output": 64}}},
    }
    return json.dumps(
        {
            "model": f"coterie/{LONG_MODEL}",
            "small_model": f"coterie/{LONG_MODEL}",
            "enabled_providers": ["coterie"],
            "provider": {"coterie": provider},
            "autoupdate": False,
            "share": "disabled",
        }
    )


for package in ("@ai-sdk/openai-compatible", "@ai-sdk/anthropic"):

    @tried(f"turn ({package})")
    def _(package: str = package) -> str:
        printed = program(
            [str(OPENCODE), "run", "What is the capital of France?"],
            OPENCODE_CONFIG_CONTENT=settings(package),
            OPENCODE_DISABLE_AUTOUPDATE="1",
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_LSP_DOWNLOAD="1",
            OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
        )
        assert SENTENCE in printed, printed
        return SENTENCE
