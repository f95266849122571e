"""service/: mailbox, admission, replica choice, names; each alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.core.config import load
from coterie.core.errors import ConfigError, Overloaded, Unavailable
from coterie.core.events import Delta, Event, Finished, Started, Timings, Usage
from coterie.core.plan import AdapterChoice, LaneState
from coterie.service.admission import MAX_RETRY_AFTER_S, Admission
from coterie.service.build import build, model_name
from coterie.service.mailbox import MAX_WAITING, Mailbox
from coterie.service.replicas import ReplicaSet


def lane(queued: int = 0, running: int = 0, *, preempting: bool = False) -> LaneState:
    return LaneState("s", queued, running, 4, 100, 100, (), (), 2.0, preempting)


class Stood:
    """A replica that stands still: what the choice looks at, nothing behind it."""

    def __init__(self, name: str, state: LaneState | None, *, healthy: bool = True) -> None:
        self.name, self._state, self._healthy = name, state, healthy

    def lane_states(self) -> dict[str, LaneState]:
        return {"s": self._state} if self._state else {}

    def healthy(self) -> bool:
        return self._healthy

    def retry_after_s(self) -> float:
        return {"a": 7.0, "b": 3.0}[self.name]


def replicas(*members: Any) -> ReplicaSet:
    return ReplicaSet("s", members)


def test_the_least_loaded_healthy_replica_is_picked() -> None:
    assert replicas(Stood("a", lane(2, 2)), Stood("b", lane(0, 3))).pick().name == "b"
    assert replicas(Stood("a", lane(2, 2)), Stood("b", lane(), healthy=False)).pick().name == "a"
    # preempting counts as being far busier
    assert replicas(Stood("a", lane(3, 3)), Stood("b", lane(preempting=True))).pick().name == "a"
    # what was just handed out counts before any report says so
    pair = replicas(Stood("a", lane()), Stood("b", lane()))
    order = []
    for _ in range(4):
        picked = pair.pick()
        pair.took(picked)
        order.append(picked.name)
    assert order == ["a", "b", "a", "b"]
    assert pair.pick(avoid={"a"}).name == "b"


def test_a_replica_that_has_the_adapters_is_preferred() -> None:
    stack = (AdapterChoice("sql@1", "d1"), AdapterChoice("json@1", "d2"))
    warm = replace(lane(0, 2), resident_adapters=("d0", "d1", "d2"))
    half = replace(lane(), resident_adapters=("d1",))
    assert replicas(Stood("a", lane(0, 1)), Stood("b", warm)).pick(adapters=stack).name == "b"
    assert replicas(Stood("a", half), Stood("b", warm)).pick(adapters=stack[:1]).name == "a"
    # one adapter missing is as good as all; and a long queue is not waited for
    assert replicas(Stood("a", half), Stood("b", warm)).pick(adapters=stack).name == "a"
    busy = replace(warm, queued=1)
    assert replicas(Stood("a", lane()), Stood("b", busy)).pick(adapters=stack).name == "a"
    # requests without adapters see no difference
    assert replicas(Stood("a", lane(0, 1)), Stood("b", warm)).pick().name == "a"
    full = replicas(Stood("a", lane(4)), Stood("b", lane(3)))
    assert [full.is_full(member) for member in full.members] == [True, False]


def test_nobody_healthy_says_when_to_return() -> None:
    down = replicas(Stood("a", None, healthy=False), Stood("b", None, healthy=False))
    with pytest.raises(Unavailable) as caught:
        down.pick()
    assert caught.value.retry_after_s == 3.0 and not down.ready()


def test_admission_refuses_at_the_bound() -> None:
    admission = Admission(clock=lambda: 0.0)
    admission.check("s", lane(3), unreported=0)
    admission.check("s", None, unreported=1000)
    for state, unreported in ((lane(4), 0), (lane(3), 1), (lane(0), 4)):
        with pytest.raises(Overloaded):
            admission.check("s", state, unreported)


def test_retry_after_is_a_place_in_line() -> None:
    now = [100.0]
    admission = Admission(clock=lambda: now[0])
    for _ in range(60):
        now[0] += 2.0
        admission.ended("s", queued=3)
    waits = [admission.overloaded("s", lane(4)).retry_after_s for _ in range(3)]
    assert waits == pytest.approx([4.0, 8.0, 12.0])
    # as time passes the line moves up
    now[0] += 8.0
    assert admission.overloaded("s", lane(4)).retry_after_s == pytest.approx(8.0)
    # nobody is sent away for longer than clients obey, and nobody waits forever behind them
    for _ in range(200):
        wait_s = admission.overloaded("s", lane(4)).retry_after_s
        assert wait_s is not None and 1.0 <= wait_s <= MAX_RETRY_AFTER_S
    now[0] += MAX_RETRY_AFTER_S
    assert admission.overloaded("s", lane(4)).retry_after_s == pytest.approx(4.0)


def test_retries_that_obey_find_room() -> None:
    """A lane frees a place every 0.8 to 1.2 s and is asked for a third more than that."""
    draw = random.Random(3)
    now, queue, places = 0.0, 4, 4
    admission = Admission(clock=lambda: now)
    next_end, back, admitted, returned = 0.5, [], 0, 0
    fresh = [draw.uniform(0, 120) for _ in range(160)]
    while now < 200:
        now += 0.05
        if now >= next_end:
            admission.ended("s", queued=queue)
            queue, next_end = max(0, queue - 1), now + draw.uniform(0.8, 1.2)
        due = [(at, True) for at in back if at <= now] + [(at, False) for at in fresh if at <= now]
        back, fresh = [at for at in back if at > now], [at for at in fresh if at > now]
        for _, again in due:
            returned += again
            if queue < places:
                queue += 1
                admitted += again
            else:
                wait_s = admission.overloaded("s", lane(queue)).retry_after_s
                assert wait_s is not None
                back.append(now + wait_s)
    assert returned > 50 and admitted / returned > 0.75


def test_a_mailbox_keeps_order_and_wakes_its_reader() -> None:
    async def test() -> None:
        box = Mailbox()
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
        box, sent = Mailbox(), 5000
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
        box = Mailbox(lambda: ends.append(1))
        box.put(Delta("r", 0, "a", (1,)))
        assert not ends
        # nobody has read anything yet
        box.put(Finished("r", ("stop",), Usage(1, 1), Timings()))
        box.end()
        assert ends == [1] and not box.disarm()
        refused = Mailbox(lambda: ends.append(2))
        assert refused.disarm()
        refused.end()
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
