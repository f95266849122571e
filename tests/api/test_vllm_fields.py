"""Fields of vLLM's API that change an answer, against a real server and its tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, frames

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Chinese is not in the vocabulary: its characters are three tokens of a byte each
BYTES = "a 漢字 b"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(tiny_checkpoint("llama"))


def text(prompt: Any = "hello there", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields


def chosen(server: Served, path: str, body: dict[str, Any]) -> Any:
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


def ids_of(server: Served, body: dict[str, Any], path: str = TEXT) -> list[int]:
    return list(chosen(server, path, body | {"return_token_ids": True})["token_ids"])


# --- which tokens may be drawn


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_only_allowed_ids_are_drawn(server: Served, path: str) -> None:
    body = chat() if path == CHAT else text()
    free = ids_of(server, body | {"temperature": 1, "seed": 3}, path)
    allowed = [50, 60, 70]
    for fields in ({"temperature": 1, "seed": 3}, {}, {"use_beam_search": True, "n": 2}):
        found = ids_of(server, body | fields | {"allowed_token_ids": allowed}, path)
        assert set(found) <= set(allowed) and len(found) == 8
    assert not set(free) <= set(allowed)


def test_the_only_allowed_token_comes_even_where_it_is_banned(server: Served) -> None:
    word = server.post("/detokenize", {"tokens": [50]}).json["prompt"]
    body = text(allowed_token_ids=[50], bad_words=[word])
    assert set(ids_of(server, body)) == {50}


def test_a_bad_word_is_never_completed(server: Served, tokenizer: Tokenizer) -> None:
    """Neither as one token nor as the last of several."""
    plain = ids_of(server, text())
    pair = tokenizer.decode(plain[1:3])
    assert tokenizer.encode(pair, special=False) == plain[1:3]
    for word in (tokenizer.decode(plain[2:3]), pair):
        if not word.strip():
            continue
        spelt = tokenizer.encode(word, special=False)
        found = ids_of(server, text(bad_words=[word]))
        assert found[:2] == plain[:2] and found != plain
        assert spelt not in [found[i : i + len(spelt)] for i in range(len(found))]


def test_rules_do_not_depend_on_the_batch(server: Served) -> None:
    body = text(temperature=1, seed=5, allowed_token_ids=list(range(40, 90)), bad_words=["the"])
    alone = chosen(server, TEXT, body)["text"]
    prompts = ["hello there", "another prompt", "hello there"]
    many = server.post(TEXT, body | {"prompt": prompts}).json["choices"]
    assert many[0]["text"] == many[2]["text"] == alone


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "response_format": {"type": "json_object"}}, None),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 201]}, "bad_words.0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logits_processors": ["x"]}, "logits_processors"),
    ],
)
def test_what_cannot_be_done_is_said(
    server: Served, fields: dict[str, Any], param: str | None
) -> None:
    for path, body in ((CHAT, chat()), (TEXT, text())):
        reply = server.post(path, body | fields)
        assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body


# --- how tokens become text


def test_the_stop_string_is_the_answers_end(server: Served) -> None:
    whole = chosen(server, TEXT, text())["text"]
    stop = whole[3:5]
    cut = whole[: whole.index(stop)]
    assert chosen(server, TEXT, text(stop=stop))["text"] == cut
    kept = text(stop=stop, include_stop_str_in_output=True)
    assert chosen(server, TEXT, kept)["text"] == cut + stop
    parts = frames(server.post(TEXT, kept | {"stream": True}).body)[:-1]
    assert "".join(part["choices"][0]["text"] for _, part in parts) == cut + stop
    token = ids_of(server, text())[2]
    ended = text(stop_token_ids=[token], include_stop_str_in_output=True)
    before = chosen(server, TEXT, text(stop_token_ids=[token]))["text"]
    last = server.post("/detokenize", {"tokens": [token]}).json["prompt"]
    assert chosen(server, TEXT, ended)["text"] == before + last


def test_special_tokens_are_text_where_they_are_asked_for(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": "<|turn|>", "add_special_tokens": False}).json
    (turn,) = ids["tokens"]
    body = text(logit_bias={str(turn): 100}, max_tokens=3)
    assert chosen(server, TEXT, body)["text"] == ""
    assert chosen(server, TEXT, body | {"skip_special_tokens": False})["text"] == "<|turn|>" * 3
    shown = chat(logit_bias={str(turn): 100}, max_tokens=3, skip_special_tokens=False)
    assert chosen(server, CHAT, shown)["message"]["content"] == "<|turn|>" * 3


# --- the prompt


def test_a_prompt_is_truncated_on_the_side_that_is_named(server: Served) -> None:
    prompt = "one two three four five six seven"
    ids = server.post("/tokenize", {"prompt": prompt}).json["tokens"]
    for side, expected in ((None, ids[-5:]), ("left", ids[-5:]), ("right", ids[:5])):
        body = text(prompt, truncate_prompt_tokens=5, return_token_ids=True)
        found = chosen(server, TEXT, body | {"truncation_side": side})
        assert found["prompt_token_ids"] == expected
        same = chosen(server, TEXT, text(expected))
        assert found["text"] == same["text"]
    assert chosen(server, TEXT, body | {"truncate_prompt_tokens": 500})["prompt_token_ids"] == ids


def test_as_much_of_a_prompt_as_fits(server: Served) -> None:
    room = server.get("/v1/models").json["data"][0]["max_model_len"]
    long = "word " * room
    refused = server.post(TEXT, text(long))
    assert refused.json["error"]["code"] == "context_length_exceeded"
    reply = server.post(TEXT, text(long, truncate_prompt_tokens=-1))
    assert reply.json["usage"]["prompt_tokens"] == room - 8
    reply = server.post(CHAT, chat(long, truncate_prompt_tokens=-1))
    assert reply.json["usage"]["prompt_tokens"] == room - 8


def test_a_request_may_bring_its_own_template(server: Served) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ documents[0].text }}{{ x }}"
    fields = {"chat_template": template, "documents": [{"text": "D"}]}
    body = chat("hi", **fields, chat_template_kwargs={"x": "!"}, return_token_ids=True)
    reply = server.post(CHAT, body).json
    expected = server.post("/tokenize", {"prompt": "[hi]D!", "add_special_tokens": False}).json
    assert reply["prompt_token_ids"] == expected["tokens"]
    with_bos = server.post(CHAT, body | {"add_special_tokens": True}).json["prompt_token_ids"]
    assert with_bos == server.post("/tokenize", {"prompt": "[hi]D!"}).json["tokens"]
    told = {"messages": body["messages"], "chat_template_kwargs": {"x": "!"}} | fields
    assert server.post("/tokenize", told).json["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ messages.__class__.__mro__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "(" * 30_000,
        "{{ " + "(" * 20_000 + " }}",
        "{% if 1 %}" * 2_000,
    ],
)
def test_a_hostile_template_is_its_callers_fault(server: Served, template: str) -> None:
    started = time.process_time()
    reply = server.post(CHAT, chat(chat_template=template))
    if template.startswith("("):
        # text, and nothing else
        assert reply.status == 400 and reply.json["error"]["code"] == "context_length_exceeded"
    else:
        assert reply.status == 400, reply.body
        assert reply.json["error"]["param"] in ("chat_template", "messages")
    assert time.process_time() - started < 10
    assert server.get("/health/ready").status == 200


def test_an_answer_may_begin_with_the_turn_it_goes_on_with(server: Served) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "The answer"},
    ]
    body = chat(continue_final_message=True, add_generation_prompt=False, messages=messages)
    plain = chosen(server, CHAT, body)["message"]["content"]
    echoed = body | {"echo": True}
    assert chosen(server, CHAT, echoed)["message"]["content"] == "The answer" + plain
    parts = frames(server.post(CHAT, echoed | {"stream": True}).body)[:-1]
    said = "".join(p["choices"][0]["delta"].get("content") or "" for _, p in parts)
    assert said == "The answer" + plain
    alone = chosen(server, CHAT, chat(echo=True))["message"]["content"]
    assert alone == chosen(server, CHAT, chat())["message"]["content"]


# --- usage and logprobs


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_chunk_may_carry_the_usage(server: Served, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = (chat() if path == CHAT else text()) | {"stream": True, "stream_options": options}
    parts = [data for _, data in frames(server.post(path, body).body)[:-1]]
    used = [part["usage"] for part in parts]
    counts = [usage["completion_tokens"] for usage in used]
    assert counts == sorted(counts) and counts[-1] == 8 and len(set(counts)) > 3
    assert len({usage["prompt_tokens"] for usage in used}) == 1
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in used)


def test_prompt_logprobs(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": BYTES}).json["tokens"]
    found = chosen(server, TEXT, text(BYTES, prompt_logprobs=2))["prompt_logprobs"]
    scored = chosen(server, TEXT, text(BYTES, echo=True, logprobs=2))["logprobs"]
    assert found[0] is None and len(found) == len(ids)
    for index, (token, place) in enumerate(zip(ids, found, strict=True)):
        if place is None:
            continue
        logprob, own = scored["token_logprobs"][index], place[str(token)]
        assert own["logprob"] == pytest.approx(logprob)
        assert len(place) in (2, 3) and (own["rank"] <= 2) == (len(place) == 2)
        assert {1, 2} <= {item["rank"] for item in place.values()}
    whole = server.post(CHAT, chat(prompt_logprobs=0)).json
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert all(len(place) == 1 for place in whole["prompt_logprobs"][1:])


def test_tokens_may_be_named_by_their_ids(server: Served) -> None:
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    found = chosen(server, TEXT, text(logprobs=2, echo=True) | body)
    ids = [*found["prompt_token_ids"], *found["token_ids"]]
    assert found["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for name in found["logprobs"]["top_logprobs"][-1])
    found = chosen(server, CHAT, chat(logprobs=True, top_logprobs=2) | body)
    listed = found["logprobs"]["content"]
    assert [item["token"] for item in listed] == [f"token_id:{t}" for t in found["token_ids"]]


def test_parts_of_characters_are_listed_apart(server: Served, tokenizer: Tokenizer) -> None:
    """Every alternative has a name of its own, and its bytes."""
    partial = [token for token in range(VOCAB) if is_partial(tokenizer.token_bytes(token))]
    assert len(partial) > 60
    bias = {str(token): 100 for token in partial}
    body = chat(logprobs=True, top_logprobs=20, max_tokens=4, logit_bias=bias)
    for item in chosen(server, CHAT, body)["logprobs"]["content"]:
        names = [top["token"] for top in item["top_logprobs"]]
        assert len(set(names)) == 20 and "\ufffd" not in "".join(names)
        assert item["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in item["bytes"])
    found = chosen(server, TEXT, text(logprobs=20, max_tokens=4, logit_bias=bias))["logprobs"]
    assert all(len(top) in (20, 21) for top in found["top_logprobs"])
    assert all(name.startswith("bytes:\\x") for name in found["tokens"])


VOCAB = 384


def is_partial(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


@pytest.mark.parametrize(
    "prompt", [BYTES, "<|turn|>user\nhello", "hello<|turn|>漢", "", "漢", " spaced  out "]
)
def test_offsets_point_into_the_echoed_text(
    server: Served, tokenizer: Tokenizer, prompt: str
) -> None:
    ids = tokenizer.encode(prompt)
    if not ids:
        return
    added = ids != tokenizer.encode(prompt, special=False)
    for given in (prompt, ids):
        body = text(given, echo=True, logprobs=1, temperature=1, seed=2, return_token_ids=True)
        found = chosen(server, TEXT, body)
        expected = prompt if given is prompt else tokenizer.decode(ids, skip_special=False)
        assert found["text"].startswith(expected)
        check_offsets(tokenizer, found, len(ids), hidden=int(added and given is prompt))


def check_offsets(tokenizer: Tokenizer, found: Any, num_prompt: int, hidden: int) -> None:
    """Each offset is where the text of all tokens before ends, but for half a character."""
    ids = [*found["prompt_token_ids"], *found["token_ids"]]
    offsets, whole = found["logprobs"]["text_offset"], found["text"]
    assert len(offsets) == len(ids) and offsets == sorted(offsets)
    lead = tokenizer.decode(ids[hidden:num_prompt], skip_special=False)
    for index, at in enumerate(offsets):
        if index <= hidden:
            before = ""
        elif index <= num_prompt:
            before = tokenizer.decode(ids[hidden:index], skip_special=False)
        else:
            before = lead + tokenizer.decode(ids[num_prompt:index])
        assert whole.startswith(before[:at]) and at <= len(whole)
        # what is not counted yet is the beginning of a character
        assert set(before[at:]) <= {"\ufffd"} and len(before) - at <= 3


def test_offsets_of_a_stream_are_those_of_the_whole(server: Served) -> None:
    body = text(BYTES, echo=True, logprobs=1, temperature=1, seed=4, stop="e", max_tokens=40)
    whole = chosen(server, TEXT, body)
    parts = frames(server.post(TEXT, body | {"stream": True}).body)[:-1]
    choices = [part["choices"][0] for _, part in parts if part["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for key, values in whole["logprobs"].items():
        listed = [choice["logprobs"][key] for choice in choices if choice["logprobs"]]
        assert [value for chunk in listed for value in chunk] == values


# --- /tokenize


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_tokenize_counts_what_a_chat_would(taught_server: Served) -> None:
    messages = [{"role": "user", "content": "Is it raining in Porto?"}]
    for fields in ({}, {"tools": [TOOL]}):
        told = taught_server.post("/tokenize", {"messages": messages} | fields).json
        body = {"model": "tiny", "messages": messages, "max_tokens": 1, "return_token_ids": True}
        answer = taught_server.post(CHAT, body | fields).json
        assert told["tokens"] == answer["prompt_token_ids"]
        assert told["count"] == answer["usage"]["prompt_tokens"]
    assert told["count"] > 40
    bad = {"messages": messages, "tools": [{"type": "web_search"}]}
    assert taught_server.post("/tokenize", bad).status == 400


def test_tokenize_opens_or_continues_a_turn(server: Served, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The"}]

    def told(**fields: Any) -> str:
        reply = server.post("/tokenize", {"messages": messages} | fields).json
        return tokenizer.decode(reply["tokens"], skip_special=False)

    assert told().endswith("<|turn|>assistant\n")
    assert told(add_generation_prompt=False).endswith("The</s>\n")
    assert told(continue_final_message=True, add_generation_prompt=False).endswith("The")
    assert told(add_special_tokens=True) != told() or tokenizer.bos_id is None


# --- what else vLLM's clients ask for


def test_tokenizer_info_and_load(server: Served, tokenizer: Tokenizer) -> None:
    told = server.get("/tokenizer_info").json
    assert told["chat_template"] == tokenizer.chat_template
    assert (told["eos_token"], told["tokenizer_class"]) == ("</s>", "PreTrainedTokenizerFast")
    ids = {item["content"]: int(key) for key, item in told["added_tokens_decoder"].items()}
    assert ids["</s>"] in tokenizer.eos_ids and told["vocab_size"] == tokenizer.vocab_size
    assert server.get("/tokenizer_info?model=nobody").status == 404
    body = chat(max_tokens=200, stream=True, ignore_eos=True)
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.get("/load").json["server_load"] >= 1
        for _ in lines:
            pass


def test_sizes_and_phases_are_measured(own_server: Served) -> None:
    """vLLM's histograms, one observation per request, and their sums."""
    reply = own_server.post(TEXT, text(n=2, temperature=1, ignore_eos=True)).json["usage"]
    sizes = {
        "vllm:request_prompt_tokens": reply["prompt_tokens"],
        "vllm:request_generation_tokens": 16,
        "vllm:request_max_num_generation_tokens": 8,
        "vllm:request_params_max_tokens": 8,
        "vllm:request_params_n": 2,
        "vllm:request_prefill_kv_computed_tokens": reply["prompt_tokens"],
    }
    for name, expected in sizes.items():
        assert own_server.metric(f"{name}_count") == 1
        assert own_server.metric(f"{name}_sum") == expected, name
    spent = {
        phase: own_server.metric(f"vllm:request_{phase}_time_seconds_sum")
        for phase in ("prefill", "decode", "inference", "queue")
    }
    assert spent["inference"] >= spent["prefill"] + spent["decode"] - 1e-6 and spent["prefill"] > 0
    token_s = own_server.metric("vllm:request_time_per_output_token_seconds_sum")
    assert token_s == pytest.approx(spent["decode"] / 7)


# --- a worker that dies


@pytest.fixture(scope="module")
def own_server() -> Iterator[Served]:
    served = Served(str(tiny_checkpoint("llama")), "--name", "tiny")
    yield served
    served.stop()


@pytest.mark.full
def test_a_killed_worker_keeps_to_the_rules(own_server: Served) -> None:
    """What is allowed, banned, skipped and cut is the same behind the tokens a client has."""
    body = text(
        temperature=1, seed=11, max_tokens=400, bad_words=["the", "e", "a"], ignore_eos=True,
        allowed_token_ids=list(range(3, 300)), skip_special_tokens=False,
        include_stop_str_in_output=True, logprobs=2, truncate_prompt_tokens=3,
        return_token_ids=True,
    )  # fmt: skip
    expected = chosen(own_server, TEXT, body)
    pieces: list[dict[str, Any]] = []
    with httpx.stream("POST", own_server.url + TEXT, json=body | {"stream": True}, timeout=60) as s:
        killed = False
        for line in s.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0])
            if len(pieces) == 20 and not killed:
                killed = True
                assert own_server.kill_workers() == 1
    assert own_server.metric("coterie_worker_restarts_total") == 1
    ids = [token for piece in pieces for token in piece.get("token_ids", ())]
    assert ids == expected["token_ids"]
    assert "".join(piece["text"] for piece in pieces) == expected["text"]
    listed = [piece["logprobs"]["text_offset"] for piece in pieces if piece["logprobs"]]
    assert [at for some in listed for at in some] == expected["logprobs"]["text_offset"]
