"""Adapters over every transport: the hint, the answers, the facts, the faults, and a crash."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.core.adapters import AdapterSettings
from coterie.core.events import Failed, Finished
from coterie.core.plan import AdapterChoice, Admitted, Assignment, Rejected
from coterie.packages.paths import digest_of
from coterie.workers import wire
from coterie.workers.contract import (
    AdapterLoad,
    Replica,
    ReplicaInfo,
    WorkerCommand,
    WorkerReport,
    WorkerSpec,
)
from coterie.workers.inproc import InprocReplica
from coterie.workers.supervisor import ProcessReplica, RestartPolicy
from tests.helpers.adapters.peft_adapters import make_adapter, peft_oracle
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.worker_requests import assign, begin, run, tiny_spec

TRANSPORTS: dict[str, Callable[[WorkerSpec], Replica]] = {
    "inproc": InprocReplica,
    "process": ProcessReplica,
}
PROMPT = (0, 40, 41, 42)
Library = tuple[Path, list[AdapterChoice], list[Path]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    root = tmp_path_factory.mktemp("library")
    choices, sources = [], []
    for seed in range(3):
        source = make_adapter(tiny_checkpoint("llama"), "lora", seed)
        digest = digest_of(source)
        shutil.copytree(source, root / digest)
        choices.append(AdapterChoice(f"a{seed}", digest))
        sources.append(source)
    return root, choices, sources


@asynccontextmanager
async def running(transport: str, root: Path) -> AsyncIterator[tuple[Replica, ReplicaInfo]]:
    adapters = AdapterSettings(device_bytes=4_000_000, host_bytes=8_000_000)
    spec = replace(tiny_spec(), library=str(root), adapters=adapters)
    replica = TRANSPORTS[transport](spec)
    info = await replica.start()
    try:
        yield replica, info
    finally:
        await replica.close()


def asked(request_id: str, *adapters: AdapterChoice, max_tokens: int = 12) -> Assignment:
    return replace(assign(request_id, PROMPT, max_tokens=max_tokens), adapters=tuple(adapters))


@pytest.mark.parametrize("transport", ["inproc", pytest.param("process", marks=pytest.mark.full)])
def test_hint_answer_facts_and_faults(transport: str, library: Library) -> None:
    root, choices, sources = library
    oracle = peft_oracle(tiny_checkpoint("llama"))

    async def test() -> None:
        async with running(transport, root) as (replica, info):
            assert info.adapters is not None and info.adapters.device_bytes <= 4_000_000
            assert info.adapters.max_stacks == 128 and info.adapters.host_bytes == 8_000_000
            replica.preload([choices[0]])
            replica.preload([AdapterChoice("nobody", "0" * 64)])
            replica.preload([])
            async with asyncio.timeout(30):
                while not replica.stats().get("adapter_loads"):
                    await run(replica, assign("base"))
            work = [asked(f"{i}", choices[i % 3]) for i in range(6)]
            done = await asyncio.gather(*(run(replica, item) for item in work))
            for number, listener in enumerate(done):
                expected = oracle.greedy(PROMPT, [(sources[number % 3], 1.0)], 12)
                assert listener.tokens() == expected
            told = {load.digest: load for load in replica.adapter_loads()}
            assert told.keys() == {choice.digest for choice in choices}
            assert all(load.resident and load.loads == 1 for load in told.values())
            assert all(load.disk_s > 0 and load.place_s > 0 for load in told.values())
            lookups = replica.stats()
            assert lookups["adapter_lookups_disk"] >= 3 and lookups["adapter_hits"] == 6
            await faults(replica, root)

    async def faults(replica: Replica, root: Path) -> None:
        unknown = await replica.submit(asked("u", AdapterChoice("x", "1" * 64)), print)
        assert isinstance(unknown, Rejected) and unknown.code == "weights_error"
        digest = "2" * 64
        shutil.copytree(root / choices[0].digest, root / digest)
        wrong = await run(replica, asked("w", AdapterChoice("x", digest)))
        shutil.rmtree(root / digest)
        assert isinstance(wrong.verdict, Admitted) and isinstance(wrong.end, Failed)
        assert wrong.end.code == "weights_error"
        again = await run(replica, asked("again", choices[1]))
        assert isinstance(again.end, Finished)
        assert replica.in_flight() == 0

    asyncio.run(test())


@pytest.mark.full
def test_a_crash_is_a_pause_and_keeps_the_digest(library: Library) -> None:
    root, choices, sources = library

    async def test() -> None:
        spec = replace(
            tiny_spec(), library=str(root), adapters=AdapterSettings(device_bytes=4_000_000)
        )
        replica = ProcessReplica(spec, RestartPolicy(backoff_s=0.05))
        await replica.start()
        try:
            listener = await begin(replica, asked("long", choices[1], max_tokens=200))
            await listener.until(lambda seen: len(seen.deltas) >= 5)
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
            assert isinstance(await listener.ended(), Finished)
            whole = await run(replica, asked("whole", choices[1], max_tokens=200))
            assert listener.tokens() == whole.tokens()
            follow = peft_oracle(tiny_checkpoint("llama")).follow
            assert (
                follow(PROMPT, [(sources[1], 1.0)], listener.tokens()[:40])
                == (listener.tokens()[:40])
            )
            assert replica.stats()["restarts"] == 1
        finally:
            await replica.close()

    asyncio.run(test())


def test_a_worker_without_a_library_runs_no_adapters(library: Library) -> None:
    async def test() -> None:
        replica = InprocReplica(tiny_spec())
        info = await replica.start()
        try:
            assert info.adapters is None and replica.adapter_loads() == ()
            replica.preload([library[1][0]])
            refused = await replica.submit(asked("a", library[1][0]), print)
            assert isinstance(refused, Rejected) and refused.code == "unsupported"
        finally:
            await replica.close()

    asyncio.run(test())


def test_the_new_words_cross_the_wire() -> None:
    command = WorkerCommand("preload", adapters=(AdapterChoice("x", "d", -0.5),))
    assert wire.decode_command(wire.encode(command)) == command
    for adapters in (None, (), (AdapterLoad("d", True, 2, 0.1, 0.2, 0.3),)):
        report = WorkerReport(adapters=adapters)
        assert wire.decode_report(wire.encode(report)) == report
    spec = replace(tiny_spec(), library="/l", adapters=AdapterSettings(1, 2, "grouped"))
    assert wire.decode_spec(wire.encode(spec)) == spec
