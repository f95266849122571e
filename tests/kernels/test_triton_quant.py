"""Products with quantised matrices and single rows against their torch twins, in Triton's
interpreter, on fresh random inputs. On a device (`tests.cuda`) the same cases run in bf16, where
int4 takes the kernels of `int4_rows`, which the interpreter does not have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
LINEAR = [f"linear/{kind}/{rows}/float16" for kind in ("int8", "int4") for rows in (1, 3, 18)]
ROWS = [f"{name}/{rows}/float16" for name in ("norm", "add", "experts") for rows in (1, 2)]
EVERY = ["linear/int4/1/float32", "widened/int8/float32", "widened/int4/float32", *LINEAR, *ROWS]
# the interpreter is slow: `make test` runs the others
SLOW = ("linear/int4/1/float16", "linear/int4/3/float16", "norm/2/float16", "experts/2/float16")
CASES, MORE = [case for case in EVERY if case not in SLOW], list(SLOW)


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_equals_its_twin(errors: dict[str, float], case: str) -> None:
    assert errors[case] < TOLERANCE[case.rsplit("/", 1)[-1]]


@pytest.mark.full
def test_more_cases_equal_their_twins() -> None:
    found = interpreted(__file__, MORE)
    assert all(found[case] < TOLERANCE[case.rsplit("/", 1)[-1]] for case in MORE)


def test_mixed_or_dense_weights_are_not_supported() -> None:
    from coterie.kernels.triton.quant_linear import QuantLinear
    from coterie.weights.quantize import DenseWeight, convert

    weight = DenseWeight(torch.randn(4, 32))
    int4, int8 = convert(weight, "int4"), convert(weight, "int8")
    assert QuantLinear.supports([int4, int4]) and QuantLinear.supports([int8])
    assert not QuantLinear.supports([int4, int8]) and not QuantLinear.supports([weight])


def product(kind: str, shapes: tuple[int, ...], columns: int, draw: Any) -> tuple[Any, Any]:
    """A product of several parts, and the values that it stands for."""
    from coterie.kernels.triton.quant_linear import QuantLinear
    from coterie.weights.quantize import DenseWeight, convert, dense

    weights = [convert(DenseWeight(draw(rows, columns)), kind) for rows in shapes]
    return QuantLinear(weights, "cpu"), torch.cat([dense(weight) for weight in weights])


def linear_error(kind: str, rows: int, dtype: Any, draw: Any) -> float:
    """In tiles where there are more rows than single ones; `widened` has its own cases."""
    from coterie.kernels.triton import quant_linear

    module: Any = quant_linear
    module.TILE_COUNT = 1
    linear, values = product(kind, (5, 4), 96 if rows == 3 else 64, draw)
    x = draw(rows, linear.in_features, std=1.0).to(dtype)
    return relative(linear(x), x.float() @ values.T)


def row_error(name: str, rows: int, dtype: Any, draw: Any) -> float:
    """Norm and product with a bias, or product and residual, as single rows run."""
    from coterie.kernels.triton import gemv

    # 22 rows are no whole tile, 288 columns no whole step
    linear, values = product("int4", (22,), 288, draw)
    x, gain, bias = (part.to(dtype) for part in (draw(rows, 288, std=1.0), 1 + draw(288), draw(22)))
    size, y = gemv.GemvSize(8, 1), draw(rows, 22).to(dtype)
    if name == "add":
        want = y.float() + x.float() @ values.T
        gemv.product_add(x, linear.matrix, y, size)
        return relative(y, want)
    gemv.norm_product(x, gain, 1e-6, linear.matrix, y, size, bias)
    return relative(y, gemv.norm_product_torch(x, gain, 1e-6, values, bias))


def experts_error(rows: int, dtype: Any, draw: Any) -> float:
    """Of x that has to be normed, with sizes that are no whole steps for two rows."""
    from coterie.kernels.triton import expert_gemv as kernels

    hidden, inner, top_k = (64, 32, 2) if rows == 1 else (96, 32, 3)
    pool = random_pool(5, hidden, inner, draw)
    x, gain = draw(rows, hidden, std=1.0).to(dtype), (1 + draw(hidden)).to(dtype)
    routed = kernels.RoutedRows.empty(rows, top_k, "cpu")
    routed.ids.copy_(torch.stack([torch.randperm(5)[:top_k] for _ in range(rows)]))
    routed.places.copy_(pool.places[routed.ids.long()])
    routed.weights.copy_(torch.rand(rows, top_k))
    routed.norms.copy_(torch.rsqrt(x.float().square().mean(-1) + 1e-6))
    sizes = kernels.PairSizes(16, 1, 16, 1, 32)
    acts = torch.empty(top_k * rows, inner, dtype=dtype)
    target = draw(rows, hidden).to(dtype)
    normed = (x.float() * routed.norms[:, None] * gain.float()).to(dtype)
    want = target.float() + kernels.experts_torch(normed, routed.ids, routed.weights, pool)
    kernels.pair_gate_up(x, routed, pool, acts, sizes, gain)
    kernels.pair_down(acts, routed, pool, target, sizes)
    return relative(target, want)


def random_pool(experts: int, hidden: int, inner: int, draw: Any) -> Any:
    from coterie.kernels.cpu.expert_record import pack_record
    from coterie.kernels.device_record import UNIT_BYTES, arrange, device_record
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.kernels.triton.expert_gemv import ExpertPool
    from coterie.weights.quantize import DenseWeight

    layout = ExpertLayout(hidden, inner, True, ("int4",) * 3)
    target, size = device_record(layout), layout.nbytes
    assert target is not None
    base, record = (torch.zeros(n * size, dtype=torch.uint8) for n in (experts, 1))
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    order = torch.randperm(experts)
    for slot in order.tolist():
        parts = {name: DenseWeight(draw(*shape)) for name, shape in shapes.items()}
        pack_record(layout, parts, record)
        arrange(layout, record, base[slot * size : (slot + 1) * size])
    return ExpertPool(base, order * (size // UNIT_BYTES), target)


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors."""
    generator = torch.Generator()
    generator.seed()
    torch.seed()

    def draw(*size: int, std: float = 0.2) -> Any:
        return torch.randn(size, generator=generator) * std

    found: dict[str, float] = {}
    for case in cases:
        name, *rest = case.split("/")
        dtype = getattr(torch, rest[-1])
        if name == "linear":
            found[case] = linear_error(rest[0], int(rest[1]), dtype, draw)
        elif name == "widened":
            linear, values = product(rest[0], (20, 12), 96, draw)
            found[case] = relative(linear.widened(dtype), values)
        elif name == "experts":
            found[case] = experts_error(int(rest[0]), dtype, draw)
        else:
            found[case] = row_error(name, int(rest[0]), dtype, draw)
    return found
