"""A MoE model in a worker: budgets, whole prompts, heatmaps, warm-up, counts, broken reads."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest

from coterie import LLM
from coterie.core.errors import ConfigError, WeightsError
from coterie.core.moe import MoeSettings, MoeUsage
from coterie.moe.dispatch.repin import MIN_INTERVAL
from coterie.moe.runtime.budget import ExpertSizes, TierNeeds, size_tiers
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.transfer import LoadWorkers
from coterie.moe.store.base import ExpertGeometry
from coterie.weights.shortage import MemoryShortage
from coterie.workers.warmup import SAVE_EVERY_S, HeatmapFile, heatmap_path
from tests.helpers.models.tiny import tiny_checkpoint

LAYERS, EXPERTS, TOP_K = 3, 8, 2
CONTEXT = 128
# fp32 keys and values of 3 layers, 2 heads of 32
KV_BYTES = CONTEXT * 2 * 3 * 2 * 32 * 4
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
PROMPTS = ([0, 40, 41, 42, 43], [0, 90, 91], [0, 200, 201, 202])


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """A folder of its own: heatmaps are written into it."""
    return Path(shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "moe"))


def opened(model: Path, **given: Any) -> LLM:
    """`given` are fields of MoeSettings, or arguments of LLM."""
    moe: dict[str, Any] = {
        "strategy": "lru",
        "cache_capacity": 3,
        "host_budget": "0",
        "warmup": "none",
        # a guess may still be under way when a request ends
        "predict": "off",
    }
    moe |= {name: given.pop(name) for name in MoeSettings.__slots__ if name in given}
    settings: dict[str, Any] = {"kv_bytes": 2_000_000, "context": CONTEXT, "max_sequences": 8}
    return LLM(str(model), dtype="fp32", threads=1, moe=moe, **(settings | given))


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """What the model says with every expert in memory, one prompt at a time."""
    model = tiny_checkpoint("qwen3_moe")
    with opened(model, strategy="persistent", cache_capacity=LAYERS * EXPERTS) as llm:
        return [llm.generate(prompt, **GREEDY)[0].token_ids for prompt in PROMPTS]


def test_requests_pay_for_their_own_experts(moe: Path, answers: list[list[int]]) -> None:
    with opened(moe) as llm:
        done = llm.generate(list(PROMPTS), **GREEDY)
        assert [one.token_ids for one in done] == answers
        report = llm.moe_report()
        stats = llm._engine.stats()
    assert report is not None
    costs = [one.moe for one in done if one.moe is not None]
    assert len(costs) == 3 and all(cost.demands > 0 for cost in costs)
    together = reduce(add, costs)
    # bytes and seconds are shared out; an expert that two needed is a demand of both
    for name in ("moved_bytes", "read_bytes"):
        assert getattr(together, name) == pytest.approx(report["total"][name], abs=200)
    assert together.io_s == pytest.approx(report["total"]["io_s"], rel=0.05)
    assert together.demands >= report["demands"] > 0
    assert together.routing_s > 0
    assert stats["moe_device_misses"] == report["total"]["device_misses"]
    assert stats["moe_saved_bytes"] == report["memory_saved_bytes"] > 0


def test_one_request_alone_pays_for_everything(moe: Path) -> None:
    with opened(moe) as llm:
        [done] = llm.generate(PROMPTS[0], **GREEDY)
        report = llm.moe_report()
    assert done.moe is not None and report is not None
    assert done.moe.demands == report["demands"]
    assert done.moe.read_bytes == report["total"]["read_bytes"] > 0
    decoded = (GREEDY["max_tokens"] - 1) * LAYERS * TOP_K
    assert decoded < done.moe.demands <= decoded + LAYERS * EXPERTS


def test_first_token_comes_before_all_experts_are_read(moe: Path) -> None:
    with opened(moe, strategy="auto", cache_capacity=0, host_budget="") as llm:
        assert llm.info.experts is not None and llm.info.experts.count == LAYERS * EXPERTS
        stream = llm.stream(PROMPTS[1][:1], **GREEDY)
        next(stream)
        report = llm.moe_report()
        stream.close()
    assert report is not None
    assert 0 < report["tiers"]["host"]["misses"] <= LAYERS * TOP_K < LAYERS * EXPERTS


def test_a_budget_in_bytes_holds_the_context_first(moe: Path) -> None:
    slot = 3 * 48 * 64 * 4
    free = {"cache_capacity": 0, "kv_bytes": 0}
    with opened(moe, device_budget=str(KV_BYTES + 2 * slot), **free) as llm:
        assert llm.info.experts is not None and llm.info.experts.device_slots == 2
        assert llm.info.contexts["embedded"] == CONTEXT
        assert llm.info.kv_bytes == KV_BYTES
    with pytest.raises(ConfigError) as refused:
        opened(moe, device_budget=str(KV_BYTES + slot - 1), **free)
    assert refused.value.param == "device_budget"


@pytest.mark.parametrize("strategy", ["cpu_only", "lru", "hot_cached_static"])
@pytest.mark.parametrize("kv_bytes", [0, 250, 700])
def test_what_is_taken_unasked_fits_what_is_free(strategy: str, kv_bytes: int) -> None:
    sizes = ExpertSizes(total=1000, slot_bytes=10, expert_bytes=10_000)
    on_host = strategy != "lru"
    needs = TierNeeds(strategy != "cpu_only", on_host, 2000, 2000, kv_bytes)
    tiers = size_tiers(MoeSettings(strategy=strategy), sizes, needs)
    assert (tiers.device + tiers.host) * 10 + kv_bytes <= 2000
    assert tiers.host > 0


def test_a_prompt_walks_through_groups_as_a_whole(moe: Path, answers: list[list[int]]) -> None:
    options = GREEDY | {"max_tokens": 1}

    def standing(llm: LLM) -> tuple[float, float]:
        """Bytes moved and steps so far; what is under way is waited for."""
        runtime = llm._host.experts.runtime  # type: ignore[union-attr]
        runtime.check()  # type: ignore[union-attr]
        return runtime.report()["total"]["moved_bytes"], llm._engine.stats()["steps"]  # type: ignore[union-attr]

    def moved(llm: LLM, tokens: int) -> tuple[float, float]:
        before = standing(llm)
        # a first token of its own: nothing is found in the prefix cache
        llm.generate([tokens, *range(40, 40 + tokens - 1)], **options)
        after = standing(llm)
        return after[0] - before[0], after[1] - before[1]

    slots = LAYERS * EXPERTS // 2 + EXPERTS
    grouped = {"strategy": "layer_grouped:2", "cache_capacity": slots, "max_step_tokens": 16}
    with opened(moe, **grouped) as llm:
        first = moved(llm, 40)
        assert first[1] == 1
        again = [moved(llm, tokens) for tokens in (100, 60, 120, 20)]
        # the prompt's length does not matter: every group is loaded once
        assert len({size for size, _ in again}) == 1
        done = llm.generate(list(PROMPTS), **GREEDY)
        assert [one.token_ids for one in done] == answers
    with opened(moe, max_step_tokens=16) as llm:
        assert moved(llm, 40)[1] == 3


@pytest.mark.parametrize("strategy", ["static_pin", "adaptive"])
def test_updates_are_rounds_and_not_tokens(strategy: str, moe: Path) -> None:
    """Made between tokens, when it is time: each request is told those of its own life."""
    long = GREEDY | {"max_tokens": 100}
    with opened(moe, strategy=strategy, cache_capacity=6) as llm:
        llm.generate(PROMPTS[0], **(GREEDY | {"max_tokens": 1}))
        first = llm.moe_report()
        assert first is not None and first["dcu_calls"] == 0
        [done] = llm.generate(PROMPTS[0], **long)
        report, stats = llm.moe_report(), llm._engine.stats()
        assert done.moe is not None and report is not None
        assert 0 < report["dcu_calls"] <= 99 // MIN_INTERVAL + 1
        assert report["dcu_calls"] == stats["moe_updates"]
        assert report["swaps"] == stats["moe_swaps"]
        # what is done behind the last token is no request's
        assert report["dcu_calls"] - done.moe.updates in (0, 1)
        assert 0 < done.moe.swaps <= report["swaps"] - first["swaps"]
        # those that run together share them: every one has all of them
        both = llm.generate(list(PROMPTS[:2]), **long)
        made = llm.moe_report()["dcu_calls"] - report["dcu_calls"]  # type: ignore[index]
        assert all(made - one.moe.updates in (0, 1) for one in both if one.moe)


def test_every_long_request_with_many_misses_has_an_update(moe: Path) -> None:
    """Also after updates that found nothing: texts of one kind, then one that asks for others."""
    with opened(moe, strategy="adaptive", cache_capacity=8) as llm:
        seen = []
        for first in (40, 90, 140, 190, 40, 240):
            [one] = llm.generate([0, first, 41, 42, 43], **(GREEDY | {"max_tokens": 60}))
            assert one.moe is not None
            hits = one.moe.device_hits + one.moe.prefetch_hits
            seen.append((1 - hits / one.moe.demands, one.moe.updates))
    busy = [updates for misses, updates in seen if misses >= 0.4]
    assert busy and min(busy) >= 1, seen


def test_strategies_without_updates_make_none(moe: Path) -> None:
    with opened(moe) as llm:
        [done] = llm.generate(PROMPTS[0], **GREEDY)
        assert llm.moe_report()["dcu_calls"] == 0  # type: ignore[index]
    assert done.moe is not None and done.moe.updates == done.moe.swaps == 0


@pytest.mark.parametrize("given", [{}, {"strategy": "persistent", "cache_capacity": 24}])
def test_a_request_is_told_its_hits_by_layer(given: dict[str, Any], moe: Path) -> None:
    """Also where every expert lies in memory and nothing is decided (24 slots)."""
    with opened(moe, **given) as llm:
        done = llm.generate(list(PROMPTS), **GREEDY)
        report = llm.moe_report()
    assert report is not None
    for one in done:
        cost = one.moe
        assert cost is not None and [layer for layer, _, _ in cost.layers] == list(range(LAYERS))
        assert sum(demands for _, demands, _ in cost.layers) == cost.demands > 0
        assert sum(hits for *_, hits in cost.layers) == cost.device_hits + cost.prefetch_hits
    for layer, counted in report["layers"].items():
        met = counted["device_hits"] + counted["prefetch_hits"]
        assert sum(one.moe.layers[layer][2] for one in done if one.moe) >= met


def test_gauges_tell_what_counters_tell(moe: Path) -> None:
    """Also of what happened in the second since the runtime was last asked for its report."""
    with opened(moe, cache_capacity=12) as llm:
        for _ in range(3):
            llm.generate(list(PROMPTS), **GREEDY)
            stats = llm._engine.stats()
        report = llm.moe_report()
    assert report is not None
    hits = stats["moe_device_hits"] + stats["moe_prefetch_hits"]
    late = stats["moe_device_misses"] + stats["moe_host_runs"]
    assert stats["moe_fallback_rate"] == pytest.approx(late / (hits + late))
    assert stats["moe_fallback_rate"] == pytest.approx(report["fallback_rate"])
    assert stats["moe_device_evictions"] == report["tiers"]["device"]["evictions"] > 0
    rates = sorted(
        (one["device_hits"] + one["prefetch_hits"])
        / sum(one[f"device_{name}"] for name in ("hits", "misses"))
        for one in report["layers"].values()
    )
    assert stats["moe_lowest_hit_rate"] == pytest.approx(rates[0])
    assert stats["moe_highest_hit_rate"] == pytest.approx(rates[-1])


def test_a_heatmap_is_kept_and_found_again(moe: Path) -> None:
    path = moe / "heatmaps" / "tales.json"
    kept = {"warmup": "heatmap", "workload": "tales", "strategy": "static_pin"}
    with opened(moe, **kept) as llm:
        [done] = llm.generate(PROMPTS[0], **GREEDY)
        store = llm._host.experts.runtime.parts.store  # type: ignore[union-attr]
        assert not path.exists()
    fingerprint, geometry = store.fingerprint, store.geometry
    known = Heatmap.load(path, geometry, lineage=(fingerprint,), workload="tales")
    rows = len(PROMPTS[0]) + GREEDY["max_tokens"] - 1
    assert known.total() == rows * LAYERS * TOP_K
    with opened(moe, **kept) as llm:
        slots = llm._host.experts.runtime.parts.slots  # type: ignore[union-attr]
        hot = known.hottest(1)[0]
        assert slots.is_pinned(hot)
        assert llm.generate(PROMPTS[0], **GREEDY)[0].token_ids == done.token_ids
    again = Heatmap.load(path, geometry, lineage=(fingerprint,), workload="tales")
    assert again.total() == 2 * known.total()
    written = path.read_bytes()
    with opened(moe, **(kept | {"warmup": "none"})) as llm:
        llm.generate(PROMPTS[0], **GREEDY)
    assert path.read_bytes() == written


@pytest.mark.parametrize("strategy", ["hot_cached_static", "adaptive", "static_pin"])
def test_a_heatmap_is_told_and_seen_in_the_first_hits(
    strategy: str, moe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first tokens behind a start find more experts in slots than without it."""
    short = GREEDY | {"max_tokens": 8}
    given = {"strategy": strategy, "cache_capacity": 8, "host_budget": "100%"}

    def first_hits(warmup: str) -> float:
        with opened(moe, warmup=warmup, **given) as llm:
            [done] = llm.generate(PROMPTS[0], **short)
        assert done.moe is not None
        return done.moe.device_hits / done.moe.demands

    caplog.set_level("INFO", logger="coterie")
    with opened(moe, warmup="heatmap", **given) as llm:
        llm.generate(PROMPTS[0], **(GREEDY | {"max_tokens": 60}))
    assert "heatmap_loaded" not in caplog.messages
    unknown = first_hits("none")
    assert "heatmap_loaded" not in caplog.messages
    known = first_hits("heatmap")
    assert known > unknown + 0.05
    [told] = [one for one in caplog.records if one.message == "heatmap_loaded"]
    assert told.__dict__["reason"] == "workload default: the experts of 64 tokens"


def test_hybrid_is_paid_before_the_first_request(moe: Path) -> None:
    pinned = {"strategy": "static_pin", "cache_capacity": 6}
    with opened(moe, warmup="none", **pinned) as llm:
        assert llm._engine.stats()["moe_swaps"] == 0
    with opened(moe, warmup="hybrid", **pinned) as llm:
        stats = llm._engine.stats()
        assert 2 <= stats["generated_tokens"] <= 48 and stats["moe_device_misses"] > 0
        assert stats["moe_updates"] > 0 and stats["moe_swaps"] > 0
        # without a heatmap its pins come from the warm-up's own tokens, between them
        assert llm.moe_report()["swaps"] > 0  # type: ignore[index]
        assert stats["waiting"] == stats["running"] == 0
        llm._host.experts.runtime.check()  # type: ignore[union-attr]
    assert (moe / "heatmaps" / "default.json").exists()


def test_heatmap_files_are_saved_rarely_and_read_with_distrust(tmp_path: Path) -> None:
    now = [0.0]
    geometry = ExpertGeometry((0, 1), 4, 2)
    path = tmp_path / "heatmaps" / "w.json"

    def make(fingerprint: str = "f") -> HeatmapFile:
        return HeatmapFile(path, (fingerprint,), "w", lambda: now[0])

    file = make()
    assert file.load(geometry) is None and file.live is not None
    file.save()
    assert not path.exists(), "nothing was counted"
    file.live.add(0, [1, 2], [3, 4])
    file.save_if_due()
    assert not path.exists(), "too early"
    now[0] += SAVE_EVERY_S
    file.save_if_due()
    written = path.read_bytes()
    known = make().load(geometry)
    assert known is not None and known.count((0, 2)) == 4
    assert make("other weights").load(geometry) is None
    path.write_text('{"version": 1')
    assert make().load(geometry) is None
    path.write_bytes(written)
    assert make().load(ExpertGeometry((0,), 4, 2)) is None


def test_where_heatmaps_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    assert heatmap_path(folder, "f", "w") == folder / "heatmaps" / "w.json"
    gguf = folder / "a.gguf"
    gguf.touch()
    assert heatmap_path(gguf, "f", "w") == folder / "heatmaps" / "a" / "w.json"
    monkeypatch.setattr("coterie.workers.warmup.os.access", lambda path, mode: False)
    state = tmp_path / "home" / "state" / "heatmaps" / "f" / "w.json"
    assert heatmap_path(folder, "f", "w") == state


@pytest.fixture
def faulty(moe: Path) -> Iterator[tuple[LLM, list[int]]]:
    """Reads fail while the list holds a number above zero."""
    with opened(moe) as llm:
        host: Any = llm._host
        disk = host.experts.runtime.parts.store.disk
        pread, faults = disk.pread, [0]

        def broken(*given: Any) -> Any:
            if faults[0]:
                raise OSError(5, "Input/output error")
            return pread(*given)

        disk.pread = broken
        yield llm, faults


def test_a_broken_read_costs_one_request(
    faulty: tuple[LLM, list[int]], answers: list[list[int]]
) -> None:
    llm, faults = faulty
    faults[0] = 1
    with pytest.raises(WeightsError) as failure:
        llm.generate(PROMPTS[0], **GREEDY)
    assert "embedded" in failure.value.message and "/" not in failure.value.message
    faults[0] = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        [done] = llm.generate(prompt, **GREEDY)
        assert done.token_ids == answer
    llm._host.experts.runtime.check()  # type: ignore[union-attr]
    llm._engine.check()
    assert llm._engine.stats()["running"] == 0


def test_a_dense_model_takes_no_expert_settings() -> None:
    with pytest.raises(ConfigError, match="no routed experts") as refused:
        LLM(str(tiny_checkpoint("llama")), kv_bytes=2_000_000, moe={"device_budget": "25%"})
    assert refused.value.param == "device_budget"
    with pytest.raises(ConfigError, match="did you mean 'strategy'"):
        LLM(str(tiny_checkpoint("llama")), moe={"stratgy": "lru"})
    with pytest.raises(ConfigError, match="25%"):
        LLM(str(tiny_checkpoint("llama")), moe={"host_budget": "a lot"})


def test_settings_may_be_a_value(moe: Path, answers: list[list[int]]) -> None:
    settings = MoeSettings(strategy="lru", cache_capacity=3, host_budget="0", warmup="none")
    with LLM(str(moe), dtype="fp32", threads=1, kv_bytes=2_000_000, moe=settings) as llm:
        assert llm.generate(PROMPTS[0], **GREEDY)[0].token_ids == answers[0]
        report = llm.moe_report()
    assert report is not None and report["strategy"] == "lru"


@pytest.mark.parametrize("name", MoeSettings.__slots__)
def test_the_arguments_of_earlier_versions_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM("nowhere", **{name: getattr(MoeSettings(), name)})
    assert refused.value.message == f"LLM({name}=...) is now LLM(moe={{{name!r}: ...}})"


def test_an_argument_that_never_was_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no argument 'stratgy'"):
        LLM("nowhere", stratgy="lru")


def test_usages_add() -> None:
    one = MoeUsage(device_hits=1, device_misses=2, host_runs=1, read_bytes=5, stall_s=0.5)
    both = one + one
    assert (both.device_hits, both.read_bytes, both.stall_s) == (2, 10, 1.0)
    assert both.demands == 8 and one.fallback_rate == 0.75 and MoeUsage().fallback_rate == 0


@pytest.mark.parametrize("strategy", ["persistent", "layer_grouped:2", "lru", "adaptive"])
def test_no_step_needs_a_thread_that_the_system_may_refuse(
    strategy: str, moe: Path, answers: list[tuple[int, ...]]
) -> None:
    """A load that finds no thread would be waited for for ever."""
    before = threading.stack_size()
    with opened(moe, strategy=strategy, cache_capacity=12) as llm:
        # no thread with such a stack can start any more
        threading.stack_size(1 << 48)
        try:
            done = llm.generate(list(PROMPTS), **GREEDY)
        finally:
            threading.stack_size(before)
    assert [one.token_ids for one in done] == answers


def test_threads_that_cannot_start_are_a_typed_error() -> None:
    before = threading.stack_size()
    threading.stack_size(1 << 48)
    try:
        with pytest.raises(MemoryShortage, match="thread"):
            LoadWorkers(4)
    finally:
        threading.stack_size(before)
