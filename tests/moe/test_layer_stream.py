"""Experts that are copied ahead of a prompt's step: each layer finds its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.kernels.device_record import UNIT_BYTES
from coterie.moe.runtime.layer_stream import LayerStream, buffer_slots
from coterie.moe.runtime.travel import MOST_ROWS, ExpertChances, LinkRates
from coterie.moe.store.base import ExpertGeometry

SLOT = 64


class _Bank:
    """Random records; a layer's are those of its experts, in order."""

    def __init__(self, geometry: ExpertGeometry, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._layers = {
            layer: torch.randint(
                0, 256, (len(geometry.present(layer)), SLOT), dtype=torch.uint8, generator=draw
            )
            for layer in geometry.layers
        }

    def layer(self, layer: int) -> Tensor:
        return self._layers[layer]


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_every_layer_finds_its_experts(layers: int, share: float) -> None:
    draw = np.random.default_rng(layers)
    numbers = tuple(range(3, 3 + 2 * layers, 2))
    geometry = ExpertGeometry(numbers, 7, 2, absent=frozenset({(numbers[0], 2), (numbers[-1], 0)}))
    bank, slots = _Bank(geometry, layers), 20
    # a record of some layers is smaller than its slot
    sizes = [SLOT - UNIT_BYTES * int(draw.integers(2)) for _ in numbers]
    arena = torch.zeros((slots + buffer_slots(geometry)) * SLOT, dtype=torch.uint8)
    stream = LayerStream(bank, geometry, sizes, arena, slots, SLOT)
    records = arena.view(-1, SLOT)
    total = 0
    for _ in range(3):
        on_device = draw.random((layers, 7)) < share
        expected = sum(
            sizes[row]
            for row, layer in enumerate(numbers)
            for expert in geometry.present(layer)
            if not on_device[row, expert]
        )
        assert stream.start(on_device) == expected
        assert not stream.held.any()
        total += expected
        for row, layer in enumerate(numbers):
            with stream.layer(row):
                _check(stream, records, bank.layer(layer), geometry, row, on_device, sizes[row])
        # the last layers stay
        for row in range(layers)[-2:]:
            source = bank.layer(numbers[row])
            _check(stream, records, source, geometry, row, ~stream.held, sizes[row])
        held = stream.held[-2:].sum()
        assert held == sum(
            not on_device[row, expert]
            for row in range(layers)[-2:]
            for expert in geometry.present(numbers[row])
        )
        assert not stream.held[:-2].any()
    assert stream.copied_bytes == total and stream.steps == 3
    assert not records[:slots].any()


def _check(
    stream: LayerStream,
    records: Tensor,
    source: Tensor,
    geometry: ExpertGeometry,
    row: int,
    skipped: np.ndarray,
    size: int,
) -> None:
    for rank, expert in enumerate(geometry.present(geometry.layers[row])):
        if not skipped[row, expert]:
            place = int(stream.places[row, expert]) * UNIT_BYTES // SLOT
            assert torch.equal(records[place][:size], source[rank][:size])


def test_a_step_that_failed_leaves_nothing_to_read() -> None:
    geometry = ExpertGeometry((0, 1, 2), 4, 1)
    arena = torch.zeros(buffer_slots(geometry) * SLOT, dtype=torch.uint8)
    stream = LayerStream(_Bank(geometry, 1), geometry, [SLOT] * 3, arena, 0, SLOT)
    none = np.zeros((3, 4), dtype=bool)
    stream.start(none)
    with pytest.raises(RuntimeError, match="no memory"), stream.layer(0):
        raise RuntimeError("no memory")
    assert not stream.held.any()
    stream.start(none)
    for row in range(3):
        with stream.layer(row):
            pass
    assert stream.held[1:].all() and not stream.held[0].any()


RATES = LinkRates(copy=54e9, read=51e9)


def test_few_rows_read_what_they_choose_and_many_take_whole_layers() -> None:
    chances = ExpertChances(4, 128, 8)
    shares = [chances.copied_ahead(rows, "bf16", RATES).mean() for rows in range(1, 200)]
    first = shares.index(1.0) + 1
    # nearly all experts are used from there on, and not before
    assert 30 < first < 60 and 1 - (1 - 8 / 128) ** first > 51 / 54
    assert set(shares[: first - 1]) == {0.0} and set(shares[first - 1 :]) == {1.0}


def test_what_is_seldom_chosen_is_not_copied() -> None:
    chances = ExpertChances(2, 16, 2)
    counts = np.zeros((2, 16), dtype=np.int64)
    counts[:, :2] = 100_000
    chances.observe(counts)
    wanted = np.zeros((2, 16), dtype=bool)
    wanted[:, :2] = True
    assert (chances.copied_ahead(8, "bf16", RATES) == wanted).all()
    # more rows than the kernels of few rows take
    assert chances.copied_ahead(MOST_ROWS * 8 + 1, "bf16", RATES).all()


def test_reads_follow_what_was_seen() -> None:
    """The expected number of reads against draws."""
    draw = np.random.default_rng(3)
    share = draw.random(32)
    share *= 4 / share.sum()
    chances = ExpertChances(1, 32, 4)
    rows = 50_000
    chances.observe((share * rows).astype(np.int64)[None])
    got = chances.reads(6, 16)[0]
    used = (draw.random((4000, 6, 32)) < share).any(axis=1).mean(axis=0)
    assert np.abs(got - used).max() < 0.05
