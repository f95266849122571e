"""Latent attention in Triton against its torch twins, in Triton's interpreter, on fresh random
inputs."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, random_batch, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

# (query rows, context lengths)
BATCHES = {
    "decode": ([1, 1, 1], [1, 90, 33]),
    "prefill": ([5, 21], [5, 21]),
    "mixed": ([3, 1, 20], [3, 40, 50]),
}
# fp16 stands for every 16-bit type: the interpreter has no bf16
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
# sizes that are no powers of two, and more heads than a program has
SIZES = {"small": (3, 12, 8, 24, 20), "heads": (17, 16, 16, 16, 16)}
TWINS = ["attention/mixed/small/float32", "layer/decode/small/float32"]
# the interpreter is slow: `make test` runs those above
MORE = [
    f"{what}/{batch}/{size}/{dtype}"
    for what, batches in (("attention", tuple(BATCHES)), ("layer", ("decode",)))
    for batch in batches
    for size in SIZES
    for dtype in TOLERANCE
]
EXACT = ["same bits alone", "same bits early", "padding"]
CASES = [*TWINS, *EXACT]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", TWINS)
def test_equals_its_twin(errors: dict[str, float], case: str) -> None:
    assert errors[case] < TOLERANCE[case.rsplit("/", 1)[1]]


@pytest.mark.parametrize("case", EXACT)
def test_rows_do_not_depend_on_others(errors: dict[str, float], case: str) -> None:
    assert errors[case] == 0.0


@pytest.mark.full
def test_all_cases_equal_their_twins() -> None:
    found = interpreted(__file__, MORE)
    assert all(found[case] < TOLERANCE[case.rsplit("/", 1)[1]] for case in MORE)


def few_tokens_are_long() -> Any:
    """Splits of several tiles, more splits for long contexts, and merging in several parts."""
    from coterie.kernels.triton import latent_attention as latent

    return patch.multiple(latent, FEW=2, MOST=4, LONG=60, MERGED=2)


def early_in_the_interpreter() -> Any:
    """Kernels that start early run there as others do: one after the other."""
    from coterie.kernels.triton import latent_attention as latent

    if os.environ.get("TRITON_INTERPRET") != "1":
        return nullcontext()
    none: Any = {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
    return patch.multiple(latent, _launch=lambda dependent: {"PDL": dependent}, **none)


def drawn(size: tuple[int, ...], dtype: Any, generator: Any, std: float = 1.0) -> Any:
    return (torch.randn(size, generator=generator) * std).to(dtype)


def attention_error(batch_name: str, size: str, dtype: Any, generator: Any) -> float:
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton.latent_attention import latent_attention

    heads, nope, rope, rank, _ = SIZES[size]
    batch, blocks = random_batch(*BATCHES[batch_name], 16, generator)
    kv = drawn((1, blocks, 1, 16, rank + rope), dtype, generator)
    count, scale = len(batch.positions), (nope + rope) ** -0.5
    wide = drawn((count, heads, rank), dtype, generator)
    # a part of a wider tensor, as in a model
    turned = drawn((count, heads, nope + rope), dtype, generator)[..., nope:]
    got = latent_attention(wide, turned, kv, batch, scale)
    return relative(got, reference.latent_attention(wide, turned, kv, batch, scale))


class Layer:
    """Random inputs of one layer's attention."""

    def __init__(self, size: str, dtype: Any, generator: Any) -> None:
        from coterie.kernels.triton.latent_attention import LatentShape

        heads, nope, rope, rank, value = SIZES[size]
        self.shape = LatentShape(heads, nope, rope, rank, value, 1e-6, (nope + rope) ** -0.5)
        self.batch, self.blocks = random_batch(*BATCHES["decode"], 16, generator)
        split = heads * (nope + rope)
        count = len(self.batch.positions)
        self.rows = drawn((count, split + rank + rope), dtype, generator)
        self.split = split
        self.gain = 1 + drawn((rank,), dtype, generator, 0.2)
        self.key_up = drawn((heads, rank, nope), dtype, generator, nope**-0.5)
        self.value_up = drawn((heads, value, rank), dtype, generator, rank**-0.5)
        self.kv = drawn((1, self.blocks, 1, 16, rank + rope), dtype, generator)
        angles = torch.arange(128)[:, None] * 100 ** (-torch.arange(rope // 2) / (rope // 2))
        self.turn = angles.cos(), angles.sin()

    def run(self, batch: Any, rows: Any, kv: Any, kept: Any = None, early: bool = False) -> Any:
        """[T, heads * value]; writes the cache."""
        from coterie.kernels.triton.latent_attention import decode_latent, place_latent

        shape, count = self.shape, len(rows)
        q, low = rows[:, : self.split], rows[:, self.split :]
        wide = rows.new_empty((count, shape.heads, shape.rank))
        up = (self.key_up, wide)
        turn, options = self.turn, {"kept": kept, "up": up, "dependent": early}
        place_latent(shape, q, low, self.gain, turn, kv, batch, **options)
        turned = q.view(count, shape.heads, shape.head)[..., shape.nope :]
        out = rows.new_empty((count, shape.heads * shape.value))
        decode_latent(wide, turned, kv, batch, shape.attention_scale, out, self.value_up, early)
        return out


def layer_error(size: str, dtype: Any, generator: Any) -> float:
    """Values, cache and kept rows of decoding rows."""
    from coterie.kernels.triton import latent_attention as kernels

    layer = Layer(size, dtype, generator)
    shape, batch, want_kv = layer.shape, layer.batch, layer.kv.clone()
    q, low = layer.rows[:, : layer.split].float(), layer.rows[:, layer.split :]
    parts = layer.gain, layer.turn, want_kv, batch
    wide, turned = kernels.place_latent_torch(shape, q, low, *parts, layer.key_up.float())
    scale, value_up = shape.attention_scale, layer.value_up.float()
    want = kernels.decode_latent_torch(wide, turned, want_kv, batch, scale, value_up)
    kept = torch.empty_like(low)
    got = layer.run(batch, layer.rows.clone(), layer.kv, kept)
    own = want_kv.view(-1, shape.cached)[batch.slots]
    pairs = ((got, want), (layer.kv, want_kv), (kept, own))
    return max(relative(one, other) for one, other in pairs)


def same_bits_alone(generator: Any) -> float:
    """The row with the longest context, with others and by itself."""
    layer = Layer("small", torch.float32, generator)
    batch = layer.batch
    together = layer.run(batch, layer.rows.clone(), layer.kv.clone())
    own = slice(1, 2)
    alone = replace(
        batch,
        positions=batch.positions[own],
        slots=batch.slots[own],
        query_starts=torch.arange(2, dtype=torch.int32),
        context_lens=batch.context_lens[own],
        block_tables=batch.block_tables[own],
    )
    got = layer.run(alone, layer.rows[own].clone(), layer.kv.clone())
    return float((got != together[own]).sum())


def same_bits_early(generator: Any) -> float:
    """With kernels that start early, which request the cache before the new token is in it."""
    layer = Layer("small", torch.float32, generator)
    got, want = (
        layer.run(layer.batch, layer.rows.clone(), layer.kv.clone(), early=early)
        for early in (True, False)
    )
    return float((got != want).sum())


def padding(generator: Any) -> float:
    """A row without a slot and a context, as a captured step has: the cache stays as it is, and
    its result is finite."""
    from coterie.kernels.triton.latent_attention import write_latent

    layer = Layer("small", torch.float32, generator)
    batch = layer.batch
    slots, contexts = batch.slots.clone(), batch.context_lens.clone()
    slots[1], contexts[1] = -1, 0
    kv = layer.kv.clone()
    got = layer.run(replace(batch, slots=slots, context_lens=contexts), layer.rows.clone(), kv)
    kept = torch.zeros(layer.blocks * 16, dtype=torch.bool)
    kept[slots[slots >= 0]] = True
    width = layer.shape.cached
    changed = (kv != layer.kv).view(-1, width).any(1)
    again, rows = layer.kv.clone(), torch.randn((3, width), generator=generator)
    write_latent(rows, again, slots)
    written = (again != layer.kv).view(-1, width).any(1)
    same = torch.equal(again.view(-1, width)[slots[[0, 2]]], rows[[0, 2]])
    right = torch.equal(changed, kept) and torch.equal(written, kept) and same
    return float(not (right and bool(got.isfinite().all())))


def error_of(case: str, generator: Any) -> float:
    if case == "same bits early":
        with early_in_the_interpreter():
            return same_bits_early(generator)
    if case in EXACT:
        return same_bits_alone(generator) if case == "same bits alone" else padding(generator)
    what, batch, size, name = case.split("/")
    dtype = getattr(torch, name)
    if what == "attention":
        return attention_error(batch, size, dtype, generator)
    return layer_error(size, dtype, generator)


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors."""
    generator = torch.Generator()
    generator.seed()
    with few_tokens_are_long():
        return {case: error_of(case, generator) for case in cases}
