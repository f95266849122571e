"""A server whose KV and experts share one memory: eight callers with long contexts get the answers
of a caller alone, slabs go to KV and come back, and nothing is restarted or refused."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coterie.engine.lent_blocks import PATIENCE
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # a server leaves its heatmap beside the model
    model = tmp_path_factory.mktemp("elastic") / "model"
    shutil.copytree(tiny_checkpoint("qwen3_moe"), model)
    served = Served(
        *(str(model), "--name", "tiny", "--elastic-memory", "--strategy", "lru"),
        *("--cache-capacity", "14", "--host-budget", "30%", "--kv-bytes", "60KB"),
        *("--max-sequences", "8"),
    )
    yield served
    served.stop()


def trades(server: Served, to: str) -> float:
    return server.metric("coterie_moe_slab_trades_total", to=to)


def ask(server: Served, index: int, length: int = 90, tokens: int = 24) -> list[int]:
    prompt = [4 + (index + 3) * place % 90 for place in range(length + index)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    reply = server.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return list(reply.json["choices"][0]["token_ids"])


def test_eight_long_contexts_take_slots_from_experts_and_give_them_back(server: Served) -> None:
    # told before the first request
    deadline = time.monotonic() + 10
    while not (slabs := server.metric("coterie_moe_slabs", owner="experts")):
        assert time.monotonic() < deadline
    assert slabs == 5 and server.metric("coterie_moe_slabs", owner="kv") == 0
    alone = [ask(server, index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda index: ask(server, index), range(8)))
    assert together == alone
    taken = trades(server, "kv")
    assert taken > 0
    # behind so many steps without need a slab goes back
    deadline = time.monotonic() + 60
    while trades(server, "experts") < 1:
        assert time.monotonic() < deadline
        ask(server, 0, length=4, tokens=PATIENCE)
    assert ask(server, 3) == alone[3]
    for name in ("coterie_worker_restarts_total", "coterie_recoveries_total"):
        assert server.metric(name) == 0, name
    assert '"step_failed"' not in server.log()


def test_a_context_that_no_memory_holds_is_refused(server: Served) -> None:
    body = {"model": "tiny", "prompt": [5] * 100_000, "max_tokens": 4}
    reply = server.post("/v1/completions", body)
    assert reply.status == 400 and reply.json["error"]["code"] == "context_length_exceeded"
    assert len(ask(server, 1)) == 24
