"""service/adapters/conversation.py: what the next turn will want, remembered within bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coterie.core.plan import AdapterChoice
from coterie.core.request import InferenceRequest
from coterie.obs.metrics import MetricRegistry
from coterie.service.adapters import conversation as module
from coterie.service.adapters.conversation import ConversationPredictor
from coterie.service.pipeline import Pipeline
from tests.helpers.serving.routed_pipeline import PROMPTS, answer, ask, install, serving
from tests.helpers.serving.server_process import own_home

A, B, C = ((AdapterChoice(name, f"digest-{name}"),) for name in "abc")


def turn(session: str | None, tenant: str = "t") -> InferenceRequest:
    return ask("hello", session=session, tenant=tenant)


def counts(registry: MetricRegistry) -> tuple[float, float]:
    hit, miss = (registry.value("coterie_conversation_turns", r).value for r in ("hit", "miss"))
    return hit, miss


def test_what_was_used_is_likely_again() -> None:
    registry = MetricRegistry()
    known = ConversationPredictor(registry)
    assert known.ahead(turn("s")) == []
    known.turn(turn("s"), A)
    assert known.ahead(turn("s")) == [A]
    known.turn(turn("s"), ())
    assert known.ahead(turn("s")) == [A]
    known.turn(turn("s"), B)
    assert known.ahead(turn("s")) == [B, A]
    known.turn(turn("s"), A)
    # a turn on the base alone asks for nobody
    assert counts(registry) == (1, 1)
    # nobody else's conversation, and none without a name
    assert known.ahead(turn("s", "other")) == [] == known.ahead(turn("t"))
    known.turn(turn(None), A)
    assert known.ahead(turn(None)) == []


def test_what_used_to_follow_is_likely_next() -> None:
    registry = MetricRegistry()
    known = ConversationPredictor(registry)
    for session in ("one", "two"):
        known.turn(turn(session), A)
        assert known.ahead(turn(session)) == [A]
        known.turn(turn(session), B)
    known.turn(turn("three"), A)
    assert known.ahead(turn("three")) == [A, B]
    known.turn(turn("three"), B)
    assert counts(registry) == (1, 2)
    # what followed once among many was chance
    for i in range(8):
        known.turn(turn(f"c{i}"), C)
        known.turn(turn(f"c{i}"), A if i == 3 else C)
    known.turn(turn("new"), C)
    assert known.ahead(turn("new")) == [C]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONVERSATIONS", 10)
    monkeypatch.setattr(module, "MAX_KNOWN", 10)
    registry = MetricRegistry()
    known = ConversationPredictor(registry)
    for i in range(200):
        stack = (AdapterChoice(f"x{i}", f"digest-{i}"),)
        known.turn(turn(f"s{i % 40}"), stack)
        known.ahead(turn(f"s{i % 40}"))
    assert len(known._states) == 10 == registry.value("coterie_conversations").value
    assert len(known._stacks) <= 10 and len(known._after) <= 10
    assert all(len(memory.recent) <= module.MAX_RECENT for memory in known._states.values())
    known.turn(turn("s39"), A)
    known.turn(turn("s0"), B)
    # the conversations of last were kept
    assert known.ahead(turn("s39"))[0] == A and len(known.ahead(turn("s1"))) == 0


def test_the_next_expert_is_there_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one stack alone: whatever is not loaded ahead has to be waited for."""
    monkeypatch.setenv("COTERIE_HOME", str(own_home(tmp_path / "home")))

    async def until_resident(pipeline: Pipeline, name: str) -> None:
        digest = pipeline.adapters.current()[name].digest
        served = pipeline._fleet.find("tiny")
        async with asyncio.timeout(60):
            # a worker that has nothing to do says nothing: any answer brings its news
            while digest not in served.replicas.states()[0].resident_adapters:
                await answer(pipeline, ask())

    async def test() -> None:
        async with serving(**{"adapters.device_bytes": "100KB"}) as pipeline:
            for seed, name in enumerate(("sql", "haiku")):
                await install(pipeline, tmp_path, name, seed=seed)
            await pipeline._fleet.catalog.settled()

            async def say(session: str, name: str) -> float:
                done = await answer(pipeline, ask(PROMPTS[name], session=session))
                assert done.experts == [name] and done.end.metrics is not None
                return done.end.metrics.expert_load_latency_ms

            for session in ("one", "two"):
                await say(session, "sql")
                await say(session, "haiku")
            # sql alone was asked for, and haiku always followed
            await say("three", "sql")
            await until_resident(pipeline, "haiku")
            assert await say("three", "haiku") == 0
            text = pipeline.metrics_text()
            assert 'coterie_conversation_turns_total{result="hit"} 1' in text
            assert pipeline.registry.value("coterie_conversation_preloads").value >= 1

    asyncio.run(test())
