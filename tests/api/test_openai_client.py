"""The official openai client, unmodified, against the real server process: sync, async, streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.helpers.serving.server_process import KEYS, Served

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0
    )
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert (choice.message.role, bool(choice.message.content)) == ("assistant", True)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details is not None


def test_chat_stream_says_the_same(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None and whole.usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    # the second time the prompt's first block is found
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16


def test_the_stream_helper(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=24).choices[0].message.content
    assert whole is not None
    with client.chat.completions.stream(**asked, stop=whole[6:9]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole[: whole.index(whole[6:9])]
    assert final.choices[0].finish_reason == "stop"


def test_without_include_usage_no_chunk_has_it(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, temperature=0, stream=True
    )
    chunks = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert all(len(chunk.choices) == 1 for chunk in chunks)


def test_seed_reproduces(client: openai.OpenAI) -> None:
    def say(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=16, temperature=1.5, seed=seed
        )
        return answer.choices[0].message.content

    assert say(7) == say(7)
    assert len({say(seed) for seed in range(4)}) > 1


def test_several_choices(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.5}
    whole = client.chat.completions.create(**asked, n=3, seed=5)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage is not None and whole.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, n=3, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_strings(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**asked).choices[0]
    word = free.text[5:8]
    cut = client.completions.create(**asked, stop=[word, "never said"]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(word)]
    assert cut.model_extra is not None and cut.model_extra["stop_reason"] == word


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 5
    for token in logprobs.content:
        assert token.logprob <= 0 and token.bytes is not None
        best = [top.logprob for top in token.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        # greedy: the chosen token is the likeliest
        assert token.logprob == pytest.approx(best[0], abs=1e-4)
    joined = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content
    streamed = [
        token.logprob
        for chunk in client.chat.completions.create(
            **asked, logprobs=True, top_logprobs=0, stream=True
        )
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == pytest.approx([token.logprob for token in logprobs.content], abs=1e-4)


def test_completion_of_every_kind_of_prompt(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    extra = {"return_token_ids": True}
    texts = ["hello", "The quick brown"]
    alone = [
        client.completions.create(prompt=text, **asked, extra_body=extra).choices[0]
        for text in texts
    ]
    together = client.completions.create(prompt=texts, **asked, extra_body=extra)
    assert [c.text for c in together.choices] == [c.text for c in alone]
    assert together.usage is not None and together.usage.completion_tokens == 12
    ids = [choice.model_extra["prompt_token_ids"] for choice in alone]
    by_ids = client.completions.create(prompt=ids, **asked, extra_body=extra)
    assert [c.text for c in by_ids.choices] == [c.text for c in alone]
    lone = client.completions.create(prompt=ids[0], **asked, extra_body=extra).choices[0]
    assert lone.model_extra["token_ids"] == alone[0].model_extra["token_ids"]
    assert len(lone.model_extra["token_ids"]) == 6
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=texts, **asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in alone]


def test_echo_and_prompt_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "The quick brown", "temperature": 0, "echo": True}
    answer = client.completions.create(**asked, max_tokens=4, logprobs=2)
    choice = answer.choices[0]
    assert choice.text.startswith("The quick brown") and choice.logprobs is not None
    tokens, values = choice.logprobs.tokens, choice.logprobs.token_logprobs
    assert answer.usage is not None and tokens is not None and values is not None
    assert len(tokens) == len(values) == answer.usage.prompt_tokens + 4
    assert values[0] is None and all(value is not None and value <= 0 for value in values[1:])
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset or [])
    scored = client.completions.create(**asked, max_tokens=0, logprobs=2)
    assert scored.choices[0].text == "The quick brown"
    assert scored.choices[0].logprobs is not None and scored.usage is not None
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(values[:-4], abs=1e-4)
    assert scored.usage.completion_tokens == 0
    streamed = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(**asked, max_tokens=4, stream=True)
    )
    assert streamed == choice.text


def test_extra_fields(client: openai.OpenAI) -> None:
    """vLLM's fields reach the engine, and fields nobody knows are let through."""

    def ids(**extra: object) -> list[int]:
        answer = client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=10,
            temperature=1.0,
            seed=3,
            extra_body={"return_token_ids": True, **extra},
        )
        return list(answer.choices[0].model_extra["token_ids"])

    greedy = ids(top_k=1)
    assert ids(min_p=1.0) == greedy and ids(top_p=0.0) == greedy
    assert ids(top_k=-1, unknown_field={"a": 1}, service_tier="auto") == ids()
    stop_id = greedy[4]
    cut = ids(top_k=1, stop_token_ids=[stop_id])
    assert cut == greedy[: greedy.index(stop_id) + 1]
    longer = ids(top_k=1, stop_token_ids=[stop_id], min_tokens=8)
    assert len(longer) >= 8 or stop_id not in longer
    assert len(set(ids(top_k=1, repetition_penalty=50.0))) == 10


def test_beam_search(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=6, n=3, extra_body={"use_beam_search": True}
    )
    assert len({choice.text for choice in answer.choices}) == 3


def test_a_turn_is_continued(client: openai.OpenAI) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "The quick brown"}]
    asked = {"model": "tiny", "messages": turns, "max_tokens": 4, "temperature": 0}
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    ids = {"return_token_ids": True}
    opened = client.chat.completions.create(**asked, extra_body=ids)
    continued = client.chat.completions.create(**asked, extra_body=ids | flags)
    long, short = (a.model_extra["prompt_token_ids"] for a in (opened, continued))
    assert len(short) < len(long) and long[: len(short)] == short


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "coterie")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/unknown")


def test_auto_is_the_first_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="auto", messages=MESSAGES, max_tokens=2)
    assert answer.model == "tiny"


def test_errors_are_typed(client: openai.OpenAI, strict_server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model="tiny", messages=[])
    assert (empty.value.param, empty.value.type) == ("messages", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=99_999)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model="tiny", input="x")
    locked = openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key="wrong", max_retries=0)
    with locked, pytest.raises(openai.AuthenticationError) as refused:
        locked.models.list()
    assert refused.value.code == "invalid_api_key"


def test_deadline(client: openai.OpenAI) -> None:
    """Time that runs out in the middle cuts the answer; before the first token it is a 504."""
    asked = {"model": "tiny", "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    cut = client.chat.completions.create(**asked, extra_headers={"x-deadline-ms": "250"})
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].model_extra["stop_reason"] == "timeout"
    assert cut.usage is not None and 0 < cut.usage.completion_tokens < 900


def test_request_ids_and_receipt(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=2, extra_headers={"x-request-id": "mine<>-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert float(raw.headers["openai-processing-ms"]) > 0
    assert raw.headers["x-coterie-specialist"] == "tiny"
    assert float(raw.headers["x-coterie-queue-ms"]) >= 0


def test_async(server: Served) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content
            many = await asyncio.gather(
                *(client.chat.completions.create(**asked) for _ in range(8))
            )
            assert {a.choices[0].message.content for a in many} == {text}
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="tiny", messages=[], max_tokens=1)

    asyncio.run(talk())


def test_a_model_that_thinks(strict_server: Served) -> None:
    with openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key=KEYS[0]) as client:
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
        answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message
        assert message.content == "" and message.model_extra["reasoning_content"]
        assert answer.usage.completion_tokens_details.reasoning_tokens == 12
        chunks = list(client.chat.completions.create(**asked, stream=True))
        extras = [c.choices[0].delta.model_extra or {} for c in chunks]
        streamed = "".join(extra.get("reasoning_content") or "" for extra in extras)
        assert streamed == message.model_extra["reasoning_content"]
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        plain = client.chat.completions.create(**asked, extra_body=off).choices[0].message
        assert plain.content and plain.model_extra["reasoning_content"] is None
