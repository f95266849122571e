"""The official anthropic client, unmodified, against the real server process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import pytest

from tests.helpers.serving.server_process import KEYS, Served

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="tiny", max_tokens=8, messages=MESSAGES, extra_body={"temperature": 0}
    )
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    [block] = message.content
    assert block.type == "text" and block.text
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8
    assert message._request_id is not None and message._request_id.startswith("req_")


def test_stream_says_the_same(client: anthropic.Anthropic) -> None:
    asked = {
        "model": "tiny",
        "max_tokens": 24,
        "messages": MESSAGES,
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_cached_tokens_are_not_input_tokens(client: anthropic.Anthropic) -> None:
    asked = {"model": "tiny", "max_tokens": 2, "extra_body": {"temperature": 0}}
    turns = [{"role": "user", "content": "She sells sea shells by the sea shore. " * 4}]
    first = client.messages.create(**asked, messages=turns).usage
    second = client.messages.create(**asked, messages=turns).usage
    counted = client.messages.count_tokens(model="tiny", messages=turns).input_tokens
    # all full blocks but the last token's are put there by the first and read by the second
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens == (counted - 1) // 16 * 16
    assert second.cache_read_input_tokens == (counted - 1) // 16 * 16 > 0
    assert second.cache_creation_input_tokens == 0
    longer = [*turns, {"role": "assistant", "content": "So?"}, *turns]
    with client.messages.stream(**asked, messages=longer) as stream:
        third = stream.get_final_message().usage
    assert third.cache_read_input_tokens and third.cache_creation_input_tokens
    whole = client.messages.count_tokens(model="tiny", messages=longer).input_tokens
    for usage, prompt in ((first, counted), (second, counted), (third, whole)):
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        assert usage.input_tokens + cached == prompt


def test_system_in_every_form(client: anthropic.Anthropic) -> None:
    asked = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0}}
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    as_text = client.messages.create(**asked, messages=MESSAGES, system="Be brief.")
    as_blocks = client.messages.create(**asked, messages=MESSAGES, system=[block])
    as_role = client.messages.create(
        **asked, messages=[{"role": "system", "content": "Be brief."}, *MESSAGES]
    )
    without = client.messages.create(**asked, messages=MESSAGES)
    texts = {m.content[0].text for m in (as_text, as_blocks, as_role)}
    assert len(texts) == 1 and without.content[0].text not in texts


def test_blocks_and_fields_nobody_knows(client: anthropic.Anthropic) -> None:
    content = [
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "odd": 1},
        {"type": "text", "text": "there"},
    ]
    turns = [
        {"role": "user", "content": content},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "yes"},
            ],
        },
        {"role": "user", "content": "go on"},
    ]
    message = client.messages.create(
        model="tiny",
        max_tokens=4,
        messages=turns,
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "someone"},
        extra_body={"unknown": True, "temperature": 0},
        extra_headers={"anthropic-beta": "something-2030"},
    )
    assert message.usage.output_tokens == 4


def test_stop_sequence(client: anthropic.Anthropic) -> None:
    asked = {
        "model": "tiny",
        "max_tokens": 40,
        "messages": MESSAGES,
        "extra_body": {"temperature": 0},
    }
    free = client.messages.create(**asked).content[0].text
    word = free[4:7]
    cut = client.messages.create(**asked, stop_sequences=[word])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert cut.content[0].text == free[: free.index(word)]
    with client.messages.stream(**asked, stop_sequences=[word]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", word)
    assert final.content[0].text == cut.content[0].text


def test_a_turn_is_continued(client: anthropic.Anthropic) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "The quick brown"}]
    started = client.messages.count_tokens(model="tiny", messages=turns).input_tokens
    answered = client.messages.count_tokens(
        model="tiny", messages=[*turns, {"role": "user", "content": ""}]
    ).input_tokens
    assert started < answered
    asked = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0}}
    assert client.messages.create(**asked, messages=turns).content[0].text


def test_models(client: anthropic.Anthropic) -> None:
    [model] = client.models.list().data
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("nobody")
    assert missing.value.body["error"]["type"] == "not_found_error"


def test_errors_are_typed(client: anthropic.Anthropic, strict_server: Served) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nobody", max_tokens=2, messages=MESSAGES)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model="tiny", max_tokens=2, messages=[])
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    assert wrong.value.request_id == wrong.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError) as tools:
        client.messages.create(
            model="tiny",
            max_tokens=2,
            messages=MESSAGES,
            tools=[{"name": "f", "input_schema": {"type": "object"}}],
            tool_choice={"type": "tool", "name": "g"},
        )
    assert "no tool is named 'g'" in str(tools.value)
    with (
        anthropic.Anthropic(base_url=strict_server.url, api_key="wrong", max_retries=0) as locked,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        locked.messages.create(model="tiny", max_tokens=2, messages=MESSAGES)
    assert refused.value.body["error"]["type"] == "authentication_error"


def test_async(server: Served) -> None:
    async def talk() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            asked = {
                "model": "tiny",
                "max_tokens": 12,
                "messages": MESSAGES,
                "extra_body": {"temperature": 0},
            }
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            assert text == whole.content[0].text
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="x", max_tokens=1, messages=MESSAGES)

    asyncio.run(talk())


def test_a_model_that_thinks(strict_server: Served) -> None:
    with anthropic.Anthropic(base_url=strict_server.url, api_key=KEYS[1]) as client:
        asked = {
            "model": "tiny",
            "max_tokens": 12,
            "messages": MESSAGES,
            "extra_body": {"temperature": 0},
        }
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = client.messages.create(**asked, thinking=thinking)
        assert [block.type for block in message.content] == ["thinking"]
        with client.messages.stream(**asked, thinking=thinking) as stream:
            final = stream.get_final_message()
        assert final.content[0].thinking == message.content[0].thinking
        silent = client.messages.create(**asked)
        assert [block.type for block in silent.content] == ["text"]
