"""llama.cpp's routes at the real server: the shapes that its documentation gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.models.text.fill import GapText, fill_marks, fill_prompt
from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.models.filling import filling_checkpoint
from tests.helpers.serving.server_process import Served, chat, frames

ASK: dict[str, Any] = {"prompt": "The quick", "n_predict": 8, "temperature": 0}


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = filling_checkpoint(tmp_path_factory.mktemp("fill") / "model")
    served = Served(str(path), "--name", "tiny")
    yield served
    served.stop()


def test_completion(server: Served) -> None:
    body = {"model": "tiny", "prompt": ASK["prompt"], "max_tokens": 8, "temperature": 0}
    theirs = server.post("/v1/completions", body | {"return_token_ids": True}).json["choices"][0]
    whole = server.post("/completion", ASK | {"return_tokens": True}).json
    assert (whole["content"], whole["tokens"]) == (theirs["text"], theirs["token_ids"])
    assert (whole["stop"], whole["stop_type"], whole["model"]) == (True, "limit", "tiny")
    assert (whole["tokens_predicted"], whole["timings"]["predicted_n"]) == (8, 8)
    assert whole["tokens_evaluated"] == len(theirs["prompt_token_ids"])
    assert whole["generation_settings"]["n_ctx"] == 1024
    *parts, last = [
        data for _, data in frames(server.post("/completion", ASK | {"stream": True}).body)
    ]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert all(part["stop"] is False for part in parts) and last["stop"] is True
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    ids = theirs["prompt_token_ids"]
    for prompt in (ids, [*ids[:1], "The quick"]):
        assert (
            server.post("/completion", ASK | {"prompt": prompt}).json["content"] == theirs["text"]
        )
    stop = theirs["text"][2:4]
    cut = server.post("/completion", ASK | {"stop": [stop]}).json
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)
    assert cut["content"] == theirs["text"].partition(stop)[0]


def test_fields_of_completion(server: Served) -> None:
    scored = server.post("/completion", ASK | {"n_probs": 3}).json["completion_probabilities"]
    assert len(scored) == 8 and len(scored[0]["top_logprobs"]) == 3
    assert scored[0]["id"] == scored[0]["top_logprobs"][0]["id"]
    never = ASK | {"logit_bias": [[scored[0]["id"], False]], "return_tokens": True}
    assert scored[0]["id"] not in server.post("/completion", never).json["tokens"]
    theirs = ASK | {"logit_bias": {str(scored[0]["id"]): -100}, "return_tokens": True}
    assert scored[0]["id"] not in server.post("/completion", theirs).json["tokens"]
    told = ASK | {"prompt": {"prompt_string": ASK["prompt"]}}
    assert (
        server.post("/completion", told).json["content"]
        == server.post("/completion", ASK).json["content"]
    )
    warmed = server.post("/completion", ASK | {"n_predict": 0}).json
    assert (warmed["content"], warmed["tokens_predicted"]) == ("", 0)
    unscored = server.post("/completion", ASK | {"n_predict": 0, "n_probs": 2}).json
    assert unscored["completion_probabilities"] == []
    # llama.cpp's other name for it; its defaults ask for nothing
    short = {"prompt": ASK["prompt"], "max_tokens": 2, "n_indent": 0, "t_max_predict_ms": 0}
    assert server.post("/completion", short).json["tokens_predicted"] == 2
    chosen = ASK | {"response_fields": ["content", "timings/prompt_n", "nothing/here"]}
    assert set(server.post("/completion", chosen).json) == {"content", "timings/prompt_n"}
    schema = {"type": "integer", "minimum": 1, "maximum": 9}
    assert server.post("/completion", ASK | {"json_schema": schema}).json[
        "content"
    ].strip() in list("123456789")
    grammar = 'root ::= "yes" | "no"'
    assert server.post("/completion", ASK | {"grammar": grammar}).json["content"] in ("yes", "no")


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/completion", {}, 400, "prompt"),
    ("/completion", {"prompt": ["one", "two"]}, 400, "one prompt"),
    ("/completion", ASK | {"model": "nobody"}, 404, "nobody"),
    ("/completion", ASK | {"mirostat": 2}, 400, "mirostat"),
    ("/completion", ASK | {"samplers": ["top_k"]}, 400, "samplers"),
    ("/completion", ASK | {"post_sampling_probs": True}, 400, "post_sampling_probs"),
    ("/completion", ASK | {"repeat_penalty": 2, "repeat_last_n": 9}, 400, "repeat_last_n"),
    ("/completion", ASK | {"logit_bias": [[1.5, 1]]}, 400, "logit_bias"),
    ("/completion", ASK | {"logit_bias": [[1, 1000]]}, 400, "logit_bias"),
    ("/completion", ASK | {"prompt": [99999]}, 400, "99999"),
    ("/completion", ASK | {"response_format": {"type": "json_object"}}, 400, "json_schema"),
    ("/completion", ASK | {"n_cmpl": 2}, 400, "one answer"),
    ("/completion", ASK | {"allowed_token_ids": [5]}, 400, "allowed_token_ids"),
    ("/completion", ASK | {"t_max_predict_ms": 5}, 400, "x-deadline-ms"),
    ("/completion", ASK | {"suffix": "b"}, 400, "/infill"),
    ("/completion", ASK | {"tools": [{"type": "function"}]}, 400, "/v1/chat/completions"),
    ("/completion", ASK | {"logit_bias": {"the": -1}}, 400, "token ids"),
    (
        "/completion",
        {"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}},
        400,
        "only text",
    ),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 400, "does not fill gaps"),
    ("/infill", {"input_extra": [{"filename": 5, "text": "x"}]}, 400, "input_extra"),
    ("/apply-template", {"messages": []}, 400, "messages"),
    ("/tokenize", {"content": "a", "prompt": "b"}, 400, "either"),
    ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
def test_refusals(server: Served, path: str, body: Any, status: int, words: str) -> None:
    reply = server.post(path, body)
    assert reply.status == status and words in reply.json["error"]["message"], reply.body


def test_properties_and_templates(server: Served) -> None:
    props = server.get("/props").json
    assert props["default_generation_settings"]["n_ctx"] == 1024 and props["total_slots"] >= 1
    assert (props["model_alias"], props["bos_token"]) == ("tiny", "<s>")
    assert "<|turn|>" in props["chat_template"]
    assert server.get("/props?model=nobody").status == 404
    messages = [{"role": "user", "content": "hello there"}]
    prompt = server.post("/apply-template", {"messages": messages}).json["prompt"]
    assert prompt.endswith("<|turn|>assistant\n") and "hello there" in prompt
    # what they make of it is what a chat makes of its messages
    ids = server.post("/tokenize", {"content": prompt}).json["tokens"]
    assert ids == server.post("/tokenize", {"messages": messages}).json["tokens"]
    said = server.post("/completion", ASK | {"prompt": ids}).json["content"]
    theirs = server.post("/v1/chat/completions", chat()).json
    assert said == theirs["choices"][0]["message"]["content"]
    assert server.post("/detokenize", {"tokens": ids}).json["content"] == prompt
    assert server.post("/tokenize", {"content": "a", "add_special": True}).json["tokens"][0] == 0
    pieces = server.post("/tokenize", {"content": "fox ☃", "with_pieces": True}).json["tokens"]
    data = b"".join(
        part.encode() if isinstance(part := item["piece"], str) else bytes(part) for item in pieces
    )
    assert data.decode() == "fox ☃"


def test_gaps_are_filled(filler: Served) -> None:
    """As llama.vim asks, and as Ollama's clients do."""
    folder = Path(filler.get("/props").json["model_path"])
    tokenizer = load_tokenizer(folder)
    marks = fill_marks(tokenizer)
    assert marks is not None and marks.file is not None
    gap = GapText("def add(", "return", (("a.py", "x = 1"),), "left")
    ids = list(fill_prompt(tokenizer, gap, 1024, "model"))
    assert ids[0] == tokenizer.bos_id and ids[1] == marks.file
    places = [ids.index(mark) for mark in (marks.prefix, marks.suffix, marks.middle)]
    assert places == sorted(places)
    asked = {
        "input_prefix": gap.before,
        "input_suffix": gap.after,
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
        "prompt": gap.begun,
        "n_predict": 8,
        "temperature": 0,
        "top_k": 40,
        "cache_prompt": True,
        "samplers": ["top_k", "top_p", "infill"],
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "n_indent": 4,
    }
    filled = filler.post("/infill", asked).json
    plain = filler.post("/completion", ASK | {"prompt": ids}).json
    assert filled["content"] == plain["content"]
    assert filled["tokens_evaluated"] == len(ids)
    long = filler.post("/infill", asked | {"input_prefix": "word " * 9000})
    assert long.status == 400 and long.json["error"]["code"] == "context_length_exceeded"
    shown = filler.post("/api/show", {"model": "tiny"}).json
    assert "insert" in shown["capabilities"]
    body = {"model": "tiny", "prompt": "def add(", "suffix": "return", "stream": False}
    options = {"temperature": 0, "num_predict": 8}
    theirs = filler.post("/api/generate", body | {"options": options}).json
    ids = list(fill_prompt(tokenizer, GapText("def add(", "return"), 1024, "suffix"))
    plain = filler.post("/completion", ASK | {"prompt": ids}).json
    assert theirs["response"] == plain["content"] and theirs["context"][: len(ids)] == ids
