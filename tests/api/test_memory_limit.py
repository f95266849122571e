"""A worker whose address space may not grow any more, under eight callers: each is answered exactly
or told with a typed error, what died is counted, and with memory again everything is as before."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import MAX_PROBE_S, Probe, Reply, Served

CALLERS = 8
# ids of a prompt that needs far more memory in a step than an answer does
LONG = 3000


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(
        str(tiny_checkpoint("llama", max_position_embeddings=8192)),
        *("--name", "tiny", "--max-sequences", "8"),
        # what a step frees goes back to the system, so that the next one asks for it again
        MALLOC_ARENA_MAX="1",
        MALLOC_MMAP_THRESHOLD_="65536",
        MALLOC_TRIM_THRESHOLD_="65536",
    )
    yield served
    served.stop()


def worker_of(server: Served) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    [worker] = [one for one in children if "coterie.workers.child" in one.cmdline()]
    return worker


def ask(server: Served, number: int) -> Reply:
    """Long and short prompts in turn, none of which is a prefix of another."""
    length = LONG if number % 2 else 20
    prompt = [3 + (number * 7 + at) % 90 for at in range(length)]
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body | {"model": "tiny"})


def text_of(reply: Reply) -> str:
    text: str = reply.json["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    ("growth_mb", "rounds"),
    [
        (0, 2),
        pytest.param(24, 2, marks=pytest.mark.full),
        pytest.param(2, 6, marks=pytest.mark.full),
        pytest.param(-1, 4, marks=pytest.mark.full),
    ],
)
def test_no_memory_loses_nobody(server: Served, growth_mb: int, rounds: int) -> None:
    count = CALLERS * rounds
    with ThreadPoolExecutor(CALLERS) as pool:
        asked = [(growth_mb + 2) * 1000 + number for number in range(count)]
        worker = worker_of(server)
        limit = worker.memory_info().vms + (growth_mb << 20)
        worker.rlimit(psutil.RLIMIT_AS, (max(limit, 1 << 20), resource.RLIM_INFINITY))
        with Probe(server) as probe:
            replies = list(pool.map(lambda number: ask(server, number), asked))
        # it may have died of it
        with suppress(psutil.NoSuchProcess):
            worker.rlimit(psutil.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        server.wait_ready()
        again = list(pool.map(lambda number: ask(server, number), asked))
    assert [reply.status for reply in again] == [200] * count
    num_good = 0
    for short, whole in zip(replies, again, strict=True):
        if short.status == 200:
            assert text_of(short) == text_of(whole)
            num_good += 1
        else:
            code = short.json["error"]["code"]
            told = ((503, "specialist_unavailable"), (500, "worker_crashed"))
            assert (short.status, code) in told, short.body
    deaths = len(re.findall(r'"event":"worker_died"', server.log()))
    server.expected_deaths = deaths
    assert server.metric("coterie_worker_restarts_total") == deaths
    smaller = len(re.findall(r'"event":"smaller_steps"', server.log()))
    failed = len(re.findall(r'"event":"step_failed"', server.log()))
    print(f"{growth_mb} MB: {num_good} of {count} answered, {deaths} deaths, {smaller} smaller, "
          f"{failed} steps failed, worst probe {probe.worst_s:.2f} s")  # fmt: skip
    assert probe.worst_s < MAX_PROBE_S
