"""Steps that are launched before the tokens of the step before them are read give the same results
as steps one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from coterie.core.events import Delta, Failed, Finished, Timings
from coterie.core.plan import AdapterChoice
from coterie.core.request import TokenRules
from coterie.engine.detokenize import TokenPieces
from coterie.engine.device_steps import DeviceSteps, LaunchedStep
from coterie.engine.engine import Engine
from coterie.engine.runner import Runner
from coterie.engine.sampler import ModelOutput, Sampler
from coterie.engine.scheduler import Scheduler
from coterie.engine.step import StepPlan
from coterie.engine.upload import ALIGNMENT, NUM_BUFFERS, UploadRing
from coterie.kernels.draws import LogitEdits
from coterie.models.build import cuda_graph
from coterie.models.build.cuda_graph import DecodeGraphs
from coterie.models.build.graph_memory import GraphMemory
from tests.helpers.kernels.twin_draws import TwinDraws
from tests.helpers.models.toy_grammars import NESTED, REGEX, constrained
from tests.helpers.models.toy_model import (
    VOCAB,
    ManualClock,
    ToyAdapters,
    ToyModel,
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    padded_forward,
    true_output,
)


class Watch:
    """Counts the steps of all engines: one by one, and ahead. Checks what must not meet a step in
    flight."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.plain = self.ahead = 0
        launch, schedule = Runner.launch, Scheduler.schedule

        def launched(
            runner: Runner, plan: StepPlan, before: LaunchedStep | None = None
        ) -> LaunchedStep:
            self.plain += plan.sources is None
            self.ahead += plan.sources is not None
            return launch(runner, plan, before)

        def scheduled(
            scheduler: Scheduler, shared: bool = False, taken: int = 0
        ) -> StepPlan | None:
            # it admits, preempts and loads adapters
            assert scheduler._ahead is None
            return schedule(scheduler, shared, taken)

        patch.setattr(Runner, "launch", launched)
        patch.setattr(Scheduler, "schedule", scheduled)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def by_request(events: list[Any]) -> dict[str, list[Any]]:
    """Every request's events in order, without times. A block that one choice of a request gives
    back and another gets is counted once, and which one gets it may differ."""
    found: dict[str, list[Any]] = {}
    for event in events:
        if isinstance(event, Finished):
            blocks = event.kv_blocks if len(event.choices) == 1 else 0
            event = replace(event, timings=Timings(), kv_blocks=blocks)
        found.setdefault(event.request_id, []).append(event)
    return found


def random_requests(rng: random.Random) -> list[Any]:
    requests = []
    for number in range(rng.randint(1, 9)):
        kind = rng.choice(["greedy", "greedy", "sampled", "filtered", "scored", "special"])
        settings: dict[str, Any] = {
            "max_tokens": rng.randint(1, 40),
            "ignore_eos": rng.random() < 0.5,
            "seed": rng.randint(0, 99),
            "n": rng.choice([1, 1, 1, 3]),
            "session": rng.choice(["", "a", "b"]),
            "tenant": rng.choice(["t", "t", "u"]),
        }
        if kind != "greedy":
            settings["temperature"] = rng.choice([0.5, 1.0, 2.0])
        if kind == "filtered":
            settings |= rng.choice([{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
        if kind == "scored":
            settings["logprobs"] = rng.randint(0, 4)
        if kind == "special":
            settings |= rng.choice(
                [
                    {"presence_penalty": 1.5},
                    {"repetition_penalty": 1.6, "penalty_window": 3},
                    {"min_tokens": 6, "ignore_eos": False},
                    {"logit_bias": ((3, 4.0), (7, -9.0))},
                    {"prompt_logprobs": 2},
                    {"typical_p": 0.6},
                    {"rules": TokenRules(bad_words=("CD", "E"))},
                    {"rules": TokenRules(allowed_ids=(0, 3, 9, 20)), "ignore_eos": False},
                    {"num_beams": 3, "n": 2, "temperature": 0.0},
                ]
            )
        if rng.random() < 0.4:
            settings["stop"] = tuple(chr(ord("A") + rng.randint(1, 40)) for _ in range(3))
        if rng.random() < 0.2:
            settings["deadline"] = 100.0 + rng.randint(0, 20)
        prompt = [rng.randint(1, VOCAB - 1) for _ in range(rng.randint(1, 30))]
        requests.append(make_assignment(f"r{number}", prompt, **settings))
    return requests


def answer(engine: Engine, requests: list[Any], aborts: dict[str, int]) -> list[Any]:
    """Run all requests to their ends; `aborts`: after how many tokens a request is aborted. The
    clock goes on by one second for every step whose tokens are committed."""
    clock = engine._tracker._now
    assert isinstance(clock, ManualClock)
    for request in requests:
        engine.add(request)
    counts = dict.fromkeys(aborts, 0)
    events: list[Any] = []
    for _ in range(2000):
        if not engine.has_work():
            return events
        clock.now = 100.0 + engine.stats()["steps"]
        new = engine.step()
        engine.check()
        events += new
        for event in new:
            if isinstance(event, Delta) and event.request_id in counts:
                counts[event.request_id] += len(event.token_ids)
                if counts[event.request_id] >= aborts[event.request_id]:
                    engine.abort(event.request_id)
                    del counts[event.request_id]
    raise AssertionError("the engine did not come to an end")


def seeds(every_time: range, full: range) -> list[Any]:
    return [*every_time, *(pytest.param(seed, marks=pytest.mark.full) for seed in full)]


@pytest.mark.parametrize("seed", seeds(range(12), range(12, 40)))
def test_results_are_those_of_single_steps(seed: int, watch: Watch) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    aborts = {one.request_id: rng.randint(1, 20) for one in requests if rng.random() < 0.2}
    lane = make_lane(
        block_size=rng.choice([2, 4, 8]),
        num_blocks=512,
        max_sequences=32,
        max_step_tokens=rng.choice([32, 64, 512]),
    )
    single, ahead = (make_engine(lane, run_ahead=run_ahead) for run_ahead in (False, True))
    expected, found = (answer(engine, requests, aborts) for engine in (single, ahead))
    assert by_request(found) == by_request(expected)
    caches = [engine._lanes[0].scheduler.space.cache for engine in (single, ahead)]
    assert set(caches[0]._block_of) == set(caches[1]._block_of)
    sessions = [[name for name, _ in cache._sessions.items()] for cache in caches]
    assert sessions[0] == sessions[1]
    kept = ("steps", "generated_tokens", "prefill_tokens", "kv_usage", "preemptions")
    assert [single.stats()[name] for name in kept] == [ahead.stats()[name] for name in kept]


def use_device_path(engine: Engine) -> TwinDraws:
    """Let the runner do on the CPU what it does on a GPU: one upload, draws without the host."""
    runner, twin = engine._lanes[0].runner, TwinDraws()
    runner._uploads = UploadRing(torch.device("cpu"))
    runner._sampler = Sampler(engine._grammars.work, twin)
    runner.counts_on_device = True
    return twin


def use_captured_steps(engine: Engine, model: ToyModel) -> DeviceSteps:
    """And its decode steps as captured ones."""
    use_device_path(engine)
    lane = engine._lanes[0]
    runner, tables = lane.runner, lane.scheduler.space.tables
    graphs = DecodeGraphs(padded_forward(model), 4096, torch.device("cpu"))
    output = ModelOutput(model.device, VOCAB)
    steps = DeviceSteps(graphs, runner._kv, lane.config, tables, TwinDraws(), output)
    # torch's order of equal alternatives depends on their number
    steps._tops = range(VOCAB)
    steps.prepare()
    runner._steps = steps
    return steps


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("seed", seeds(range(100, 105), range(105, 115)))
def test_results_of_the_device_path_are_those_of_single_steps(
    seed: int, captured: bool, watch: Watch
) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    lane = make_lane(num_blocks=512, max_sequences=32, max_step_tokens=64)
    single, ahead = (make_engine(lane, run_ahead=run_ahead) for run_ahead in (False, True))
    if captured:
        use_captured_steps(ahead, ahead._lanes[0].runner._model)  # type: ignore[arg-type]
    else:
        use_device_path(ahead)
    expected, found = (answer(engine, requests, {}) for engine in (single, ahead))
    assert by_request(found) == by_request(expected)


def count_calls(owner: Any, name: str) -> list[None]:
    """A list that grows with every call."""
    calls: list[None] = []
    original = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return original(*arguments)

    setattr(owner, name, counted)
    return calls


def test_captured_steps_are_sent_only_when_blocks_or_sequences_change(watch: Watch) -> None:
    engine = make_engine(make_lane(block_size=8), run_ahead=True)
    steps = use_captured_steps(engine, engine._lanes[0].runner._model)  # type: ignore[arg-type]
    sends, forwards = count_calls(steps, "_send"), count_calls(engine._lanes[0].runner, "_arrays")
    requests = [
        make_assignment("a", [1, 2, 3], max_tokens=40),
        make_assignment("b", [4, 5, 6], max_tokens=20, temperature=1.0),
        make_assignment("c", [7, 8, 9], max_tokens=40, temperature=0.8, seed=3),
    ]
    for request in requests:
        engine.add(request)
    found = outputs(drain(engine))
    assert all(found[one.request_id, 0] == true_output(one) for one in requests)
    # the prompts in the general way; the first step, one without "b", and five new blocks
    assert (len(forwards), len(sends)) == (1, 7)


@pytest.mark.parametrize("captured", [False, True])
def test_penalties_are_counted_ahead_on_the_device(captured: bool, watch: Watch) -> None:
    lane = make_lane(num_blocks=512, max_sequences=32, max_step_tokens=64)
    requests = [
        make_assignment("a", [1, 2, 3], max_tokens=40, repetition_penalty=1.5),
        make_assignment("b", [4, 5], max_tokens=40, frequency_penalty=1.0, temperature=1.0),
        make_assignment("c", [4, 5], max_tokens=40, min_tokens=20, ignore_eos=False),
        make_assignment("d", [4, 5], max_tokens=40, logit_bias=((9, 2.0), (3, -5.0))),
    ]
    single, ahead = (make_engine(lane, run_ahead=run_ahead) for run_ahead in (False, True))
    twin = use_device_path(ahead)
    if captured:
        steps = use_captured_steps(ahead, ahead._lanes[0].runner._model)  # type: ignore[arg-type]
        sends = count_calls(steps, "_send_edits")
    expected, found = (answer(engine, requests, {}) for engine in (single, ahead))
    assert by_request(found) == by_request(expected)
    assert watch.ahead == 39
    if captured:
        # at the start, and when the ban of "c" ends
        assert len(sends) == 2
    else:
        assert twin.num_unknown == 39


@pytest.mark.parametrize("captured", [False, True])
def test_windows_of_penalties_are_kept_by_the_host(captured: bool, watch: Watch) -> None:
    """No step runs ahead while a token may leave a window; afterwards they do again."""
    lane = make_lane(num_blocks=512, max_sequences=32, max_step_tokens=64)
    requests = [
        make_assignment("a", [1, 2, 3], max_tokens=20, repetition_penalty=1.5, penalty_window=4),
        make_assignment("b", [4, 5], max_tokens=40, frequency_penalty=1.0, temperature=1.0),
        make_assignment("c", [4, 5], max_tokens=40),
    ]
    single, ahead = (make_engine(lane, run_ahead=run_ahead) for run_ahead in (False, True))
    use_device_path(ahead)
    if captured:
        use_captured_steps(ahead, ahead._lanes[0].runner._model)  # type: ignore[arg-type]
    expected, found = (answer(engine, requests, {}) for engine in (single, ahead))
    assert by_request(found) == by_request(expected)
    assert 0 < watch.ahead <= 20


def test_draws_and_lists_of_edits_count_as_graphs(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes memory of the reserve. When that is used up, other draws take the general way."""
    held = [0]
    monkeypatch.setattr(GraphMemory, "_held_bytes", lambda _: held[0])
    empty = LogitEdits.empty

    def counted(*size: Any) -> LogitEdits:
        held[0] += 1 << 30
        return empty(*size)

    monkeypatch.setattr(LogitEdits, "empty", counted)
    lane = make_lane(num_blocks=512, max_sequences=4, max_step_tokens=64)
    single, ahead = (make_engine(lane, run_ahead=run_ahead) for run_ahead in (False, True))
    steps = use_captured_steps(ahead, ahead._lanes[0].runner._model)  # type: ignore[arg-type]
    memory = steps._graphs.memory
    # of three sizes: the step, what receives it, and two kinds of draws
    assert memory.count == 12 and memory.used < 16 << 20
    memory.reserved = 1 << 30
    for number, name in enumerate(("presence_penalty", "min_p")):
        settings: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, name: 0.5}
        if number:
            settings["logprobs"] = 1
        requests = [make_assignment(f"r{i}", [1, 2, i], **settings) for i in range(3)]
        drawn = count_calls(steps, "_capture_draw")
        expected, found = (answer(engine, requests, {}) for engine in (single, ahead))
        assert by_request(found) == by_request(expected)
        # the list of edits takes all: the same draw with counting is refused
        assert len(drawn) == (0 if number else 1)
    assert memory.used > 1 << 30 and not memory.has_room


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_survive_a_step_for_longer_contexts(
    penalty: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another graph, whose draws are captured while the sequences go on."""
    monkeypatch.setattr(cuda_graph, "CONTEXTS", (16,))
    lane = make_lane(num_blocks=512, max_sequences=32, max_step_tokens=64)
    settings: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, penalty: 1.5}
    requests = [make_assignment(f"r{i}", [1, 2, i], **settings) for i in range(3)]
    single, ahead = (make_engine(lane, run_ahead=run_ahead) for run_ahead in (False, True))
    use_captured_steps(ahead, ahead._lanes[0].runner._model)  # type: ignore[arg-type]
    expected, found = (answer(engine, requests, {}) for engine in (single, ahead))
    assert by_request(found) == by_request(expected)


def test_a_device_draws_what_grammars_allow(watch: Watch) -> None:
    lane = make_lane(num_blocks=512, max_sequences=32, max_step_tokens=64)
    requests = [
        constrained("a", REGEX, temperature=0.0),
        constrained("b", REGEX, temperature=1.0, top_k=5),
        constrained("c", NESTED, temperature=0.7, min_tokens=4, logit_bias=((9, 1.0),)),
        make_assignment("d", [7, 8], max_tokens=30, temperature=1.0, presence_penalty=1.0),
        make_assignment("e", [9], max_tokens=30),
    ]
    single, ahead = (make_engine(lane, run_ahead=run_ahead) for run_ahead in (False, True))
    use_captured_steps(ahead, ahead._lanes[0].runner._model)  # type: ignore[arg-type]
    draws = count_calls(ahead._lanes[0].runner._sampler, "sample")
    expected, found = (answer(engine, requests, {}) for engine in (single, ahead))
    # what was cached when a request began depends on how long its grammar took
    assert outputs(found) == outputs(expected)
    assert not draws


@pytest.mark.parametrize("seed", seeds(range(4), range(4, 12)))
def test_tokens_are_right_when_blocks_are_few(seed: int, watch: Watch) -> None:
    """With preemptions and evictions only the order of the work may differ."""
    rng = random.Random(seed)
    lane = make_lane(num_blocks=rng.choice([12, 20]), max_sequences=5, context=40, block_size=4)
    engine = make_engine(lane, run_ahead=True)
    requests = [
        make_assignment(
            f"r{number}",
            [rng.randint(1, 9)] * rng.randint(1, 12),
            max_tokens=rng.randint(4, 24),
            temperature=rng.choice([0.0, 1.0]),
            ignore_eos=False,
        )
        for number in range(10)
    ]
    events: list[Any] = []
    for request in requests:
        engine.add(request)
        for _ in range(rng.randint(0, 6)):
            events += engine.step()
    events += drain(engine)
    found = outputs(events)
    for request in requests:
        assert found[request.request_id, 0] == true_output(request)
    assert watch.ahead and engine.stats()["kv_usage"] == 0


def test_decode_steps_are_launched_ahead(watch: Watch) -> None:
    engine = make_engine(run_ahead=True)
    for number in range(4):
        engine.add(make_assignment(f"r{number}", [1, 2, number], max_tokens=10 + number))
    drain(engine)
    # the prompts take the first step; the lengths are known, so no row is wasted
    assert (watch.plain, watch.ahead) == (1, 12)


def test_waiting_sequences_that_found_no_room_do_not_stop_it(watch: Watch) -> None:
    engine = make_engine(make_lane(max_sequences=2), run_ahead=True)
    requests = [make_assignment(f"r{i}", [1, 2, i], max_tokens=12) for i in range(6)]
    for request in requests:
        engine.add(request)
    found = outputs(drain(engine))
    assert all(found[one.request_id, 0] == true_output(one) for one in requests)
    assert watch.ahead > 2 * watch.plain


def test_a_step_in_flight_is_work(watch: Watch) -> None:
    """The end of the only request is found while the next step is in flight."""
    tries = [make_assignment("r", [n], max_tokens=40, ignore_eos=False) for n in range(40)]
    request = next(one for one in tries if 3 < len(true_output(one)) < 40)
    engine = make_engine(run_ahead=True)
    engine.add(request)
    events: list[Any] = []
    while not any(isinstance(event, Finished) for event in events):
        events += engine.step()
        engine.check()
    assert outputs(events)["r", 0] == true_output(request)
    assert engine.has_work() and engine.stats()["running"] == engine.stats()["kv_usage"] == 0
    # the same name may come again; the row in flight is not its own
    engine.add(again := replace(request, prompt_ids=(5, 6, 7)))
    assert outputs(drain(engine))["r", 0] == true_output(again)


def test_settling_experts_waits_for_the_step_in_flight(watch: Watch) -> None:
    engine = make_engine(run_ahead=True)
    engine.add(request := make_assignment("r", [1, 2], max_tokens=9))
    events = engine.step()
    assert engine._flight is not None
    engine.settle_moe(1)
    assert engine._flight is None
    assert outputs(events + drain(engine))["r", 0] == true_output(request)


def test_a_step_that_cannot_be_launched_fails_its_requests(watch: Watch) -> None:
    model = ToyModel()
    engine = make_engine(model=model, run_ahead=True)
    for number in range(2):
        engine.add(make_assignment(f"r{number}", [1, number], max_tokens=9))
    engine.step()
    model.fail_next = True
    events = engine.step()
    kinds = [type(event) for event in events]
    assert kinds == [Delta, Delta, Failed, Failed]
    assert not engine.has_work() and engine.stats()["kv_usage"] == 0


def test_a_step_that_fails_on_the_device_fails_its_requests(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(run_ahead=True)
    engine.add(make_assignment("r", [1, 2], max_tokens=9))
    engine.step()

    def broken(runner: Runner, launched: LaunchedStep) -> Any:
        raise RuntimeError("an error of the device")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "collect", broken)
        events = drain(engine)
    assert [type(event) for event in events] == [Failed]
    engine.add(request := make_assignment("r", [1, 2], max_tokens=9))
    assert outputs(drain(engine))["r", 0] == true_output(request)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_choices_of_a_request_that_failed_send_nothing_more(
    run_ahead: bool, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_assignment("r", [1, 2], max_tokens=30, n=10, temperature=1.0)
    answers = [true_output(request, choice) for choice in range(10)]
    first: dict[int, tuple[int, int]] = {}
    for step in range(30):
        for choice in range(10):
            first.setdefault(answers[choice][step], (step, choice))
    # a token of some step that draws of the same step come behind
    bad = next(token for token, (step, choice) in first.items() if step > 3 and choice < 9)
    read = TokenPieces._read

    def broken(pieces: TokenPieces, token: int) -> str | None:
        if token == bad:
            raise RuntimeError("a token without a text")
        return read(pieces, token)

    monkeypatch.setattr(TokenPieces, "_read", broken)
    lane = make_lane(num_blocks=512, max_sequences=32, max_step_tokens=64)
    engine = make_engine(lane, run_ahead=run_ahead)
    engine.add(request)
    kinds = [type(event) for event in drain(engine)]
    assert kinds.index(Failed) == len(kinds) - 1


def test_adapters_stay_until_the_step_in_flight_is_computed(watch: Watch) -> None:
    pool = ToyAdapters(1)
    engine = make_engine(adapters=pool, run_ahead=True)
    choice = (AdapterChoice("a", "a"),)
    engine.add(make_assignment("r", [1, 2], max_tokens=9, adapters=choice))
    for _ in range(3):
        pool.tick()
        engine.step()
    assert engine._flight is not None
    engine.abort("r")
    assert pool.users
    engine.check()
    drain(engine, pool=pool)
    assert not pool.users


def test_uploads_keep_values_types_and_shapes() -> None:
    ring = UploadRing(torch.device("cpu"))
    rng = np.random.default_rng(0)
    sent, arrays = [], []
    for _ in range(2 * NUM_BUFFERS):
        some: list[Any] = [
            rng.integers(0, 99, rng.integers(0, 40)),
            rng.integers(0, 99, (3, rng.integers(1, 9))).astype(np.int32),
            rng.random(7),
            rng.random(5).astype(np.float32),
        ]
        arrays.append([one.copy() for one in some])
        sent.append(ring.send(some))
        for one in some:
            one[...] = 0
    for tensors, expected in zip(sent, arrays, strict=True):
        base = tensors[0].untyped_storage().data_ptr()
        for tensor, array in zip(tensors, expected, strict=True):
            assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
            assert tensor.untyped_storage().data_ptr() == base
            assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
