"""`coterie expert test` finds the figures of the manifests again: a slice here, all behind full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.packages import archive, shipped
from coterie.packages.evaluate import ITEMS
from coterie.packages.paths import CONFIG, WEIGHTS

FILES = shipped.files()


def tried(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = main(["expert", "test", *arguments, "--device", "cpu", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_slice_of_one_expert(
    default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shipped.FOLDER / "intent.expert"
    code, report = tried(capsys, str(path), str(default_model_path), "--items", "3")
    assert code == 0 and report["reproduced"]
    measured = report["measured"]
    assert isinstance(measured, dict)
    assert measured["n"] == 3 and measured["expert"]["right"] > measured["base"]["right"]


@pytest.mark.full
def test_a_slice_of_one_language(
    default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shipped.FOLDER / "sentiment.expert"
    code, report = tried(
        capsys, str(path), str(default_model_path), "--language", "fr", "--items", "2"
    )
    assert code == 0 and report["reproduced"] and report["language"] == "fr"


@pytest.mark.full
def test_items_of_ones_own_in_a_new_language(
    default_model_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    item = {
        "language": "sv",
        "messages": [{"role": "user", "content": "Positiv eller negativ? Maten var hemsk."}],
        "expected": {"label": "negative", "among": ["positive", "negative", "neutral"]},
    }
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps(item) + "\n")
    path = shipped.FOLDER / "sentiment.expert"
    code, report = tried(
        capsys, str(path), str(default_model_path), "--language", "sv", "--from", str(mine)
    )
    # the manifest states nothing of them, which is no failure
    assert code == 0 and report["reproduced"] is None and report["manifest"] is None
    assert main(["expert", "test", str(path), "--language", "sv"]) == 1
    assert "no items in sv; there are en, de" in capsys.readouterr().err


@pytest.mark.full
def test_an_expert_that_promises_too_much_is_found_out(
    default_model_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    package = archive.inspect(shipped.FOLDER / "intent.expert")
    archive.unpack(package, tmp_path)
    section = dict(package.manifest.section("evaluation"))
    n = section["n"]
    # the base is said to know what only the expert knows
    section["base"] = {"right": n, "verdicts": "1" * n}
    files = {name: tmp_path / name for name in (CONFIG, WEIGHTS, ITEMS)}
    liar = tmp_path / "liar.expert"
    archive.pack(files, package.manifest.with_section("evaluation", section), liar)
    code, report = tried(
        capsys, str(liar), str(default_model_path), "--items", "2", "--allow-unsigned"
    )
    assert code == 1 and not report["reproduced"]


def test_a_directory_without_figures_is_refused(
    capsys: pytest.CaptureFixture[str], private_home: Path
) -> None:
    assert main(["expert", "test", "no-such-expert"]) != 0
    assert "no-such-expert" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_items(
    path: Path, default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = tried(capsys, str(path), str(default_model_path))
    assert code == 0, report


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_languages(
    path: Path, default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = tried(capsys, str(path), str(default_model_path), "--language", "all")
    assert code == 0, report
