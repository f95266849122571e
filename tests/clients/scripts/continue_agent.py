"""Continue's command line, one text turn with the file that `coterie client-config` prints."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tried import LONG_MODEL, LONG_URL, SENTENCE, client_config, program, tried

CN = Path(os.environ["CLIENT_HOME"]) / "node_modules" / ".bin" / "cn"


@tried("turn (client-config continue)")
def _() -> str:
    with tempfile.TemporaryDirectory(prefix="continue-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(client_config("continue", LONG_URL, LONG_MODEL))
        command = [str(CN), "-p", "What is the capital of France?", "--config", str(file)]
        printed = program(command, CONTINUE_TELEMETRY_ENABLED="0")
    assert SENTENCE in printed, printed
    return SENTENCE
