"""service/: mailbox, admission, replica choice, names; each alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.core.config import load
from coterie.core.errors import ConfigError, Unavailable
from coterie.core.events import Delta, Event, Finished, Started, Timings, Usage
from coterie.core.plan import AdapterChoice, LaneState
from coterie.service.build import build
from coterie.service.config_check import model_name
from coterie.service.submit.event_queue import MAX_WAITING, EventQueue
from coterie.service.submit.load import ReplicaQueue, ReplicaRequest
from coterie.service.submit.replicas import ReplicaSet


def lane(*, preempting: bool = False) -> LaneState:
    return LaneState("s", 0, 4, 100, 100, (), frozenset(), 2.0, preempting, step_s=0.01)


class Stood:
    """A replica that stands still: what the choice looks at, nothing behind it."""

    def __init__(self, name: str, state: LaneState | None, *, healthy: bool = True) -> None:
        self.name, self._state, self._healthy = name, state, healthy

    def lane_states(self) -> dict[str, LaneState]:
        return {"s": self._state} if self._state else {}

    def healthy(self) -> bool:
        return self._healthy

    def state(self) -> str:
        return "up" if self._healthy else "down"

    def retry_after_s(self) -> float:
        return {"a": 7.0, "b": 3.0}[self.name]


def ticket(priority: int = 5, tenant: str = "t", max_tokens: int = 100) -> ReplicaRequest:
    return ReplicaRequest(priority, tenant, 10, max_tokens)


def fill(line: ReplicaQueue, waiting: int = 0, running: int = 0, **more: Any) -> ReplicaQueue:
    for index in range(waiting + running):
        made = ticket(**more)
        line.add(made)
        if index < running:
            line.started(made)
    return line


def replicas(*members: Any, **busy: tuple[int, int]) -> ReplicaSet:
    """`busy`: who waits and who runs, by the member's name."""
    made = ReplicaSet("s", members, places=8)
    for member in members:
        fill(made.queue(member), *busy.get(member.name, ()))
    return made


def test_the_least_loaded_healthy_replica_is_picked() -> None:
    a, b = Stood("a", lane()), Stood("b", lane())
    assert replicas(a, b, a=(2, 2), b=(0, 3)).pick().name == "b"
    down = Stood("b", lane(), healthy=False)
    assert replicas(a, down, a=(2, 2)).pick().name == "a"
    # preempting counts as being far busier
    assert replicas(a, Stood("b", lane(preempting=True)), a=(3, 3)).pick().name == "a"
    # what was just handed out counts before any report says so
    pair = replicas(a, b)
    order = []
    for _ in range(4):
        picked = pair.pick()
        pair.queue(picked).add(ticket())
        order.append(picked.name)
    assert order == ["a", "b", "a", "b"]
    assert pair.pick(avoid={"a"}).name == "b"


def test_a_replica_that_has_the_adapters_is_preferred() -> None:
    stack = (AdapterChoice("sql@1", "d1"), AdapterChoice("json@1", "d2"))
    a = Stood("a", lane())
    warm = Stood("b", replace(lane(), resident_adapters=("d0", "d1", "d2")))
    half = Stood("a", replace(lane(), resident_adapters=("d1",)))
    assert replicas(a, warm, a=(0, 1), b=(0, 2)).pick(adapters=stack).name == "b"
    assert replicas(half, warm, b=(0, 2)).pick(adapters=stack[:1]).name == "a"
    # one adapter missing is as good as all; and a long queue is not waited for
    assert replicas(half, warm, b=(0, 2)).pick(adapters=stack).name == "a"
    assert replicas(a, warm, b=(1, 2)).pick(adapters=stack).name == "a"
    # requests without adapters see no difference
    assert replicas(a, warm, a=(0, 1), b=(0, 2)).pick().name == "a"
    full = replicas(a, warm, a=(4, 0), b=(3, 1))
    assert [full.is_full(member) for member in full.members] == [True, False]


def test_what_started_waits_no_longer_and_what_ended_is_gone() -> None:
    line = ReplicaQueue()
    one = ticket()
    line.add(one)
    assert (line.waiting, line.running) == (1, 0)
    line.started(one)
    # a takeover after a crash tells it again
    line.started(one)
    assert (line.waiting, line.running) == (0, 1)
    line.remove(one)
    line.remove(one)
    assert not line and not line.holds("t")


def test_nobody_healthy_says_when_to_return() -> None:
    down = replicas(Stood("a", None, healthy=False), Stood("b", None, healthy=False))
    with pytest.raises(Unavailable) as caught:
        down.pick()
    assert caught.value.retry_after_s == 3.0 and not down.ready()


def test_a_drained_replica_bears_no_load_and_is_not_waited_for() -> None:
    a, b = Stood("a", lane(), healthy=False), Stood("b", lane())
    pair = replicas(a, b, a=(4, 1), b=(2, 1))
    assert (len(pair.taking()[0]), pair.taking()[1]) == (2, 6)
    pair.drained = lambda: {"b"}
    # what waits there still counts as waiting, but the room is that of the others
    states, waiting = pair.taking()
    assert (len(states), waiting, pair.queued()) == (1, 4, 6)
    assert [pair.shown_state(one) for one in pair.members] == ["down", "draining"]
    with pytest.raises(Unavailable) as caught:
        pair.pick()
    assert caught.value.retry_after_s == 7.0


def test_a_mailbox_keeps_order_and_wakes_its_reader() -> None:
    async def test() -> None:
        box = EventQueue()
        box.put(Started("r", "r0", 1, 0))
        box.put(Delta("r", 0, "a", (1,)))
        assert [type(event) for event in await box.take()] == [Started, Delta]
        reader = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        box.put(Delta("r", 0, "b", (2,)))
        assert [event.text for event in await reader if isinstance(event, Delta)] == ["b"]

    asyncio.run(test())


def test_a_slow_reader_loses_nothing_and_holds_few_events() -> None:
    async def test() -> None:
        box, sent = EventQueue(), 5000
        for index in range(sent):
            box.put(Delta("r", index % 3, chr(97 + index % 26), (index,)))
        for choice in range(3):
            box.put(Delta("r", choice, "", (), finish_reason="stop", stop_match="x"))
        box.put(Finished("r", ("stop",) * 3, Usage(1, sent), Timings()))
        events: list[Event] = await box.take()
        assert len(events) <= MAX_WAITING + 1 and isinstance(events[-1], Finished)
        deltas = [event for event in events if isinstance(event, Delta)]
        for choice in range(3):
            mine = [delta for delta in deltas if delta.choice == choice]
            assert [t for d in mine for t in d.token_ids] == list(range(choice, sent, 3))
            text = "".join(delta.text for delta in mine)
            assert text == "".join(chr(97 + i % 26) for i in range(choice, sent, 3))
            assert mine[-1].finish_reason == "stop" and mine[-1].stop_match == "x"

    asyncio.run(test())


def test_a_mailbox_says_once_that_the_last_event_came() -> None:
    async def test() -> None:
        ends: list[int] = []
        box = EventQueue(lambda _: ends.append(1))
        box.put(Delta("r", 0, "a", (1,)))
        assert not ends
        # nobody has read anything yet
        box.put(Finished("r", ("stop",), Usage(1, 1), Timings()))
        box.end()
        assert ends == [1] and not box.disarm()
        gone = EventQueue(lambda _: ends.append(2))
        assert gone.disarm()
        gone.end()
        assert ends == [1]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("model", "path", "name"),
    [
        ("", "/m/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("/m/Qwen3-0.6B-bf16", "/m/Qwen3-0.6B-bf16", "qwen3-0.6b"),
        ("hf:Qwen/Qwen3-0.6B", "/home/models/0a1b2c", "qwen3-0.6b"),
        ("hf:Qwen/Qwen3-0.6B@main", "/home/models/0a1b2c", "qwen3-0.6b"),
        ("hf:Org/Repo-GGUF/Some-1B.Q4_K_M.gguf", "/home/models/0a/x.gguf", "some-1b"),
        ("hf:Org/Repo-GGUF/sub/Some-1B-Q8_0.gguf@main", "/home/models/0a/x.gguf", "some-1b"),
        ("/m/tiny.Q8_0.gguf", "/m/tiny.Q8_0.gguf", "tiny"),
        (".", ".", Path.cwd().name.lower()),
        ("..", "..", Path.cwd().parent.name.lower()),
    ],
)
def test_names_come_from_the_model(model: str, path: str, name: str) -> None:
    assert model_name(model, Path(path)) == name


def test_equal_names_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "same").mkdir(parents=True)
        (tmp_path / folder / "same" / "config.json").write_text("{}")
    file = tmp_path / "c.toml"
    file.write_text(
        "".join(f'[[specialists]]\nmodel = "{tmp_path}/{x}/same"\n' for x in ("a", "b"))
    )
    with pytest.raises(ConfigError, match="same"):
        build(load(file))
