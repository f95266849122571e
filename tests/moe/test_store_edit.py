"""Pruned and edited stores: what is gone, what stays, and a new fingerprint each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry
from coterie.moe.store.edit import ExpertGroups, named_parts, prune, replace_expert
from coterie.moe.store.export import export
from coterie.moe.store.inspect import inspect, profile_reads, verify
from coterie.moe.store.packed import EXPERTS_FILE, open_packed, read_index
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import DenseWeight, convert, dense
from tests.helpers.moe import store_files


@pytest.fixture
def weights() -> store_files.Weights:
    return store_files.draw()


@pytest.fixture
def packed(tmp_path: Path, weights: store_files.Weights) -> Path:
    checkpoint = open_checkpoint(store_files.write(tmp_path / "m", store_files.singles(weights)))
    export(checkpoint, store_files.opened(checkpoint, "int8"), tmp_path / "p")
    return tmp_path / "p"


def counted(*used: dict[int, int]) -> Heatmap:
    counts = np.zeros((len(store_files.LAYERS), store_files.EXPERTS))
    for row, experts in enumerate(used):
        for expert, count in experts.items():
            counts[row, expert] = count
    return Heatmap(store_files.GEOMETRY, counts)


# layer 2 uses one expert; a token needs two
HEAT = ({0: 5, 3: 1, 4: 2}, {5: 9})


def test_prune_in_place(packed: Path, weights: store_files.Weights) -> None:
    before = open_packed(packed)
    size = (packed / EXPERTS_FILE).stat().st_size
    done = prune(packed, counted(*HEAT))
    assert done.dropped == {0: (1, 2, 5), 2: (1, 2, 3, 4)}
    assert done.spared == {0: (), 2: (0,)}
    assert done.freed_bytes == 7 * before.slot_bytes
    store = store_files.opened(packed)
    assert store.geometry.absent == {(0, 1), (0, 2), (0, 5), (2, 1), (2, 2), (2, 3), (2, 4)}
    assert store.expert_bytes == 5 * before.slot_bytes
    assert store.fingerprint == done.fingerprint != before.fingerprint
    assert before.fingerprint in store.lineage
    assert (packed / EXPERTS_FILE).stat().st_size == size
    store_files.expect(store, weights, "int8")
    with pytest.raises(WeightsError, match="pruned"):
        store_files.parts_of(store, (0, 1))
    # a running engine opened the store before: it goes on
    store_files.expect(before, weights, "int8")


def test_prune_into_a_compact_copy(
    packed: Path, tmp_path: Path, weights: store_files.Weights
) -> None:
    old = read_index(packed)
    done = prune(packed, counted(*HEAT), out=tmp_path / "q")
    assert read_index(packed) == old and done.path == tmp_path / "q"
    store = store_files.opened(tmp_path / "q")
    assert store.fingerprint == done.fingerprint and store.geometry.total == 5
    assert (tmp_path / "q" / EXPERTS_FILE).stat().st_size == store.expert_bytes
    store_files.expect(store, weights, "int8")
    # pruning again changes nothing, and says so
    again = prune(tmp_path / "q", counted(*HEAT))
    assert not any(again.dropped.values()) and again.fingerprint == store.fingerprint


def test_groups_keep_enough_for_any_choice_of_groups(packed: Path) -> None:
    """3 groups of 2, one of which is picked: both of each group must stay."""
    done = prune(packed, counted(*HEAT), ExpertGroups(3, 1))
    assert not any(done.dropped.values())
    done = prune(packed, counted(*HEAT), ExpertGroups(3, 2))
    assert done.dropped == {0: (1, 2, 5), 2: (1, 3, 4)}


def test_a_heatmap_that_says_nothing_prunes_nothing(packed: Path) -> None:
    old = read_index(packed)
    for heatmap in (
        counted(),
        Heatmap(ExpertGeometry((0, 1), store_files.EXPERTS, 2), np.ones((2, 6))),
    ):
        with pytest.raises(WeightsError, match="heatmap"):
            prune(packed, heatmap)
    assert read_index(packed) == old


def test_replace(packed: Path, weights: store_files.Weights) -> None:
    other = store_files.draw(seed=1)[2, 3]
    before = open_packed(packed)
    parts = named_parts(
        {f"{p}_proj.weight": DenseWeight(t) for p, t in other.items()}, before.layout(2)
    )
    edited = replace_expert(packed, (2, 3), parts)
    store = store_files.opened(packed)
    assert store.fingerprint == edited.fingerprint != before.fingerprint
    assert verify(store).faults == ()
    store_files.expect(store, {**weights, (2, 3): other}, "int8")
    store_files.expect(before, weights, "int8")
    # back again: the same experts, and still another history
    replace_expert(packed, (2, 3), weighed(weights[2, 3]))
    store_files.expect(store_files.opened(packed), weights, "int8")


def weighed(parts: dict[str, torch.Tensor]) -> dict[str, DenseWeight]:
    return {part: DenseWeight(tensor) for part, tensor in parts.items()}


def test_replace_takes_any_precision(packed: Path, weights: store_files.Weights) -> None:
    quantised = {
        part: convert(DenseWeight(t), "int4") for part, t in store_files.draw(seed=2)[0, 0].items()
    }
    replace_expert(packed, (0, 0), quantised)
    found = store_files.parts_of(open_packed(packed), (0, 0))
    for part, weight in quantised.items():
        wanted = dense(convert(DenseWeight(dense(weight)), "int8"))
        assert torch.equal(found[part], wanted)


def test_replace_refuses_what_does_not_fit(packed: Path, weights: store_files.Weights) -> None:
    old, size = read_index(packed), (packed / EXPERTS_FILE).stat().st_size
    good = weighed(weights[0, 0])
    bad = {
        "up for expert 1 of layer 0 is missing": {k: v for k, v in good.items() if k != "up"},
        r"gate for .* is \(64, 96\)": {**good, "gate": good["down"]},
    }
    for said, parts in bad.items():
        with pytest.raises(WeightsError, match=said):
            replace_expert(packed, (0, 1), parts)
    with pytest.raises(WeightsError, match="no expert 9"):
        replace_expert(packed, (0, 9), good)
    with pytest.raises(WeightsError, match="no gate among up"):
        named_parts({"up": good["up"]}, open_packed(packed).layout(0))
    assert read_index(packed) == old and (packed / EXPERTS_FILE).stat().st_size == size


def test_inspect_tells_norms_and_counts(packed: Path) -> None:
    store = open_packed(packed)
    keys = store.geometry.keys()
    found = list(inspect(store, keys, counted(*HEAT)))
    assert [facts.key for facts in found] == keys
    assert [facts.count for facts in found] == [5, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 9]
    for facts in found:
        wanted = store_files.parts_of(store, facts.key)
        assert facts.nbytes == store.slot_bytes
        assert facts.norms == {part: float(tensor.norm()) for part, tensor in wanted.items()}


def test_profile_reads_what_it_says(packed: Path) -> None:
    samples = profile_reads(lambda reads: store_files.opened(packed, reads=reads), 1 << 30, (1, 3))
    assert {sample.depth for sample in samples} == {1, 3}
    assert "buffered" in {sample.reads for sample in samples}
    for sample in samples:
        assert sample.experts == 12 and sample.nbytes == 12 * open_packed(packed).slot_bytes
        assert sample.bytes_s > 0 and sample.read_s > 0 and sample.checksum_s > 0
