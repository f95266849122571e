"""A Coterie server in the place of another project's: its flags translated, the default model."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.packages import shipped
from tests.helpers.folders import temporary_folder

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
# flags of theirs that mean something here, and those that mean nothing and take a value
_SAME = {
    "--max-model-len": "--context",
    "--context-length": "--context",
    "--ctx-size": "--context",
    "--max-num-seqs": "--max-sequences",
    "--served-model-name": "--name",
    "--alias": "--name",
    "--parallel": "--max-sequences",
    "--host": "--host",
    "--port": "--port",
}
MAX_CONTEXT = 8192
USUAL_CONTEXT = 2048
# what vLLM's clients send to a server that asks for no key
ADMIN_KEY = "token-abc123"


def arguments(given: Sequence[str]) -> list[str]:
    """Coterie's, of another server's."""
    made, rest = [], list(map(str, given))
    while rest:
        flag = rest.pop(0)
        value = rest.pop(0) if rest and not rest[0].startswith("--") else None
        if flag not in _SAME or value is None:
            continue
        if _SAME[flag] == "--context":
            value = str(min(int(value), MAX_CONTEXT))
        made += [_SAME[flag], value]
    return made


@functools.cache
def lora_directory() -> Path:
    """A LoRA for the default model, as PEFT writes it."""
    from coterie.packages.archive import inspect, unpack

    folder = temporary_folder("foreign-lora-")
    unpack(inspect(shipped.FOLDER / "commit-header.expert"), folder)
    for path in folder.iterdir():
        if not path.name.startswith("adapter_"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COTERIE_HOME": str(_home())}


def _home() -> Path:
    """The downloaded model and kernels, but no experts that somebody or another test installed."""
    made = temporary_folder("foreign-home-")
    kept = Path(os.environ.get("COTERIE_HOME", ROOT / ".cache" / "home"))
    for name in ("models", "kernels"):
        if (kept / name).is_dir():
            (made / name).symlink_to(kept / name)
    return made


class Server:
    """Runs until `stop`; keys and adapters as vLLM's and SGLang's flags name them."""

    def __init__(self, model: str, given: Sequence[str], api_key: str | None = None) -> None:
        command = [sys.executable, "-m", "coterie", "serve", *arguments(given)]
        if "--name" not in command:
            command += ["--name", model]
        if "--port" not in command:
            command += ["--port", "0"]
        if "--context" not in command:
            # a small model's answer without a limit often runs to the context's end
            command += ["--context", str(USUAL_CONTEXT)]
        folder = temporary_folder("foreign-server-")
        keys = folder / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"{api_key or ADMIN_KEY}\n")
        if api_key is not None:
            command += ["--api-key-file", str(keys)]
        elif "--enable-lora" in given:
            command += ["--admin-key-file", str(keys), "--allow-unsigned"]
        self.log_path = folder / "log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        self.url = self._until_ready()

    def _until_ready(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            text = self.log_path.read_text(errors="replace")
            if found := re.search(r"listening on (http://\S+?),", text):
                try:
                    with urllib.request.urlopen(f"{found[1]}/health/ready", timeout=5) as reply:
                        if reply.status == 200:
                            return found[1]
                except (urllib.error.URLError, OSError):
                    pass
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"no server: {self.log_path.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ModelTokenizer:
    """The default model's, with the methods that their tests call."""

    def __init__(self) -> None:
        from coterie.models.text.tokenizer import load_tokenizer
        from coterie.weights.sources.source import DEFAULT_MODEL, resolve

        self._own = load_tokenizer(resolve(DEFAULT_MODEL))

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        return self._own.encode(text)

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        listed = [ids] if isinstance(ids, int) else list(ids)
        return self._own.decode(listed, skip_special=skip_special_tokens)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._own.special_ids.get(token, self._own.encode(token)[0])

    def convert_ids_to_tokens(self, ids: Sequence[int], **_: Any) -> list[str]:
        return [self._own.decode([one], skip_special=False) for one in ids]

    def apply_chat_template(
        self,
        conversation: Any,
        tokenize: bool = True,
        tools: Any = (),
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **_: Any,
    ) -> Any:
        from coterie.core.request import Chat, Message

        turns = tuple(Message(turn["role"], turn["content"]) for turn in conversation)
        text = self._own.render(
            Chat(
                turns,
                add_generation_prompt=add_generation_prompt,
                closes_last=not continue_final_message,
                tools=tuple(tool["function"] for tool in tools),
            )
        )
        return self._own.encode(text) if tokenize else text
