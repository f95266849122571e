"""A GGUF file in its stored bits (Q4_K, Q6_K, Q5_0) behind a real server, most experts on disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

from tests.api.test_structured import FORMAT, valid
from tests.helpers.models.gguf_conversion import write_stored_bits
from tests.helpers.serving.server_process import Served

# of the eight, by place: which have a schema
STRUCTURED = (1, 4, 6)


def said(served: Served, place: int, retries: int = 0) -> str:
    """Whole or streamed, greedy or sampled, free or structured."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=retries)
    given: dict[str, Any] = {"temperature": place % 2, "seed": place, "max_tokens": 80}
    if place in STRUCTURED:
        given["response_format"] = FORMAT
    asked = [{"role": "user", "content": f"Who is number {place}? " * (1 + place)}]
    parts = client.chat.completions.create(model="tiny", messages=asked, stream=True, **given)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    if place not in STRUCTURED:
        return text
    whole = client.chat.completions.create(model="tiny", messages=asked, **given)
    assert whole.choices[0].message.content == text and valid(text)
    return text


def test_eight_callers_and_a_killed_worker(tmp_path: Path) -> None:
    file, _ = write_stored_bits("qwen3_moe", tmp_path)
    budgets = ("--device-budget", "25%", "--host-budget", "50%", "--strategy", "lru")
    served = Served(str(file), "--name", "tiny", *budgets)
    try:
        model = served.get("/v1/models").json["data"][0]
        # of the file; experts are in their own budgets
        assert 0 < model["weight_bytes"] < file.stat().st_size
        alone = [said(served, place) for place in range(8)]
        assert len(set(alone)) == 8
        with ThreadPoolExecutor(8) as callers:
            together = list(callers.map(lambda place: said(served, place), range(8)))
            assert together == alone
            # what is running goes on by itself; what comes before the new worker is there is a 503
            # with the time of the next try
            running = [callers.submit(said, served, place, 8) for place in range(8)]
            while served.metric("vllm:num_requests_running") < 2:
                assert not all(answer.done() for answer in running)
            assert served.kill_workers() == 1
            assert [answer.result() for answer in running] == alone
        assert served.metric("coterie_recoveries_total", kind="request_continued") > 0
    finally:
        served.stop()
