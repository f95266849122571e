"""Raw transcripts of both dialects, byte for byte but for ids, times and the model's words."""

from __future__ import annotations

import re

from tests.helpers.serving.server_process import Served, chat, frames

GOLDEN_CHAT = """\
data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"V","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"V","choices":[{"index":0,"delta":{"content":"TEXT"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"V","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","system_fingerprint":"V","choices":[],"usage":{"prompt_tokens":N,"completion_tokens":N,"total_tokens":N,"prompt_tokens_details":{"cached_tokens":N},"completion_tokens_details":{"reasoning_tokens":N}},"coterie":{}}

data: [DONE]

"""  # noqa: E501

GOLDEN_TEXT = """\
data: {"id":"ID","object":"text_completion","created":0,"model":"tiny","system_fingerprint":"V","choices":[{"index":0,"text":"TEXT","logprobs":null,"finish_reason":null}]}

data: {"id":"ID","object":"text_completion","created":0,"model":"tiny","system_fingerprint":"V","choices":[{"index":0,"text":"TEXT","logprobs":null,"finish_reason":"length"}]}

data: [DONE]

"""  # noqa: E501

GOLDEN_MESSAGE = """\
event: message_start
data: {"type":"message_start","message":{"id":"ID","type":"message","role":"assistant","model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":N,"cache_creation_input_tokens":N,"cache_read_input_tokens":N,"output_tokens":N}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: ping
data: {"type":"ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"TEXT"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},"usage":{"input_tokens":N,"cache_creation_input_tokens":N,"cache_read_input_tokens":N,"output_tokens":N},"coterie":{}}

event: message_stop
data: {"type":"message_stop"}

"""  # noqa: E501

_TEXT = r'"(?:[^"\\]|\\.)+"'


def normal(raw: bytes) -> str:
    """The transcript with what varies replaced, and repeated text frames folded into one."""
    text = raw.decode()
    text = re.sub(r'"id":"(chatcmpl-|cmpl-|msg_)[0-9a-f]{32}"', '"id":"ID"', text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    text = re.sub(r'"system_fingerprint":"[^"]+"', '"system_fingerprint":"V"', text)
    text = re.sub(rf'("(?:content|text)":){_TEXT}', r'\1"TEXT"', text)
    text = re.sub(r'"text":"","logprobs"', '"text":"TEXT","logprobs"', text)
    text = re.sub(r'_tokens":\d+', '_tokens":N', text)
    # a receipt has a plan, which has the values of sampling, each with its source
    nested = r"\{[^{}]*\}"
    for _ in range(3):
        nested = rf"\{{(?:[^{{}}]|{nested})*\}}"
    told = rf'"coterie":\{{"timings":{nested},"receipt":{nested}\}}'
    text = re.sub(told, '"coterie":{}', text)
    blocks = text.split("\n\n")
    kept = [b for i, b in enumerate(blocks) if i == 0 or b != blocks[i - 1]]
    return "\n\n".join(kept)


def test_chat_transcript(server: Served) -> None:
    body = chat("golden", stream=True, stream_options={"include_usage": True}, temperature=0)
    reply = server.post("/v1/chat/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in reply.headers
    assert normal(reply.body) == GOLDEN_CHAT


def test_completion_transcript(server: Served) -> None:
    body = {"model": "tiny", "prompt": "golden", "max_tokens": 6, "stream": True, "temperature": 0}
    reply = server.post("/v1/completions", body)
    assert normal(reply.body) == GOLDEN_TEXT


def test_message_transcript(server: Served) -> None:
    reply = server.post("/v1/messages", chat("golden", stream=True, temperature=0))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert normal(reply.body) == GOLDEN_MESSAGE


def test_utf8_is_never_broken(server: Served) -> None:
    """A random model says half characters: every frame is still valid JSON in valid UTF-8."""
    body = chat("bytes", stream=True, max_tokens=300, temperature=1.3, seed=1, ignore_eos=True)
    found = frames(server.post("/v1/chat/completions", body).body)
    assert found[-1][1] == "[DONE]"
    said = "".join(
        data["choices"][0]["delta"].get("content", "") for _, data in found[:-1] if data["choices"]
    )
    whole = server.post("/v1/chat/completions", body | {"stream": False}).json
    assert said == whole["choices"][0]["message"]["content"]


def test_token_ids_in_a_stream(server: Served) -> None:
    body = chat("ids", stream=True, temperature=0, return_token_ids=True)
    found = [data for _, data in frames(server.post("/v1/chat/completions", body).body)[:-1]]
    streamed = [i for data in found for i in data["choices"][0].get("token_ids", [])]
    whole = server.post("/v1/chat/completions", body | {"stream": False}).json
    assert streamed == whole["choices"][0]["token_ids"]
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
