"""Attention over a KV cache that lies in one memory with experts: the same bits as over one of its
own, and no other byte is written. Triton kernels in their interpreter, native and plain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, random_batch

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)

CASES = ("paged", "decode", "whole", "place", "gather", "latent")
LAYERS, SIZE, DIM, KV_HEADS, HEADS = 3, 16, 16, 2, 4


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_with_a_cache_of_its_own(differences: dict[str, float], case: str) -> None:
    assert differences[case] == 0


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_without_triton(name: str) -> None:
    if name == "cpu":
        from coterie.kernels.cpu import layers as kernels
        from coterie.kernels.cpu.build import native

        if native() is None:
            pytest.skip("no compiler on this machine")
    else:
        from coterie.kernels.reference import layers as kernels  # type: ignore[no-redef]
    generator = torch.Generator().manual_seed(3)
    shared = SharedCaches([1, 7], [50, 30], 2, generator)
    q = torch.randn((8, HEADS, DIM), generator=generator)
    for own, view in zip(shared.own, shared.views, strict=True):
        want = kernels.paged_attention(q, own, shared.batch, 0.25)
        assert torch.equal(kernels.paged_attention(q, view, shared.shared_batch, 0.25), want)


class SharedCaches:
    """Caches of all layers twice: each of its own, and all in one memory."""

    def __init__(self, rows: list[int], contexts: list[int], planes: int, generator: Any) -> None:
        from coterie.moe.runtime.slabs import KvBlocks, plan_slabs

        self.batch, count = random_batch(rows, contexts, SIZE, generator)
        heads, dim = (KV_HEADS, DIM) if planes == 2 else (1, 24)
        cell = heads * SIZE * dim * 4
        kv = KvBlocks(cell, planes * LAYERS, SIZE, 2)
        # a slot is no multiple of a cell
        layout = plan_slabs(kv, 3 * cell + 48, 9 * count, 1, 0)
        assert layout.num_blocks >= count
        self.memory = torch.randint(0, 256, (layout.nbytes,), generator=generator).byte()
        self.views = layout.kv_views(self.memory, torch.float32, planes, (heads, SIZE, dim))
        cells = torch.from_numpy(layout.first_cells())
        # from own blocks and slabs alike
        self.cells = cells[torch.randperm(len(cells), generator=generator)[:count]].long()
        shape = (planes, count, heads, SIZE, dim)
        self.own = [torch.randn(shape, generator=generator) for _ in range(LAYERS)]
        for own, view in zip(self.own, self.views, strict=True):
            view[:, self.cells] = own
        self._before = self.memory.clone()
        slots, tables = self.batch.slots, self.batch.block_tables
        self.shared_batch = replace(
            self.batch,
            slots=self.cells[slots // SIZE] * SIZE + slots % SIZE,
            block_tables=self.cells[tables.long()].int(),
        )

    def differences(self) -> int:
        """Values that are not the same in both, and bytes of others that have changed."""
        wrong = sum(
            int((view[:, self.cells] != own).sum())
            for own, view in zip(self.own, self.views, strict=True)
        )
        for view in self.views:
            view[:, self.cells] = 0.0
        after, self.memory[:] = self.memory.clone(), self._before
        for view in self.views:
            view[:, self.cells] = 0.0
        return wrong + int((after != self.memory).sum())


def error_of(case: str, generator: Any) -> float:
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.triton import attention, prompt_attention
    from coterie.kernels.triton.decode_attention import AttentionScratch, decode_attention
    from coterie.kernels.triton.latent_attention import latent_attention, write_latent

    decodes = case in ("decode", "whole")
    rows, contexts = ([1, 1], [37, 20]) if decodes else ([5, 1], [37, 20])
    shared = SharedCaches(rows, contexts, 1 if case == "latent" else 2, generator)
    shape = DecoderShape(HEADS, KV_HEADS, DIM, 64, 64, 1e-6, DIM**-0.5)
    unused: Any = None
    layer = DecoderLayer(
        input_norm=unused, qkv=unused, o=unused, qkv_bias=None, q_norm=None, k_norm=None
    )
    angles = torch.arange(64)[:, None] * 10_000 ** (-torch.arange(DIM // 2) / (DIM // 2))
    turn, count = (angles.cos(), angles.sin()), sum(rows)
    q = torch.randn((count, HEADS, DIM), generator=generator)
    qkv = torch.randn((count, shape.q_size + 2 * shape.kv_size), generator=generator)
    latent = torch.randn((count, 24), generator=generator)
    wide, turned = (torch.randn((count, HEADS, n), generator=generator) for n in (16, 8))

    def run(kv: Any, batch: Any) -> Any:
        if case == "paged":
            return attention.paged_attention(q, kv, batch, 0.25)
        if case == "place":
            return prompt_attention.place_all_heads(shape, layer, qkv, turn, kv, batch)[0]
        if case == "gather":
            table = batch.block_tables[0]
            return prompt_attention.gather_tokens(kv, table, 37, 27, torch.float32)
        if case == "latent":
            write_latent(latent, kv, batch.slots)
            return latent_attention(wide, turned, kv, batch, 0.25)
        splits = 1 if case == "whole" else 2
        scratch = AttentionScratch.empty(2, shape, splits, torch.device("cpu"))
        out = torch.empty(2, shape.q_size)
        decode_attention(shape, layer, qkv, turn, kv, batch, scratch, splits, out)
        return out

    wrong = 0
    for own, view in zip(shared.own, shared.views, strict=True):
        want, got = run(own, shared.batch), run(view, shared.shared_batch)
        wrong += int((got != want).sum())
    return float(wrong + shared.differences())


def measure(cases: list[str]) -> dict[str, float]:
    """Values that differ."""
    generator = torch.Generator().manual_seed(11)
    return {case: error_of(case, generator) for case in cases}
