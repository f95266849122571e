"""Streaming text equals decoding at once, for byte-level and byte-fallback tokenizers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from coterie.engine.detokenize import Detokenizer, StopMatch, TextOffsets, TokenPieces, token_name
from coterie.models.text.tokenizer import Tokenizer as CoterieTokenizer
from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.models.tiny import tiny_checkpoint

TEXTS = [
    "Hello world, this is plain text.",
    "Die Straße führt über die Brücke",
    "你好，世界。 漢字 and more",
    "emoji 👩‍👩‍👧‍👦 family 🎉🎉 flags 🇫🇷",
    "  two leading spaces\n\n\ttabs  ",
]


@pytest.fixture(scope="module")
def byte_level() -> CoterieTokenizer:
    return load_tokenizer(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> CoterieTokenizer:
    """Llama-2's kind: '▁' for spaces, <0xNN> for unknown bytes, one leading space stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁Hello", "Hello", "▁wor", "ld", "é", "▁é", "a", "b", ".", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in words[:3]])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    path: Path = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(path / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    return load_tokenizer(path)


def stream(tokenizer: CoterieTokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenPieces(tokenizer))
    sent = [detokenizer.push(token) for token in ids]
    assert all(isinstance(text, str) for text in sent)
    return [*map(str, sent), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streams_equal_decode(byte_level: CoterieTokenizer, text: str) -> None:
    ids = byte_level.encode(text, special=False)
    sent = stream(byte_level, ids)
    assert "".join(sent) == byte_level.decode(ids) == text
    # whole characters only: nothing had to be replaced on the way
    assert not any("�" in piece for piece in sent)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_random_tokens_equal_decode(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    rng = random.Random(3)
    for _ in range(400):
        # special tokens and broken bytes anywhere; also ids beyond the tokenizer's
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(1, 24))]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_random_bytes_among_words(byte_fallback: CoterieTokenizer) -> None:
    """Runs of byte tokens, whole, cut and spoiled, between words that are text."""
    rng = random.Random(4)
    characters = ["é", "€", "漢", "🎉", "a"]
    for _ in range(400):
        ids: list[int] = []
        for _ in range(rng.randrange(1, 8)):
            if rng.random() < 0.5:
                ids.append(rng.randrange(259, 270))
            else:
                data = rng.choice(characters).encode()
                cut = rng.randrange(1, len(data) + 1) if rng.random() < 0.3 else len(data)
                ids += [3 + byte for byte in data[:cut]]
        assert "".join(stream(byte_fallback, ids)) == byte_fallback.decode(ids), ids


def test_leading_space(byte_fallback: CoterieTokenizer) -> None:
    ids = [260, 262, 263]  # ▁Hello ▁wor ld
    assert stream(byte_fallback, ids) == ["Hello", " wor", "ld", ""]
    # a special token before the first word changes nothing
    assert stream(byte_fallback, [1, *ids])[1:] == ["Hello", " wor", "ld", ""]
    assert (
        "".join(stream(byte_fallback, [259, 260])) == byte_fallback.decode([259, 260]) == " Hello"
    )


def test_half_a_character_is_held_then_replaced(byte_level: CoterieTokenizer) -> None:
    party = "🎉".encode()
    singles = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [singles[party[i : i + 1]] for i in range(4)]
    assert stream(byte_level, ids) == ["", "", "", "🎉", ""]
    assert stream(byte_level, ids[:3]) == ["", "", "", "�"]
    assert stream(byte_level, [*ids[:2], singles[b"a"]]) == ["", "", "�a", ""]


def run_stops(
    tokenizer: CoterieTokenizer, ids: list[int], stops: list[str], min_tokens: int = 0
) -> tuple[str, str | None, int]:
    detokenizer = Detokenizer(TokenPieces(tokenizer), stops)
    text = ""
    for count, token in enumerate(ids, 1):
        pushed = detokenizer.push(token, may_stop=count > min_tokens)
        if isinstance(pushed, StopMatch):
            return text + pushed.text, pushed.match, count
        text += pushed
        # nothing sent so far may contain a stop, nor end where one begins and is completed later
        if not min_tokens:
            assert not any(stop in text for stop in stops)
    return text + detokenizer.flush(), None, len(ids)


def characterwise(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: text comes one character at a time, the first completed stop ends it."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def test_stops_do_not_depend_on_token_borders(byte_level: CoterieTokenizer) -> None:
    rng = random.Random(7)
    singles = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    # pieces over a tiny alphabet, so that stops overlap and begin again all the time
    pieces = [i for data, i in singles.items() if data and set(data) <= set(b"theansr ")]
    for _ in range(1500):
        ids = [rng.choice(pieces) for _ in range(rng.randrange(1, 16))]
        whole = byte_level.decode(ids)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(whole))
            stops.append(
                whole[start : start + rng.randrange(1, 6)] + rng.choice(["", "", "e", "z"])
            )
        text, match, _ = run_stops(byte_level, ids, stops)
        assert (text, match) == characterwise(whole, stops), (ids, stops)


def test_text_after_a_stop_is_never_sent(byte_level: CoterieTokenizer) -> None:
    ids = byte_level.encode("one two STOP three", special=False)
    text, match, count = run_stops(byte_level, ids, ["STOP"])
    assert (text, match) == ("one two ", "STOP") and count < len(ids)


def test_held_text_is_released(byte_level: CoterieTokenizer) -> None:
    ids = byte_level.encode("a STOx STO", special=False)
    assert run_stops(byte_level, ids, ["STOP"])[:2] == ("a STOx STO", None)


def test_stops_wait_for_min_tokens(byte_level: CoterieTokenizer) -> None:
    singles = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [singles[bytes([c])] for c in b"abXcXd"]
    assert run_stops(byte_level, ids, ["X"], min_tokens=3) == ("abXc", "X", 5)
    assert run_stops(byte_level, ids, ["X"], min_tokens=2) == ("ab", "X", 3)


def test_a_stop_may_begin_before_min_tokens(byte_level: CoterieTokenizer) -> None:
    singles = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [singles[bytes([c])] for c in b"abcdef"]
    assert run_stops(byte_level, ids, ["bcd"], min_tokens=3) == ("a", "bcd", 4)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_offsets_are_where_the_text_before_ends(
    kind: str, skip_special: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    rng, pieces = random.Random(5), TokenPieces(tokenizer, skip_special)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        offsets, whole = TextOffsets(pieces, start=3), pieces.text(ids)
        places = [offsets.push(token) - 3 for token in ids]
        assert places[0] == 0 and places == sorted(places) and places[-1] <= len(whole)
        for index, at in enumerate(places):
            before = pieces.text(ids[:index])
            # otherwise it is in the middle of a character, or of bytes that a later one spoils
            if whole.startswith(before) and "\ufffd" not in before:
                assert at == len(before)


def test_tokens_have_names_of_their_own(byte_level: CoterieTokenizer) -> None:
    names = [token_name(byte_level, token)[0] for token in range(byte_level.vocab_size + 3)]
    assert len(set(names)) == len(names) and not any("\ufffd" in name for name in names)


def test_a_stop_string_may_be_kept() -> None:
    """Wherever it lies in a token's text, nothing behind it is sent."""
    detokenizer = Detokenizer(TokenPieces(load_tokenizer(tiny_checkpoint("llama"))), ["o w"], True)
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    sent = []
    for token in tokenizer.encode("Hello world", special=False):
        pushed = detokenizer.push(token)
        if isinstance(pushed, StopMatch):
            sent.append(pushed.text)
            break
        sent.append(pushed)
    assert "".join(sent) == "Hello w"


def test_pushing_whole_tokens_is_pushing(byte_level: CoterieTokenizer) -> None:
    rng, pieces, num_whole = random.Random(11), TokenPieces(byte_level), 0
    for _ in range(60):
        stops = rng.sample(["a", "the", " of", "e t", "\u00fc"], rng.randint(0, 3))
        plain, fast = (Detokenizer(pieces, stops) for _ in range(2))
        for _ in range(80):
            token = rng.randrange(byte_level.vocab_size)
            expected = plain.push(token)
            found: str | StopMatch | None = fast.push_whole(token)
            num_whole += found is not None
            assert (fast.push(token) if found is None else found) == expected
            if isinstance(expected, StopMatch):
                break
        assert fast.flush() == plain.flush()
    assert num_whole > 100
