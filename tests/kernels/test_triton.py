"""Triton kernels against their torch twins, in Triton's interpreter, on fresh random inputs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, random_batch, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

# (query rows, context lengths): decode only, prefill only, prefill behind a prefix, and mixtures
BATCHES = {
    "decode": ([1, 1, 1], [1, 70, 33]),
    "decode one long": ([1], [200]),
    "prefill": ([5, 37], [5, 37]),
    "mixed": ([5, 1, 20], [5, 60, 50]),
    "short mixed": ([3, 1, 4], [3, 18, 9]),
    "tile borders": ([2, 34], [2, 65]),
}
# fp16 stands for every 16-bit type: the interpreter has no bf16. The softmax's weights are rounded
# to that type before they meet the values.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
ATTENTION = [f"attention/mixed/9x3x64/{dtype}" for dtype in TOLERANCE]
ATTENTION += ["attention/decode/4x2x80/float32"]
# the interpreter is slow: `make test` runs those above
MORE_ATTENTION = [
    f"attention/{batch}/{heads}/{dtype}"
    for batch in BATCHES
    for heads in ("9x3x64", "4x2x80", "8x1x128", "2x2x16")
    for dtype in ("float32", "float16")
]
# olmoe: norms over all heads, and layers that end after attention
KINDS = ("plain", "qwen3", "olmoe")
DECODERS = [f"decoder/decode/{kind}" for kind in ("plain", "olmoe")]
DECODERS += [f"decoder/{batch}/{kind}" for batch in ("short mixed", "mixed") for kind in KINDS]
CASES, MORE = ATTENTION, [*MORE_ATTENTION, *DECODERS]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_matches_reference(errors: dict[str, float], case: str) -> None:
    assert errors[case] < TOLERANCE[case.rsplit("/", 1)[1]]


@pytest.mark.full
def test_all_batches_match_reference() -> None:
    found = interpreted(__file__, MORE)
    assert max(found[case] for case in DECODERS) < 1e-5
    assert all(found[case] < TOLERANCE[case.rsplit("/", 1)[1]] for case in MORE_ATTENTION)


def test_tiles_of_prompts_are_those_of_a_loop(errors: dict[str, float]) -> None:
    assert errors["tiles"] == 0.0


@pytest.mark.parametrize("part", ["neighbours", "attention"])
def test_padded_rows_leave_the_cache_alone(errors: dict[str, float], part: str) -> None:
    assert errors[f"padding/{part}"] == 0.0


def attention_error(name: str, generator: Any) -> float:
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton import attention as triton_attention

    _, batch_name, heads, dtype_name = name.split("/")
    h, kv_heads, dim = map(int, heads.split("x"))
    dtype = getattr(torch, dtype_name)
    batch, blocks = random_batch(*BATCHES[batch_name], 16, generator)
    kv = torch.randn((2, blocks, kv_heads, 16, dim), generator=generator).to(dtype)
    q = torch.randn((len(batch.positions), h, dim), generator=generator).to(dtype)
    got = triton_attention.paged_attention(q, kv, batch, dim**-0.5)
    return relative(got, reference.paged_attention(q, kv, batch, dim**-0.5))


def wrong_tiles(generator: Any) -> float:
    """How many tiles of prompts are not those of a plain loop; a search takes several turns."""
    from coterie.kernels.triton import attention

    counts = torch.randint(0, 9, (11,), generator=generator).tolist()
    contexts = [count + 3 * index for index, count in enumerate(counts)]
    batch, _ = random_batch(counts, contexts, 16, generator)
    with patch.object(attention, "_SEARCHED", 4):
        got = attention.prompt_tiles(batch, sum(counts), 16, 64, torch.float16)
    queries, want, row = 4, [], 0
    for sequence, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        for first in range(0, count, queries):
            position = context - count + first
            want.append([sequence, row + first, min(queries, count - first), position])
        row += count
    same = [one == other for one, other in zip(got.tolist(), want, strict=False)]
    return same.count(False) + float(got[len(want) :, 2].any())


def random_stack(kind: str, generator: Any) -> tuple[Any, list[Any], Any, Any]:
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.linear import ReferenceLinear
    from coterie.weights.quantize import DenseWeight

    shape = DecoderShape(6, 2, 24, 96, 144, 1e-6, 24**-0.5)
    total = shape.q_size + 2 * shape.kv_size

    def draw(*size: int, std: float = 0.2) -> Any:
        return torch.randn(size, generator=generator) * std

    def product(rows: int, columns: int) -> Any:
        return ReferenceLinear([DenseWeight(draw(rows, columns))], "cpu")

    special, whole = kind != "plain", kind == "olmoe"
    norms = (shape.q_size, shape.kv_size) if whole else (shape.head_dim,) * 2
    layers = [
        DecoderLayer(
            input_norm=1 + draw(96),
            qkv=product(total, 96),
            q_norm=1 + draw(norms[0]) if special else None,
            k_norm=1 + draw(norms[1]) if special else None,
            qkv_bias=draw(total) if special else None,
            o=product(96, shape.q_size),
            post_norm=None if whole else 1 + draw(96),
            gate_up=None if whole else product(288, 96),
            down=None if whole else product(96, 144),
        )
        for _ in range(2)
    ]
    angles = torch.arange(512)[:, None] * 10_000 ** (-torch.arange(12) / 12)
    return shape, layers, angles.cos(), angles.sin()


def decoder_error(name: str, generator: Any) -> float:
    """Hidden states and caches of a two-layer stack behind random prefixes."""
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton.decoder import decoder

    _, batch_name, kind = name.split("/")
    shape, layers, cos, sin = random_stack(kind, generator)
    batch, blocks = random_batch(*BATCHES[batch_name], 8, generator)
    mine = [torch.randn((2, blocks, 2, 8, 24), generator=generator) for _ in layers]
    theirs = [cache.clone() for cache in mine]
    hidden = torch.randn((len(batch.positions), 96), generator=generator)
    want = reference.decoder(shape, layers, cos, sin, hidden.clone(), theirs, batch)
    got = decoder(shape, layers, cos, sin, hidden.clone(), mine, batch)
    caches = max(relative(a, b) for a, b in zip(mine, theirs, strict=True))
    return max(relative(got, want), caches)


def padding_errors(generator: Any) -> dict[str, float]:
    """Rows with slot -1 and no context, as a captured decode step has behind its last sequence."""
    from dataclasses import replace

    from coterie.kernels.triton.decoder import decoder

    shape, layers, cos, sin = random_stack("plain", generator)
    layers = layers[:1]
    batch, blocks = random_batch([1, 1], [9, 20], 8, generator)
    tables = torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables)))
    padded = replace(
        batch,
        positions=torch.cat((batch.positions, torch.zeros(2, dtype=torch.int64))),
        slots=torch.cat((batch.slots, torch.full((2,), -1))),
        query_starts=torch.arange(5, dtype=torch.int32),
        context_lens=torch.cat((batch.context_lens, torch.zeros(2, dtype=torch.int32))),
        block_tables=tables,
    )
    caches = [torch.randn((2, blocks, 2, 8, 24), generator=generator) for _ in layers]
    alone, beside = [c.clone() for c in caches], [c.clone() for c in caches]
    hidden = torch.randn((4, 96), generator=generator)
    want = decoder(shape, layers, cos, sin, hidden[:2].clone(), alone, batch)
    got = decoder(shape, layers, cos, sin, hidden.clone(), beside, padded)
    same = all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    finite = bool(got.isfinite().all()) and torch.allclose(got[:2], want, atol=1e-5)
    return {"padding/neighbours": float(not same), "padding/attention": float(not finite)}


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors."""
    generator = torch.Generator().manual_seed(7)
    errors_of = {"attention": attention_error, "decoder": decoder_error}
    found = {name: errors_of[name.split("/")[0]](name, generator) for name in cases}
    found["tiles"] = wrong_tiles(generator)
    return found | padding_errors(generator)
