"""Slots follow the traffic while a model decodes, and in warm-up; counts are kept, added up and
inherited."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from coterie import LLM
from coterie.cli.main import main
from coterie.moe.dispatch.base import ExpertCosts
from coterie.moe.planner.simulate import ReplaySetup, replay
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry
from coterie.workers.warmup import HeatmapFile
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.moe.routing_traces import make

GEOMETRY = ExpertGeometry(tuple(range(6)), 16, 2)
SLOTS = 24
# seconds of upload, a run from a slot, a run on the host, a read
PLACES = {
    "all in RAM": ExpertCosts(0.0, 1e-3, 1e-3),
    "accelerator": ExpertCosts(2e-3, 1e-4, 1e-3),
    "disk": ExpertCosts(2e-3, 1e-3, 1e-3, 5e-3),
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize("costs", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("text", ["hot_cached_static", "adaptive"])
@pytest.mark.parametrize("known", [False, True], ids=["no heatmap", "another workload's"])
def test_skewed_traffic_changes_who_is_in(text: str, costs: ExpertCosts, known: bool) -> None:
    """Whoever was in at first makes way, and hits come near those of a heatmap of this traffic."""
    trace = make("skewed", GEOMETRY, 300, prompts=75)
    other = make("skewed", GEOMETRY, 50, seed=9).heatmap() if known else None
    told = replay(text, trace, ReplaySetup(SLOTS, heatmap=trace.heatmap(), costs=costs)).total
    live = replay(text, trace, ReplaySetup(SLOTS, heatmap=other, costs=costs))
    assert live.total.moves + live.update_moves > 0
    hits = live.total.hits + live.total.prefetch_hits
    assert hits / live.total.demands > told.hit_rate - 0.12


@pytest.mark.parametrize("text", ["hot_cached_static", "adaptive"])
def test_even_traffic_moves_little(text: str) -> None:
    trace = make("uniform", GEOMETRY, 300)
    stage = ReplaySetup(SLOTS, heatmap=trace.heatmap(), costs=PLACES["all in RAM"])
    assert replay(text, trace, stage).update_moves < 0.02 * 300 * 6 * 2


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "moe"))


def opened(model: Path, **given: Any) -> LLM:
    moe: dict[str, Any] = {"cache_capacity": 6, "host_budget": "100%"}
    settings: dict[str, Any] = {"kv_bytes": 2_000_000, "context": 128, "max_sequences": 4}
    return LLM(str(model), dtype="fp32", threads=1, moe=moe | given, **settings)


def report_of(llm: LLM) -> dict[str, Any]:
    told = llm.moe_report()
    assert told is not None
    return told


@pytest.mark.parametrize("strategy", ["hot_cached_static", "adaptive"])
def test_the_engine_swaps_while_it_decodes_and_in_warm_up(moe: Path, strategy: str) -> None:
    with opened(moe, strategy=strategy, warmup="none") as llm:
        [plain] = llm.generate([0, 40, 41, 42, 43], **GREEDY)
        assert report_of(llm)["swaps"] > 0
    with opened(moe, strategy=strategy, warmup="hybrid") as llm:
        assert report_of(llm)["swaps"] > 0, "before the first request"
        assert llm.generate([0, 40, 41, 42, 43], **GREEDY)[0].token_ids == plain.token_ids
        llm._host.experts.runtime.check()  # type: ignore[union-attr]
    with opened(moe, strategy=strategy, warmup="none", deterministic=True) as llm:
        assert llm.generate([0, 40, 41, 42, 43], **GREEDY)[0].token_ids == plain.token_ids


def test_a_miss_that_leads_a_member_counts_as_a_swap(moe: Path) -> None:
    with opened(moe, strategy="adaptive", warmup="none", host_budget="0") as llm:
        # no token is behind another, between which experts are exchanged: misses made these
        for first in range(3):
            llm.generate([first, 40, 41, 42, 43], **(GREEDY | {"max_tokens": 1}))
        told = report_of(llm)
        assert told["dcu_calls"] == 0 and told["swaps"] > 0


def test_guesses_that_nobody_takes_are_told(moe: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(moe, strategy="lru", predict="prefetch", warmup="none") as llm:
        told = report_of(llm)["prediction"]
    assert not told["protecting"] and not told["prefetching"]
    assert "lru takes no guesses" in told["why_off"]
    assert "predict is prefetch and has no effect" in caplog.text


def test_two_engines_add_up_in_one_heatmap(tmp_path: Path) -> None:
    path = tmp_path / "w.json"

    def opened() -> tuple[HeatmapFile, Heatmap]:
        file = HeatmapFile(path, ("f",), "w")
        file.load(GEOMETRY)
        assert file.live is not None
        return file, file.live

    (first, mine), (second, theirs) = opened(), opened()
    mine.add(0, [1], [3])
    theirs.add(0, [1, 2], [4, 5])
    first.save()
    second.save()
    mine.add(0, [7], [1])
    first.save()
    first.save()
    known = opened()[1]
    assert [known.count((0, e)) for e in (1, 2, 7)] == [7, 5, 1]
    assert mine.count((0, 2)) == 5, "what others counted is known here too"


def test_a_store_inherits_the_counts_of_what_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    path = tmp_path / "w.json"
    parent = HeatmapFile(path, ("model",), "w")
    parent.load(GEOMETRY)
    assert parent.live is not None
    parent.live.add(0, [1, 2], [3, 4])
    parent.save()
    pruned = ExpertGeometry(GEOMETRY.layers, 16, 2, frozenset({(0, 2)}))
    found = HeatmapFile(path, ("model", "packed", "pruned"), "w").load(pruned)
    assert found is not None
    assert [found.count((0, e)) for e in (1, 2)] == [3, 0]
    assert HeatmapFile(path, ("other",), "w").load(GEOMETRY) is None
    # nothing beside the store: the state folder has what its model counted
    state = tmp_path / "home" / "state" / "heatmaps" / "model" / "w.json"
    state.parent.mkdir(parents=True)
    path.rename(state)
    again = HeatmapFile(path, ("model", "packed"), "w").load(GEOMETRY)
    assert again is not None and again.count((0, 2)) == 4


def test_an_exported_and_a_pruned_store_start_with_their_models_counts(
    moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(moe, strategy="static_pin", warmup="heatmap") as llm:
        llm.generate([0, 40, 41, 42, 43], **GREEDY)
    packed, compact = tmp_path / "packed", tmp_path / "compact"
    assert main(["store", "export", str(moe), str(packed)]) == 0
    counts = packed / "heatmaps" / "default.json"
    prune = ["store", "prune", str(packed), "--heatmap", str(counts)]
    assert main([*prune, "--out", str(compact)]) == 0
    assert main(prune) == 0
    for store in (packed, compact):
        with opened(store, strategy="static_pin", warmup="heatmap") as llm:
            host: Any = llm._host
            runtime = host.experts.runtime
            assert runtime.heatmap.total() > 0
            assert runtime.parts.slots.pinned()
