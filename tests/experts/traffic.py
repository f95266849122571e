"""Each strategy's own traffic, so that several names for one path cannot pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry, Key
from tests.experts.stage import NEW_TOKENS, PROMPTS, Setting, Stage
from tests.experts.tiny_moe import EXPERTS, LAYERS, TOP_K, checkpoint_of

TOTAL = LAYERS * EXPERTS
GEOMETRY = ExpertGeometry(tuple(range(LAYERS)), EXPERTS, TOP_K)


def stage_of(
    strategy: str, capacity: int, device: str, heatmap: Heatmap | None = None, host: str = "100%"
) -> Stage:
    path = checkpoint_of("qwen3_moe")
    setting = Setting(path, strategy, capacity, host, "fp32", device, predict="off")
    stage = Stage(setting, heatmap)
    stage.runtime.trace = Trace(stage.runtime.geometry)
    return stage


def moved(stage: Stage) -> int:
    """Experts moved to the device since start."""
    stage.runtime.check()
    size = stage.runtime.parts.store.layout(0).nbytes
    total = stage.runtime.report()["total"]
    assert total["moved_bytes"] % size == 0
    return int(total["moved_bytes"] // size)


def demanded(stage: Stage, phase: str | None = None) -> list[Key]:
    """Every demand of the recorded steps, in the order they ran."""
    trace = stage.runtime.trace
    assert trace is not None
    return [
        (visit.demand.layer, expert)
        for step in trace.steps
        for _, visit in step.visits()
        for expert in visit.demand.experts
        if phase in (None, visit.demand.phase)
    ]


def steps(chunk: int) -> int:
    return -(-len(PROMPTS[0]) // chunk) + NEW_TOKENS - 1


def skewed() -> Heatmap:
    """Layer 0 asks for two experts only, layer 1 for four, layer 2 for all alike (and most)."""
    heat = Heatmap(GEOMETRY)
    heat.add(0, [6, 7], [30, 20])
    heat.add(1, [1, 3, 4, 5], [25, 15, 15, 25])
    heat.add(2, range(EXPERTS), [50 + e for e in range(EXPERTS)])
    return heat


def invariants(strategy: str, device: str) -> str:
    """Demands add up, bytes follow counts, and reads are what the disk was asked for."""
    with stage_of(strategy, 5, device, skewed(), host="13%") as stage:
        stage.generate(PROMPTS, 16)
        asked = len(demanded(stage))
        stage.runtime.check()
        total = stage.runtime.report()["total"]
        met = sum(total[k] for k in ("device_hits", "prefetch_hits", "device_misses", "host_runs"))
        size = stage.runtime.parts.store.layout(0).nbytes
        assert met == asked, f"{met} demands met of {asked}"
        assert total["moved_bytes"] >= total["device_misses"] * size
        looked = total["host_hits"] + total["host_misses"]
        assert looked == total["moved_bytes"] // size + total["host_runs"]
        assert total["read_bytes"] == stage.disk.read_bytes, "a read was not counted"
        layers = stage.runtime.report()["layers"].values()
        assert sum(layer["device_misses"] for layer in layers) == total["device_misses"]
    return f"{asked} demands, {total['moved_bytes'] // size} moves, {total['host_misses']} reads"


def cpu_only_moves_nothing(device: str) -> str:
    with stage_of("cpu_only", 0, device) as stage:
        stage.generate(PROMPTS[:1], 16)
        assert moved(stage) == 0
        assert stage.runtime.report()["total"]["host_runs"] == len(demanded(stage))
    return "0 moves"


def second_copies(stage: Stage) -> int:
    """Bytes in RAM beside the slots' own; slots that share the host's memory have none."""
    parts = stage.runtime.parts
    return 0 if parts.device.shared else parts.host.used_bytes


def persistent_moves_nothing_after_load(device: str) -> str:
    with stage_of("persistent", TOTAL, device) as stage:
        assert moved(stage) == TOTAL
        read = stage.disk.read_bytes
        stage.generate(PROMPTS[:1], 16)
        assert moved(stage) == TOTAL
        assert stage.disk.read_bytes == read
        assert second_copies(stage) == 0, "a second copy in RAM"
    return f"{TOTAL} moves at load, 0 after"


def hot_cached_static_moves_between_tokens_only(device: str) -> str:
    with stage_of("hot_cached_static", 10, device, skewed()) as stage:
        assert moved(stage) == 10
        assert set(stage.runtime.parts.device.keys()) == set(skewed().hottest(10))
        stage.generate(PROMPTS[:1], 16)
        assert moved(stage) == 10 + stage.runtime.swaps
        total = stage.runtime.report()["total"]
        assert total["device_misses"] == 0
        assert total["device_hits"] > 0
        assert total["host_runs"] > 0
    return "10 moves at load, then swaps between tokens"


def chunked_moves_all_per_layer_and_chunk(device: str) -> str:
    for capacity in (1, 3, EXPERTS):
        with stage_of("chunked", capacity, device) as stage:
            stage.generate(PROMPTS[:1], 16)
            assert moved(stage) == TOTAL * steps(16), f"{moved(stage)} at capacity {capacity}"
    return f"{TOTAL} moves x {steps(16)} steps at capacities 1, 3, {EXPERTS}"


def active_only_moves_unique_misses(device: str) -> str:
    with stage_of("active_only", TOTAL, device) as stage:
        stage.generate(PROMPTS[:1], 16)
        unique = len(set(demanded(stage)))
        assert moved(stage) == unique < len(demanded(stage))
    with stage_of("active_only", 4, device) as stage:
        stage.generate(PROMPTS[:1], 16)
        total = stage.runtime.report()["total"]
        assert moved(stage) == total["device_misses"]
        assert unique < total["device_misses"] <= len(demanded(stage))
    return f"{unique} moves with room for all, misses only without"


def layer_grouped_loads_whole_groups_once(device: str) -> str:
    counts = set()
    for groups, capacity in ((2, 2 * EXPERTS), (3, EXPERTS)):
        for length in (9, 26):
            with stage_of(f"layer_grouped:{groups}", capacity, device) as stage:
                stage.generate([PROMPTS[0][:length]], 4)
                decoded = stage.runtime.report()["total"]["device_misses"]
                counts.add(moved(stage) - decoded)
    assert counts == {TOTAL}, f"moved {sorted(counts)} by groups"
    return f"{TOTAL} moves for 9 and for 26 tokens"


def lru_evicts_least_recent_of_all_layers(device: str) -> str:
    capacity = 10
    with stage_of("lru", capacity, device) as stage:
        stage.generate(PROMPTS[:1], 4)
        held: OrderedDict[Key, None] = OrderedDict()
        misses = 0
        trace = stage.runtime.trace
        assert trace is not None
        for step in trace.steps:
            for _, visit in step.visits():
                keys = [(visit.demand.layer, e) for e in visit.demand.experts]
                for key in sorted(keys, key=lambda k: k not in held):
                    misses += key not in held
                    held[key] = None
                    held.move_to_end(key)
                    if len(held) > capacity:
                        held.popitem(last=False)
        assert moved(stage) == misses, f"{moved(stage)} moves, an LRU of {capacity} has {misses}"
    return f"{misses} moves, as an LRU of {capacity} has"


def pins_follow_the_heatmap(device: str) -> str:
    pinned = {}
    for strategy in ("static_pin", "weighted_pin"):
        with stage_of(strategy, 12, device, skewed()) as stage:
            pinned[strategy] = stage.runtime.parts.slots.pinned()
            assert pinned[strategy], f"{strategy} pinned nothing"
            assert moved(stage) == len(pinned[strategy])
            assert second_copies(stage) == 0, "a second copy of what is pinned"
    static = pinned["static_pin"]
    assert static == frozenset(skewed().hottest(len(static)))
    assert pinned["weighted_pin"] != static
    even, weighted = (
        [sum(key[0] == layer for key in pinned[name]) for layer in range(LAYERS)]
        for name in ("static_pin", "weighted_pin")
    )
    assert weighted[0] > even[0], "the most skewed layer gets more"
    return f"pins per layer {even}, weighted {weighted}"


CHECKS: dict[str, Callable[[str], str]] = {
    check.__name__: check
    for check in (
        cpu_only_moves_nothing,
        persistent_moves_nothing_after_load,
        hot_cached_static_moves_between_tokens_only,
        chunked_moves_all_per_layer_and_chunk,
        active_only_moves_unique_misses,
        layer_grouped_loads_whole_groups_once,
        lru_evicts_least_recent_of_all_layers,
        pins_follow_the_heatmap,
    )
}
