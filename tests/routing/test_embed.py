"""Texts become vectors of unit length, without a download and in bounded time."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.routing.features.instruction import HEAD_CHARS, TAIL_CHARS, bounded, words
from coterie.routing.match.embed import DEFAULT, EMBEDDERS, Embedder


@pytest.fixture(params=sorted(EMBEDDERS))
def embedder(request: pytest.FixtureRequest) -> Embedder:
    return EMBEDDERS[request.param]()


def test_vectors_have_unit_length(embedder: Embedder) -> None:
    for text in ("Make a slug", "Zażółć gęślą jaźń", "x" * 5000, "俳句を書いて"):
        found = embedder.embed(text)
        assert found.shape == (embedder.dim,) and found.dtype == np.float32
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-5), text


def test_a_text_without_words_is_zero(embedder: Embedder) -> None:
    assert not embedder.embed(" \n\t ").any()


def test_case_and_accents_do_not_count(embedder: Embedder) -> None:
    assert np.allclose(embedder.embed("Ecrire un RESUME"), embedder.embed("écrire un résumé"))


def test_meanings_that_are_near_have_vectors_that_are_near() -> None:
    embedder = EMBEDDERS[DEFAULT]()
    feeling, mood, parcel = map(embedder.embed, ("how unhappy", "so sad", "ship the package"))
    assert feeling @ mood > feeling @ parcel + 0.1


def test_a_word_that_nobody_knows_is_cut_into_pieces() -> None:
    embedder = EMBEDDERS[DEFAULT]()
    found = embedder.embed("slugification")
    assert found @ embedder.embed("slug") > found @ embedder.embed("weather")


def test_of_a_long_text_both_ends_are_read() -> None:
    text = f"begin {'middle ' * 10_000} end"
    assert len(bounded(text)) <= HEAD_CHARS + TAIL_CHARS + 1
    found = words(bounded(text))
    assert found[0] == "begin" and found[-1] == "end"
