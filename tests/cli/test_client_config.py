"""`coterie client-config` against a real server: each text is read by the parser of its format."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import ollama
import pytest
import yaml

from coterie.cli.client_config import CLIENTS
from coterie.cli.main import main
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served

KEY = "key-of-a-client"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("client-config")
    (folder / "keys.txt").write_text(KEY + "\n")
    file = folder / "coterie.toml"
    file.write_text(
        f"""
        [server]
        api_key_file = "{folder}/keys.txt"
        [engine]
        kv_bytes = "8MB"
        [[specialists]]
        name = "small"
        model = "{tiny_checkpoint("llama")}"
        context = 512
        [[specialists]]
        name = "large"
        model = "{tiny_checkpoint("llama")}"
        [aliases]
        "claude-*" = "large"
        """
    )
    served = Served("--config", str(file))
    yield served
    served.stop()


class Printer:
    """Runs the command; `err` is what it noted beside the settings."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self.capsys, self.err = url, capsys, ""

    def __call__(self, *arguments: str) -> str:
        common = ["--url", self.url, "--key-env", "MY_KEY"]
        assert main(["client-config", *arguments, *common]) == 0
        out, self.err = self.capsys.readouterr()
        assert KEY not in out + self.err
        return out


@pytest.fixture
def printed(
    locked: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Printer:
    monkeypatch.setenv("MY_KEY", KEY)
    return Printer(locked.url, capsys)


def variables(text: str, folder: Path) -> dict[str, str]:
    """What a shell makes of it."""
    script = f"set -eu\nMY_KEY={KEY}\n{text}\nenv -0"
    done = subprocess.run(
        ["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=True, env={}
    )
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


def test_lines_for_a_shell(printed: Printer, locked: Served, tmp_path: Path) -> None:
    found = variables(printed("claude-code", "--model", "large"), tmp_path)
    assert (found["ANTHROPIC_BASE_URL"], found["ANTHROPIC_AUTH_TOKEN"]) == (locked.url, KEY)
    assert found["ANTHROPIC_MODEL"] == "large"
    assert found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "256"
    text = printed("aider", "--model", "small").rpartition("\naider")[0]
    found = variables(text, tmp_path)
    assert found["OPENAI_API_BASE"] == locked.url + "/v1"
    limits = json.loads((tmp_path / ".aider.model.metadata.json").read_text())["openai/small"]
    assert limits["max_input_tokens"] + limits["max_output_tokens"] == 512
    found = variables(printed("openwebui"), tmp_path)
    assert found["OPENAI_API_KEY"] == KEY and found["DEFAULT_MODELS"] == "auto"
    found = variables(printed("ollama"), tmp_path)
    headers = {"authorization": f"Bearer {found['OLLAMA_API_KEY']}"}
    with ollama.Client(host=found["OLLAMA_HOST"], headers=headers) as client:
        assert "small:latest" in [model.model for model in client.list().models]


def test_files(printed: Printer, locked: Served) -> None:
    codex = tomllib.loads(printed("codex", "--model", "claude-sonnet"))
    assert (codex["model"], codex["model_context_window"]) == ("claude-sonnet", 1024)
    assert codex["model_providers"]["coterie"]["env_key"] == "MY_KEY"
    opencode = json.loads(printed("opencode"))
    # any may answer: the smallest context
    assert opencode["provider"]["coterie"]["models"]["auto"]["limit"]["context"] == 512
    assert opencode["provider"]["coterie"]["options"]["apiKey"] == "{env:MY_KEY}"
    [model] = yaml.safe_load(printed("continue", "--model", "large"))["models"]
    assert (model["apiBase"], model["apiKey"]) == (locked.url + "/v1", "${{ secrets.MY_KEY }}")
    assert model["defaultCompletionOptions"] == {"contextLength": 1024, "maxTokens": 256}
    zed = json.loads(printed("zed", "--model", "large"))
    [listed] = zed["language_models"]["openai_compatible"]["Coterie"]["available_models"]
    assert (listed["name"], listed["max_tokens"]) == ("large", 1024)
    assert "for Zed's settings.json" in printed.err


def test_a_context_that_is_too_small_is_told(printed: Printer) -> None:
    for name, client in CLIENTS.items():
        printed(name, "--model", "large")
        assert ("warning: large has a context of 1024" in printed.err) == (client.needs > 1024)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "no answer from"),
        (["--url", "ftp://host"], "write a URL"),
        (["--key-env", "sk-not a name"], "not the key"),
        (["--key-env", "NOT_SET"], "is not set"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client-config", "codex", *arguments]) in (1, 2)
    out, err = capsys.readouterr()
    assert words in err and not out and "sk-not" not in err


@contextmanager
def listing(cards: Any) -> Iterator[str]:
    """A server of others that lists these."""

    class Lister(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            raw = json.dumps(cards).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Lister) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


GOOD = {"id": "good", "max_model_len": 4096}


@pytest.mark.parametrize(
    "cards",
    [
        [],
        {"data": None},
        {"data": []},
        {"data": [{"id": "good"}]},
        {"data": [{"id": "good", "max_model_len": "4096; touch /tmp/x"}]},
        # in a comment for a shell this would be a command
        {"data": [{"id": "x\ntouch /tmp/x", "max_model_len": 4096}]},
        {"data": [{"id": "encoder", "max_model_len": 64, "kind": "encoder"}]},
    ],
)
def test_a_list_that_is_not_understood_prints_nothing(
    cards: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with listing(cards) as url:
        assert main(["client-config", "ollama", "--url", url]) == 2
    out, err = capsys.readouterr()
    assert not out and url in err


def test_encoders_write_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = {"id": "encoder", "max_model_len": 64, "kind": "encoder"}
    with listing({"data": [encoder, GOOD, GOOD | {"id": "auto"}]}) as url:
        assert main(["client-config", "codex", "--url", url]) == 0
        assert tomllib.loads(capsys.readouterr().out)["model_context_window"] == 4096
        assert main(["client-config", "codex", "--url", url, "--model", "encoder"]) == 2
    assert "writes no text" in capsys.readouterr().err


def test_an_unknown_model_and_a_missing_key(
    locked: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["client-config", "codex", "--url", locked.url]) == 1
    assert "no API key" in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", KEY)
    command = ["client-config", "codex", "--url", locked.url, "--key-env", "MY_KEY"]
    assert main([*command, "--model", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err
