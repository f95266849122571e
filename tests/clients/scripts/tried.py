"""What the scripts share: where the server is, and one line of JSON for each thing that was tried.

Runs in a client's own environment: the standard library alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# the default model, and one with a long context that always says SENTENCE
URL, MODEL = os.environ["COTERIE_URL"], os.environ["COTERIE_MODEL"]
LONG_URL, LONG_MODEL = os.environ["COTERIE_LONG_URL"], os.environ["COTERIE_LONG_MODEL"]
SENTENCE = os.environ["COTERIE_SENTENCE"]
# more tokens than the default model has positions
TOO_LONG = "word " * 9000
QUESTION = "What is the capital of France? Answer in one word."
# what no model has read before, and questions with a part of the text that answers them
CORPUS = (
    "The lighthouse of Varn is kept by Odile Marrec, who lights its lamp every evening at six.",
    "Bread in the town of Karsk is baked with rye and caraway, and sold before sunrise.",
    "The railway from Tolm to Istrae was closed after the flood and rebuilt with steel bridges.",
    "Wool from the sheep of Hallow Fell is dyed blue with woad and woven into blankets.",
    "The observatory on Mount Serrin follows comets with a telescope of two metres.",
    "The football club of Brenn wears green shirts and plays its matches beside the harbour.",
)
QUESTIONS = {
    "Who lights the lamp of the lighthouse?": "Odile Marrec",
    "What do bakers use for the bread?": "caraway",
    "Why was the train line rebuilt?": "flood",
    "Which colour are the woven blankets?": "woad",
    "Where do astronomers watch comets?": "Serrin",
    "What do the football players wear?": "green shirts",
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def tried(name: str) -> Callable[[Callable[[], Any]], None]:
    """Runs the function at once; what it returns is shown, what it raises is a failure."""

    def run(function: Callable[[], Any]) -> None:
        try:
            said, passed = function(), True
        except Exception as error:
            said, passed = f"{type(error).__name__}: {error}", False
        print(json.dumps({"tried": name, "passed": passed, "said": str(said)}), flush=True)

    return run


def raised(kind: type[BaseException], function: Callable[[], Any]) -> Any:
    """The error of this kind that the function raises."""
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def spoken(text: Any) -> str:
    assert isinstance(text, str) and text.strip(), f"no text: {text!r}"
    return text.strip()


def client_config(client: str, url: str, model: str) -> str:
    """What `coterie client-config` prints; in the environment of the repository."""
    command = [sys.executable, "-m", "coterie", "client-config", client]
    done = subprocess.run(
        [*command, "--url", url, "--model", model], capture_output=True, text=True, check=True
    )
    return done.stdout


def program(command: list[str], *, passing: tuple[int, ...] = (0,), **environment: str) -> str:
    """What a program prints, in an empty folder and home of its own."""
    with tempfile.TemporaryDirectory(prefix="coterie-client-") as home:
        done = subprocess.run(
            command,
            cwd=home,
            env={**os.environ, "HOME": home, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=540,
        )
    assert done.returncode in passing, f"exit status {done.returncode}: {done.stdout} {done.stderr}"
    return done.stdout
