"""The kernels of single rows against their torch twins, in Triton's interpreter, on fresh random
inputs: products with a norm, experts one pair at a time, attention while decoding."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, random_batch, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

KINDS = ("fp32", "int8", "int4")
PRODUCTS = [f"{name}/{kind}" for name in ("product", "add", "gate_up") for kind in KINDS]
EXPERTS = [f"experts/{kind}/{rows}" for kind in KINDS for rows in (1, 3)]
RULES = ("plain", "normalised", "equal", "absent")
ROUTES = [f"route/{rule}" for rule in RULES]
ATTENTION = [f"attention/{shape}" for shape in ("9x3x64", "8x1x128 norm", "6x2x24")]
HEADS = ["heads/6x2x24", "heads/4x1x32 norm"]
# a record arranged for the device: hidden x intermediate
ARRANGED = [
    f"arrange/{case}" for case in ("fp32/160x96", "bf16/288x32", "int8/544x32", "int4/1056x32")
]
# tokens before the part of a prompt: none for all rows, some, and a multiple
CONTINUED = [f"continued/{before}" for before in (9, 21, 32)]
# the interpreter is slow: `make test` runs these
CASES = ["arrange/int4/96x32", "heads/4x1x32 norm", "continued/21", "product/int4", "add/int8"]
CASES += ["gate_up/fp32", "experts/fp32/1", "experts/int4/1", "route/plain", "route/absent"]
CASES += ["attention/6x2x24"]
EVERY = [*ARRANGED, *HEADS, *CONTINUED, *PRODUCTS, *EXPERTS, *ROUTES, *ATTENTION]
MORE = [case for case in EVERY if case not in CASES]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_equals_its_twin(errors: dict[str, float], case: str) -> None:
    assert errors[case] < 1e-5


@pytest.mark.full
def test_more_cases_equal_their_twins() -> None:
    found = interpreted(__file__, MORE)
    assert all(found[case] < 1e-5 for case in MORE)
    assert found["counters"] == 0.0


def test_counters_are_zero_again(errors: dict[str, float]) -> None:
    assert errors["counters"] == 0.0


def matrix_of(kind: str, rows: int, columns: int, draw: Any) -> tuple[Any, Any]:
    """A matrix for the kernels, and the values that it stands for."""
    from coterie.kernels.device_record import packed_matrix
    from coterie.kernels.triton.gemv import DeviceMatrix
    from coterie.weights.quantize import DenseWeight, Weight, convert, dense

    weight: Weight = DenseWeight(draw(rows, columns))
    if kind != "fp32":
        weight = convert(weight, kind)
    values, scales = packed_matrix(weight)
    number = {"fp32": 0, "int8": 1, "int4": 2}[kind]
    return DeviceMatrix(values, scales, rows, columns, number), dense(weight)


def product_error(name: str, kind: str, size: tuple[int, int], draw: Any) -> float:
    from coterie.kernels.triton import gemv

    rows, columns = size
    x, gain, eps = draw(2, columns, std=1.0), 1 + draw(columns), 1e-6
    sizes = gemv.GemvSize(8, 1)
    matrix, values = matrix_of(kind, rows, columns, draw)
    if name == "add":
        hidden = draw(2, rows)
        want = hidden + x @ values.T
        gemv.product_add(x, matrix, hidden, sizes)
        return relative(hidden, want)
    full = gemv.norm_product_torch(x, gain, eps, values)
    if name == "product":
        y, bias = torch.empty(2, rows), draw(rows)
        gemv.norm_product(x, gain, eps, matrix, y, sizes, bias)
        return relative(y, full + bias)
    out = torch.empty(2, rows // 2)
    gemv.norm_gate_up(x, gain, eps, matrix, out, sizes)
    gate, up = full.chunk(2, 1)
    return relative(out, torch.nn.functional.silu(gate) * up)


def random_pool(kind: str, experts: int, hidden: int, inner: int, draw: Any) -> Any:
    from coterie.kernels.cpu.expert_record import pack_record
    from coterie.kernels.device_record import UNIT_BYTES, arrange, device_record
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.kernels.triton.expert_gemv import ExpertPool
    from coterie.weights.quantize import DenseWeight

    layout = ExpertLayout(hidden, inner, True, (kind,) * 3)
    target = device_record(layout)
    assert target is not None and target.nbytes <= layout.nbytes
    base = torch.zeros(experts * layout.nbytes, dtype=torch.uint8)
    record = torch.zeros(layout.nbytes, dtype=torch.uint8)
    order = torch.randperm(experts)
    for slot in order.tolist():
        parts = {
            "gate": DenseWeight(draw(inner, hidden)),
            "up": DenseWeight(draw(inner, hidden)),
            "down": DenseWeight(draw(hidden, inner)),
        }
        pack_record(layout, parts, record)
        arrange(layout, record, base[slot * layout.nbytes : (slot + 1) * layout.nbytes])
    return ExpertPool(base, order * (layout.nbytes // UNIT_BYTES), target)


def arrange_error(kind: str, size: str, generator: Any) -> float:
    """The number of bytes that differ."""
    from coterie.kernels.device_record import arrange, device_record
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.kernels.triton.arrange import arrange_record

    hidden, inner = map(int, size.split("x"))
    layout = ExpertLayout(hidden, inner, True, (kind,) * 3)
    target = device_record(layout)
    assert target is not None
    record = torch.randint(0, 256, (layout.nbytes,), generator=generator, dtype=torch.uint8)
    want, got = (torch.zeros_like(record) for _ in range(2))
    arrange(layout, record, want)
    arrange_record(layout, record, got)
    return float((want != got).sum())


def experts_error(kind: str, rows: int, draw: Any) -> float:
    from coterie.kernels.triton import expert_gemv as kernels

    # one row: nothing is masked; more rows: widths and numbers of experts that need masks
    top_k, inner = (2, 64) if rows == 1 else (3, 96)
    pool = random_pool(kind, 6, 64, inner, draw)
    x = draw(rows, 64, std=1.0)
    routed = kernels.RoutedRows.empty(rows, top_k, "cpu")
    routed.ids.copy_(torch.stack([torch.randperm(6)[:top_k] for _ in range(rows)]))
    routed.places.copy_(pool.places[routed.ids.long()])
    routed.weights.copy_(torch.rand(rows, top_k))
    sizes = kernels.PairSizes(16, 1, 16, 1, 32 if rows == 1 else 64)
    acts, hidden = torch.empty(top_k * rows, inner), draw(rows, 64)
    want = hidden + kernels.experts_torch(x, routed.ids, routed.weights, pool)
    kernels.pair_gate_up(x, routed, pool, acts, sizes)
    kernels.pair_down(acts, routed, pool, hidden, sizes)
    return relative(hidden, want)


def route_error(name: str, draw: Any, counters: list[Any]) -> float:
    """Also with a norm before, as `gate_up` then needs its scale."""
    from coterie.kernels.expert_gate import GateRule, choose_in_place
    from coterie.kernels.triton import expert_gemv as kernels

    rule = GateRule(
        3, normalise=name != "plain", scale=0.5 if name == "plain" else 1.0, equal=name == "equal"
    )
    penalty = None
    if name == "absent":
        penalty = torch.zeros(10)
        penalty[torch.randperm(10)[:4]] = -2.0
    x, gain, gate, eps = draw(2, 48, std=1.0), 1 + draw(48), draw(10, 48), 1e-6
    wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    logits = (wide * gain) @ gate.T
    chosen, weights = choose_in_place(rule, logits, penalty)
    ids = chosen.int()
    out, places = kernels.RoutedRows.empty(2, 3, "cpu"), torch.arange(10) * 7
    scratch = torch.empty(2, 10), torch.zeros(2, dtype=torch.int32)
    kernels.route(x, gain, eps, gate, rule, penalty, places, scratch, out)
    again = kernels.RoutedRows.empty(2, 3, "cpu")
    kernels.choose(logits, rule, penalty, places, again)
    many = kernels.RoutedRows.empty(2, 3, "cpu")
    with patch.object(kernels, "MANY_ROWS", 1):
        kernels.choose(logits, rule, penalty, places, many)
    counters.append(scratch[1])
    same = torch.equal(out.ids, ids) and torch.equal(out.places, ids.long() * 7)
    if not (same and torch.equal(again.ids, ids) and torch.equal(many.ids, ids)):
        return float("inf")
    if not torch.equal(many.places, ids.long() * 7):
        return float("inf")
    norms = torch.rsqrt(x.square().mean(-1) + eps)
    pairs = ((out.weights, weights), (again.weights, weights), (out.norms, norms),
             (many.weights, weights))  # fmt: skip
    return max(relative(got, want) for got, want in pairs)


def attention_error(name: str, draw: Any, counters: list[Any], generator: Any) -> float:
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton.decode_attention import AttentionScratch, decode_attention

    heads, kv_heads, dim = map(int, name.split()[0].split("x"))
    norm = name.endswith("norm")
    shape = DecoderShape(heads, kv_heads, dim, 64, 64, 1e-6, dim**-0.5)
    contexts = [1, 140]
    # tiles are whole blocks, or not
    size = 24 if dim == 24 else 16
    batch, blocks = random_batch([1] * 2, contexts, size, generator)
    unused: Any = None
    layer = DecoderLayer(
        input_norm=unused, qkv=unused, o=unused, qkv_bias=None,
        q_norm=1 + draw(dim) if norm else None, k_norm=1 + draw(dim) if norm else None,
    )  # fmt: skip
    angles = torch.arange(512)[:, None] * 10_000 ** (-torch.arange(dim // 2) / (dim // 2))
    cos, sin = angles.cos(), angles.sin()
    qkv = draw(2, shape.q_size + 2 * shape.kv_size, std=1.0)
    kv = draw(2, blocks, kv_heads, size, dim, std=1.0)
    want_kv = kv.clone()
    q, k, v = reference.project(shape, layer, qkv)
    turn = cos[batch.positions], sin[batch.positions]
    reference.write_kv(reference.rotary(k, *turn), v, want_kv, batch.slots)
    want = reference.paged_attention(
        reference.rotary(q, *turn), want_kv, batch, shape.attention_scale
    )
    errors = []
    for splits in (2, 1):
        scratch = AttentionScratch.empty(2, shape, splits, torch.device("cpu"))
        own, out = kv.clone(), torch.empty(2, shape.q_size)
        decode_attention(shape, layer, qkv, (cos, sin), own, batch, scratch, splits, out)
        counters.append(scratch.counts)
        errors += [relative(out, want.view(2, -1)), relative(own, want_kv)]
    return max(errors)


def heads_error(name: str, draw: Any, generator: Any) -> float:
    """Queries, keys, values and the cache of a prompt's rows."""
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton.prompt_attention import place_all_heads

    heads, kv_heads, dim = map(int, name.split()[0].split("x"))
    norm = name.endswith("norm")
    shape = DecoderShape(heads, kv_heads, dim, 64, 64, 1e-6, dim**-0.5)
    batch, blocks = random_batch([3, 1], [3, 20], 16, generator)
    unused: Any = None
    layer = DecoderLayer(
        input_norm=unused, qkv=unused, o=unused, qkv_bias=None,
        q_norm=1 + draw(dim) if norm else None, k_norm=1 + draw(dim) if norm else None,
    )  # fmt: skip
    angles = torch.arange(64)[:, None] * 10_000 ** (-torch.arange(dim // 2) / (dim // 2))
    qkv = draw(4, shape.q_size + 2 * shape.kv_size, std=1.0)
    kv = draw(2, blocks, kv_heads, 16, dim, std=1.0)
    want_kv = kv.clone()
    q, k, v = reference.project(shape, layer, qkv)
    turn = angles.cos()[batch.positions], angles.sin()[batch.positions]
    q, k = reference.rotary(q, *turn), reference.rotary(k, *turn)
    reference.write_kv(k, v, want_kv, batch.slots)
    got, rows = place_all_heads(shape, layer, qkv, (angles.cos(), angles.sin()), kv, batch)
    pairs = [(got, q), (rows, torch.stack((k, v))), (kv, want_kv)]
    if norm:
        # only in the cache
        turns, empty = (angles.cos(), angles.sin()), torch.zeros_like(kv)
        got, rows = place_all_heads(shape, layer, qkv, turns, empty, batch, keep=False)
        assert rows.numel() == 0
        reference.write_kv(k, v, want := torch.zeros_like(kv), batch.slots)
        pairs += [(got, q), (empty, want)]
    return max(relative(one, other) for one, other in pairs)


def continued_error(before: int, draw: Any, generator: Any) -> float:
    """A later part of a prompt, in parts that are merged, beside other rows."""
    from dataclasses import replace

    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton import prompt_attention as kernels

    heads, kv_heads, dim, count = 6, 2, 24, 7
    # the part between others, or behind them
    order = ([1, count, 2], [12, before + count, 5]) if before > 9 else ([1, 1, count], [12, 5, 16])
    batch, blocks = random_batch(*order, 16, generator)
    first = 1 if before > 9 else 2
    q = draw(sum(order[0]), heads, dim, std=1.0)
    kv = draw(2, blocks, kv_heads, 16, dim, std=1.0)
    want = reference.paged_attention(q, kv, batch, 0.2)
    own = replace(batch, continued=((first, first + count, first, before),))
    with patch.multiple(kernels, _ROWS=8, _BEFORE=16, attend_part=plain_part):
        paged = kernels.paged_rows(own)
        assert paged is not None and paged[0] == (len(q) if before > 9 else 2)
        got = kernels.prompt_attention(q, kv, kv, own, paged, 0.2)
    return relative(got, want.view(len(q), -1))


def plain_part(q: Any, kv: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """The twin of `attend_part`."""
    keys, values = kv.repeat_interleave(q.shape[1] // kv.shape[2], 2)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(2), values)
    return mixed.contiguous(), scores.logsumexp(2)


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors."""
    generator = torch.Generator()
    generator.seed()
    torch.seed()

    def draw(*size: int, std: float = 0.2) -> Any:
        return torch.randn(size, generator=generator) * std

    found: dict[str, float] = {}
    counters: list[Any] = []
    for case in cases:
        name, *rest = case.split("/")
        if name == "experts":
            found[case] = experts_error(rest[0], int(rest[1]), draw)
        elif name == "arrange":
            found[case] = arrange_error(rest[0], rest[1], generator)
        elif name == "continued":
            found[case] = continued_error(int(rest[0]), draw, generator)
        elif name == "heads":
            found[case] = heads_error(rest[0], draw, generator)
        elif name == "route":
            found[case] = route_error(rest[0], draw, counters)
        elif name == "attention":
            found[case] = attention_error(rest[0], draw, counters, generator)
        else:
            # with masks and without
            both = (product_error(name, rest[0], size, draw) for size in ((36, 96), (32, 64)))
            found[case] = max(both)
    found["counters"] = float(sum(int(each.abs().sum()) for each in counters))
    return found
