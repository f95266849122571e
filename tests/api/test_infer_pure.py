"""Reception without a server: what becomes of a body, rates, deadlines."""

from __future__ import annotations

import asyncio
import time
import unicodedata
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from coterie.api.dialect import CallerInfo, ParsedRequest
from coterie.api.native.infer_body import (
    FIELDS,
    InferBodyReader,
    read_body,
)
from coterie.core.errors import CoterieError, InvalidRequest, Overloaded
from coterie.core.events import Delta, Event, Failed, Finished, Started, Timings, Usage
from coterie.core.request import Chat
from coterie.obs.metrics import Histogram
from coterie.service.request_limits import UserRate, until_deadline

SECONDS = Histogram((0.001,))


def receive(session: str = "", **body: Any) -> ParsedRequest:
    return read_body(body, CallerInfo("tenant", time.monotonic(), session))


def text_of(asked: ParsedRequest) -> str:
    assert isinstance(asked.request.prompt, Chat)
    (message,) = asked.request.prompt.messages
    return message.content


def refused(**body: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        receive(**body)
    return caught.value.param, caught.value.message


# name -> values out of range, one of the wrong type, and the ends of the range
RANGES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "prompt": (("", " \n", "x" * 500_001, 5, None), ("x", "x" * 500_000)),
    "template": (("no hole", "{body}", 5, "{prompt}" + "x" * 20_000), ("{prompt}",)),
    "body": (("x" * 2_000_001, {}), ("", "x" * 2_000_000)),
    "temperature": ((-0.1, 2.1, "1", True), (0, 2)),
    "max_tokens": ((0, 200_001, 1.5, "8"), (1, 200_000)),
    "top_p": ((0, 1.1, "x"), (0.001, 1)),
    "top_k": ((-1, 0.5), (0, 1000)),
    "min_p": ((-0.1, 1.1), (0, 1)),
    "typical_p": ((0, 1.1), (0.001, 1)),
    "num_beams": ((0, 65, 1.5), (1, 64)),
    "length_penalty": ((-10.1, 10.1, "1"), (-10, 10)),
    "repetition_penalty": ((0.9, 2.1), (1, 2)),
    "force_experts": (("a", [""], ["a"] * 11, [1]), ([], ["a@1.0.0", "b"])),
    "exclude_experts": (("a", ["a"] * 101), (["a"] * 100,)),
    "max_experts": ((0, 11, 1.5), (1, 10)),
    "intent": (("", "a b", "x" * 65, 5), ("text-to-sql", "x" * 64)),
    "context_size": ((15, 2**31), (16,)),
    "user_id": (("", "x" * 257, 5), ("x" * 256,)),
    "priority": ((-1, 10, "5"), (0, 9)),
    "timeout_ms": ((0, 86_400_001), (1, 86_400_000)),
    "model": (("", "x" * 513, None), ("auto", "tiny:sql")),
    "stream": (("yes", 1), (True, False)),
    "seed": ((2**63, 0.5), (-1, 2**63 - 1)),
    "stop": (([""], ["x"] * 33, 5), ("x", ["x", "y"])),
    "response_format": (("json", {"type": "xml"}), ({"type": "text"}, {"type": "json_object"})),
    "grammar": (("", {"type": "ebnf", "text": "x"}, {"type": "lark"}), ('root ::= "x"',)),
    "regex": (("", "x" * 10_001), ("a+",)),
    "session_id": (("", "x" * 257), ("x",)),
    "explain": (("no",), (True,)),
}


def test_every_field_has_its_range_here() -> None:
    assert set(RANGES) == set(FIELDS)


@pytest.mark.parametrize("name", RANGES)
def test_a_field_out_of_its_range_is_named(name: str) -> None:
    wrong, right = RANGES[name]
    for value in wrong:
        param, message = refused(**{"prompt": "hello", "num_beams": 2} | {name: value})
        assert param is not None and param.partition(".")[0] == name, (value, message)
        assert "x" * 100 not in message
    for value in right:
        body: dict[str, Any] = {"prompt": "hello", "num_beams": 2, name: value}
        receive(**body)


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    assert refused(prompt="x", temprature=1) == (
        "temprature",
        "unknown field `temprature`; did you mean `temperature`?",
    )
    assert "`max_tokens`" in refused(prompt="x", maxTokens=1)[1]
    # a name may hold anything; it is not repeated
    param, message = refused(prompt="x", **{"my secret is 42": 1})
    assert param is None and "secret" not in message


def test_prompts_are_normalised_and_trimmed() -> None:
    asked = receive(prompt="  caf\u0065\u0301 \n", body=" e\u0301\n")
    assert asked.request.hints.instruction == "caf\u00e9"
    assert text_of(asked) == "caf\u00e9\n\n \u00e9\n"


def test_normalising_takes_no_longer_than_the_text_is_long() -> None:
    for mark in ("\u0301\u0316", "\u0f73\u0f71"):
        text = "a" + mark * 200_000
        begun = time.thread_time()
        asked = receive(prompt="x", body=text)
        assert time.thread_time() - begun < 1.0
        assert asked.request.hints.document == text
    dense = "e\u0316\u0301" * 1000 + "e" + "\u0301\u0316" * 32
    assert receive(prompt=dense).request.hints.instruction == unicodedata.normalize("NFC", dense)


def test_templates_are_filled_in_one_pass() -> None:
    template = "Q: {prompt} {other}\nD: {body}"
    asked = receive(prompt="what is {body}?", body="a {prompt}", template=template)
    assert text_of(asked) == "Q: what is {body}? {other}\nD: a {prompt}"
    assert text_of(receive(prompt="x", body="y", template="<{prompt}>")) == "<x>\n\ny"
    assert text_of(receive(prompt="x", template="{prompt}|{body}")) == "x|"


@pytest.mark.parametrize("hole", ["{prompt}", "{body}"])
def test_templates_that_repeat_make_no_giants(hole: str) -> None:
    fields = {"prompt": "p" * 100_000, "body": "b" * 100_000}
    assert len(text_of(receive(**fields, template="{prompt}" + 20 * hole))) >= 2_100_000
    with pytest.raises(InvalidRequest, match="2500000 characters") as caught:
        receive(**fields, template="{prompt}" + 2000 * hole)
    assert caught.value.param == "template"


def test_a_long_grammar_is_told_from_the_other_kind_at_once() -> None:
    begun = time.process_time()
    receive(prompt="x", grammar="\n" * 90_000 + 'root ::= "a"')
    assert time.process_time() - begun < 2.0
    assert text_of(receive(prompt="x")) == "x"


def test_fields_that_contradict_each_other_are_refused() -> None:
    assert refused(prompt="x", force_experts=["a"], exclude_experts=["a"])[0] == "force_experts"
    assert refused(prompt="x", force_experts=["a@1.0"], exclude_experts=["a"])[0] == "force_experts"
    assert refused(prompt="x", force_experts=["a", "b"], max_experts=1)[0] == "force_experts"
    assert refused(prompt="x", regex="a", grammar='root ::= "x"')[0] == "regex"


def test_what_is_given_reaches_the_request() -> None:
    asked = receive(
        session="from-header", prompt="x", body="doc", temperature=0.3, max_tokens=7, top_k=0,
        force_experts=["a@1.0"], exclude_experts=["b"], max_experts=2, context_size=64,
        user_id="u", priority=9, timeout_ms=1500, stop="end", seed=-1, explain=True,
    )  # fmt: skip
    request = asked.request
    assert (request.sampling.temperature, request.sampling.top_k) == (0.3, 0)
    assert request.sampling.seed is not None and request.sampling.seed >= 0
    limits = request.limits
    assert (limits.max_tokens, limits.context_size, limits.priority) == (7, 64, 9)
    assert (limits.timeout_s, limits.stop) == (1.5, ("end",))
    hints = request.hints
    assert (hints.model, hints.tune, hints.max_adapters) == (None, True, 2)
    assert [hint.name for hint in hints.adapters] == ["a@1.0"] and hints.exclude == ("b",)
    assert (hints.instruction, hints.document) == ("x", "doc")
    assert (request.user_id, asked.explain, request.session) == ("u", True, "from-header")


def test_a_user_who_asks_too_often_is_told_when_to_come_back() -> None:
    now = [0.0]
    rate = UserRate(0.5, clock=lambda: now[0])
    for _ in range(5):
        rate.take("t", "u")
    with pytest.raises(Overloaded) as caught:
        rate.take("t", "u")
    assert caught.value.retry_after_s == pytest.approx(2.0)
    rate.take("t", "v")
    rate.take("other tenant", "u")
    now[0] = 1.9
    with pytest.raises(Overloaded):
        rate.take("t", "u")
    now[0] = 4.0
    rate.take("t", "u")


def test_the_table_of_users_is_bounded() -> None:
    rate = UserRate(1.0, clock=lambda: 0.0, max_users=10)
    for index in range(1000):
        rate.take("t", str(index))
    assert len(rate._buckets) == 10


def test_a_refused_body_costs_nothing_of_the_rate() -> None:
    reception = InferBodyReader(UserRate(0.1), SECONDS)

    def ask(prompt: str) -> None:
        asyncio.run(reception.receive({"prompt": prompt}, CallerInfo("t", 0.0), 0))

    with pytest.raises(InvalidRequest):
        ask("")
    ask("x")
    with pytest.raises(Overloaded):
        ask("x")


async def events(*items: Event | CoterieError, wait_s: float = 0.0) -> AsyncGenerator[Event, None]:
    for item in items:
        if isinstance(item, CoterieError):
            raise item
        yield item
    await asyncio.sleep(wait_s)


def gathered(source: AsyncGenerator[Event, None], timeout_ms: int | None = None) -> list[Event]:
    async def gather() -> list[Event]:
        limit: dict[str, Any] = {"timeout_ms": timeout_ms} if timeout_ms else {}
        request = receive(prompt="x", **limit).request
        return [event async for event in until_deadline(source, request)]

    return asyncio.run(gather())


DONE = Finished("r", ("stop",), Usage(1, 1), Timings())


def test_events_in_time_pass_as_they_are() -> None:
    told: tuple[Event, ...] = (Started("r", "e0", 1, 0), Delta("r", 0, "a", (1,)), DONE)
    assert gathered(events(*told), 60_000) == list(told)


def test_a_deadline_in_the_queue_starts_and_finishes() -> None:
    late = Delta("r", 0, "", (), finish_reason="timeout")
    told = gathered(events(late, DONE))
    assert [type(event) for event in told] == [Started, Delta, Finished]


@pytest.mark.parametrize("end", [Failed("r", "deadline_exceeded", "late"), CoterieError("x"), None])
def test_a_deadline_that_is_told_as_an_error_or_not_at_all(end: Any) -> None:
    source = events(Started("r", "e0", 4, 0), Delta("r", 0, "ab", (1, 2)), wait_s=60.0)
    if isinstance(end, Failed):
        source = events(Started("r", "e0", 4, 0), Delta("r", 0, "ab", (1, 2)), end)
    elif end is not None:
        with pytest.raises(CoterieError):
            gathered(events(end))
        return
    *_, cut, finished = gathered(source, 10)
    assert isinstance(cut, Delta) and cut.finish_reason == "timeout"
    assert isinstance(finished, Finished) and finished.choices == ("timeout",)
    assert finished.usage == Usage(4, 2)
