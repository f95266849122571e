"""Called as llama-server by llama.cpp's tests: becomes a Coterie server with the same meaning."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.foreign.server import arguments, environment


def main() -> None:
    given = sys.argv[1:]
    command = [sys.executable, "-m", "coterie", "serve", *arguments(given)]
    if "--parallel" in given:
        command += ["--max-sequences", given[given.index("--parallel") + 1]]
    if "--api-key" in given:
        handle, path = tempfile.mkstemp(prefix="foreign-key-")
        os.write(handle, given[given.index("--api-key") + 1].encode() + b"\n")
        command += ["--api-key-file", path]
    os.execve(sys.executable, command, environment())


main()
