"""`coterie config`, and `--config FILE --specialist NAME` of the other commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.cli.serve import configure, settings
from coterie.cli.specialist import use_specialist
from coterie.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
EIGHT = ROOT / "examples" / "eight.toml"
Run = Callable[..., tuple[int, str, str]]
WRONG = """
[server]
api_key_file = "{folder}/keys.txt"
prot = 1
[engine]
max_queue = 0
[[specialists]]
name = "a"
fallbak = "b"
[[tenants]]
name = "two words"
"""
TANGLED = """
[server]
api_key_file = "{folder}/keys.txt"
[ensemble]
router = "{folder}/nowhere"
[[specialists]]
name = "a"
fallback = "b"
model = "{folder}/no-model"
[[specialists]]
name = "b"
fallback = "a"
checks = ["spelling"]
moe = {{ strategy = "best" }}
[[specialists]]
name = "far"
intents = ["poems"]
remote = {{ url = "https://host/v1", key_env = "COTERIE_TEST_ABSENT" }}
[[specialists]]
name = "farther"
remote = {{ url = "https://host/v1", key_file = "{folder}/absent.key" }}
[[validators]]
name = "v"
command = ["/nowhere/check"]
task_types = ["extraction"]
[[tenants]]
name = "acme"
specialists = ["c"]
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    (tmp_path / "keys.txt").write_text("s3cret-key tenant=nobody\n")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(arguments)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def written(folder: Path, text: str) -> str:
    path = folder / "coterie.toml"
    path.write_text(text.format(folder=folder))
    return str(path)


def test_every_wrong_key_is_reported(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("config", "check", written(tmp_path, WRONG))
    assert status == 2
    for words in ("server.prot", "engine.max_queue", "specialists.0.fallbak", "tenants.0.name"):
        assert words in out
    assert len(out.splitlines()) == 4


def test_every_fault_of_names_and_files_is_reported(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("config", "check", written(tmp_path, TANGLED), "--json")
    faults = json.loads(out)["faults"]
    assert status == 2 and "s3cret" not in out
    expected = (
        "the fallbacks go in a circle: a -> b -> a",
        "specialists.a.model:",
        "'spelling' is not a check here",
        "specialists.b.moe.strategy:",
        "'poems' is not an intent here",
        "the environment variable COTERIE_TEST_ABSENT is not set",
        "absent.key: No such file",
        "there is no program '/nowhere/check'",
        "'c' is not a specialist here",
        "ensemble.router: there is no folder",
        "a key belongs to the tenant 'nobody'",
    )
    for words in expected:
        assert any(words in fault for fault in faults), (words, faults)
    assert len(faults) == len(expected)


def test_files_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    assert run("config", "check", str(tmp_path / "absent.toml"))[0] == 2
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    status, out, _ = run("config", "check", str(tmp_path / "binary.toml"))
    assert status == 2 and "not valid TOML" in out


def test_the_example_needs_the_shipped_experts(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("config", "check", str(EIGHT))
    assert status == 2 and "'text-to-sql' is not installed" in out
    # without experts it is whole
    lines = EIGHT.read_text().splitlines()
    plain = "\n".join(line for line in lines if not line.startswith("adapters"))
    (tmp_path / "plain.toml").write_text(plain)
    status, out, _ = run("config", "check", str(tmp_path / "plain.toml"), "--json")
    report = json.loads(out)
    assert status == 0 and len(report["specialists"]) == 8
    # one engine: one copy of the weights
    assert report["engines"] == [report["specialists"]] and report["notes"] == []
    status, shown, _ = run("config", "show", str(tmp_path / "plain.toml"))
    assert status == 0
    (tmp_path / "shown.toml").write_text(shown)
    status, out, _ = run("config", "check", str(tmp_path / "shown.toml"), "--json")
    assert status == 0 and json.loads(out)["digest"] == report["digest"]


def test_notes_tell_of_copies_and_unserved_intents(run: Run, tmp_path: Path) -> None:
    text = '[[specialists]]\nname = "a"\n[[specialists]]\nname = "b"\ndtype = "int8"\n'
    (tmp_path / "c.toml").write_text(text + '[[intents]]\nname = "poems"\n')
    status, out, _ = run("config", "check", str(tmp_path / "c.toml"), "--json")
    fresh, first, second = json.loads(out)["notes"]
    assert status == 0 and "'poems'" in first and "loaded 2 times" in second
    assert fresh.startswith("specialists.b.checks: ")


NOTED = """
[ensemble]
shadow_sample = 0.0
[[specialists]]
name = "base"
slo = { correctness = 0.5 }
[[specialists]]
name = "empty"
checks = ["generic"]
slo = { correctness = 0.5 }
fallback = "plain"
[[specialists]]
name = "plain"
[[specialists]]
name = "far"
checks = ["json"]
slo = { correctness = 0.5 }
remote = { url = "http://127.0.0.1:9/v1" }
[[validators]]
name = "json"
command = ["/bin/true"]
"""


def test_notes_tell_of_settings_that_can_never_work(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(NOTED)
    status, out, _ = run("config", "check", str(tmp_path / "c.toml"), "--json")
    notes = json.loads(out)["notes"]
    assert status == 0
    assert [note.partition(": ")[0] for note in notes] == [
        "specialists.base.slo.correctness",
        "specialists.empty.slo.correctness",
        "specialists.empty.fallback",
        "ensemble.shadow_sample",
        "specialists.plain.checks",
        "specialists.far.remote.shadow",
        "validators.json.name",
    ]
    assert "stays unknown" in notes[1] and "does not answer" in notes[2]
    # a person reads them too
    assert "validators.json.name" in run("config", "check", str(tmp_path / "c.toml"))[1]


def test_no_server(run: Run, tmp_path: Path) -> None:
    status, _, error = run("config", "reload", "--url", "http://127.0.0.1:9")
    assert status == 1 and "no answer from http://127.0.0.1:9" in error
    (tmp_path / "empty.txt").write_text("# none\n")
    keys = str(tmp_path / "empty.txt")
    status, _, error = run("config", "reload", "--admin-key-file", keys)
    assert status == 2 and "holds no key" in error


def test_flags_of_any_specialist(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    given = ["--config", str(EIGHT), "--specialist", "sentiment", "--dtype", "int8"]
    config = settings(parser.parse_args(given))
    assert [item.name for item in config.specialists if item.dtype == "int8"] == ["sentiment"]
    with pytest.raises(ConfigError, match="did you mean 'sentiment'"):
        settings(parser.parse_args([*given[:3], "sentimnt"]))
    with pytest.raises(ConfigError, match="needs --config"):
        settings(parser.parse_args(["--specialist", "sentiment"]))


def test_commands_take_the_settings_of_a_specialist(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        '[engine]\nthreads = 3\n[[specialists]]\nname = "a"\n[[specialists]]\nname = "b"\n'
        'model = "x"\ndtype = "int8"\ncontext = 64\nadapters = ["one=0.5"]\n'
        'moe = { strategy = "lru" }\n[[specialists]]\nname = "c"\nremote = { url = "http://h/v1" }'
    )
    plain = argparse.Namespace(
        config=str(tmp_path / "c.toml"), specialist="b", model=None, dtype=None, context=None,
        threads=None, strategy=None, expert=["two"],
    )  # fmt: skip
    used = use_specialist(plain)
    assert (used.model, used.dtype, used.context, used.threads) == ("x", "int8", 64, 3)
    assert used.strategy == "lru" and used.expert == ["one=0.5", "two"]
    # a flag has priority
    plain.dtype = "fp32"
    assert use_specialist(plain).dtype == "fp32" and plain.expert == ["two"]
    plain.specialist = None
    assert use_specialist(plain).model is None
    plain.specialist = "c"
    with pytest.raises(ConfigError, match="is remote"):
        use_specialist(plain)
