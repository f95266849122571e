"""Each strategy's own traffic, so that several names for one path cannot pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry, Key
from tests.helpers.moe.dispatched_model import NEW_TOKENS, PROMPTS, DispatchedModel, Setting
from tests.helpers.moe.tiny_moe import EXPERTS, LAYERS, TOP_K, checkpoint_of

TOTAL = LAYERS * EXPERTS
GEOMETRY = ExpertGeometry(tuple(range(LAYERS)), EXPERTS, TOP_K)


def dispatched_model(
    strategy: str, capacity: int, device: str, heatmap: Heatmap | None = None, host: str = "100%"
) -> DispatchedModel:
    path = checkpoint_of("qwen3_moe")
    setting = Setting(path, strategy, capacity, host, "fp32", device, predict="off")
    dispatched = DispatchedModel(setting, heatmap)
    dispatched.runtime.trace = Trace(dispatched.runtime.geometry)
    return dispatched


def moved(dispatched: DispatchedModel) -> int:
    """Experts moved to the device since start."""
    dispatched.runtime.check()
    size = dispatched.runtime.parts.store.layout(0).nbytes
    total = dispatched.runtime.report()["total"]
    assert total["moved_bytes"] % size == 0
    return int(total["moved_bytes"] // size)


def demanded(dispatched: DispatchedModel, phase: str | None = None) -> list[Key]:
    """Every demand of the recorded steps, in the order they ran."""
    trace = dispatched.runtime.trace
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
    with dispatched_model(strategy, 5, device, skewed(), host="13%") as dispatched:
        dispatched.generate(PROMPTS, 16)
        asked = len(demanded(dispatched))
        dispatched.runtime.check()
        total = dispatched.runtime.report()["total"]
        met = sum(total[k] for k in ("device_hits", "prefetch_hits", "device_misses", "host_runs"))
        size = dispatched.runtime.parts.store.layout(0).nbytes
        assert met == asked, f"{met} demands met of {asked}"
        assert total["moved_bytes"] >= total["device_misses"] * size
        looked = total["host_hits"] + total["host_misses"]
        assert looked == total["moved_bytes"] // size + total["host_runs"]
        assert total["read_bytes"] == dispatched.disk.read_bytes, "a read was not counted"
        layers = dispatched.runtime.report()["layers"].values()
        assert sum(layer["device_misses"] for layer in layers) == total["device_misses"]
    return f"{asked} demands, {total['moved_bytes'] // size} moves, {total['host_misses']} reads"


def cpu_only_moves_nothing(device: str) -> str:
    with dispatched_model("cpu_only", 0, device) as dispatched:
        dispatched.generate(PROMPTS[:1], 16)
        assert moved(dispatched) == 0
        assert dispatched.runtime.report()["total"]["host_runs"] == len(demanded(dispatched))
    return "0 moves"


def second_copies(dispatched: DispatchedModel) -> int:
    """Bytes in RAM beside the slots' own; slots that share the host's memory have none."""
    parts = dispatched.runtime.parts
    return 0 if parts.device.shared else parts.host.used_bytes


def persistent_moves_nothing_after_load(device: str) -> str:
    with dispatched_model("persistent", TOTAL, device) as dispatched:
        assert moved(dispatched) == TOTAL
        read = dispatched.disk.read_bytes
        dispatched.generate(PROMPTS[:1], 16)
        assert moved(dispatched) == TOTAL
        assert dispatched.disk.read_bytes == read
        assert second_copies(dispatched) == 0, "a second copy in RAM"
    return f"{TOTAL} moves at load, 0 after"


def hot_cached_static_moves_between_tokens_only(device: str) -> str:
    with dispatched_model("hot_cached_static", 10, device, skewed()) as dispatched:
        assert moved(dispatched) == 10
        assert set(dispatched.runtime.parts.device.keys()) == set(skewed().hottest(10))
        dispatched.generate(PROMPTS[:1], 16)
        assert moved(dispatched) == 10 + dispatched.runtime.swaps
        total = dispatched.runtime.report()["total"]
        assert total["device_misses"] == 0
        assert total["device_hits"] > 0
        assert total["host_runs"] > 0
    return "10 moves at load, then swaps between tokens"


def chunked_moves_all_per_layer_and_chunk(device: str) -> str:
    for capacity in (1, 3, EXPERTS):
        with dispatched_model("chunked", capacity, device) as dispatched:
            dispatched.generate(PROMPTS[:1], 16)
            assert moved(dispatched) == TOTAL * steps(16), (
                f"{moved(dispatched)} at capacity {capacity}"
            )
    return f"{TOTAL} moves x {steps(16)} steps at capacities 1, 3, {EXPERTS}"


def active_only_moves_unique_misses(device: str) -> str:
    with dispatched_model("active_only", TOTAL, device) as dispatched:
        dispatched.generate(PROMPTS[:1], 16)
        unique = len(set(demanded(dispatched)))
        assert moved(dispatched) == unique < len(demanded(dispatched))
    with dispatched_model("active_only", 4, device) as dispatched:
        dispatched.generate(PROMPTS[:1], 16)
        total = dispatched.runtime.report()["total"]
        assert moved(dispatched) == total["device_misses"]
        assert unique < total["device_misses"] <= len(demanded(dispatched))
    return f"{unique} moves with room for all, misses only without"


def layer_grouped_loads_whole_groups_once(device: str) -> str:
    counts = set()
    for groups, capacity in ((2, 2 * EXPERTS), (3, EXPERTS)):
        for length in (9, 26):
            with dispatched_model(f"layer_grouped:{groups}", capacity, device) as dispatched:
                dispatched.generate([PROMPTS[0][:length]], 4)
                decoded = dispatched.runtime.report()["total"]["device_misses"]
                counts.add(moved(dispatched) - decoded)
    assert counts == {TOTAL}, f"moved {sorted(counts)} by groups"
    return f"{TOTAL} moves for 9 and for 26 tokens"


def lru_evicts_least_recent_of_all_layers(device: str) -> str:
    capacity = 10
    with dispatched_model("lru", capacity, device) as dispatched:
        dispatched.generate(PROMPTS[:1], 4)
        held: OrderedDict[Key, None] = OrderedDict()
        misses = 0
        trace = dispatched.runtime.trace
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
        assert moved(dispatched) == misses, (
            f"{moved(dispatched)} moves, an LRU of {capacity} has {misses}"
        )
    return f"{misses} moves, as an LRU of {capacity} has"


def pins_follow_the_heatmap(device: str) -> str:
    pinned = {}
    for strategy in ("static_pin", "weighted_pin"):
        with dispatched_model(strategy, 12, device, skewed()) as dispatched:
            pinned[strategy] = dispatched.runtime.parts.slots.pinned()
            assert pinned[strategy], f"{strategy} pinned nothing"
            assert moved(dispatched) == len(pinned[strategy])
            assert second_copies(dispatched) == 0, "a second copy of what is pinned"
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
