"""`coterie router train`, `eval`, `calibrate`, `promote`, `rollback` on small traffic files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.cli.main import main

THINGS = ("rivers", "lakes", "bridges", "trains", "birds", "songs", "films", "towns", "boats")


def traffic(path: Path, first: int, last: int, swapped: bool = False) -> str:
    rows = []
    for number in range(first, last):
        thing = THINGS[number % 9]
        texts = {
            "sql": f"Write SQL: how many {thing} are older than {number}? {thing}(name, age)",
            "reject": f"What do you know about {thing}, question {number}?",
        }
        labels = ("reject", "sql") if swapped else ("sql", "reject")
        for label, text in zip(labels, texts.values(), strict=True):
            rows.append(json.dumps({"prompt": text, "specialist": label}))
    path.write_text("\n".join(rows))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["router", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_from_traffic_to_a_version_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--router", str(tmp_path / "router"))
    held_out = traffic(tmp_path / "held_out.jsonl", 100, 140)
    status, out, _ = run(
        capsys, "train", traffic(tmp_path / "a.jsonl", 0, 16), "--json", *folder,
        "--held-out", held_out,
    )  # fmt: skip
    good = json.loads(out)
    assert status == 0 and good["held_out"]["right"]["n"] == 80
    assert good["held_out"]["right"]["share"] > 0.9 and good["trained_on"] == {
        "reject": 16,
        "sql": 16,
    }
    status, _, err = run(capsys, "eval", held_out, *folder)
    assert status != 0 and "no version is in use" in err
    assert run(capsys, "promote", good["version"][:5], "--held-out", held_out, *folder)[0] == 0
    status, out, _ = run(capsys, "eval", held_out, "--json", *folder)
    assert status == 0 and json.loads(out)["version"] == good["version"]
    worse = traffic(tmp_path / "worse.jsonl", 0, 16, swapped=True)
    bad = json.loads(run(capsys, "train", worse, "--json", *folder)[1])["version"]
    status, _, err = run(capsys, "promote", bad, "--held-out", held_out, *folder)
    assert status == 1 and "not promoted" in err and "80 held-out" in err
    status, out, _ = run(capsys, "calibrate", held_out, "--json", *folder)
    changed = json.loads(out)
    assert status == 0 and changed["parent"] == good["version"]
    status, out, _ = run(capsys, "versions", *folder)
    assert status == 0 and f"* {good['version']}" in out and f"  {bad}" in out
    assert run(capsys, "rollback", *folder)[0] == 0
    status, _, err = run(capsys, "rollback", *folder)
    assert status == 1 and "no router version is in use" in err


def test_wrong_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ("--router", str(tmp_path / "router"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}')
    for arguments in (
        ("train", str(tmp_path / "none.jsonl")),
        ("train", str(tmp_path / "bad.jsonl")),
        ("eval", str(tmp_path / "bad.jsonl"), "--version", "x"),
        ("promote", "x", "--held-out", str(tmp_path / "bad.jsonl")),
    ):
        status, out, err = run(capsys, *arguments, *folder)
        assert status != 0 and not out and err.startswith("coterie")
    assert not list((tmp_path / "router").glob("*.npz"))
