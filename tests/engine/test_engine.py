"""The engine end to end over the KV-faithful toy model: tokens, events, ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.core.events import Delta, Failed, Finished, Started
from coterie.core.plan import AdapterChoice, Admitted, Rejected
from coterie.engine import active_request
from coterie.engine.request_tracker import FAILED
from tests.helpers.models.toy_model import (
    EOS,
    ManualClock,
    ToyModel,
    ToyTokenizer,
    chain_logits,
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    taken_over,
    texts,
    true_output,
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())


def test_one_request_from_start_to_end() -> None:
    engine = make_engine()
    assignment = make_assignment("a", range(1, 30), max_tokens=12)
    assert isinstance(engine.add(assignment), Admitted)
    events = drain(engine)
    assert events[0] == Started("a", "r0", 29, 0, stored_tokens=28, at=100.0)
    assert outputs(events)["a", 0] == true_output(assignment)
    assert texts(events)["a", 0] == ToyTokenizer().decode(true_output(assignment))
    last = events[-1]
    assert isinstance(last, Finished) and last.choices == ("length",)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (29, 12)
    assert [e.finish_reason for e in events[1:-1]] == [None] * 11 + ["length"]


def test_a_request_without_memory_for_its_lists_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    engine, assignment = make_engine(), make_assignment("a", range(1, 30), max_tokens=12)
    with monkeypatch.context() as patch:
        patch.setattr(active_request, "_sequence", refuse)
        verdict = engine.add(assignment)
    assert isinstance(verdict, Rejected)
    assert verdict.code == "unavailable" and "memory" in verdict.reason and verdict.retry_after_s
    # it may be tried again
    assert isinstance(engine.add(assignment), Admitted)
    assert outputs(drain(engine))["a", 0] == true_output(assignment)


def test_a_prompt_of_full_blocks_stores_all_but_the_last() -> None:
    """Of 28 tokens in blocks of four the last block is computed again: 24 are found."""
    engine = make_engine()
    engine.add(make_assignment("a", range(1, 29), max_tokens=2))
    assert drain(engine)[0] == Started("a", "r0", 28, 0, stored_tokens=24, at=100.0)
    engine.add(make_assignment("b", range(1, 29), max_tokens=2))
    assert drain(engine)[0] == Started("b", "r0", 28, 24, stored_tokens=0, at=100.0)


def test_many_requests_under_pressure() -> None:
    engine = make_engine(make_lane(num_blocks=20, prefix_cache=False))
    work = [make_assignment(f"r{i}", range(1, 5 + 3 * i), max_tokens=20) for i in range(8)]
    for assignment in work:
        assert isinstance(engine.add(assignment), Admitted)
    found = outputs(drain(engine))
    for assignment in work:
        assert found[assignment.request_id, 0] == true_output(assignment)
    assert engine.stats()["preemptions"] > 0


def test_windows_of_penalties_outlast_preemptions() -> None:
    settings: dict[str, Any] = {
        "max_tokens": 20, "repetition_penalty": 3.0, "frequency_penalty": 1.0,
    }  # fmt: skip

    def answers(num_blocks: int, **window: int) -> tuple[dict[Any, list[int]], int]:
        engine = make_engine(make_lane(num_blocks=num_blocks, prefix_cache=False))
        for i in range(8):
            prompt = range(1, 5 + 3 * i)
            engine.add(make_assignment(f"r{i}", prompt, **settings, **window))
        return outputs(drain(engine)), int(engine.stats()["preemptions"])

    roomy, none = answers(400, penalty_window=4)
    crowded, some = answers(20, penalty_window=4)
    assert crowded == roomy and none == 0 and some > 0
    assert answers(400)[0] != roomy


@pytest.mark.parametrize("rows", [8, 3])
def test_choices_fork_from_one_prefill(rows: int) -> None:
    """Also when there are more choices than rows: the others wait and recompute."""
    model = ToyModel()
    engine = make_engine(make_lane(max_sequences=rows), model=model)
    assignment = make_assignment("a", range(1, 11), n=5, temperature=1.0, max_tokens=9)
    engine.add(assignment)
    events = drain(engine)
    for choice in range(5):
        assert outputs(events)["a", choice] == true_output(assignment, choice)
    assert sum(isinstance(event, Started) for event in events) == 1
    if rows == 8:
        # ten prompt tokens once, then eight more inputs for each of the five
        assert model.num_rows == 10 + 5 * 8


def test_decode_never_stalls_behind_a_long_prompt() -> None:
    engine = make_engine(make_lane(num_blocks=200, max_step_tokens=16, context=800))
    first = make_assignment("a", [1, 2, 3], max_tokens=60)
    engine.add(first)
    engine.step()
    engine.add(make_assignment("b", [4] * 300, max_tokens=2))
    while engine.stats()["prefill_tokens"] < 300:
        events = engine.step()
        assert any(isinstance(e, Delta) and e.request_id == "a" for e in events)
    drain(engine)


def test_steps_name_the_rows_of_long_prompts() -> None:
    """What attention computes without the paged kernel: whole prompts, and later parts of them."""
    seen: list[tuple[Any, Any]] = []

    class WatchedModel(ToyModel):
        def forward(self, token_ids: Any, batch: Any, *rest: Any) -> Any:
            seen.append((batch.fresh, batch.continued))
            return super().forward(token_ids, batch, *rest)

    lane = make_lane(num_blocks=300, max_step_tokens=400, max_mixed_tokens=200, context=800)
    engine = make_engine(lane, model=WatchedModel())
    engine.add(make_assignment("a", [1, 2, 3], max_tokens=60))
    engine.step()
    engine.add(make_assignment("b", [4] * 500, max_tokens=2))
    for _ in range(4):
        engine.step()
    assert seen[1:5] == [(((1, 201),), ()), ((), ((1, 201, 1, 200),)), ((), ()), ((), ())]
    drain(engine)


def test_eos_ends_and_is_counted() -> None:
    engine = make_engine()
    prompt = next(
        [i, 7]
        for i in range(1, 40)
        if EOS in true_output(make_assignment("a", [i, 7], max_tokens=40), count=40)
    )
    assignment = make_assignment("a", prompt, max_tokens=40, ignore_eos=False)
    engine.add(assignment)
    events = drain(engine)
    tokens = outputs(events)["a", 0]
    assert tokens == true_output(assignment) and tokens[-1] == EOS
    assert events[-1].choices == ("stop",) and events[-1].usage.completion_tokens == len(tokens)
    assert "</s>" not in texts(events)["a", 0]


def test_stop_tokens_and_min_tokens() -> None:
    engine = make_engine()
    plain = true_output(make_assignment("a", [3, 4], max_tokens=10))
    stop = plain[4]
    engine.add(make_assignment("a", [3, 4], max_tokens=10, stop_token_ids=(stop,)))
    events = drain(engine)
    cut = plain[: plain.index(stop) + 1]
    assert outputs(events)["a", 0] == cut
    assert [e.stop_match for e in events if isinstance(e, Delta)][-1] == stop
    # the stop token's own text is not sent
    assert texts(events)["a", 0] == ToyTokenizer().decode(cut[:-1])
    engine.add(make_assignment("b", [3, 4], max_tokens=10, stop_token_ids=(stop,), min_tokens=8))
    later = outputs(drain(engine))["b", 0]
    assert stop not in later[:8] and later[: len(cut) - 1] == cut[:-1] and len(later) > 8


def test_stop_strings() -> None:
    engine = make_engine()
    plain = make_assignment("a", [3, 4, 5], max_tokens=20)
    whole = ToyTokenizer().decode(true_output(plain))
    stop = whole[5:8]
    engine.add(replace(plain, limits=replace(plain.limits, stop=("nowhere", stop))))
    events = drain(engine)
    assert texts(events)["a", 0] == whole[: whole.index(stop)]
    last = [e for e in events if isinstance(e, Delta)][-1]
    assert (last.finish_reason, last.stop_match) == ("stop", stop)
    assert engine.stats()["kv_usage"] == 0


def test_deadlines_end_with_the_partial_text() -> None:
    clock = ManualClock()
    engine = make_engine(make_lane(max_sequences=1), clock=clock)
    running = make_assignment("a", [1, 2], max_tokens=50, deadline=105.0, stop=("zz",))
    engine.add(running)
    engine.add(make_assignment("b", [1, 2], max_tokens=50, deadline=106.0))
    events = [event for _ in range(6) for event in engine.step()]
    clock.now = 106.0
    events += engine.step()
    ends = {e.request_id: e for e in events if isinstance(e, Finished)}
    assert ends["a"].choices == ends["b"].choices == ("timeout",)
    assert len(outputs(events)["a", 0]) == 6 == ends["a"].usage.completion_tokens
    assert texts(events)["a", 0] == ToyTokenizer().decode(outputs(events)["a", 0])
    # the one that waited never started and has no tokens
    assert not any(isinstance(e, Started) and e.request_id == "b" for e in events)
    assert not engine.has_work() and engine.stats()["kv_usage"] == 0


def test_abort_frees_at_once() -> None:
    engine = make_engine()
    engine.add(make_assignment("a", range(1, 20), max_tokens=50, n=3, temperature=1.0))
    engine.add(make_assignment("b", [5, 6], max_tokens=4))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.check()
    assert engine.stats()["kv_usage"] <= 2 / 64
    events = drain(engine)
    ended = [e for e in events if isinstance(e, Finished) and e.request_id == "a"]
    assert len(ended) == 1 and ended[0].choices == ("abort",) * 3
    engine.abort("a")
    engine.abort("never heard of")
    assert not engine.has_work()
    assert (
        outputs(events)["b", 0][-1:] == true_output(make_assignment("b", [5, 6], max_tokens=4))[-1:]
    )


def test_a_failing_step_fails_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    model = ToyModel()
    engine = make_engine(make_lane(max_sequences=2), model=model)
    for name in ("a", "b", "c"):
        engine.add(make_assignment(name, [1, 2, 3], max_tokens=6))
    engine.step()
    model.fail_next = True
    events = engine.step()
    assert {e.request_id for e in events if isinstance(e, Failed)} == {"a", "b"}
    assert all(e.code == "internal_error" for e in events if isinstance(e, Failed))
    assert {e.message for e in events if isinstance(e, Failed)} == {FAILED}
    named = {vars(record).get("request_id") for record in caplog.records}
    assert named == {None, "a", "b"}
    engine.check()
    events = drain(engine)
    assert outputs(events)["c", 0] == true_output(make_assignment("c", [1, 2, 3], max_tokens=6))
    assert [e.request_id for e in events if isinstance(e, Finished)] == ["c"]


def test_a_failing_tokenizer_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    good = make_assignment("good", [1, 2, 3], max_tokens=5)
    bad = make_assignment("bad", [4, 5, 6], max_tokens=5)
    poison = true_output(bad)[2]
    assert poison not in true_output(good)
    original = ToyTokenizer.is_special

    def is_special(self: ToyTokenizer, token_id: int) -> bool:
        if token_id == poison:
            raise ValueError("no such token")
        return original(self, token_id)

    monkeypatch.setattr(ToyTokenizer, "is_special", is_special)
    engine.add(good)
    engine.add(bad)
    events = drain(engine)
    assert [e.request_id for e in events if isinstance(e, Failed)] == ["bad"]
    assert outputs(events)["good", 0] == true_output(good)
    assert engine.stats()["kv_usage"] == 0


SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"repetition_penalty": 2.0, "frequency_penalty": 0.6, "penalty_window": 5},
    {"temperature": 1.0, "stop": ("QQ", "AB"), "logprobs": 2},
    {"num_beams": 3, "n": 2},
    {"num_beams": 3, "n": 2, "repetition_penalty": 2.0, "penalty_window": 4},
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_takeover_after_any_token_is_invisible(number: int) -> None:
    """Cut the stream anywhere, hand the rest to a fresh engine: the whole is the same."""
    assignment = make_assignment("a", range(1, 12), max_tokens=14, **SHAPES[number])
    engine = make_engine()
    engine.add(assignment)
    whole = [e for e in drain(engine) if isinstance(e, Delta)]
    end = [(e.choice, e.finish_reason, e.stop_match) for e in whole if e.finish_reason]
    for cut in range(0, len(whole) + 1, 3):
        seen = whole[:cut]
        other = make_engine()
        assert isinstance(other.add(taken_over(assignment, seen)), Admitted)
        events = drain(other)
        rest = [e for e in events if isinstance(e, Delta)]
        assert outputs(seen + rest) == outputs(whole)
        assert texts(seen + rest) == texts(whole)
        ends = [(e.choice, e.finish_reason, e.stop_match) for e in seen + rest if e.finish_reason]
        assert sorted(ends, key=str) == sorted(end, key=str)
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.completion_tokens == sum(len(d.token_ids) for d in whole)
        assert events[-1].choices == tuple(reason for _, reason, _ in sorted(end, key=str))


def test_logprobs() -> None:
    engine = make_engine()
    assignment = make_assignment("a", [1, 2, 3], max_tokens=4, temperature=1.0, logprobs=3)
    engine.add(assignment)
    tokens = [1, 2, 3]
    for delta in [e for e in drain(engine) if isinstance(e, Delta)]:
        assert delta.logprobs is not None
        (one,) = delta.logprobs
        expected = log_softmax(chain_logits(tokens, range(len(tokens))))
        assert one.token_id == delta.token_ids[0]
        assert one.logprob == pytest.approx(expected[one.token_id], abs=1e-5)
        assert [other for other, _, _, _ in one.top] == np.argsort(-expected)[:3].tolist()
        assert one.data == ToyTokenizer().token_bytes(one.token_id)
        tokens += delta.token_ids
    assert len(tokens) == 3 + 4


@pytest.mark.parametrize("prompt_length", [1, 2, 17, 150])
def test_prompt_logprobs(prompt_length: int) -> None:
    """Every position is scored, whatever the chunks, and the cache is not read for it."""
    engine = make_engine(make_lane(max_step_tokens=9))
    prompt = [1 + i % 40 for i in range(prompt_length)]
    engine.add(make_assignment("warm", prompt, max_tokens=2))
    drain(engine)
    engine.add(make_assignment("other", [9, 9], max_tokens=30))
    engine.add(make_assignment("a", prompt, max_tokens=2, prompt_logprobs=1))
    events = [e for e in drain(engine) if e.request_id == "a"]
    assert isinstance(events[0], Started) and events[0].cached_tokens == 0
    scores = events[0].prompt_logprobs
    assert scores is not None and len(scores) == prompt_length and scores[0] is None
    for position, one in enumerate(scores[1:], 1):
        assert one is not None and one.token_id == prompt[position] and len(one.top) == 1
        expected = log_softmax(chain_logits(prompt[:position], range(position)))
        assert one.logprob == pytest.approx(expected[prompt[position]], abs=1e-5)
        assert one.top[0][0] == int(expected.argmax())


def test_prefixes_are_reused_within_a_tenant_only() -> None:
    engine = make_engine()
    cached = []
    for name, tenant in (("a", "t"), ("b", "t"), ("c", "u")):
        engine.add(make_assignment(name, range(1, 20), tenant=tenant))
        cached += [e.cached_tokens for e in drain(engine) if isinstance(e, Started)]
    assert cached == [0, 16, 0]
    stats = engine.stats()
    assert stats["prefix_queries_tokens"] == 3 * 19 and stats["prefix_hits_tokens"] == 16


def test_a_second_turn_reuses_the_first() -> None:
    engine = make_engine()
    first = make_assignment("a", range(1, 10), max_tokens=12)
    engine.add(first)
    drain(engine)
    history = [*range(1, 10), *true_output(first)]
    engine.add(make_assignment("b", [*history, 5, 5, 5], max_tokens=3))
    started = next(e for e in drain(engine) if isinstance(e, Started))
    # the last token of a turn is not computed; whole blocks are found again
    assert started.cached_tokens == (len(history) - 1) // 4 * 4


def test_refusals() -> None:
    engine = make_engine(make_lane(num_blocks=8, context=100, max_queue=2, max_sequences=1))
    cases: list[tuple[Any, str]] = [
        (make_assignment("x", []), "invalid_request"),
        (make_assignment("x", [48]), "invalid_request"),
        (make_assignment("x", [-1]), "invalid_request"),
        (make_assignment("x", [1], lane="nowhere"), "not_found"),
        (make_assignment("x", [1] * 32), "context_length_exceeded"),
        (make_assignment("x", [1] * 10, context_size=10), "context_length_exceeded"),
        (make_assignment("x", [1], temperature=math.nan), "invalid_request"),
        (make_assignment("x", [1], temperature=-0.1), "invalid_request"),
        (make_assignment("x", [1], top_p=0.0), "invalid_request"),
        (make_assignment("x", [1], top_p=1.5), "invalid_request"),
        (make_assignment("x", [1], repetition_penalty=0.0), "invalid_request"),
        (make_assignment("x", [1], n=0), "invalid_request"),
        (make_assignment("x", [1], n=100_000), "invalid_request"),
        (make_assignment("x", [1], max_tokens=0), "invalid_request"),
        (make_assignment("x", [1], min_tokens=-1), "invalid_request"),
        (make_assignment("x", [1], logit_bias=((99, 1.0),)), "invalid_request"),
        (make_assignment("x", [1], logit_bias=((1, math.inf),)), "invalid_request"),
        (make_assignment("x", [1], emitted=((1,), (2,))), "invalid_request"),
        (make_assignment("x", [1], adapters=(AdapterChoice("a", "d"),)), "unsupported"),
    ]
    for assignment, code in cases:
        verdict = engine.add(assignment)
        assert isinstance(verdict, Rejected) and verdict.code == code, assignment
        assert verdict.retry_after_s is None
    assert isinstance(engine.add(make_assignment("x", [1] * 31)), Admitted)
    assert isinstance(engine.add(make_assignment("x", [1])), Rejected)
    assert isinstance(engine.add(make_assignment("y", [1])), Admitted)
    full = engine.add(make_assignment("z", [1]))
    assert isinstance(full, Rejected) and full.code == "overloaded" and full.retry_after_s
    assert outputs(drain(engine)).keys() == {("x", 0), ("y", 0)}


def test_output_is_cut_where_the_context_ends() -> None:
    engine = make_engine(make_lane(context=20))
    assignment = make_assignment("a", [1] * 15, max_tokens=None)
    engine.add(assignment)
    events = drain(engine)
    assert outputs(events)["a", 0] == true_output(assignment, count=5)
    assert events[-1].choices == ("length",)


def test_higher_priority_takes_the_blocks() -> None:
    engine = make_engine(make_lane(num_blocks=12))
    low = [make_assignment(f"low{i}", [i + 1] * 8, max_tokens=12, priority=1) for i in range(2)]
    for assignment in low:
        engine.add(assignment)
    events = engine.step()
    urgent = make_assignment("urgent", [9] * 30, max_tokens=4, priority=8)
    engine.add(urgent)
    events += drain(engine)
    ends = [e.request_id for e in events if isinstance(e, Finished)]
    assert ends[0] == "urgent"
    preempted = {e.request_id: e.timings.num_preemptions for e in events if isinstance(e, Finished)}
    assert preempted["urgent"] == 0 and preempted["low1"] > 0
    for assignment in (*low, urgent):
        assert outputs(events)[assignment.request_id, 0] == true_output(assignment)


def test_lanes_share_by_weight_and_keep_their_own_blocks() -> None:
    lanes = [
        make_lane("heavy", weight=3.0, num_blocks=400, context=1000, max_queue=50),
        make_lane("light", weight=1.0, num_blocks=300, context=1000, block_size=8),
    ]
    engine = make_engine(*lanes)
    for lane in ("heavy", "light"):
        for i in range(8):
            engine.add(make_assignment(f"{lane}{i}", [i + 1] * 5, max_tokens=150, lane=lane))
    tokens = {"heavy": 0, "light": 0}
    for _ in range(120):
        for event in engine.step():
            if isinstance(event, Delta):
                tokens[event.request_id[:5]] += 1
        engine.check()
    assert tokens["heavy"] / tokens["light"] == pytest.approx(3.0, rel=0.1)
    states = {state.lane: state for state in engine.lane_states()}
    assert [len(lane.scheduler.running) for lane in engine._lanes] == [8, 8]
    assert states["light"].total_tokens == 2400 and states["light"].free_tokens < 2400


def test_lane_state_and_stats() -> None:
    engine = make_engine(make_lane(max_sequences=2))
    for i in range(5):
        engine.add(make_assignment(f"r{i}", [i + 1] * 9, session=f"s{i}"))
    engine.step()
    (state,) = engine.lane_states()
    assert (engine.stats()["running"], state.queued, state.max_queue) == (2, 3, 256)
    assert state.predicted_first_token_s > 0 and not state.preempting
    drain(engine)
    (state,) = engine.lane_states()
    assert state.free_tokens == state.total_tokens == 256 and len(state.prefix_digests or ()) == 20
    stats = engine.stats()
    assert stats["generated_tokens"] == 40 and stats["prefill_tokens"] == 45
    assert stats["steps"] > 8
    assert all(stats[f"{part}_s"] > 0 for part in ("schedule", "run", "sample", "commit"))
