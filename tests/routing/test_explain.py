"""`coterie router explain`: without a server, over what this home has installed."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main
from coterie.cli.router import candidates_table
from coterie.core.plan import Candidate
from coterie.packages.registry import AdapterRegistry
from coterie.packages.trust import TrustStore
from tests.helpers.adapters.package_files import package

Capture = pytest.CaptureFixture[str]
NAME = "a-name-that-is-as-long-as-the-names-of-experts-may-be-at-all-0000"[:64]
EXPERTS: dict[str, dict[str, Any]] = {
    "slug": {"routing": {"keywords": ["slug"], "examples": ["Make a URL slug: Hello World"]}},
    "sql": {
        "routing": {"keywords": ["sql"], "examples": ["Write SQL: how many users are there?"]},
        "constraints": {"requires": ["absent"]},
    },
    NAME: {"routing": {"keywords": ["poem"], "examples": ["Write a poem about the sea"]}},
}


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("explain")
    registry = AdapterRegistry(home / "state" / "experts")
    for seed, (name, sections) in enumerate(EXPERTS.items()):
        made = package(home, name=name, seed=seed, **sections)
        registry.install(made.source, trust=TrustStore(home / "trust"), allow_unsigned=True)
    registry.close()
    return home


@pytest.fixture
def home(stocked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_HOME", str(stocked))
    monkeypatch.setenv("COLUMNS", "80")
    return stocked


def told(capsys: Capture, *arguments: str) -> Any:
    assert main(["router", "explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys: Capture, *arguments: str) -> str:
    assert main(["router", "explain", *arguments]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return out


def refused(capsys: Capture, *arguments: str) -> str:
    assert main(["router", "explain", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    return said[0]


def test_json_and_table_say_the_same(home: Path, capsys: Capture) -> None:
    prompt = "Make a URL slug: Hello World"
    report, text = told(capsys, prompt), shown(capsys, prompt)
    assert report["composition_order"] == ["slug@1.0.0"] and report["confidence"] > 0.5
    trace = report["reasoning_trace"]
    assert trace["task_type"] == "transformation" and trace["language"] == "en"
    assert trace["candidates"][0]["why"] == "chosen" and trace["timings_ms"]["total"] > 0
    assert report["generation_params"]["max_tokens"] == 4096
    assert re.search(r"^experts +slug@1\.0\.0$", text, re.M)
    assert re.search(r"^\* slug@1\.0\.0 .* chosen$", text, re.M)
    assert text.index("* slug") < text.index("below threshold")
    first = trace["candidates"][0]
    for name in ("similarity", "success", "memory", "score", "probability"):
        assert f"{first[name]:.3f}" in text
    # names of any length are cut to the terminal
    assert "…" in text and NAME not in text


def test_the_base_alone_and_why(home: Path, capsys: Capture) -> None:
    text = shown(capsys, "Write SQL: how many users are there?")
    assert "none: the base model alone" in text
    assert "sql@1.0.0 requires absent, which is not installed" in " ".join(text.split())
    assert "excluded" in shown(capsys, "Make a URL slug: Hello World", "--exclude", "slug")
    assert shown(capsys, "hello", "--rows", "1").count("below threshold") <= 2
    report = told(capsys, "Zugspitze", "--max-experts", "3")
    assert report["experts"] == [] and report["confidence"] > 0.5


def test_a_document_and_standard_input(
    home: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "body.json").write_text('{"a": 1}')
    body = str(tmp_path / "body.json")
    features = told(capsys, "Classify this", "--body", body)["reasoning_trace"]["features"]
    assert features["has_document"] and features["has_json"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Make a URL slug: Hello World"))
    assert told(capsys, "-")["composition_order"] == ["slug@1.0.0"]
    # a byte that is no UTF-8, as Python hands it over
    assert told(capsys, "Make a URL slug: Hello \udcff")["composition_order"] == ["slug@1.0.0"]
    assert "cannot read" in refused(capsys, "x", "--body", str(tmp_path / "none"))
    assert "both" in refused(capsys, "-", "--body", "-")
    assert "empty" in refused(capsys, "  ")
    assert "1 to 10" in refused(capsys, "x", "--max-experts", "11")


def test_settings_count(home: Path, capsys: Capture, tmp_path: Path) -> None:
    prompt = "Make a URL slug: Hello World"
    (tmp_path / "c.toml").write_text("[routing]\nthreshold = 1.0\nsimilarity_weight = 0.0\n")
    strict = told(capsys, prompt, "--config", str(tmp_path / "c.toml"))["reasoning_trace"]
    assert strict["threshold"] == 1.0
    usual = told(capsys, prompt)["reasoning_trace"]
    scores = [
        next(c for c in trace["candidates"] if c["name"] == "slug@1.0.0")
        for trace in (strict, usual)
    ]
    lost = scores[1]["score"] - scores[0]["score"]
    assert lost == pytest.approx(0.5 * scores[0]["similarity"])
    (tmp_path / "off.toml").write_text("[routing]\nenabled = false\n")
    assert "routing is off" in shown(capsys, prompt, "--config", str(tmp_path / "off.toml"))


def test_specialists_of_a_file(home: Path, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "coterie.toml"
    text = '[[specialists]]\nname = "general"\n[[specialists]]\nname = "s"\nadapters = ["{}"]\n'
    file.write_text(text.format("slug"))
    prompt = "Make a URL slug: Hello World"
    plan = told(capsys, prompt, "--config", str(file))
    assert plan["specialist"] in ("general", "s")
    assert [item["name"] for item in plan["experts"]] == ["slug@1.0.0"]
    assert "specialist" in shown(capsys, prompt, "--config", str(file))
    assert "specialist" not in shown(capsys, prompt)
    file.write_text(text.format("slugg"))
    assert main(["router", "explain", prompt, "--config", str(file)]) == 2
    assert "'slugg' is not installed; did you mean 'slug'?" in capsys.readouterr().err


def test_an_empty_home(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    assert "no experts are installed" in shown(capsys, "hello")


@pytest.mark.parametrize("columns", [40, 60, 79, 80, 200])
def test_tables_fit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    why = "some-name requires another-name-that-is-long@1.2.3, which is not installed"
    rows = [Candidate(name, "d", 0.1, 0.2, 0.3, 0.4, 0.5, False, why) for name in ("a", NAME)]
    text = candidates_table(rows)
    assert max(map(len, text.splitlines())) <= max(columns, 64 + 10)
    if columns >= 80:
        assert max(map(len, text.splitlines())) <= columns
    # nothing of the reason is lost
    assert " ".join(text.split()).count("installed") == 2


def test_help_has_examples(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["router", "--help"], ["router", "explain", "--help"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        out = capsys.readouterr().out
        assert left.value.code == 0 and "coterie router explain" in out and "examples:" in out
        assert max(map(len, out.splitlines())) <= 80
