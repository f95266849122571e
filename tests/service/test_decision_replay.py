"""Logged decisions come out the same when they are made again, and others under other settings."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.ensemble.null_engine import NullReplica
from coterie.cli.main import main
from coterie.core.config import load
from coterie.core.events import Finished
from coterie.core.request import Chat, InferenceRequest, Limits, Message, RouteHints, Sampling
from coterie.routing.classify import train as trainer
from coterie.routing.classify.features import prompt_input
from coterie.routing.classify.traffic import LabelledPrompt, input_hash
from coterie.routing.classify.trained import TrainedRouter
from coterie.routing.classify.versions import RouterVersions
from coterie.routing.match.embed import static
from coterie.routing.protocols import NoAdapters
from coterie.service import build
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.breaker.spike import SPILL
from coterie.service.pipeline import Pipeline
from coterie.service.receipts import context as contexts
from coterie.service.receipts.decisions import AskedRoute, DecisionRecord, decoded, encoded
from coterie.service.receipts.replay import CHANGED, LOST, SAME, DecisionReplay
from coterie.service.records.store import RecordStore
from coterie.service.slo.evidence import whole
from tests.helpers.serving.routed_pipeline import MODEL, PROMPTS, packed
from tests.helpers.serving.server_process import own_home

CONFIG = """
[[specialists]]
name = "general"

[[specialists]]
name = "sql-desk"
intents = ["sql", "billing"]
fallback = "general"
checks = ["json"]
[specialists.slo]
correctness = 0.8

[[specialists]]
name = "logs"
intents = ["log", "stack-trace"]
fallback = "sql-desk"

[[intents]]
name = "sql"
shadow_below = 0.95
spill_below = 0.6

[[intents]]
name = "log"
shadow_below = 0.2

[[intents]]
name = "billing"

[[intents]]
name = "stack-trace"
high_stakes = true
"""
TEXTS = [
    *PROMPTS.values(),
    "What is the capital of France?",
    "SELECT name FROM users WHERE age > 30;",
    'Traceback (most recent call last)\n  File "a.py", line 3, in main\nValueError: x',
    "2024-01-02 10:00:00 INFO start\n2024-01-02 10:00:01 ERROR stop\nWhat failed?",
    "Écris un haïku sur le vent d'automne, s'il te plaît.",
    "Was ist die Hauptstadt von Österreich?",
    '{"a": 1, "b": [2, 3], "c": {"d": null}}',
]
COUNT = iter(range(10**9))
COUNTED = 160


def request(rng: random.Random) -> InferenceRequest:
    model = rng.choice((None, None, None, None, "auto", "general", "logs", "sql", "sql-desk:haiku"))
    hints = RouteHints(
        model,
        exclude=("sql",) if model is None and rng.random() < 0.2 else (),
        max_adapters=rng.choice((None, None, 1, 2)),
        intent=rng.choice(("", "", "", "", "sql", "log", "billing")),
    )
    text = rng.choice(TEXTS) + " please" * rng.randrange(4)
    return InferenceRequest(
        id=f"chatcmpl-{next(COUNT):032x}",
        prompt=Chat((Message("user", text),)),
        sampling=Sampling(temperature=0.0),
        limits=Limits(max_tokens=4, priority=rng.randrange(10)),
        hints=hints,
        response_format=None,
        session=None,
        tenant="t",
        arrived_at=time.monotonic(),
    )


def shaken(pipeline: Pipeline, rng: random.Random, overrides: bool) -> None:
    """Another state of the specialists: load, spikes, breakers, an operator if `overrides`."""
    control = pipeline.ensemble.control
    for name, watch in control.watches.items():
        watch.spike.level, watch.spike.load = rng.choice((0, 0, 1, 2)), rng.random() * 1.5
        watch.is_full = rng.random() < 0.1
        watch.is_held = name == "sql-desk" and rng.random() < 0.5
    for _ in range(rng.randrange(5)):
        control.judged_alone("sql-desk", whole(rng.random() < 0.9))
    if overrides:
        control.set_thresholds("sql", "tests", spill_below=rng.random())


def trained(seed: int, shift: int = 0) -> TrainedRouter:
    """A router for SQL and logs, from a few prompts."""
    labels = ("sql", "log", "reject")
    rows = []
    for number in range(seed, seed + 24):
        texts = (
            f"Count the orders of customer {number} with a query",
            f"Why did job {number} fail",
            f"Tell me about town {number}",
        )
        for place, text in enumerate(texts):
            given = prompt_input(text, "", static())
            label = labels[(place + shift) % 3]
            rows.append(LabelledPrompt(given, label, input_hash(given)))
    return trainer.train(rows)


def logged(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> Path:
    """The database of a server that has answered `count` requests over an engine that answers at
    once."""
    monkeypatch.setenv("COTERIE_HOME", str(own_home(folder / "home")))
    monkeypatch.setattr(build, "_process_maker", lambda engine: NullReplica)
    file = folder / "ensemble.toml"
    file.write_text(CONFIG)
    overrides: dict[str, Any] = {f"specialists.{i}.model": str(MODEL) for i in range(3)}
    overrides |= {"server.allow_unsigned": True, "adapters.device_bytes": "4MB"}
    rng = random.Random(count)

    packages = [str(packed(folder, name, seed=seed)) for seed, name in enumerate(PROMPTS)]
    assert main(["expert", "install", *packages, "--allow-unsigned"]) == 0
    routers = RouterVersions(folder / "home" / "state" / "router")
    routers._use([routers.add(trained(0)).version], "tests", {})

    async def serve() -> None:
        pipeline = build.build(load(file, overrides))
        await pipeline.start()
        try:
            await pipeline._fleet.catalog.settled()
            done = 0
            while done < count:
                if done % 8 == 0:
                    shaken(pipeline, rng, overrides=done % 40 == 0)
                try:
                    events = [event async for event in pipeline.handle(request(rng))]
                except Exception as error:
                    assert getattr(error, "code", "") in ("overloaded", "saturated"), error
                    continue
                assert isinstance(events[-1], Finished)
                done += 1
        finally:
            await pipeline.close()

    asyncio.run(serve())
    return folder / "home" / "state" / "records.db"


def read(path: Path) -> tuple[list[DecisionRecord], dict[str, contexts.DecisionContext]]:
    store = RecordStore(path, 1, 10**6)
    try:
        known = {key: contexts.decoded(data) for key, data in store.contexts().items()}
        return [decoded(data) for data in store.decisions(10**6)], known
    finally:
        store.close()


def replays(path: Path, test: Callable[[Any], None]) -> None:
    """Calls `test` with a function that makes a `DecisionReplay` over the log of `path`."""
    _, known = read(path)
    routers = RouterVersions(path.parent / "router")

    async def run() -> None:
        catalog = AdapterCatalog(path.parent / "experts")
        await catalog.start()
        try:
            test(lambda **more: DecisionReplay(known, catalog, routers.read, **more))
        finally:
            await catalog.close()

    asyncio.run(run())


def add_foreign(path: Path, record: DecisionRecord) -> None:
    """Add a decision that a specialist of other settings made alone, and bytes of no decision."""
    _, known = read(path)
    [context] = known.values()
    alone = replace(context.specialists[0], name="alone", intents=(), fixed=())
    watched = replace(alone.watched, name="alone", fallback="")
    other = replace(context, digest="foreign", specialists=(replace(alone, watched=watched),))
    asked = AskedRoute("alone", (), (), None, (), "", 5, False, False, True, False)
    routed = msgspec.structs.replace(
        record.routed, specialist="alone", adapters=(), confidence=1.0, intent=asked.intent,
        alternates=(), reasons=("named by the caller",),
    )  # fmt: skip
    made = msgspec.structs.replace(
        record, request_id="foreign", config="foreign", asked=asked, classified=None,
        candidates=(), routed=routed, steering=None, steered=None,
    )  # fmt: skip
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO contexts (digest, context) VALUES (?, ?)",
                   ("foreign", contexts.encoded(other)))  # fmt: skip
        for name, data in (("foreign", encoded(made)), ("unreadable", b"\x93\x01\x02\x03")):
            db.execute("INSERT INTO receipts (id, tenant, outcome, receipt, decision) "
                       "VALUES (?, 't', 'stop', '{}', ?)", (name, data))  # fmt: skip


def was_crowded(record: DecisionRecord) -> bool:
    """Whether a share of what its specialist got went to an alternate."""
    assert record.steering is not None
    readings = {item.name: item for item in record.steering.readings}
    return readings[record.routed.specialist].spike_level >= SPILL


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield logged(tmp_path_factory.mktemp("replay"), monkeypatch, COUNTED)


def check_same(path: Path, count: int) -> None:
    records, known = read(path)
    assert len(records) == count and len(known) == 1
    steered = [record.steered for record in records if record.steered is not None]
    # what was to be shown: other specialists, adapters, shadows, breakers, thresholds
    assert len({record.routed.specialist for record in records}) == 3
    assert any(record.routed.adapters for record in records)
    assert any(item.shadow for item in steered) and any(
        item.breaker != "closed" for item in steered
    )
    assert any(a.specialist != r.routed.specialist for a, r in zip(steered, records, strict=True))
    assert any(record.steering and record.steering.override for record in records)
    assert any("probability" in record.routed.reasons[0] for record in records)
    assert all(record.lanes and record.replica for record in records)

    def test(make: Any) -> None:
        summary, different = make().run(records)
        assert different == []
        assert summary.outcomes == {SAME: count} and not summary.moves

    replays(path, test)


def test_decisions_come_out_the_same(log: Path) -> None:
    check_same(log, COUNTED)


@pytest.mark.full
def test_ten_thousand_come_out_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(logged(tmp_path, monkeypatch, 10_000), 10_000)


def test_a_record_is_small_and_has_no_text(log: Path) -> None:
    store = RecordStore(log, 1, 10**6)
    sizes = []
    for data in store.decisions(10**6):
        sizes.append(len(data))
        for word in ("Paris", "capital", "customer", "Traceback", "automne", "please"):
            assert word.encode() not in data
    store.close()
    assert len(sizes) == COUNTED and max(sizes) < 4000


def test_other_settings_and_versions_change_some(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, _ = read(log)
    other = RouterVersions(log.parent / "router").add(trained(100, shift=1))
    file = tmp_path / "other.toml"
    text = CONFIG.replace("spill_below = 0.6", "spill_below = 0.0")
    file.write_text(text + "\n[routing]\nthreshold = 0.9999\n")

    def test(make: Any) -> None:
        def changed(context: contexts.DecisionContext) -> contexts.DecisionContext:
            return contexts.changed(context, load(file))

        summary, different = make(other=changed).run(records)
        assert 0 < summary.other_answer <= summary.outcomes[CHANGED] < COUNTED
        # no adapter is that likely
        chosen = [r for r in records if r.asked.by_content and r.routed.adapters]
        assert chosen and {r.request_id for r in chosen} <= {d.record.request_id for d in different}
        assert all("+" not in d.after for d in different if d.record.asked.by_content)
        # a declared intent, a structure and a name decide as before
        replay = make(version=other.version)
        summary, different = replay.run(records)
        assert summary.other_answer and summary.outcomes[CHANGED]
        declared = [d for d in different if d.record.asked.intent]
        for before, (after, _) in ((d.record.routed, replay.again(d.record)) for d in declared):
            assert (after.specialist, after.adapters) == (before.specialist, before.adapters)
            assert (after.intent, after.confidence) == (before.intent, before.confidence)
        # in a spike an alternate answers some of them: the alternates follow from the version
        assert all(was_crowded(d.record) for d in declared if d.before != d.after)
        named = [d for d in different if not d.record.asked.by_content]
        assert all(item.outcome == SAME for item in named)
        # what is lost is said
        gone = DecisionReplay({}, NoAdapters(), lambda version: None)
        assert gone.run(records)[0].outcomes == {LOST: COUNTED}

    replays(log, test)
    assert main(["router", "replay"]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["router", "replay", "--config", str(file)]) == 0
    assert "would answer" in capsys.readouterr().out
    assert main(["router", "replay", "--version", other.version[:6], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["other_answer"] > 0
    assert main(["router", "replay", "--version", "nothing"]) == 1
    # another version is current: names mean what is recorded
    [now] = [r for r in records if r.asked.model == "sql-desk:haiku"][:1]
    assert now.routed.adapters
    newer = str(packed(tmp_path, "haiku", seed=77, version="7.0.0"))
    assert main(["expert", "install", newer, "--allow-unsigned", "--now"]) == 0
    assert main(["router", "replay"]) == 0
    assert main(["expert", "rollback", "haiku"]) == 0
    # settings of other specialists, and a record that nothing can read
    add_foreign(log, records[0])
    capsys.readouterr()
    assert main(["router", "replay", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["same"], report["lost"]) == (COUNTED + 1, 1), report["different"]
    assert main(["router", "replay", "--config", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lost"] == 2 and report["decisions"] == COUNTED + 2
    assert any("none of these specialists" in why for why in report["losses"])
    # an expert that is gone
    assert main(["expert", "remove", "haiku"]) == 0
    assert main(["router", "replay"]) == 1
    assert "not installed" in capsys.readouterr().out
