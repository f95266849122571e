"""`coterie expert` and `coterie keys`: the whole road, their JSON, and their one-line errors."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from coterie.cli.expert import actions as expert_actions
from coterie.cli.expert import command
from coterie.cli.expert.state import experts_dir
from coterie.cli.main import COMMANDS, build_parser, main
from coterie.cli.terminal import table
from coterie.core.errors import Conflict
from coterie.packages import shipped
from coterie.packages.archive import inspect
from coterie.packages.paths import digest_of
from coterie.routing.match import learn
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.adapters.package_files import lora_directory
from tests.helpers.models.tiny import tiny_checkpoint

Capture = pytest.CaptureFixture[str]
LEARN = expert_actions._learn


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    # seconds for each installation; the one test that is about it learns
    monkeypatch.setattr(expert_actions, "_learn", lambda registry: None)
    logger = logging.getLogger("coterie")
    handlers, level = list(logger.handlers), logger.level
    yield tmp_path
    # a command speaks for a whole process: the next test is another one
    logger.handlers[:] = handlers
    logger.setLevel(level)


def run(capsys: Capture, *arguments: object, status: int = 0) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def text(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return out


def refused(capsys: Capture, *arguments: object) -> str:
    """One line, and no traceback."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("coterie: ")
    return said[0]


def packed(capsys: Capture, version: str = "1.0.0", seed: int = 0) -> Path:
    directory = lora_directory(Path(f"lora-{seed}"), seed, floats=512)
    made = run(capsys, "expert", "pack", directory, "--name", "sql", "--version", version)
    assert made["digest"] == digest_of(directory)
    return Path(made["file"])


def test_from_a_peft_directory_to_an_installed_expert(home: Path, capsys: Capture) -> None:
    model = tiny_checkpoint("llama")
    directory = lora_directory(Path("my-lora"), floats=512)
    (directory / "optimizer.pt").write_bytes(b"x")
    options = ["--name", "sql", "--version", "1.0.0", "--description", "Writes SQL"]
    made = run(capsys, "expert", "pack", directory, *options, "--base", model)
    assert made["left_out"] == ["optimizer.pt"]
    file = Path(made["file"])
    assert file.name == "sql-1.0.0.expert"
    assert inspect(file).manifest.fingerprints == (open_checkpoint(model).fingerprint(),)
    assert str(home) not in inspect(file).read_text("manifest.json")

    assert run(capsys, "expert", "verify", file, status=1)["signature"]["state"] == "unsigned"
    assert "it is not signed" in refused(capsys, "expert", "install", file)
    key = run(capsys, "keys", "new", "my.key", "--comment", "me")
    run(capsys, "expert", "sign", file, "--key", "my.key")
    assert "unknown key" in refused(capsys, "expert", "install", file)
    assert run(capsys, "keys", "trust", "my.key.pub")["id"] == key["key_id"]
    assert run(capsys, "expert", "verify", file)["signature"]["key_id"] == key["key_id"]

    other = tiny_checkpoint("qwen3")
    assert "another base model" in refused(capsys, "expert", "install", file, "--base", other)
    card = run(capsys, "expert", "install", file, "--base", model)
    assert (card["name"], card["signer"]) == ("sql", key["key_id"])
    assert (home / "home/state/experts/library" / card["digest"]).is_dir()
    shown = run(capsys, "expert", "show", "sql")
    assert shown["manifest"]["description"] == "Writes SQL"
    assert "Writes SQL" in text(capsys, "expert", "show", "sql@1.0.0")
    assert "trusted, key" in text(capsys, "expert", "verify", file)


def test_those_that_come_with_coterie(home: Path, capsys: Capture) -> None:
    assert "FILE_OR_DIR or --shipped is required" in refused(capsys, "expert", "install")
    report = run(capsys, "expert", "install", "--shipped")
    assert report["failed"] == 0
    names = sorted(card["name"] for card in report["experts"])
    assert names == [path.stem for path in shipped.files()] and len(names) == 7
    # beside another one
    file = packed(capsys)
    run(capsys, "expert", "install", "--shipped", file, "--allow-unsigned")
    listed = run(capsys, "expert", "list")["experts"]
    assert sorted(item["name"] for item in listed) == sorted([*names, "sql"])


def test_versions_names_and_pins(home: Path, capsys: Capture) -> None:
    for number in (1, 2):
        file = packed(capsys, f"{number}.0.0", seed=number)
        said = text(capsys, "expert", "install", file, "--allow-unsigned")
    assert "staged: sql means 1.0.0 until coterie expert promote sql@2.0.0" in " ".join(
        said.split()
    )
    listed = run(capsys, "expert", "list")["experts"]
    assert [(e["version"], e["current"]) for e in listed] == [("1.0.0", True), ("2.0.0", False)]
    assert "promote one of them" in refused(capsys, "expert", "remove", "sql@1.0.0")
    # no server is asked, and without one it says what to do
    away = ("--url", "http://127.0.0.1:9")
    assert "promote sql --now" in refused(capsys, "expert", "promote", "sql", *away)
    with pytest.MonkeyPatch.context() as patch:
        # what a server refuses is no reason to go round it
        patch.setattr(command, "ask", Mock(side_effect=Conflict("a canary for sql is running")))
        assert refused(capsys, "expert", "promote", "sql").endswith("is running")
    assert run(capsys, "expert", "promote", "sql", "--now")["version"] == "2.0.0"
    assert run(capsys, "expert", "show", "sql")["version"] == "2.0.0"
    assert run(capsys, "expert", "rollback", "sql")["version"] == "1.0.0"
    run(capsys, "expert", "alias", "prod", "sql@2.0.0")
    assert run(capsys, "expert", "pin", "sql")["pinned"]
    out = text(capsys, "expert", "list")
    assert "* pinned" in out and "prod = sql@2.0.0" in out
    assert "is pinned" in refused(capsys, "expert", "remove", "sql")
    run(capsys, "expert", "install", packed(capsys, "3.0.0", seed=3), "--allow-unsigned", "--now")
    assert run(capsys, "expert", "show", "sql")["version"] == "1.0.0"
    run(capsys, "expert", "alias", "prod", "--off")
    run(capsys, "expert", "pin", "sql", "--off")
    run(capsys, "expert", "install", packed(capsys, "3.0.0", seed=3), "--allow-unsigned", "--now")
    assert run(capsys, "expert", "show", "sql")["version"] == "3.0.0"
    assert len(run(capsys, "expert", "remove", "sql")["removed"]) == 3
    assert run(capsys, "expert", "list")["experts"] == []
    # a server may still be running them
    assert len(list((home / "home/state/experts/library").iterdir())) == 3


def test_an_unsigned_installation_is_said(home: Path, capsys: Capture) -> None:
    directory = lora_directory(Path("plain"))
    assert "not signed" in refused(capsys, "expert", "install", directory)
    assert main(["expert", "install", str(directory), "--allow-unsigned"]) == 0
    said = capsys.readouterr()
    assert "--allow-unsigned used: plain@0.0.0-" in said.err
    assert said.out.startswith("plain@0.0.0-")


def test_packing_twice_gives_the_same_bytes(home: Path, capsys: Capture) -> None:
    directory = lora_directory(Path("x"))
    Path("manifest.json").write_text(json.dumps({"name": "x", "version": "1", "perf": {"a": 1}}))
    for out in ("a.expert", "b.expert"):
        run(capsys, "expert", "pack", directory, "--manifest", "manifest.json", "--out", out)
    assert Path("a.expert").read_bytes() == Path("b.expert").read_bytes()
    assert inspect(Path("a.expert")).manifest.section("perf") == {"a": 1}


def test_keys(home: Path, capsys: Capture) -> None:
    made = run(capsys, "keys", "new", "--trust", "--comment", "the data team")
    assert Path(made["private_key"]).stat().st_mode & 0o777 == 0o600
    assert "the data team" in text(capsys, "keys", "list")
    public = Path(made["public_key"]).read_text().split()[1]
    found = run(capsys, "keys", "trust", public, "--expires", "2030-01-31")
    assert found["expires_at"] == 1_896_134_400
    assert "trusted until 2030-01-31" in text(capsys, "keys", "list")
    assert "2027-12-31 or 90d" in refused(capsys, "keys", "trust", public, "--expires", "soon")
    assert "64 hex digits" in refused(capsys, "keys", "trust", "abc")
    assert run(capsys, "keys", "revoke", made["key_id"][:5])["state"] == "revoked"
    assert "stays so" in refused(capsys, "keys", "trust", public)
    assert "never overwritten" in refused(capsys, "keys", "new")
    assert "no known key starts" in refused(capsys, "keys", "revoke", "zz")


def test_one_line_errors(home: Path, capsys: Capture) -> None:
    Path("x.expert").write_bytes(b"not a package")
    Path("empty").mkdir()
    lora_directory(Path("lora"))
    assert "not a gzip" in refused(capsys, "expert", "verify", "x.expert")
    assert "no such file" in refused(capsys, "expert", "verify", "y.expert")
    assert "no adapter_config.json" in refused(capsys, "expert", "pack", "empty", "--version", "1")
    assert "give --version" in refused(capsys, "expert", "pack", "lora")
    wrong = refused(capsys, "expert", "pack", "lora", "--version", "1", "--name", "A b")
    assert "no name for an expert" in wrong
    assert "no expert 'sql'" in refused(capsys, "expert", "show", "sql")
    assert "no private key" in refused(capsys, "expert", "sign", "x.expert", "--key", "x.expert")
    assert "cannot be written" in refused(capsys, "keys", "new", "x.expert/inside/my.key")
    assert "say which expert" in refused(capsys, "expert", "alias", "prod")


@pytest.mark.parametrize("command", ["expert", "keys"])
def test_help_has_examples(command: str, capsys: Capture) -> None:
    assert main([command]) == 0
    assert "examples:" in capsys.readouterr().out
    parser = build_parser()._subparsers._group_actions[0].choices[command]  # type: ignore
    actions = parser._subparsers._group_actions[0].choices
    expected = {"pack", "sign", "verify", "install", "list", "show", "remove", "pin", "test"}
    assert set(actions) >= (expected if command == "expert" else {"new", "trust", "revoke", "list"})
    for action in actions.values():
        assert action.epilog.startswith("examples:\n  coterie ")
    assert command in COMMANDS


def test_one_bad_file_does_not_keep_the_others_out(home: Path, capsys: Capture) -> None:
    file = packed(capsys)
    Path("cut.expert").write_bytes(file.read_bytes()[:500])
    capsys.readouterr()
    assert main(["expert", "install", "cut.expert", str(file), "--allow-unsigned"]) == 1
    said = capsys.readouterr()
    assert said.out == f"sql@1.0.0: installed (lora, {said.out.split('(lora, ')[1]}"
    assert "cut.expert: refused" in said.err and "sql@1.0.0: it is not signed" in said.err
    assert "installed again" in text(capsys, "expert", "install", file, "--allow-unsigned")


def test_a_start_after_an_installation_learns_nothing(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_actions, "_learn", LEARN)
    command = ["expert", "install", str(packed(capsys)), "--allow-unsigned"]
    assert main(command) == 0
    assert "learning when to use 1 expert\n" in capsys.readouterr().err
    assert len(list((home / "home" / "routing").glob("*.probes"))) == 1
    assert main(command) == 0 and "learning" not in capsys.readouterr().err
    monkeypatch.setattr(learn, "_by_child", lambda *_: pytest.fail("it learns again"))

    async def start() -> None:
        catalog = AdapterCatalog(experts_dir())
        await catalog.start()
        await catalog.settled()
        found = catalog.matcher()
        assert found is not None and found.match("Write SQL")[0].profile.card.name == "sql"
        await catalog.close()

    asyncio.run(start())
    # a child that fails costs the installation nothing
    monkeypatch.setattr(learn, "_by_child", lambda *_: b"")
    command = ["expert", "install", str(packed(capsys, "2.0.0")), "--allow-unsigned"]
    assert main([*command, "--name", "other"]) == 0
    said = capsys.readouterr()
    assert "other@2.0.0: installed" in said.out and "the next server will try again" in said.err


def test_a_revoked_signer_is_seen_on_what_stays(home: Path, capsys: Capture) -> None:
    key = run(capsys, "keys", "new", "my.key", "--trust")["key_id"]
    file = packed(capsys)
    run(capsys, "expert", "sign", file, "--key", "my.key")
    base = tiny_checkpoint("llama")
    run(capsys, "expert", "install", file, "--base", base)
    assert open_checkpoint(base).fingerprint()[:12] in text(capsys, "expert", "show", "sql")
    assert run(capsys, "keys", "revoke", key[:6])["installed"] == ["sql@1.0.0"]
    assert f"{key} revoked" in text(capsys, "expert", "list")
    assert run(capsys, "expert", "list")["experts"][0]["signer_state"] == "revoked"
    assert f"{key} revoked" in text(capsys, "expert", "show", "sql")
    (home / "home/state/trust.json").write_text("{")
    assert f"{key} unknown" in text(capsys, "expert", "list")
    assert "nope: no such file" in refused(capsys, "keys", "trust", "nope")


def test_an_alias_is_told_from_a_name(home: Path, capsys: Capture) -> None:
    run(capsys, "expert", "install", packed(capsys), "--allow-unsigned")
    run(capsys, "expert", "alias", "prod", "sql")
    assert run(capsys, "expert", "show", "prod")["aliases"] == ["prod"]
    assert "prod is an alias of sql" in refused(capsys, "expert", "remove", "prod")
    assert "prod is an alias of sql" in refused(capsys, "expert", "pin", "prod")


def test_tables_set_words_left_and_numbers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [("a", "7.5 MB", "someone else"), ("b", "12.5 MB", "me")]
    shown = table(("key", "size", "by"), rows, words=("by",))
    assert shown.splitlines() == [
        "key     size  by",
        "a     7.5 MB  someone else",
        "b    12.5 MB  me",
    ]


def test_what_could_never_be_loaded_is_not_installed(home: Path, capsys: Capture) -> None:
    """Numbers that are none, and more than there is room for."""
    directory = lora_directory(Path("lora"), 1, floats=512)
    install = ("expert", "install", directory, "--allow-unsigned", "--name", "sql")

    def refusal(*more: object) -> str:
        capsys.readouterr()
        assert main([*map(str, (*install, *more))]) == 1
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "room for 100" in refusal("--adapter-bytes", "100")
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + struct.pack("<f", math.nan))
    assert "holds NaN or infinity" in refusal()
    assert run(capsys, "expert", "list")["experts"] == []
    weights.write_bytes(whole)
    assert run(capsys, *install)["name"] == "sql"
