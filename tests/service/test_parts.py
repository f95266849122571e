"""service/: mailbox, admission, replica choice, names; each alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.core.config import load
from coterie.core.errors import ConfigError, Overloaded, Unavailable
from coterie.core.events import Delta, Event, Finished, Started, Timings, Usage
from coterie.core.plan import AdapterChoice, Assignment, LaneState
from coterie.core.request import Limits, Sampling
from coterie.service.build import build, model_name
from coterie.service.submit.admission import (
    MAX_RETRY_AFTER_S,
    Admission,
    ReplicaQueue,
    ReplicaRequest,
    ReplicaSet,
)
from coterie.service.submit.submitter import MAX_WAITING, EventQueue


def lane(*, preempting: bool = False) -> LaneState:
    return LaneState("s", 0, 4, 100, 100, (), (), 2.0, preempting, step_s=0.01)


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
    made = ReplicaSet("s", members)
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
    assert (len(line.waiting), len(line.running)) == (1, 0)
    line.started(one)
    # a takeover after a crash tells it again
    line.started(one)
    assert (len(line.waiting), len(line.running)) == (0, 1)
    line.remove(one)
    line.remove(one)
    assert not line and not line.holds("t")


def test_nobody_healthy_says_when_to_return() -> None:
    down = replicas(Stood("a", None, healthy=False), Stood("b", None, healthy=False))
    with pytest.raises(Unavailable) as caught:
        down.pick()
    assert caught.value.retry_after_s == 3.0 and not down.ready()


def asked(
    prompt: int = 1,
    priority: int = 5,
    tenant: str = "t",
    deadline: float | None = None,
    **more: Any,
) -> Assignment:
    limits = Limits(max_tokens=100, priority=priority)
    given = ("r", "s", (prompt,) * 10, Sampling(), limits, (), "", tenant, deadline, 0.0)
    return Assignment(*given, **more)


def refused(admission: Admission, line: ReplicaQueue, work: Assignment) -> float | None:
    """The seconds that it is told to wait; None where it was let in."""
    try:
        admission.check("s", work, line, lane())
    except Overloaded as error:
        return error.retry_after_s
    return None


def test_admission_refuses_at_the_bound_of_each_priority() -> None:
    admission = Admission(clock=lambda: 0.0)
    assert refused(admission, fill(ReplicaQueue(), 3), asked()) is None
    line = fill(ReplicaQueue(), 4, priority=1)
    assert refused(admission, line, asked(priority=1)) is not None
    # those that wait below take no place from it
    assert refused(admission, line, asked(priority=9)) is None
    fill(line, 4, priority=9)
    assert refused(admission, line, asked(priority=9)) is not None
    # a tenant of which nobody is here finds a place, and their number is bounded
    for tenant in ("u", "w"):
        assert refused(admission, line, asked(priority=9, tenant=tenant)) is None
        fill(line, 1, priority=9, tenant=tenant)
    assert refused(admission, line, asked(priority=9, tenant="v")) is not None
    # what runs does not wait
    assert refused(admission, fill(ReplicaQueue(), 0, running=50), asked()) is None


def test_retry_after_is_a_place_in_line_at_the_measured_speed() -> None:
    now = [time.monotonic()]
    admission = Admission(clock=lambda: now[0])
    line = fill(ReplicaQueue(), 4, running=1)
    one = next(iter(line.running))
    for _ in range(60):
        # a hundred tokens in ten seconds
        one.started_at = now[0]
        now[0] += 10.0
        admission.ended("s", one, 100)
    one.started_at = now[0]
    waits = [refused(admission, line, asked(prompt)) or 0.0 for prompt in range(3)]
    # one runs at a time, for ten seconds each
    assert waits == pytest.approx([10, 20, 30], rel=0.3)
    assert all(wait > 10 * (place + 1) for place, wait in enumerate(waits))
    # nobody is sent away for longer than clients obey
    for prompt in range(3, 200):
        wait_s = refused(admission, line, asked(prompt))
        assert wait_s is not None and 1.0 <= wait_s <= MAX_RETRY_AFTER_S


def test_a_promised_place_is_kept_for_whom_it_was_promised() -> None:
    now = [time.monotonic()]
    admission = Admission(clock=lambda: now[0])
    line = fill(ReplicaQueue(), 4, running=1)
    wait_s = refused(admission, line, asked(7))
    # who comes too early is no better off
    assert wait_s is not None and refused(admission, line, asked(7)) is not None
    now[0] += wait_s
    line.started(next(iter(line.waiting)))
    assert refused(admission, line, asked(8)) is not None
    assert refused(admission, line, asked(7)) is None
    # it was taken; whoever asks next finds what is there
    assert refused(admission, line, asked(9)) is None
    # who does not come loses it, and nobody waits for ever behind it
    now[0] += MAX_RETRY_AFTER_S
    assert refused(admission, line, asked(8)) is None


def test_what_one_tenant_was_promised_keeps_no_other_out() -> None:
    now = [time.monotonic()]
    admission = Admission(clock=lambda: now[0])
    line = fill(ReplicaQueue(), 4, running=2)
    waits = [refused(admission, line, asked(prompt)) or 0.0 for prompt in range(6)]
    now[0] += max(waits)
    # places are kept for those who were told to come
    assert refused(admission, line, asked(tenant="u")) is None
    # they came, and took the room beyond the bound
    while refused(admission, line, asked(prompt := waits.index(max(waits)))) is None:
        fill(line, 1)
        waits[prompt] = 0.0
    assert len(line.waiting) == 5
    assert refused(admission, line, asked(tenant="u")) is None


def test_a_deadline_that_cannot_be_kept_is_refused_at_once() -> None:
    now = time.monotonic()
    admission = Admission(clock=lambda: now)
    line = fill(ReplicaQueue(), 4, running=1, max_tokens=1000)
    admission.check_deadline("s", asked(), line, lane())
    # four times a thousand tokens are ahead, at 10 ms each
    with pytest.raises(Overloaded) as caught:
        admission.check_deadline("s", asked(deadline=now + 2.0), line, lane())
    assert "2.0 s are left" in caught.value.message and caught.value.retry_after_s
    admission.check_deadline("s", asked(deadline=now + 60.0), line, lane())
    # the engine makes way for these
    admission.check_deadline("s", asked(deadline=now + 2.0, priority=9), line, lane())
    admission.check_deadline("s", asked(deadline=now + 2.0, tenant="u"), line, lane())
    # nobody is ahead: one millisecond is tried
    admission.check_deadline("s", asked(deadline=now + 0.001), ReplicaQueue(), lane())


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
