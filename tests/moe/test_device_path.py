"""Predictions for a CUDA device against cases worked out by hand, and against measured runs."""

from __future__ import annotations

import pytest

from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.device_path import (
    JOINT_S,
    DevicePath,
    missing_by_rates,
    missing_by_steps,
    streamed_s,
)

GB, LAYERS, EXPERTS, TOP_K, DISTINCT_OF_8 = 10**9, 48, 128, 8, 51.5
# Qwen3-30B-A3B's experts: 3 matrices of 2048 x 768
SIZES = {"bf16": 3 * 2048 * 768 * 2, "int4": 3 * 2048 * 768 * 20 // 32}
# one H200, as docs/performance.md has it: ms of a step with all experts on the device (1 and 8
# streams; a prompt of 8,192), of the head; GB/s of copies, and of link and CPU beside each other
STEPS = {"bf16": (1e3 / 461, 8e3 / 977), "int4": (1e3 / 553, 8e3 / 1608)}
PROMPTS = {"bf16": 8192 / 57.6, "int4": 8192 / 50.4}
HEAD_MS, COPIES = 0.15, 55.3
BESIDE = {"bf16": (44.0, 106.0), "int4": (34.0, 82.0)}


def h200(kind: str) -> DevicePath:
    def layer_s(ms: float) -> float:
        return (ms - HEAD_MS) / 1e3 / LAYERS

    link, cpu = (rate * GB for rate in BESIDE[kind])
    return DevicePath(
        kind=kind,
        record_bytes=SIZES[kind],
        copy_bytes_s=COPIES * GB,
        read_bytes_s=link,
        cpu_bytes_s=cpu,
        decode_layer=CostCurve((1, 8), tuple(map(layer_s, STEPS[kind]))),
        prompt_layer=CostCurve((8192,), (layer_s(PROMPTS[kind]),)),
        rest_s=HEAD_MS / 1e3,
        missing=missing_by_rates(SIZES[kind], link, cpu),
    )


@pytest.mark.parametrize(
    ("kind", "streams", "hits", "measured"),
    [
        ("bf16", 1, 1.0, 461),
        ("int4", 1, 1.0, 553),
        ("int4", 1, 0.32, 111.6),
        ("int4", 1, 0.57, 133.1),
        # no slots, but the last two layers of a prompt stay in its buffers
        ("int4", 1, 2 / LAYERS, 89.5),
        ("bf16", 1, 0.32, 44.7),
        # a device of 16 GB: hits follow from its limit and that of the row above
        ("bf16", 1, 0.26, 41.6),
        ("int4", 8, 0.32, 176.2),
    ],
)
def test_decode_runs_on_an_h200_are_predicted(
    kind: str, streams: int, hits: float, measured: float
) -> None:
    used = TOP_K if streams == 1 else DISTINCT_OF_8
    missing = [(1 - hits) * used] * LAYERS
    predicted = streams / h200(kind).decode_s(streams, missing, TOP_K)
    assert predicted == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "crossing_gb", "measured"),
    [
        ("bf16", 43.5, 10_271),
        ("int4", 13.6, 31_519),
        ("bf16", 50.3, 8_922),
        ("bf16", 0.0, 57_600),
        ("int4", 0.0, 50_400),
    ],
)
def test_prompts_on_an_h200_are_predicted(kind: str, crossing_gb: float, measured: float) -> None:
    path, nothing = h200(kind), [0.0] * LAYERS
    each = crossing_gb * GB / path.record_bytes / LAYERS
    predicted = 8192 / path.prompt_s(8192, [each] * LAYERS, nothing, TOP_K)
    assert predicted == pytest.approx(measured, rel=0.1)


def simple(**changes: object) -> DevicePath:
    """A record of 10 MB; copies 10, reads 5 and CPU 5 GB/s; layers of 1 ms, 2 ms of a prompt."""
    facts: dict[str, object] = {
        "kind": "bf16",
        "record_bytes": 10**7,
        "copy_bytes_s": 10e9,
        "read_bytes_s": 5e9,
        "cpu_bytes_s": 5e9,
        "decode_layer": CostCurve((1,), (1e-3,)),
        "prompt_layer": CostCurve((100,), (2e-3,)),
        "rest_s": 3e-3,
        "missing": CostCurve((1, 3), (2e-3, 4e-3)),
    }
    return DevicePath(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_step_is_its_layers_and_what_they_miss() -> None:
    path = simple()
    assert path.decode_s(1, [0, 0], 2) == pytest.approx(5e-3)
    # 2 ms for one expert, 1 ms for each more; between 0 and 1 in proportion
    assert path.decode_s(1, [1, 3], 2) == pytest.approx(11e-3)
    assert path.decode_s(1, [5, 0.5], 2) == pytest.approx(5e-3 + 6e-3 + 1e-3)
    # too many rows for the CPU: 10 MB at 5 GB/s each
    assert path.decode_s(200, [3, 0], 2) == pytest.approx(5e-3 + 6e-3)


def test_copies_beside_a_step_take_the_link_from_reads() -> None:
    path = simple()
    # 2 ms of copies; the CPU's part does not grow for a few steps
    assert path.decode_s(1, [1, 3], 2, copied_beside=2) == pytest.approx(13e-3)
    # a step that reads nothing hides them, unless they take longer than itself
    assert path.decode_s(1, [0, 0], 2, copied_beside=2) == pytest.approx(5e-3)
    assert path.decode_s(1, [0, 0], 2, copied_beside=20) == pytest.approx(20e-3)


@pytest.mark.parametrize(
    ("copies", "computes", "seconds"),
    [
        # nothing to copy; the first copy is waited for, then layers hide copies
        ([0, 0, 0], [2, 2, 2], 6),
        ([1, 1, 1], [2, 2, 2], 7),
        # copies are longer: all of them, and the last layer
        ([3, 3, 3], [1, 1, 1], 10),
        # the third copy needs the first layer's buffer, which is read until 11
        ([1, 1, 1], [10, 1, 1], 13),
    ],
)
def test_two_buffers_take_turns(copies: list[float], computes: list[float], seconds: float) -> None:
    assert streamed_s(copies, computes) == pytest.approx(seconds)


def test_missing_experts_follow_from_measured_steps() -> None:
    curve = missing_by_steps([(8.0, 5e-3), (4.0, 3e-3), (50.0, 47e-3)])
    assert [curve.at(n) for n in (1, 4, 6, 8, 29, 51)] == pytest.approx(
        [1.5e-3, 3e-3, 4e-3, 5e-3, 26e-3, 48e-3]
    )
    # a disturbed measurement: more of them took less time, or nothing at all
    odd = missing_by_steps([(4.0, 3e-3), (8.0, 2e-3)])
    assert odd.at(1) > 0 and odd.at(1) <= odd.at(4) <= odd.at(8)
    # one point alone
    alone = missing_by_steps([(8.0, 8e-3)])
    assert alone.at(8) == pytest.approx(8e-3) and alone.at(4) == pytest.approx(4e-3)
    assert missing_by_steps([(0.5, 1e-3)]).at(1) == 1e-3


def test_rates_alone_give_a_cost_too() -> None:
    curve = missing_by_rates(10**7, 5e9, 5e9)
    assert curve.at(4) == pytest.approx(JOINT_S + 4e-3)


def test_limits_are_those_of_the_wires() -> None:
    path = simple()
    # 30 MB over 15 GB/s, or 1 MB of weights at 100 MB/s
    assert path.decode_limit_s(3, 0, 1e12) == pytest.approx(2e-3)
    assert path.decode_limit_s(3, 1e6, 1e8) == pytest.approx(10e-3)
    assert path.prompt_limit_s(3, 0, 1e12) == pytest.approx(3e-3)


def test_a_faster_part_changes_only_what_it_does() -> None:
    path = simple()
    assert path.faster(device=2).decode_s(1, [0, 0], 2) == pytest.approx(2.5e-3)
    link = path.faster(link=2)
    assert link.missing.at(1) == pytest.approx(2e-3 / 1.5) and link.copy_bytes_s == 20e9
    assert link.decode_layer == path.decode_layer and link.cpu_bytes_s == path.cpu_bytes_s
