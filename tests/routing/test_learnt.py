"""routing/match/learn.py: probes are learnt once by a child, kept by digest, again if damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing.catalogs import shipped
from coterie.core.adapters import AdapterProfile
from coterie.routing.match import learn
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from coterie.routing.match.matcher import Matcher
from coterie.routing.match.probe_store import MAX_KEPT, digest_of, stored_inverse, write
from tests.helpers.adapters.profiles import brief

TEXTS = ("Make a URL slug: Why Geese Fly", "Write a poem about JSON", "3.5 kg in grams")


def test_what_a_child_learnt_is_kept_and_never_trusted_blindly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known: list[AdapterProfile] = [brief(profile) for profile in shipped()[-2:]]
    here = Matcher.build(known, EMBEDDERS[DEFAULT]())
    first = learn.cached_matcher(known, tmp_path)
    for text in TEXTS:
        for one, other in zip(here.match(text), first.match(text), strict=True):
            assert one.profile is other.profile
            assert one.probability == pytest.approx(other.probability, abs=1e-4)
    (path,), (inverse,) = tmp_path.glob("*.probes"), tmp_path.glob("*.inverse")
    whole, child = path.read_bytes(), learn._by_child
    asked: list[bytes] = []

    def by_child(found: Sequence[AdapterProfile], folder: Path) -> bytes:
        """A child learns once more; what it said stands for those after it."""
        asked.append(asked[0] if asked else child(found, folder))
        return asked[-1]

    monkeypatch.setattr(learn, "_by_child", by_child)
    again = learn.cached_matcher(known, tmp_path)
    assert not asked and all(again.match(text) == first.match(text) for text in TEXTS)
    kept = inverse.read_bytes()
    inverse.write_bytes(kept[:-9])
    for damaged in (whole[:-9], b"", b"PK" + whole, whole[:100] + b"x" + whole[101:]):
        path.write_bytes(damaged)
        assert learn.cached_matcher(known, tmp_path).match(TEXTS[0]) == first.match(TEXTS[0])
        assert path.read_bytes() == whole
    assert inverse.read_bytes() == kept
    assert len(asked) == 4 and "kept_probes_unreadable" in caplog.text


def test_the_digest_follows_what_is_said_and_not_who_says_it() -> None:
    known = shipped()[:2]
    digest = digest_of(known, "static")
    other = replace(known[0], card=replace(known[0].card, name="copy", version="9.0.0"))
    assert digest_of([other, known[1]], "static") == digest
    assert digest_of(known[::-1], "static") != digest
    assert digest_of([replace(known[0], keywords=("x",)), known[1]], "static") != digest
    assert digest_of(known, "hashed") != digest


def test_an_inverse_is_stored_once_and_a_foreign_one_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = np.random.default_rng()
    matrix, other = (np.eye(n) + draw.random((n, n)) / (4 * n) for n in (5, 6))
    first = stored_inverse(matrix, tmp_path)
    assert np.allclose(first @ matrix, np.eye(5), atol=1e-5)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    assert np.array_equal(stored_inverse(matrix, tmp_path), first)
    assert path.stat().st_mtime_ns == before and "unreadable" not in caplog.text
    stored_inverse(other, tmp_path)
    (foreign,) = set(tmp_path.iterdir()) - {path}
    path.write_bytes(foreign.read_bytes())
    assert np.array_equal(stored_inverse(matrix, tmp_path), first)
    assert "kept_probes_unreadable" in caplog.text and path.read_bytes() != foreign.read_bytes()


def test_few_files_are_kept(tmp_path: Path) -> None:
    for number in range(MAX_KEPT + 3):
        write(tmp_path / f"{number}.probes", json.dumps(number).encode())
    assert len(list(tmp_path.iterdir())) == MAX_KEPT
