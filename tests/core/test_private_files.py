"""State is for its owner alone, and a home that cannot be written is told with what to do."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.core.errors import ConfigError
from coterie.core.private_files import private_file, private_folder
from coterie.packages.signing import new_key, public_of, read_key
from coterie.packages.sqlite import connect, transaction
from tests.helpers.adapters.package_files import lora_directory
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, own_home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_databases_are_closed_also_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "state" / "experts" / "registry.db"
    for _ in range(2):
        db = connect(path)
        with transaction(db):
            db.execute("CREATE TABLE IF NOT EXISTS t (a)")
            db.execute("INSERT INTO t VALUES (1)")
        names = sorted(item.name for item in path.parent.iterdir())
        assert names == ["registry.db", "registry.db-shm", "registry.db-wal"]
        assert {mode(item) for item in path.parent.iterdir()} == {0o600}
        assert [mode(path.parent), mode(path.parent.parent)] == [0o700, 0o700]
        # as an earlier version left them
        for item in path.parent.iterdir():
            item.chmod(0o644)
        path.parent.chmod(0o755)
        db.close()


def test_what_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "state", tmp_path / "file" / "a" / "b"):
        with pytest.raises(ConfigError, match="COTERIE_HOME"):
            private_folder(path)
        with pytest.raises(ConfigError, match="COTERIE_HOME"):
            private_file(path)


def test_a_server_leaves_nothing_for_others(tmp_path: Path) -> None:
    home = own_home(tmp_path / "home")
    # as an earlier version left it
    (home / "state").mkdir()
    (home / "state").chmod(0o755)
    (home / "state" / "records.db").touch()
    (home / "state" / "records.db").chmod(0o644)
    arguments = (str(tiny_checkpoint("llama")), "--name", "tiny")
    served = Served(*arguments, COTERIE_HOME=str(home))
    try:
        assert served.post("/v1/chat/completions", chat()).status == 200
        body = {"prompt": "hello", "max_tokens": 2}
        assert served.post("/v1/infer", body, prefer="respond-async").status == 202
        reply = served.post("/v1/responses", {"model": "tiny", "input": "hello", "store": True})
        assert reply.status == 200
        state = home / "state"
        assert mode(state) == 0o700
        found = {path: mode(path) for path in state.rglob("*") if not path.is_symlink()}
        names = {path.name for path in found}
        assert {"records.db", "jobs.db", "responses.db", "ensemble.db", "registry.db"} <= names
        folders = {path: m for path, m in found.items() if path.is_dir()}
        assert not {path: oct(m) for path, m in folders.items() if m & 0o077}
        files = {path: m for path, m in found.items() if path.is_file()}
        assert not {path: oct(m) for path, m in files.items() if m & 0o077}
    finally:
        served.stop()


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "MODEL", "--port", "0"),
        ("expert", "install", "DIRECTORY", "--allow-unsigned", "--name", "x"),
        ("expert", "list"),
        ("pull",),
        ("router", "train", "LABELS"),
        ("keys", "trust", "PUB"),
    ],
)
def test_a_home_that_cannot_be_written(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    labels = tmp_path / "labels.jsonl"
    rows = [
        f'{{"prompt": "{text} {number}", "intent": "{label}"}}'
        for number in range(30)
        for text, label in (("Count the orders of customer", "sql"), ("Tell me of town", "reject"))
    ]
    labels.write_text("\n".join(rows) + "\n")
    new_key(tmp_path / "my.key")
    words = {
        "MODEL": str(tiny_checkpoint("llama")),
        "DIRECTORY": str(lora_directory(tmp_path / "lora")),
        "LABELS": str(labels),
        "PUB": public_of(read_key(tmp_path / "my.key")).hex(),
    }
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *(words.get(word, word) for word in command)],
        env={**os.environ, "COTERIE_HOME": str(tmp_path / "file" / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (1, 2), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("coterie: ") and "set COTERIE_HOME to" in last, done.stderr
    assert "unexpected" not in done.stderr and "Traceback" not in done.stderr
