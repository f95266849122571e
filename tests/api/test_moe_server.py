"""A MoE directory as it is, served with less memory than its experts take: stock clients, metadata,
metrics; and beside it a packed store whose records are damaged for a while."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest

from coterie.cli.main import main
from coterie.obs.tables import MOE_SERIES
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, frames

TOTAL = 3 * 8
# four device slots of 24 experts and nothing in RAM: every miss reads the disk
SETTINGS = """
[engine]
kv_bytes = "4MB"
max_sequences = 8
threads = 1
[[specialists]]
name = "tiny"
model = "{plain}"
context = 256
[specialists.moe]
strategy = "lru"
cache_capacity = 4
host_budget = "0"
workload = "tests"
[[specialists]]
name = "packed"
model = "{packed}"
context = 256
[specialists.moe]
strategy = "lru"
cache_capacity = 4
host_budget = "0"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "secret-place"
    shutil.copytree(tiny_checkpoint("qwen3_moe"), folder / "plain")
    assert main(["store", "export", str(folder / "plain"), str(folder / "packed")]) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    config = folder / "coterie.toml"
    config.write_text(SETTINGS.format(plain=folder / "plain", packed=folder / "packed"))
    served = Served("--config", str(config))
    yield served
    served.stop()


def test_a_damaged_expert_fails_one_request(server: Served, folder: Path) -> None:
    """No expert was read yet: a record is checked at its first read."""
    records = folder / "packed" / "experts.bin"
    whole = records.read_bytes()
    with records.open("r+b") as file:
        file.write(bytes(len(whole)))
    reply = server.post("/v1/chat/completions", chat(model="packed"))
    with records.open("r+b") as file:
        file.write(whole)
    assert reply.status == 500, reply.body
    error = reply.json["error"]
    assert error["code"] == "weights_error" and "packed" in error["message"]
    assert "secret-place" not in reply.body.decode()
    # whoever runs the server is told which file it was
    [line] = [line for line in server.log().splitlines() if '"step_failed"' in line]
    assert str(records.parent) in json.loads(line)["reason"]
    assert server.metric("coterie_failures_total") == 1
    again = server.post("/v1/chat/completions", chat(model="packed"))
    assert again.status == 200, again.body
    plain = server.post("/v1/chat/completions", chat())
    assert again.json["choices"] == plain.json["choices"]


def test_stock_clients_read_what_an_answer_cost(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages = [{"role": "user", "content": "hello there"}]
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": messages}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    cost = whole.model_extra["coterie"]
    demands = sum(
        cost["experts"][name]
        for name in ("device_hits", "prefetch_hits", "device_misses", "host_runs")
    )
    assert demands >= 7 * 3 * 2
    assert cost["experts"]["read_bytes"] > 0 and cost["experts"]["host_hits"] == 0
    assert 0 < cost["experts"]["fallback_rate"] <= 1
    assert cost["timings"]["ttft_s"] > 0 and cost["timings"]["decode_tok_s"] > 0
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(stream)
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].model_extra["coterie"]["experts"]["device_misses"] > 0
    assert all("coterie" not in chunk.model_extra for chunk in chunks[:-1])
    both = client.completions.create(
        model="tiny", prompt=["hello", "there"], max_tokens=4, temperature=0
    )
    assert both.model_extra["coterie"]["experts"]["read_bytes"] > 0


def test_eight_at_once_say_what_each_says_alone(server: Served) -> None:
    def ask(index: int) -> str:
        body = {"model": "tiny", "prompt": [0, *range(20, 24 + index)], "max_tokens": 12,
                "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        return str(reply.json["choices"][0]["token_ids"])

    alone = [ask(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert server.metric("coterie_worker_restarts_total") == 0
    # by a refusal of the worker, a retry, a value that could not be sent
    assert server.metric("coterie_recoveries_total") == 0


def test_anthropic_answers_carry_it_too(server: Served) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    message = client.messages.create(
        model="tiny", max_tokens=8, messages=[{"role": "user", "content": "hello there"}]
    )
    assert message.model_extra["coterie"]["experts"]["device_misses"] > 0
    body = {"model": "tiny", "max_tokens": 4, "stream": True,
            "messages": [{"role": "user", "content": "hello"}]}  # fmt: skip
    reply = server.post("/v1/messages", body, anthropic_version="2023-06-01")
    [last] = [data for name, data in frames(reply.body) if name == "message_delta"]
    assert last["coterie"]["timings"]["prefill_s"] > 0


def test_native_answers_tell_why_they_were_slow(server: Served) -> None:
    reply = server.post("/v1/infer", {"prompt": "hello there", "model": "tiny", "max_tokens": 8})
    assert reply.status == 200, reply.body
    told = reply.json["telemetry"]
    assert told["timings"]["ttft_s"] > 0 and told["experts"]["read_bytes"] > 0
    assert told["experts"]["updates"] == told["experts"]["swaps"] == 0
    layers = told["experts"]["layers"]
    assert [one["layer"] for one in layers] == [0, 1, 2]
    hits = told["experts"]["device_hits"] + told["experts"]["prefetch_hits"]
    assert sum(one["hits"] for one in layers) == hits
    assert all(one["demands"] >= one["hits"] for one in layers)


def test_metrics_and_health_tell_tiers_apart(server: Served) -> None:
    server.post("/v1/chat/completions", chat())
    demands = server.metric("coterie_moe_demands_total")
    assert demands > 0 and server.metric("coterie_request_seconds_total") > 0
    text = server.get("/metrics").body.decode()
    assert 'coterie_moe_demands_total{replica="e0r0",met="device_miss"}' in text
    assert server.metric("coterie_moe_bytes_total") > 0
    assert server.metric("coterie_moe_memory_bytes") > 0
    # bounded: one series per stat and replica, nothing is labelled by expert or by layer
    assert text.count("\ncoterie_moe_") == 2 * len(MOE_SERIES)
    experts = server.get("/health").json["specialists"]["tiny"]["experts"]
    assert experts["strategy"] == "lru" and experts["count"] == TOTAL
    assert experts["device_slots"] == 4 and experts["host_slots"] == 0
    assert experts["held_bytes"] < experts["expert_bytes"]


def test_live_traffic_is_kept_when_the_server_stops(server: Served, folder: Path) -> None:
    """Last of all tests here."""
    assert server.stop() == 0
    for path, workload in (("plain", "tests"), ("packed", "default")):
        kept = json.loads((folder / path / "heatmaps" / f"{workload}.json").read_text())
        assert kept["workload"] == workload and sum(map(sum, kept["counts"])) > 0
