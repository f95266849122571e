"""The Triton decoder under patches against its torch twin, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, random_batch, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

FIELDS = {
    "lora": ("low_rank",),
    "dora": ("low_rank", "out_scale", "shift"),
    # in_scale in front of a fused product: left to torch
    "all": ("low_rank", "in_scale", "out_scale", "shift"),
}
# kind, rank and type of one of two stacks; "large" is over what the row kernels take, "olmoe" has
# norms that only torch computes: both are mixed with what they do take
CASES = ["dora/3/bfloat16"]
MORE = ["all/1/float32", "lora/16/bfloat16", "olmoe/8/float32", "dora/17/float32", "ia3/4/float32"]
MORE += ["large/300/float32", "deep/20/bfloat16", "deep/250/bfloat16"]
MORE += ["dora/33/bfloat16", "ia3/40/bfloat16"]
# rows so long that a program has 8 ranks at a time
MORE += ["long/16/bfloat16"]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_patched_decoder_matches_reference(errors: dict[str, float], case: str) -> None:
    assert errors[case] < 1e-5


@pytest.mark.full
def test_long_cases_match_reference() -> None:
    found = interpreted(__file__, MORE)
    assert max(found[case] for case in MORE) < 1e-5


def test_rows_without_patches_keep_their_bits(errors: dict[str, float]) -> None:
    assert errors["plain rows"] == 0.0


def test_captured_rows_equal_segments(errors: dict[str, float]) -> None:
    assert errors["captured"] == 0.0


def test_long_segments_and_large_ranks_are_left_to_torch() -> None:
    from coterie.kernels.batch import LONG_ROWS, MAX_RANK, AttentionBatch, graph_family, places_of
    from coterie.kernels.decoder import DecoderShape
    from coterie.kernels.patch import PARTS, Segment
    from coterie.kernels.triton.decoder import patch_rows_of
    from tests.helpers.kernels.patch_inputs import random_stack

    shape = DecoderShape(2, 1, 8, 16, 32, 1e-6, 0.25)
    small = random_stack(shape, [1], 3, torch.bfloat16, ("low_rank",), ("q",))
    large = random_stack(shape, [0], MAX_RANK + 1, torch.float32, ("low_rank",), ("q",))
    none = torch.zeros(LONG_ROWS + 4, dtype=torch.int64)
    cut = Segment(0, 2, small), Segment(2, 3, large), Segment(4, LONG_ROWS + 4, small)
    batch = AttentionBatch(none, none, none, none, none[None], 8, patches=cut)
    rows, rest = patch_rows_of(batch, 3)
    assert rest == cut[1:]
    assert rows is not None
    found = rows.table[:, len(PARTS)]
    a = small.patches[1, "q"].a
    assert a is not None
    assert found[:, 0].nonzero().flatten().tolist() == [0, 1]
    assert found[0].tolist()[5:7] == [3, 0]
    assert found[0, 0].item() == a.data_ptr()
    assert rows.table.count_nonzero() == 2 * 4
    device = torch.device("cpu")
    places = places_of(cut, device)
    assert [graph_family(places[i : i + 1], 2) for i in (0, 1)] == ["narrow", ""]
    for rank, dtype, kind in ((17, torch.bfloat16, "deep"), (3, torch.float32, "wide")):
        other = random_stack(shape, [0], rank, dtype, ("low_rank",), ("q",))
        pair = Segment(0, 1, small), Segment(1, 2, other)
        assert graph_family(places_of(pair, device), 2) == kind
    assert [graph_family(places[:1], 1), graph_family((), 1)] == ["", "plain"]


def small_model(kind: str) -> tuple[Any, list[Any], Any, Any]:
    """Two layers; as few programs as show every index."""
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.linear import ReferenceLinear
    from coterie.weights.quantize import DenseWeight

    shape = DecoderShape(2, 1, 16, 40, 144, 1e-6, 0.25)
    special, whole = kind != "plain", kind == "olmoe"

    def product(height: int, width: int) -> Any:
        return ReferenceLinear([DenseWeight(torch.randn(height, width) * width**-0.5)], "cpu")

    layers = [
        DecoderLayer(
            input_norm=1 + 0.2 * torch.randn(40),
            qkv=product(64, 40),
            q_norm=1 + 0.2 * torch.randn(32 if whole else 16) if special else None,
            k_norm=1 + 0.2 * torch.randn(16) if special else None,
            qkv_bias=0.2 * torch.randn(64) if special else None,
            o=product(40, 32),
            post_norm=None if whole else 1 + 0.2 * torch.randn(40),
            gate_up=None if whole else product(288, 40),
            down=None if whole else product(40, 144),
        )
        for _ in range(2)
    ]
    angles = torch.arange(64)[:, None] * 100 ** (-torch.arange(8) / 8)
    return shape, layers, angles.cos(), angles.sin()


def stacks_for(case: str, shape: Any) -> tuple[Any, Any]:
    from tests.helpers.kernels.patch_inputs import random_stack

    kind, rank, dtype = case.split("/")
    # ia3 as PEFT places it: scaled keys and values, and a scaled input of down
    fields, parts = FIELDS.get(kind, ("low_rank",)), ("q", "k", "v", "o", "gate", "up", "down")
    one = random_stack(shape, [0, 1], int(rank), getattr(torch, dtype), fields, parts)
    if kind == "ia3":
        keys = random_stack(shape, [0, 1], 1, torch.float32, ("out_scale",), ("k", "v"))
        down = random_stack(shape, [0, 1], 3, torch.float32, ("in_scale", "low_rank"), ("down",))
        one = replace(keys, patches={**keys.patches, **down.patches})
    # the other one has fewer parts, and layers where both are run; one type for both takes the
    # kernels of bf16 alone
    layers = [0] if kind == "lora" else [0, 1]
    other = torch.bfloat16 if kind in ("lora", "deep", "long") else torch.float32
    return one, random_stack(shape, layers, 3, other, fields, ("q", "up", "down"))


def decoder_error(case: str, generator: Any) -> float:
    """Hidden states and caches of a two-layer stack behind random prefixes."""
    from coterie.kernels.patch import Segment
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton import decoder as triton_decoder
    from coterie.kernels.triton.decoder import decoder

    kind = case.split("/")[0]
    tile = 512 if kind == "long" else 32768
    base = {"ia3": "qwen3", "olmoe": "olmoe"}.get(kind, "plain")
    shape, layers, cos, sin = small_model(base)
    # both layers where what one leaves to the next is in question, else the second alone
    first = 0 if kind == "lora" else 1
    layers = layers[first:]
    batch, blocks = random_batch([1, 2, 1], [9, 7, 3], 8, generator)
    one, other = stacks_for(case, shape)
    cut = Segment(0, 1, one), Segment(2, 3, other), Segment(3, 4, one)
    batch = replace(batch, patches=cut)
    mine = [torch.randn((2, blocks, 1, 8, 16), generator=generator) for _ in layers]
    theirs = [cache.clone() for cache in mine]
    hidden = torch.randn((len(batch.positions), 40), generator=generator)
    given = (shape, layers, cos, sin, hidden)
    want = reference.decoder(*given, theirs, batch, first=first)
    with patch.object(triton_decoder, "_TILE", tile):
        got = decoder(*given[:-1], hidden.clone(), mine, batch, first)
    caches = max(relative(a, b) for a, b in zip(mine, theirs, strict=True))
    return max(relative(got, want), caches)


def captured_errors(generator: Any) -> dict[str, float]:
    """A table filled twice, as captured steps do; and plain rows beside the plain path."""
    from coterie.kernels.batch import PatchRows, places_of
    from coterie.kernels.patch import Segment
    from coterie.kernels.triton.decoder import decoder

    shape, layers, cos, sin = small_model("plain")
    layers = layers[:1]
    batch, blocks = random_batch([1] * 3, [9, 2, 3], 8, generator)
    one, other = stacks_for("lora/8/float32", shape)
    rows = PatchRows(3, 2, torch.device("cpu"), kind=2)
    rows.fill(places_of((Segment(0, 3, other),), rows.device))
    cut = Segment(0, 1, one), Segment(2, 3, other)
    rows.fill(places_of(cut, rows.device))
    caches = [torch.randn((2, blocks, 1, 8, 16), generator=generator) for _ in layers]
    hidden = torch.randn((3, 40), generator=generator)

    def run(given: Any) -> Any:
        kv = [cache.clone() for cache in caches]
        return decoder(shape, layers, cos, sin, hidden.clone(), kv, given)

    plain, eager = run(batch), run(replace(batch, patches=cut))
    captured = run(replace(batch, patch_rows=rows))
    same = torch.equal(plain[1], eager[1]) and not torch.equal(plain, eager)
    return {
        "plain rows": float(not same),
        "captured": float(not (rows.read and torch.equal(captured, eager))),
    }


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors."""
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7)
    found = {case: decoder_error(case, generator) for case in cases}
    return found | captured_errors(generator)
