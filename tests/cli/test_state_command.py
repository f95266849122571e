"""`coterie state`: a backup beside a running server, a restore that checks, hostile archives."""

from __future__ import annotations

import gzip
import io
import json
import random
import sqlite3
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, own_home

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: object, status: int = 0) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert main(list(map(str, arguments))) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("coterie: ")
    return said


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a home with a database, a key and a file in a folder."""
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home" / "state"
    (folder / "keys").mkdir(parents=True)
    (folder / "keys" / "my.key").write_bytes(bytes(range(32)))
    (folder / "heat maps" / ("x" * 90)).mkdir(parents=True)
    (folder / "heat maps" / ("x" * 90) / "code.json").write_text("{}")
    with sqlite3.connect(folder / "jobs.db") as database:
        database.execute("CREATE TABLE numbers (value INTEGER)")
    database.close()
    # of processes: not stored
    (folder / "run").mkdir()
    (folder / "run" / "left").write_text("x")
    (folder / "jobs.owners").mkdir()
    return folder


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


STORED = {"keys/my.key", f"heat maps/{'x' * 90}/code.json", "jobs.db"}


def test_there_and_back(
    state: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(capsys, "state", "backup", "b.tar.gz")
    assert made["files"] == len(STORED)
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    assert "exists" in refused(capsys, "state", "backup", "b.tar.gz")
    assert "--replace" in refused(capsys, "state", "restore", "b.tar.gz")
    (state / "keys" / "my.key").write_bytes(b"newer")
    report = run(capsys, "state", "restore", "b.tar.gz", "--replace")
    assert names(state) == STORED and (state / "keys" / "my.key").read_bytes() == bytes(range(32))
    assert (Path(report["before"]) / "keys" / "my.key").read_bytes() == b"newer"
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "other"))
    assert "nothing to back up" in refused(capsys, "state", "backup")
    run(capsys, "state", "restore", "b.tar.gz")
    assert names(tmp_path / "other" / "state") == STORED
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "other").rglob("*"))


def test_a_database_is_of_one_moment(state: Path, capsys: Capture) -> None:
    """Rows are written in pairs while it is copied: there is no half of one."""
    ended = threading.Event()

    def write() -> None:
        database = sqlite3.connect(state / "jobs.db", isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        number = 0
        while not ended.is_set():
            database.execute("BEGIN")
            for value in (number, -number):
                database.execute("INSERT INTO numbers VALUES (?)", (value,))
            database.execute("COMMIT")
            number += 1
        database.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for turn in range(5):
            run(capsys, "state", "backup", f"{turn}.tar.gz")
    finally:
        ended.set()
        writer.join()
    run(capsys, "state", "restore", "4.tar.gz", "--replace")
    with sqlite3.connect(state / "jobs.db") as database:
        count, total = database.execute("SELECT count(*), sum(value) FROM numbers").fetchone()
        assert count > 0 and count % 2 == 0 and total == 0
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def rewritten(path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    """The archive with other members."""
    with tarfile.open(path) as archive:
        members = [(one, archive.extractfile(one).read()) for one in archive]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))


def relisted(members: list[tuple[tarfile.TarInfo, bytes]], change: Callable[[Any], None]) -> None:
    listing = json.loads(members[0][1])
    change(listing)
    text = json.dumps(listing).encode()
    members[0][0].size = len(text)
    members[0] = (members[0][0], text)


def rename(name: str) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        member = next(one for one, _ in members if one.name == "keys/my.key")
        relisted(members, lambda told: told["files"].update({name: told["files"].pop(member.name)}))
        member.name = name

    return change


def link(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    member = next(one for one, _ in members if one.name == "keys/my.key")
    member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0


def extra(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append((tarfile.TarInfo("more"), b""))


def twice(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append(members[-1])


HOSTILE: dict[str, Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]] = {
    "above": rename("../escaped"),
    "absolute": rename("/tmp/escaped"),
    "through": rename("keys/../../escaped"),
    "dots": rename("keys/./my.key"),
    "empty": rename(""),
    "link": link,
    "extra": extra,
    "twice": twice,
    "missing": lambda members: members.pop(),  # type: ignore[dict-item,return-value]
    "no list": lambda members: members.pop(0),  # type: ignore[dict-item,return-value]
    "newer": lambda members: relisted(members, lambda told: told.update(format=2)),
    "no format": lambda members: relisted(members, lambda told: told.pop("format")),
    "list of files": lambda members: relisted(members, lambda told: told.update(files=[])),
    "other fields": lambda members: relisted(
        members, lambda told: told.update(files={"a": {"b": 1}})
    ),
    "negative": lambda members: relisted(
        members, lambda told: told["files"]["keys/my.key"].update(size=-1)
    ),
    "too large": lambda members: relisted(
        members, lambda told: told["files"]["keys/my.key"].update(size=1 << 60)
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_changes_nothing(
    name: str, state: Path, tmp_path: Path, capsys: Capture
) -> None:
    run(capsys, "state", "backup", "b.tar.gz")
    rewritten(tmp_path / "b.tar.gz", HOSTILE[name])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = refused(capsys, "state", "restore", "b.tar.gz", "--replace")
    assert "b.tar.gz" in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not Path("/tmp/escaped").exists()


def test_a_damaged_archive_changes_nothing(state: Path, tmp_path: Path, capsys: Capture) -> None:
    path, draw = tmp_path / "b.tar.gz", random.Random(5)
    run(capsys, "state", "backup", path)
    good, key = path.read_bytes(), state / "keys" / "my.key"
    key.write_bytes(b"newer")
    refusals = 0
    for turn in range(60):
        damaged = bytearray(good)
        if turn % 3 == 0:
            del damaged[draw.randrange(len(good)) :]
        else:
            damaged[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        # bits of gzip's own header change nothing
        if main(["state", "restore", str(path), "--replace"]) == 0:
            assert gzip.decompress(damaged) == gzip.decompress(good)
            key.write_bytes(b"newer")
        else:
            refusals += 1
            assert key.read_bytes() == b"newer"
    assert refusals > 40
    assert not [one for one in state.parent.iterdir() if ".restored-" in one.name]
    assert names(state) in (STORED, STORED | {"run/left"})


def test_beside_a_running_server(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = own_home(tmp_path / "home"), own_home(tmp_path / "other")
    model = str(tiny_checkpoint("llama"))
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 6, "temperature": 0}
    archive = tmp_path / "b.tar.gz"
    server = Served(model, "--name", "tiny", COTERIE_HOME=str(home))
    try:
        kept = server.post("/v1/responses", asked).json
        monkeypatch.setenv("COTERIE_HOME", str(home))
        run(capsys, "state", "backup", archive)
        assert "a server runs" in refused(capsys, "state", "restore", archive, "--replace")
        later = server.post("/v1/responses", asked).json
    finally:
        server.stop()
    monkeypatch.setenv("COTERIE_HOME", str(other))
    run(capsys, "state", "restore", archive)
    server = Served(model, "--name", "tiny", COTERIE_HOME=str(other))
    try:
        assert server.get(f"/v1/responses/{kept['id']}").json["output"] == kept["output"]
        assert server.get(f"/v1/responses/{later['id']}").status == 404
        assert server.get(f"/v1/receipts/{kept['id']}").status == 200
    finally:
        server.stop()
