"""Answers parted into words and calls: the same pieces however the text is cut into deltas."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.api.anthropic.render import MessageShape, MessageStream
from coterie.api.openai.chat import ChatShape, ChatStream
from coterie.api.tools.read import ARGUMENTS, CALL, CONTENT, REASONING, AnswerSyntax, CallMarks
from coterie.core.events import Delta, Finished, Started, Timings, Usage
from coterie.models.text.tool_format import FORMATS
from tests.helpers.serving.server_process import frames

NAMES = frozenset({"get", "get_more"})
TRICKY = json.dumps({"a": '}"</tool_call>\\ {', "b": [{"c": {}}, "]"]})
HERMES = f'<tool_call>\n{{"name": "get", "arguments": {TRICKY}}}\n</tool_call>'
MORE = '<tool_call>\n{"name": "get_more", "arguments": {}}\n</tool_call>'
LLAMA = f'{{"name": "get", "parameters": {TRICKY}}}'
LLAMA_MORE = '{"name": "get_more", "parameters": {}}'

Said = tuple[str, str, list[tuple[str, str]], bool]


def read(
    text: str, style: str, cuts: list[int], marks: tuple[tuple[str, str], bool] | None = None
) -> Said:
    """(thought, words, calls, whether it was cut) of `text` fed in pieces."""
    reader = AnswerSyntax(marks, CallMarks(FORMATS[style], NAMES)).reader()
    assert reader is not None
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = []
    for start, end in pairwise(places):
        pieces += reader.feed(text[start:end], (7,))
    pieces += reader.finish()
    calls: list[tuple[str, str]] = []
    for kind, part in pieces:
        if kind == CALL:
            calls.append((part, ""))
        elif kind == ARGUMENTS:
            calls[-1] = (calls[-1][0], calls[-1][1] + part)
    thought = "".join(part for kind, part in pieces if kind == REASONING)
    words = "".join(part for kind, part in pieces if kind == CONTENT)
    return thought, words, calls, reader.ending("stop") == "length"


TEXTS = [
    ("hermes", HERMES, "", ["get"]),
    ("hermes", f"Let me see. \n{HERMES}\n{MORE}", "Let me see.", ["get", "get_more"]),
    ("hermes", f"{MORE}\n{MORE}\n{HERMES}", "", ["get_more", "get_more", "get"]),
    ("hermes", "a <tool b <tool_ca c\n\n", "a <tool b <tool_ca c\n\n", []),
    ("hermes", "", "", []),
    ("llama", LLAMA, "", ["get"]),
    ("llama", f"\n {LLAMA}; {LLAMA_MORE}", "", ["get", "get_more"]),
    ("llama", LLAMA_MORE.replace(" ", ""), "", ["get_more"]),
    ("llama", f"So: <|python_tag|>{LLAMA}", "So:", ["get"]),
    ("llama", '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
    ("llama", f"I would say {LLAMA}", f"I would say {LLAMA}", []),
    ("llama", '{"name": "getting"} <|pyth', '{"name": "getting"} <|pyth', []),
]


@pytest.mark.parametrize(("style", "text", "words", "names"), TEXTS)
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_pieces_do_not_depend_on_deltas(
    style: str, text: str, words: str, names: list[str], cuts: list[int]
) -> None:
    thought, said, calls, was_cut = read(text, style, cuts)
    assert (thought, said, was_cut) == ("", words, False)
    assert [name for name, _ in calls] == names
    for name, arguments in calls:
        assert arguments == (TRICKY if name == "get" else "{}")


@given(st.text(alphabet='<tool_call>{}"\n {name', max_size=60), st.lists(st.integers(0, 60)))
def test_words_without_a_call_are_left_alone(text: str, cuts: list[int]) -> None:
    for style, mark in (("hermes", "<tool_call>"), ("llama", "<|python_tag|>")):
        if mark not in text:
            _, words, calls, was_cut = read(text, style, cuts)
            assert calls == []
            # half a mark at the very end is a call that found no room
            assert words == text or (was_cut and text.startswith(words))


@pytest.mark.parametrize(
    ("style", "text", "words"),
    [
        ("hermes", "So <tool_call", "So"),
        ("hermes", "So <tool_", "So"),
        ("hermes", "So <tool", "So <tool"),
        ("llama", '{"name": "get", "para', ""),
        ("llama", '{"name"', '{"name"'),
        ("llama", "So <|python_t", "So"),
    ],
)
def test_a_mark_at_the_end(style: str, text: str, words: str) -> None:
    _, said, calls, was_cut = read(text, style, [3, 5, 9])
    assert (said, calls, was_cut) == (words, [], words != text)


@pytest.mark.parametrize(("style", "whole"), [("hermes", HERMES), ("llama", LLAMA)])
def test_a_call_that_had_to_come_leaves_no_words_however_short(style: str, whole: str) -> None:
    opened = len('<tool_call>\n{"name": ') if style == "hermes" else len('{"name": ')
    for size in range(1, opened):
        reader = AnswerSyntax(None, CallMarks(FORMATS[style], NAMES, required=True)).reader()
        assert reader is not None
        assert reader.feed(whole[:size], (7,)) + reader.finish() == []


def test_thoughts_call_nothing() -> None:
    text = f"<think>maybe {HERMES}</think>\n\nWell.\n{MORE}"
    for cuts in ([], list(range(len(text)))):
        thought, words, calls, _ = read(text, "hermes", cuts, (("<think>", "</think>"), False))
        assert thought == f"maybe {HERMES}"
        assert words == "Well."
        assert calls == [("get_more", "{}")]


@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_a_mark_that_is_a_special_token(style: str) -> None:
    """It has no text of its own; deltas may hold several tokens around it."""
    call = LLAMA if style == "llama" else f'\n{{"name": "get", "arguments": {TRICKY}}}\n'
    for deltas in (
        [("Well. ", (1,)), ("", (99,)), (call, (2,))],
        [("Well. " + call[:4], (1, 99, 2)), (call[4:], (3,))],
    ):
        reader = AnswerSyntax(None, CallMarks(FORMATS[style], NAMES, mark_id=99)).reader()
        assert reader is not None
        pieces = [piece for text, ids in deltas for piece in reader.feed(text, ids)]
        pieces += reader.finish()
        assert "".join(part for kind, part in pieces if kind == CONTENT) == "Well."
        assert [part for kind, part in pieces if kind == CALL] == ["get"]
        assert "".join(part for kind, part in pieces if kind == ARGUMENTS) == TRICKY


def events(text: str) -> list[Started | Delta | Finished]:
    """One token a character."""
    deltas = [Delta("r", 0, character, (5,)) for character in text]
    end = Delta("r", 0, "", (1,), finish_reason="stop")
    usage = Usage(3, len(text) + 1)
    return [Started("r", "x", 3, 0), *deltas, end, Finished("r", ("stop",), usage, Timings())]


READING = AnswerSyntax(None, CallMarks(FORMATS["hermes"], NAMES))


def test_arguments_stream_as_they_are_written() -> None:
    """Nothing is held back that can be told: one character, one delta."""
    stream = ChatStream(ChatShape("i", 0, "m", 1, syntax=READING))
    raw = b"".join(map(stream.render, events(f"Well. {HERMES}")))
    chunks = [data["choices"][0] for _, data in frames(raw) if data != "[DONE]"]
    calls = [chunk["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert calls[0]["function"] == {"name": "get", "arguments": ""}
    assert [item["function"]["arguments"] for item in calls[1:]] == list(TRICKY)
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Well."
    assert chunks[-1]["finish_reason"] == "tool_calls"

    claude = MessageStream(MessageShape("i", "m", "r", READING))
    sent = [data for _, data in frames(b"".join(map(claude.render, events(f"Well. {HERMES}"))))]
    deltas = [data["delta"] for data in sent if data["type"] == "content_block_delta"]
    parts = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert parts == list(TRICKY)
    kinds = [data["type"] for data in sent if data["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    expected = ["message_start", block[0], "ping", block[1], *block, "message_delta"]
    assert kinds == [*expected, "message_stop"]


def test_an_answer_without_a_word() -> None:
    stream = ChatStream(ChatShape("i", 0, "m", 1, syntax=READING))
    raw = b"".join(map(stream.render, events("")))
    contents = [
        data["choices"][0]["delta"].get("content") for _, data in frames(raw) if data != "[DONE]"
    ]
    assert contents == [None, "", None]
    claude = MessageStream(MessageShape("i", "m", "r", READING))
    sent = [data for _, data in frames(b"".join(map(claude.render, events(""))))]
    assert [data["content_block"] for data in sent if data["type"] == "content_block_start"] == [
        {"type": "text", "text": ""}
    ]
