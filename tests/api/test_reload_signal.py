"""SIGHUP and `coterie config reload` at a real server: new keys and rights, or a reason."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.cli.main import main
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, own_home

pytestmark = pytest.mark.full
FILE = """
[server]
api_key_file = "{folder}/keys.txt"
admin_key_file = "{folder}/admins.txt"
[engine]
kv_bytes = "8MB"
[[specialists]]
name = "first"
model = "{model}"
[[specialists]]
name = "second"
model = "{model}"
{more}
"""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_running_server_reads_its_file_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(keys: str, more: str = "") -> None:
        (tmp_path / "keys.txt").write_text(keys)
        text = FILE.format(folder=tmp_path, model=tiny_checkpoint("llama"), more=more)
        (tmp_path / "coterie.toml").write_text(text)

    def ask(key: str, model: str = "first") -> int:
        return server.post(
            "/v1/chat/completions", chat(model=model, max_tokens=3), authorization=f"Bearer {key}"
        ).status

    (tmp_path / "admins.txt").write_text("admin\n")
    write("one\n")
    home = own_home(tmp_path / "home")
    server = Served("--config", str(tmp_path / "coterie.toml"), COTERIE_HOME=str(home))
    try:
        assert (ask("one"), ask("two")) == (200, 401)
        write("two tenant=acme\n", '[[tenants]]\nname = "acme"\nspecialists = ["second"]')
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "changed: tenants" in server.log())
        assert (ask("one"), ask("two"), ask("two", "second")) == (401, 403, 200)
        # a wrong file: the reason is printed, and all stays
        write("two tenant=acme\n", '[[tenants]]\nname = "acme"\nspecialists = ["thrid"]')
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "settings not changed: tenants.acme.specialists" in server.log())
        assert (ask("two"), ask("two", "second")) == (403, 200)
        write("one\n")
        command = ["config", "reload", "--url", server.url]
        command += ["--admin-key-file", str(tmp_path / "admins.txt")]
        assert main(command) == 0 and "tenants" in capsys.readouterr().out
        assert (ask("one"), ask("two")) == (200, 401)
        assert main([*command[:4], "--admin-key-file", str(tmp_path / "keys.txt")]) == 1
        assert "not known here" in capsys.readouterr().err
        shown = server.get("/metrics", authorization="Bearer one").body.decode()
        for result, count in (("done", 2), ("refused", 1)):
            assert f'coterie_config_reloads_total{{result="{result}"}} {count}.0' in shown
    finally:
        assert server.stop() == 0
