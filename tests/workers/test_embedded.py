"""`from coterie import LLM`: the embedded engine, and what it may import."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie import LLM
from coterie.core.config import CAPTURES
from coterie.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    Unavailable,
)
from coterie.core.request import Chat, Message
from tests.helpers.models.tiny import tiny_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint("llama")), dtype="fp32", threads=1, kv_bytes=8_000_000) as llm:
        yield llm


def test_generate_one_or_many(llm: LLM) -> None:
    (single,) = llm.generate("The quick brown fox", **GREEDY)
    prompts: list[str | list[int]] = ["The quick brown fox", [0, 40, 41]]
    both = llm.generate(prompts, **GREEDY)
    assert both[0].text == single.text and both[0].token_ids == single.token_ids
    assert len(single.token_ids) == 12 and single.choices[0].finish_reason == "length"
    assert both[1].prompt_token_ids == [0, 40, 41] and both[1].usage.completion_tokens == 12
    assert llm.generate([0, 40, 41], **GREEDY)[0].token_ids == both[1].token_ids
    assert llm.generate([], **GREEDY) == []


def test_token_ids_are_lists(llm: LLM) -> None:
    """As the tokenizer's: a tuple would equal no list."""
    prompt = [0, 40, 41]
    (answer,) = llm.generate(prompt, **GREEDY)
    assert answer.prompt_token_ids == prompt
    streamed = [delta.token_ids for delta in llm.stream(prompt, **GREEDY)]
    assert all(type(ids) is list for ids in streamed)
    joined = [token for ids in streamed for token in ids]
    assert answer.token_ids == answer.choices[0].token_ids == joined
    said = llm.chat([{"role": "user", "content": "Hello"}], **GREEDY)
    assert said.prompt_token_ids == llm.tokenizer.encode_prompt(Chat((Message("user", "Hello"),)))


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    prompts = [[0, 30 + i % 300, 40 + i // 300] for i in range(400)]
    options = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    answers = llm.generate(prompts, **options)
    assert len(answers) == 400 and all(len(answer.token_ids) == 2 for answer in answers)
    assert llm.generate(prompts[5], **options)[0].token_ids == answers[5].token_ids


def test_chat_and_stream_agree(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, **GREEDY)
    deltas = list(llm.stream(messages, **GREEDY))
    assert "".join(delta.text for delta in deltas) == answer.text
    assert [t for delta in deltas for t in delta.token_ids] == answer.token_ids
    # an open assistant turn is continued
    opened = llm.chat([*messages, {"role": "assistant", "content": "Par"}], **GREEDY)
    assert opened.prompt_token_ids != answer.prompt_token_ids


def test_choices_logprobs_and_seeds(llm: LLM) -> None:
    options = {"n": 2, "seed": 3, "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    first, again = llm.generate(["abc", "abc"], **options)
    assert first.choices == again.choices
    assert first.choices[0].token_ids != first.choices[1].token_ids
    assert len(first.choices[0].logprobs or ()) == 8
    drawn = [llm.generate("abc", max_tokens=8, ignore_eos=True)[0].text for _ in range(4)]
    assert len(set(drawn)) > 1


def test_a_closed_stream_frees_its_blocks(llm: LLM) -> None:
    free = llm._engine.lane_states()[0].free_tokens
    stream = llm.stream("abc", max_tokens=500, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm._engine.lane_states()[0].free_tokens == free
    assert not llm._shared.inboxes


def test_streams_interleave_and_threads_share(llm: LLM) -> None:
    alone = [llm.generate([0, 50 + i], **GREEDY)[0].token_ids for i in range(4)]
    first, second = llm.stream([0, 50], **GREEDY), llm.stream([0, 51], **GREEDY)
    pairs = list(zip(first, second, strict=True))
    assert [t for a, _ in pairs for t in a.token_ids] == alone[0]
    assert [t for _, b in pairs for t in b.token_ids] == alone[1]
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        found[index] = llm.generate([0, 50 + index], **GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == alone


def test_wrong_calls_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="tempratur"):
        llm.generate("abc", tempratur=1.0)
    with pytest.raises(ContextLengthExceeded):
        llm.generate("abc", max_tokens=5000)
    with pytest.raises(InvalidRequest):
        llm.generate([0, 99_999])
    assert len(llm.generate("abc", **GREEDY)) == 1


BARE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from coterie import LLM
with LLM({model!r}, dtype="fp32", threads=1, kv_bytes=8_000_000) as llm:
    print(len(llm.generate("abc", max_tokens=5, ignore_eos=True)[0].token_ids))
"""


def test_runs_with_nothing_but_the_engine_s_packages() -> None:
    blocked = {"msgspec", "zmq", "fastapi", "pydantic", "uvicorn", "httpx", "rich", "transformers",
               "huggingface_hub", "gguf", "psutil", "platformdirs"}  # fmt: skip
    code = BARE.format(blocked=blocked, model=str(tiny_checkpoint("llama")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "5"


def test_when_steps_are_captured(tmp_path: Path) -> None:
    """Without a GPU nothing is, whatever is asked for; a mistake is refused before loading."""
    for mode in CAPTURES:
        given = str(tiny_checkpoint("llama"))
        with LLM(given, dtype="fp32", threads=1, kv_bytes=2_000_000, capture_graphs=mode) as llm:
            assert llm.graph_stats() == {} and llm.info.graph_bytes == 0
            assert len(llm.generate("a", max_tokens=2)[0].token_ids) == 2
    for count in (100_000, -1):
        with pytest.raises(ConfigError, match=f"engine.threads is {count}"):
            LLM(given, threads=count)
    with pytest.raises(ConfigError, match=r"engine\.device is 'banana'"):
        LLM(given, device="banana")
    with pytest.raises(ConfigError, match="capture_graphs"):
        LLM(str(tmp_path), capture_graphs="never")


def test_a_model_that_is_dropped_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    dropped: LLM | None = LLM(str(tiny_checkpoint("qwen3_moe")), threads=1, kv_bytes=2**22)
    assert dropped is not None and dropped.generate("a", max_tokens=2)
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} >= {"engine", "experts"}
    dropped = None
    # the engine's thread, which has woken this one, may still hold the model behind its last step
    end = time.monotonic() + 60
    while any(thread.is_alive() for thread in started) and time.monotonic() < end:
        gc.collect()
        for thread in started:
            thread.join(0.1)
    assert not any(thread.is_alive() for thread in started)


BUSY_AT_THE_END = """
import sys, threading, time
from coterie import LLM
llm = LLM(sys.argv[1], dtype="fp32", threads=1, kv_bytes=8_000_000)
asked = {"max_tokens": 900, "ignore_eos": True}
for _ in range(4):
    threading.Thread(target=lambda: llm.generate("hello", **asked), daemon=True).start()
while not llm._engine.has_work():
    time.sleep(0.01)
if sys.argv[2] == "closed":
    llm.close()
print("the end")
"""


@pytest.mark.parametrize("how", ["left", "closed"])
def test_a_program_that_ends_while_steps_run_ends_well(how: str) -> None:
    """A thread that is inside of torch when the interpreter ends would abort the process."""
    command = [sys.executable, "-c", BUSY_AT_THE_END, str(tiny_checkpoint("llama")), how]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
        assert "terminate" not in done.stderr


def test_a_closed_model_ends_what_runs_and_says_so() -> None:
    llm = LLM(str(tiny_checkpoint("llama")), dtype="fp32", threads=1, kv_bytes=8_000_000)
    asked = {"max_tokens": 900, "ignore_eos": True}
    thread = threading.Thread(target=lambda: llm.generate("hello", **asked))
    thread.start()
    while not llm._engine.has_work():
        time.sleep(0.01)
    llm.close()
    llm.close()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("hello", max_tokens=1)
