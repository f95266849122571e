"""The native decoder under patches: against the torch one, and against itself in other batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from coterie.core.errors import InternalError
from coterie.kernels import patched
from coterie.kernels.backend import make_linear
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.cpu import layers as cpu
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.decoder import DecoderShape
from coterie.kernels.patch import PARTS, Patch, PatchStack, Segment
from coterie.kernels.reference import layers as reference
from tests.helpers.kernels.kernel_inputs import (
    KINDS,
    cache_for,
    decoder_layers,
    paged_batch,
    rope_tables,
    weight,
)
from tests.helpers.kernels.patch_inputs import FIELDS, random_patch, random_stack

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

SMOLLM = DecoderShape(9, 3, 64, 576, 1536, 1e-5, 64**-0.5)
SMALL = DecoderShape(6, 2, 32, 96, 160, 1e-6, 0.17)
ODD = DecoderShape(4, 4, 80, 64, 96, 1e-5, 80**-0.5)
SPEC = [(700, 1), (0, 37), (1, 1), (90, 5), (33, 1), (12, 1)]
ALL_FIELDS = [
    fields for count in range(1, len(FIELDS) + 1) for fields in combinations(FIELDS, count)
]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def both(
    shape: DecoderShape, kind: str, patches: tuple[Segment, ...], spec: list[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Native, torch, and native without patches."""
    stacks = decoder_layers(shape, [kind] * 2, ("cpu", "reference"), extras=True)
    tables = rope_tables(1000, shape.head_dim)
    batch = paged_batch(spec)
    step = replace(batch, patches=patches)
    cache = cache_for(batch, shape.num_kv_heads, shape.head_dim, torch.float32)
    hidden = torch.randn(len(batch.positions), shape.hidden)
    decoder = cpu.NativeDecoder(shape, stacks["cpu"], *tables)
    mine, theirs, plain = ([cache.clone() for _ in range(2)] for _ in range(3))
    got = decoder.forward(hidden, mine, step)
    base = decoder.forward(hidden, plain, batch)
    want = reference.decoder(shape, stacks["reference"], *tables, hidden, theirs, step)
    for layer, other in zip(mine, theirs, strict=True):
        assert error(layer, other) < 1e-2
    return got, want, base


def limit_of(kind: str) -> float:
    library = native()
    if kind == "bf16" and library is not None and "amx" in library.isa:
        return 2e-2
    return 2e-5 if kind in ("fp32", "bf16") else 5e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [SMOLLM, SMALL, ODD])
def test_equals_reference(kind: str, shape: DecoderShape) -> None:
    """Segments of one row, of a prompt, over two sequences, with gaps before and between."""
    torch.manual_seed(31)
    stacks = [
        random_stack(shape, [0, 1], 16, torch.bfloat16, ("low_rank",)),
        random_stack(shape, [0, 1], 7),
        random_stack(shape, [1], 33, parts=("q", "o", "up", "down")),
    ]
    where = ((1, 38, stacks[0]), (38, 41, stacks[1]), (42, 44, stacks[2]), (44, 45, stacks[0]))
    got, want, base = both(shape, kind, tuple(Segment(*at) for at in where), SPEC)
    assert error(got, want) < limit_of(kind)
    assert torch.equal(got[[0, 45]], base[[0, 45]])
    assert (got[1:41] - base[1:41]).abs().amax(1).min() > 1e-2


@pytest.mark.parametrize("fields", ALL_FIELDS, ids="+".join)
def test_every_combination_of_fields(fields: tuple[str, ...]) -> None:
    torch.manual_seed(32)
    stacks = [
        random_stack(SMALL, [0, 1], rank, dtype, fields)
        for rank, dtype in ((1, torch.float32), (5, torch.bfloat16))
    ]
    where = ((0, 1, stacks[0]), (1, 30, stacks[1]), (39, 46, stacks[0]))
    got, want, base = both(SMALL, "fp32", tuple(Segment(*at) for at in where), SPEC)
    assert error(got, want) < limit_of("fp32")
    assert not torch.equal(got[0], base[0])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("field", FIELDS)
def test_every_part_alone(part: str, field: str) -> None:
    torch.manual_seed(33)
    stack = random_stack(SMALL, [1], 3, fields=(field,), parts=(part,))
    got, want, base = both(SMALL, "fp32", (Segment(1, 4, stack),), [(5, 4), (9, 1)])
    assert error(got, want) < limit_of("fp32")
    assert torch.equal(got[[0, 4]], base[[0, 4]])
    assert (got[1:4] - base[1:4]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 17, 64, 160])
def test_ranks(rank: int, dtype: torch.dtype) -> None:
    """Python-walked products take the same kernels; widths that no vector divides."""
    torch.manual_seed(34 + rank)
    stored = [weight("fp32", 103, 70), weight("fp32", 900, 70)]
    mine, theirs = (make_linear(stored, backend) for backend in ("cpu", "reference"))
    one = PatchStack("one", 0, {(0, "gate"): random_patch(70, 103, rank, dtype)})
    two = PatchStack(
        "two", 1, {(0, "up"): random_patch(70, 900, rank, dtype, ("low_rank", "shift"))}
    )
    patches = (Segment(1, 80, one), Segment(80, 81, two), Segment(83, 86, two))
    x, parts = torch.randn(90, 70), (("gate", 103), ("up", 900))
    got = patched.linear(mine, x, 0, parts, patches)
    assert error(got, patched.linear(theirs, x, 0, parts, patches)) < 3e-6
    for first, last, stack in patches:
        for row in range(first, last, 7):
            alone = patched.linear(mine, x[row : row + 1], 0, parts, (Segment(0, 1, stack),))
            assert torch.equal(alone[0], got[row])


def _generate(
    decoder: cpu.NativeDecoder,
    stack: PatchStack,
    x: Tensor,
    chunks: list[int],
    crowd: PatchStack | None,
) -> Tensor:
    """Rows of one sequence under `stack`, fed in chunks; between others' rows where there is a
    crowd."""
    kv = [torch.zeros(2, 9, SMALL.num_kv_heads, 16, SMALL.head_dim) for _ in KINDS]
    table = torch.tensor([[5, 2, 7, 1, 3], [8, 8, 8, 8, 8]], dtype=torch.int32)
    outputs, start = [], 0
    for count in chunks:
        here = torch.arange(start, start + count)
        slots = table[0, here // 16].long() * 16 + here % 16
        if crowd is None:
            batch = AttentionBatch(
                here,
                slots,
                torch.tensor([0, count], dtype=torch.int32),
                torch.tensor([start + count], dtype=torch.int32),
                table[:1],
                16,
                patches=(Segment(0, count, stack),),
            )
            outputs.append(decoder.forward(x[start : start + count], kv, batch))
        else:
            other, zeros = torch.randn(3, SMALL.hidden), torch.zeros(3, dtype=torch.int64)
            batch = AttentionBatch(
                torch.cat((zeros, here)),
                torch.cat((torch.tensor([128, 129, 130]), slots)),
                torch.tensor([0, 1, 2, 3, count + 3], dtype=torch.int32),
                torch.tensor([1, 1, 1, start + count], dtype=torch.int32),
                table[[1, 1, 1, 0]],
                16,
                patches=(Segment(1, 3, crowd), Segment(3, count + 3, stack)),
            )
            rows = torch.cat((other, x[start : start + count]))
            outputs.append(decoder.forward(rows, kv, batch)[3:])
        start += count
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_and_threads_do_not_change_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(35)
    layers = decoder_layers(SMALL, KINDS, ("cpu",), extras=True)["cpu"]
    decoder = cpu.NativeDecoder(SMALL, layers, *rope_tables(100, SMALL.head_dim))
    stack = random_stack(SMALL, range(4), 13, dtype)
    crowd = random_stack(SMALL, range(4), 6)
    x = torch.randn(70, SMALL.hidden)
    whole = _generate(decoder, stack, x, [70], None)
    for chunks in ([1] * 70, [33, 1, 1, 35], [7] * 10):
        assert torch.equal(_generate(decoder, stack, x, chunks, None), whole)
    assert torch.equal(_generate(decoder, stack, x, [9, 1, 60], crowd), whole)
    before = torch.get_num_threads()
    cpu.set_threads(1)
    try:
        assert torch.equal(_generate(decoder, stack, x, [2, 68], None), whole)
    finally:
        cpu.set_threads(before)


def test_layers_may_run_in_pieces() -> None:
    torch.manual_seed(36)
    layers = decoder_layers(SMALL, KINDS, ("cpu",))["cpu"]
    decoder = cpu.NativeDecoder(SMALL, layers, *rope_tables(100, SMALL.head_dim))
    stack = random_stack(SMALL, range(4), 4)
    batch = replace(paged_batch([(3, 2), (40, 1)]), patches=(Segment(1, 3, stack),))
    cache = cache_for(batch, SMALL.num_kv_heads, SMALL.head_dim, torch.bfloat16)
    hidden = torch.randn(3, SMALL.hidden)
    whole = decoder.forward(hidden, [cache.clone() for _ in KINDS], batch)
    kv = [cache.clone() for _ in KINDS]
    for first, last in ((0, 1), (1, 3), (3, None)):
        hidden = decoder.forward(hidden, kv, batch, first, last)
    assert torch.equal(hidden, whole)


@pytest.mark.parametrize(
    "patch,message",
    [
        (Patch(torch.zeros(4, 95), torch.zeros(4, 192)), r"\(4, 95\) .* where \(4, 96\)"),
        (Patch(torch.zeros(4, 96), torch.zeros(192, 4).T), "where"),
        (Patch(torch.zeros(4, 96), torch.zeros(4, 192).bfloat16()), "before"),
        (Patch(out_scale=torch.ones(192).double()), "fp32"),
    ],
)
def test_what_c_trusts_is_checked(patch: Patch, message: str) -> None:
    layers = decoder_layers(SMALL, ["fp32"], ("cpu",))["cpu"]
    decoder = cpu.NativeDecoder(SMALL, layers, *rope_tables(10, SMALL.head_dim))
    batch = paged_batch([(0, 1)])
    cache = cache_for(batch, SMALL.num_kv_heads, SMALL.head_dim, torch.float32)
    step = replace(batch, patches=(Segment(0, 1, PatchStack("bad", 0, {(0, "q"): patch})),))
    with pytest.raises(InternalError, match=message):
        decoder.forward(torch.zeros(1, SMALL.hidden), [cache], step)
    far = PatchStack("far", 0, {(1, "q"): random_patch(96, 192, 1)})
    with pytest.raises(InternalError, match="layer 1 of 1"):
        decoder.forward(
            torch.zeros(1, SMALL.hidden), [cache], replace(batch, patches=(Segment(0, 1, far),))
        )
