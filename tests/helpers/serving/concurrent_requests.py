"""Eight requests at once over a real worker process: together, some aborted, the worker killed.

Any spec may be put through it: what each request says alone is what it says in company and behind
a crash, and the worker dies exactly as often as it was killed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coterie.core.adapters import AdapterSettings
from coterie.core.events import Failed, Finished
from coterie.core.moe import MoeSettings
from coterie.core.plan import AdapterChoice, Assignment
from coterie.packages.paths import digest_of
from coterie.workers.contract import WorkerSpec
from coterie.workers.supervisor import ProcessReplica, RestartPolicy
from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.worker_requests import (
    GREEDY,
    SAMPLED,
    Listener,
    assign,
    begin,
    run,
    tiny_spec,
)

QUICK = RestartPolicy(backoff_s=0.05, max_backoff_s=0.2, hang_s=0)
# a quarter of the experts in slots, half of them in RAM: something is always on its way
COLD = MoeSettings(strategy="lru", device_budget="25%", host_budget="50%")
# of the eight, by place
ABORTED = (1, 6)


def kill(replica: ProcessReplica) -> int:
    pid = replica.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


async def until_died(replica: ProcessReplica, pid: int) -> None:
    async with asyncio.timeout(30):
        while replica.pid == pid:
            await asyncio.sleep(0.005)


def eight(
    prefix: str,
    max_tokens: int = 200,
    stacks: Sequence[tuple[AdapterChoice, ...]] = ((),),
) -> list[Assignment]:
    """Greedy, sampled, several choices, logprobs, penalties: mixed lengths, stacks in turn."""
    kinds = [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, seed=5, top_k=20),
        replace(SAMPLED, seed=6, n=3),
        replace(GREEDY, logprobs=2),
        replace(SAMPLED, seed=8, presence_penalty=0.5, frequency_penalty=0.5),
        replace(GREEDY, repetition_penalty=1.3),
        replace(SAMPLED, seed=9, min_p=0.02),
    ]
    asked = [
        assign(
            f"{prefix}{i}", tuple(range(20 + i, 30 + 7 * i)), sampling=kind,
            max_tokens=max_tokens + max_tokens // 8 * i,
        )
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    return [replace(one, adapters=stacks[i % len(stacks)]) for i, one in enumerate(asked)]


def said(listener: Listener) -> list[tuple[list[int], str]]:
    assert isinstance(listener.end, Finished), listener.end
    count = len(listener.end.choices)
    return [(listener.tokens(choice), listener.text(choice)) for choice in range(count)]


def model_copy(architecture: str, folder: Path) -> Path:
    """A tiny model of its own: heatmaps are written beside it."""
    return Path(shutil.copytree(tiny_checkpoint(architecture), folder / architecture))


def spec_of(model: Path, dispatch: MoeSettings | None = None) -> WorkerSpec:
    spec = replace(tiny_spec(), model=str(model), kv_bytes=40_000_000)
    return spec if dispatch is None else replace(spec, dispatch=dispatch)


def with_adapters(
    spec: WorkerSpec, architecture: str, library: Path
) -> tuple[WorkerSpec, list[tuple[AdapterChoice, ...]]]:
    """Room for about two stacks of three, and the stacks: none, one, another, both."""
    choices = []
    for seed in range(2):
        source = make_adapter(tiny_checkpoint(architecture), "lora", seed)
        shutil.copytree(source, library / digest_of(source))
        choices.append(AdapterChoice(f"a{seed}", digest_of(source)))
    first, second = choices
    adapters = AdapterSettings(device_bytes=4_000_000, host_bytes=8_000_000)
    stacks = [(), (first,), (second,), (first, replace(second, weight=0.5))]
    return replace(spec, library=str(library), adapters=adapters), stacks


async def storm(
    spec: WorkerSpec,
    stacks: Sequence[tuple[AdapterChoice, ...]] = ((),),
    max_tokens: int = 24,
) -> list[Listener]:
    """The eight that ran together undisturbed; raises AssertionError where a promise broke."""
    replica = ProcessReplica(spec, QUICK)
    await replica.start()
    try:
        alone = [said(await run(replica, one)) for one in eight("alone", max_tokens, stacks)]
        together = await asyncio.gather(
            *(run(replica, one) for one in eight("together", max_tokens, stacks))
        )
        assert [said(listener) for listener in together] == alone
        assert replica.stats()["restarts"] == 0
        await _disturbed(replica, eight("killed", max_tokens, stacks), alone)
        # exactly the one that was asked for, and nobody was left behind
        assert replica.stats()["restarts"] == 1 and replica.in_flight() == 0
        again = await run(replica, eight("after", max_tokens, stacks)[0])
        assert said(again) == alone[0]
        return list(together)
    finally:
        await replica.close()


async def _disturbed(
    replica: ProcessReplica, work: list[Assignment], alone: list[list[tuple[list[int], str]]]
) -> None:
    listeners = await asyncio.gather(*(begin(replica, one) for one in work))
    for listener in listeners:
        await listener.until(lambda seen: len(seen.tokens()) >= 8 or seen.end is not None)
    for place in ABORTED:
        await replica.abort(work[place].request_id)
    assert any(listener.end is None for listener in listeners)
    await until_died(replica, kill(replica))
    for place, (listener, whole) in enumerate(zip(listeners, alone, strict=True)):
        if place in ABORTED:
            # what came until then; nothing is sent to who has left
            assert not isinstance(listener.end, Failed)
            assert listener.tokens() == whole[0][0][: len(listener.tokens())]
            continue
        await listener.ended()
        assert said(listener) == whole
