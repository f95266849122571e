"""A few layers of a model with made-up experts, as the planner measures them for a GPU; here on the
CPU, with the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.moe.random_moe import Shape, write
from coterie.core.moe import MoeSettings
from coterie.models import plan_device
from coterie.models.plan_device import (
    SlicedCheckpoint,
    decode_steps,
    measure_device_path,
    slice_layers,
    slice_opener,
)
from coterie.models.plan_inputs import open_plan_inputs
from coterie.weights.checkpoint import open_checkpoint

SHAPE = Shape(3, 8, 2, 64, 32, 4, 2, 16, 320, 128, skew=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("moe"), SHAPE)


def test_a_path_is_measured_on_the_first_layers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_device, "MOST_LAYERS", 2)
    monkeypatch.setattr(plan_device, "_STEPS", 3)
    monkeypatch.setattr(plan_device, "_WARM", 1)
    monkeypatch.setattr(plan_device, "_CONTEXT", 16)
    given = open_plan_inputs(open_checkpoint(model), "auto", "cpu")
    assert given.spec.moe is not None and not given.reads_in_place
    try:
        opener = slice_opener(given.checkpoint, given.spec.moe, given.store, "auto", "cpu")
        few = opener(MoeSettings("cpu_only", host_budget="100%", predict="off"))
        assert few.spec.num_layers == 2
        seconds, missing = decode_steps(few, 2)
        # two streams use two experts each, of which none has a slot
        assert seconds > 0 and 2 <= missing <= 4
        few.close()
        path = measure_device_path(opener, 1e10, (4, 8))
    finally:
        given.store.close()
    assert path.kind == "bf16" and path.decode_layer.rows == (1, 8)
    assert path.prompt_layer.rows == (4, 8)
    assert min(*path.decode_layer.seconds, *path.prompt_layer.seconds, path.rest_s) > 0
    # half of the experts have slots, then none: at most two experts of one stream are missing
    assert path.missing.rows[0] <= 1 and 1 < path.missing.rows[-1] <= 8
    assert list(path.missing.seconds) == sorted(path.missing.seconds)


def test_a_slice_has_the_first_layers_and_all_that_is_in_none(model: Path) -> None:
    whole = open_checkpoint(model)
    part = SlicedCheckpoint(whole, 1)
    names = part.names()
    assert part.config["num_hidden_layers"] == 1 and whole.config["num_hidden_layers"] == 3
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(names)
    assert any(".layers.0." in name for name in names)
    assert not any(".layers.1." in name or ".layers.2." in name for name in names)
    name = "model.norm.weight"
    assert part.shape(name) == whole.shape(name) and part.extent(name) == whole.extent(name)
    assert (
        type(part.read(name)) is type(whole.read(name))
        and part.fingerprint() == whole.fingerprint()
    )


def test_large_experts_leave_room_for_fewer_layers() -> None:
    every = tuple(range(1, 40))
    assert slice_layers(every, 128, 9 << 20) == every[5] + 1
    assert slice_layers(every, 8, 352 << 20) == every[1] + 1
    assert slice_layers((0, 1, 2), 8, 1) == 3
    assert slice_layers((4,), 8, 1) == 5
