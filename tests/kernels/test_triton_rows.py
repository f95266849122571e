"""Steps whose rows have adapters, through the device decoder, against the torch path: in Triton's
interpreter, on fresh random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, random_batch, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

# which adapters the rows have; "odd": sizes that are no powers of two, a bias and norms of heads
CASES = ["one", "lora/odd"]
# the interpreter is slow: `make test` runs those above
MORE = [
    "mixed/odd",
    "prompt",
    "lora",
    "captured",
    "plain",
    "one/odd",
    "dora",
    "ia3",
    "deep",
    "ia3/odd",
    "mixed",
    "many",
    # as many rows as torch's products are faster for
    "above",
]
PARTS = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_torch_path(errors: dict[str, float], case: str) -> None:
    assert errors[case] < 1e-5


@pytest.mark.full
def test_long_cases_equal_the_torch_path() -> None:
    found = interpreted(__file__, MORE)
    assert max(found[case] for case in MORE) < 1e-5


def small_layers(odd: bool) -> tuple[Any, list[Any]]:
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.linear import ReferenceLinear
    from coterie.weights.quantize import DenseWeight

    dim, hidden, inner = (24, 40, 72) if odd else (16, 32, 128)
    shape = DecoderShape(2, 1, dim, hidden, inner, 1e-6, 0.25)

    def product(height: int, width: int) -> Any:
        return ReferenceLinear([DenseWeight(torch.randn(height, width) * width**-0.5)], "cpu")

    def layer() -> Any:
        return DecoderLayer(
            input_norm=1 + 0.2 * torch.randn(hidden),
            qkv=product(4 * dim, hidden),
            q_norm=1 + 0.2 * torch.randn(dim) if odd else None,
            k_norm=1 + 0.2 * torch.randn(dim) if odd else None,
            qkv_bias=0.2 * torch.randn(4 * dim) if odd else None,
            o=product(hidden, 2 * dim),
            post_norm=1 + 0.2 * torch.randn(hidden),
            gate_up=product(2 * inner, hidden),
            down=product(hidden, inner),
        )

    return shape, [layer(), layer()]


def stacks_of(kind: str, shape: Any) -> list[Any]:
    from tests.helpers.kernels.patch_inputs import random_stack

    half, full = torch.bfloat16, torch.float32

    def ia3() -> Any:
        # as PEFT places it: scaled keys and values, and a scaled input of down
        keys = random_stack(shape, [0, 1], 1, full, ("out_scale",), ("k", "v"))
        down = random_stack(shape, [0, 1], 3, full, ("in_scale", "low_rank"), ("down",))
        return replace(keys, patches={**keys.patches, **down.patches})

    makers = {
        "lora": lambda: random_stack(shape, [0, 1], 16, half, ("low_rank",), PARTS),
        "few": lambda: random_stack(shape, [0], 3, half, ("low_rank",), ("q", "up", "down")),
        "dora": lambda: random_stack(
            shape, [0, 1], 5, full, ("low_rank", "out_scale", "shift"), PARTS
        ),
        "deep": lambda: random_stack(shape, [0, 1], 35, half, ("low_rank",), PARTS),
        "ia3": ia3,
    }
    makers["beyond"] = lambda: random_stack(shape, [0, 1], 2, full, ("low_rank", "in_scale"), PARTS)
    several = {
        "mixed": ["lora", "dora", "ia3", "few"],
        "above": ["lora", "dora", "ia3", "few"],
        # the last one is left to torch
        "prompt": ["dora", "ia3", "beyond"],
    }
    names = several.get(kind, [kind, "few"])
    return [makers[name]() for name in names]


def decode_error(case: str, generator: Any) -> float:
    """Logits and caches of one or two layers behind random prefixes; row 1 has no adapter."""
    from coterie.kernels.batch import PatchRows, places_of
    from coterie.kernels.linear import ReferenceLinear
    from coterie.kernels.patch import Segment
    from coterie.kernels.reference import layers as reference
    from coterie.models.build import device_decoder
    from coterie.weights.quantize import DenseWeight

    kind, *rest = case.split("/")
    shape, layers = small_layers(bool(rest))
    # the last norm reads what a layer leaves to the next one
    layers = layers[:1] if case in CASES and kind != "one" else layers
    stacks = stacks_of("lora" if kind in ("captured", "plain", "many", "one") else kind, shape)
    count = {"many": 35, "one": 1}.get(kind, 2 + len(stacks))
    lengths = [2, 1, count - 3] if kind == "prompt" else [1] * count
    contexts = [n + 5 * i % 9 for i, n in enumerate(lengths)]
    batch, blocks = random_batch(lengths, contexts, 8, generator)
    cut = [Segment(0, 1, stacks[0])]
    cut += [Segment(2 + at, 3 + at, stack) for at, stack in enumerate(stacks)]
    if kind == "one":
        del cut[1:]
    if kind == "many":
        cut[-1] = cut[-1]._replace(last=count)
    patches = tuple(cut) if kind != "plain" else ()
    angles = torch.arange(64)[:, None] * 100 ** (-torch.arange(shape.head_dim // 2) / 8)
    turn = angles.cos(), angles.sin()
    mine = [torch.randn((2, blocks, 1, 8, shape.head_dim), generator=generator) for _ in layers]
    theirs = [cache.clone() for cache in mine]
    table = torch.randn((9, shape.hidden), generator=generator)
    ids = torch.randint(0, 9, (count,), generator=generator)
    norm = 1 + 0.2 * torch.randn(shape.hidden, generator=generator)
    adapted = replace(batch, patches=patches)
    want = reference.decoder(shape, layers, *turn, table[ids], theirs, adapted, first=0)
    matrix = DenseWeight(torch.randn(11, shape.hidden, generator=generator))
    head = ReferenceLinear([matrix], "cpu")
    want = head(reference.rms_norm(want, norm, shape.eps))
    ends: Any = SimpleNamespace(embedding=lambda given: table[given], head=head)
    decoder = device_decoder.DeviceDecoder(shape, layers, turn, ends, norm, ())
    decoder.dependent, decoder.own_rows = False, 64
    decoder.adapted_rows = 2 if kind == "above" else 64
    if kind == "captured":
        rows = PatchRows(count, 2, torch.device("cpu"), kind=2)
        rows.fill(places_of((Segment(0, count, stacks[1]),), rows.device))
        rows.fill(places_of(patches, rows.device))
        adapted = replace(batch, patch_rows=rows)
    assert decoder.takes(adapted, None)
    got, _ = decoder.run(ids, adapted, mine, torch.arange(count), None)
    caches = max(relative(a, b) for a, b in zip(mine, theirs, strict=True))
    return max(relative(got, want), caches)


@contextmanager
def few_programs() -> Iterator[None]:
    """Short products are split too; of other kernels few programs."""
    from coterie.kernels.triton import row_products
    from coterie.kernels.triton.gemv import GemvSize
    from coterie.models.build import device_decoder

    own: dict[str, Any] = {"context_splits": lambda *_: 1, "gemv_size": lambda _: GemvSize(8, 1)}
    with (
        patch.multiple(row_products, _LEAST_DEPTH=64, CHUNK=64),
        patch.multiple(device_decoder, **own),
    ):
        yield


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors."""
    torch.seed()
    generator = torch.Generator()
    generator.seed()
    with few_programs():
        return {case: decode_error(case, generator) for case in cases}
