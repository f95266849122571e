"""Products with GGUF's blocks against their torch twins, in Triton's interpreter, on fresh random
inputs with every value of the integers; and a decoder of the kinds that a quantiser mixes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from coterie.weights.kinds import BLOCK_KINDS
from tests.helpers.kernels.kernel_inputs import blocks, weight
from tests.helpers.kernels.triton_interpreter import interpreted, random_batch, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

TOLERANCE = {"exact": 0.0, "float32": 1e-5, "float16": 2e-3}
EXACT = [f"{name}/{kind}/exact" for name in ("widened", "rows", "panels") for kind in BLOCK_KINDS]
ONE = [f"{name}/{kind}/float32" for name in ("norm", "add", "gate_up") for kind in BLOCK_KINDS]
TILES = [f"tiles/{kind}/{rows}/float16" for kind in BLOCK_KINDS for rows in (3, 18)]
DECODERS = [f"decoder/{rows}/float32" for rows in (1, 3)]
EVERY = [*EXACT, *ONE, *TILES, *DECODERS]
# the interpreter is slow: `make test` runs the others
SLOW = [f"{name}/{kind}/float32" for name in ("add", "gate_up") for kind in ("q5_1", "q5_k")]
SLOW += ["rows/q5_1/exact", "rows/q5_k/exact", "tiles/q5_1/18/float16", "decoder/3/float32"]
CASES, MORE = [case for case in EVERY if case not in SLOW], SLOW


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_equals_its_twin(errors: dict[str, float], case: str) -> None:
    assert errors[case] <= TOLERANCE[case.rsplit("/", 1)[-1]]


@pytest.mark.full
def test_more_cases_equal_their_twins() -> None:
    found = interpreted(__file__, MORE)
    assert all(found[case] <= TOLERANCE[case.rsplit("/", 1)[-1]] for case in MORE)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_the_kept_form_has_the_files_values_and_size(kind: str) -> None:
    from coterie.kernels.device_blocks import block_rows, block_values
    from coterie.weights.quantize import dense

    for width in (256, 1024, 4864):
        stored = blocks(kind, 9, width)
        kept = block_rows(stored, "cpu")
        assert torch.equal(block_values(kind, kept, width), dense(stored))
        # rows are padded to 16 bytes
        assert kept.nbytes <= 1.03 * stored.nbytes + 16 * 9


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_scale_that_is_no_number_is_refused(kind: str) -> None:
    from coterie.kernels.device_blocks import block_rows
    from coterie.weights.formats.gguf_blocks import NotFinite

    stored = blocks(kind, 3, 512)
    at = 208 if kind == "q6_k" else 0
    stored.data[2, at : at + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(NotFinite):
        block_rows(stored, "cpu")


def linear_of(kind: str, heights: tuple[int, ...], width: int) -> tuple[Any, Any]:
    """A product of several parts, and the file's own values."""
    from coterie.kernels.triton.quant_linear import QuantLinear
    from coterie.weights.quantize import dense

    weights = [blocks(kind, rows, width) for rows in heights]
    return QuantLinear(weights, "cpu"), torch.cat([dense(each) for each in weights])


def width_of(kind: str) -> int:
    """No power of two, and no whole step of the tiles."""
    return 768 if kind.endswith("_k") else 160


def exact_error(name: str, kind: str) -> float:
    """The number of bits that differ, or of values."""
    if name == "panels":
        return panels_error(kind)
    linear, values = linear_of(kind, (12, 7), width_of(kind))
    if name == "widened":
        return float((linear.widened(torch.float32) != values).sum())
    ids = torch.tensor([18, 0, 11, 0])
    return float((linear.rows(ids, torch.float32) != values[ids]).sum())


def panels_error(kind: str) -> float:
    """Of an expert's record as a store has it, with a part of another kind."""
    from coterie.kernels.cpu.expert_record import pack_record
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.kernels.triton.panels import panel_parts
    from coterie.weights.quantize import dense

    hidden, inner = (512, 256) if kind.endswith("_k") else (96, 32)
    layout = ExpertLayout(hidden, inner, True, (kind, kind, "int8"))
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    kinds = {"gate": kind, "up": kind, "down": "int8"}
    parts = {name: weight(kinds[name], *shape) for name, shape in shapes.items()}
    record = torch.zeros(layout.nbytes, dtype=torch.uint8)
    pack_record(layout, parts, record)
    found = panel_parts(layout, record, torch.float32)
    return float(sum((found[name] != dense(part)).sum() for name, part in parts.items()))


def one_error(name: str, kind: str, dtype: Any) -> float:
    """One row: norm and product with a bias, product and residual, or gate and up."""
    from coterie.kernels.triton import gemv

    width, size = width_of(kind), gemv.GemvSize(8, 1)
    linear, values = linear_of(kind, (12, 10), width)
    x, gain = torch.randn(1, width).to(dtype), (1 + 0.2 * torch.randn(width)).to(dtype)
    if name == "add":
        y = torch.randn(1, 22).to(dtype)
        want = y.float() + x.float() @ values.T
        gemv.product_add(x, linear.matrix, y, size)
        return relative(y, want)
    if name == "norm":
        bias, y = torch.randn(22).to(dtype), torch.empty(1, 22, dtype=dtype)
        gemv.norm_product(x, gain, 1e-6, linear.matrix, y, size, bias)
        return relative(y, gemv.norm_product_torch(x, gain, 1e-6, values, bias))
    y = torch.empty(1, 11, dtype=dtype)
    gemv.norm_gate_up(x, gain, 1e-6, linear.matrix, y, size)
    gate, up = gemv.norm_product_torch(x, gain, 1e-6, values).chunk(2, 1)
    return relative(y, torch.nn.functional.silu(gate) * up)


def tiles_error(kind: str, rows: int, dtype: Any) -> float:
    from coterie.kernels.triton import quant_linear

    linear, values = linear_of(kind, (9, 8), width_of(kind))
    x = torch.randn(rows, linear.in_features).to(dtype)
    with patch.object(quant_linear, "TILE_COUNT", 1):
        return relative(linear(x), x.float() @ values.T)


def decoder_error(rows: int) -> float:
    """Logits of a layer with v, down and the tied head of other kinds."""
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.reference import layers as reference
    from coterie.models.build import device_decoder

    shape = DecoderShape(2, 1, 128, 256, 256, 1e-6, 128**-0.5)
    parts = [
        [weight(kind, n, 256) for kind, n in zip(kinds, heights, strict=True)]
        for kinds, heights in (
            (("q4_k", "q4_k", "q6_k"), (256, 128, 128)),
            (("q4_k",), (256,)),
            (("q5_k", "q5_k"), (256, 256)),
            (("q6_k",), (256,)),
            (("q5_0",), (40,)),
        )
    ]
    norms, bias = [1 + 0.2 * torch.randn(256) for _ in range(3)], torch.randn(512)

    def built(backend: str) -> tuple[Any, Any]:
        from coterie.kernels.backend import make_linear
        from coterie.kernels.linear import ReferenceLinear
        from coterie.weights.quantize import DenseWeight, dense

        def make(weights: Any) -> Any:
            if backend == "triton":
                return make_linear(weights, backend, "cpu")
            return ReferenceLinear([DenseWeight(dense(each)) for each in weights], "cpu")

        qkv, o, gate_up, down, head = map(make, parts)
        return DecoderLayer(norms[0], qkv, None, None, bias, o, norms[1], gate_up, down), head

    layer, head = built("triton")
    plain, plain_head = built("reference")
    assert device_decoder.DeviceDecoder.fits(shape, [layer], (), head)
    assert not device_decoder.DeviceDecoder.fits(shape, [layer], (), layer.qkv)
    generator = torch.Generator()
    contexts = [7 + 2 * at for at in range(rows)]
    batch, count = random_batch([1] * rows, contexts, 8, generator)
    angles = torch.arange(64)[:, None] * 100 ** (-torch.arange(64) / 64)
    turn = angles.cos(), angles.sin()
    mine = [torch.randn(2, count, 1, 8, 128)]
    theirs = [cache.clone() for cache in mine]
    ids = torch.randint(0, 40, (rows,))
    want = reference.decoder(shape, [plain], *turn, plain_head.weight[ids], theirs, batch, first=0)
    want = plain_head(reference.rms_norm(want, norms[2], shape.eps))
    rows_of: Any = head.rows
    ends: Any = SimpleNamespace(embedding=lambda given: rows_of(given, torch.float32), head=head)
    decoder = device_decoder.DeviceDecoder(shape, [layer], turn, ends, norms[2], ())
    decoder.dependent = False
    got, _ = decoder.run(ids, batch, mine, torch.arange(rows), None)
    return max(relative(got, want), relative(mine[0], theirs[0]))


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors, and numbers of values that differ."""
    from coterie.kernels.triton.gemv import GemvSize
    from coterie.models.build import device_decoder

    torch.seed()
    few: Any = {"context_splits": lambda *_: 1, "gemv_size": lambda _: GemvSize(32, 1)}
    found: dict[str, float] = {}
    for case in cases:
        name, kind, *rest = case.split("/")
        if name in ("widened", "rows", "panels"):
            found[case] = exact_error(name, kind)
        elif name == "decoder":
            with patch.multiple(device_decoder, **few):
                found[case] = decoder_error(int(kind))
        elif name == "tiles":
            found[case] = tiles_error(kind, int(rest[0]), getattr(torch, rest[-1]))
        else:
            found[case] = one_error(name, kind, getattr(torch, rest[-1]))
    return found
