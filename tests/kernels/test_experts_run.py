"""The native expert kernel: equal to the torch twin, and bit for bit the same in every company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.errors import InternalError
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.cpu.expert_mlp import RecordTable, combine, run_experts, run_experts_torch
from coterie.kernels.expert_layout import ExpertLayout
from coterie.weights.kinds import BLOCK_KINDS, KINDS
from coterie.weights.quantize import dense
from tests.helpers.kernels.expert_inputs import choices, expert_parts, record_of, records_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

UNTOUCHED = 123.0
SIZES = {
    **{key: [(53, 21), (96, 160)] for key in ("fp32", "bf16")},
    **{key: [(64, 96), (160, 32)] for key in ("int8", "int4")},
    **{key: [(256, 512)] for key in BLOCK_KINDS},
}


def tolerance(kind: str) -> float:
    library = native()
    assert library is not None, "a compiler is here, but the native kernels did not build"
    if kind == "bf16" and "amx" in library.isa:
        return 1e-2
    return 3e-6 if kind in ("fp32", "bf16") else 5e-4


def layout_of(kind: str, hidden: int, inner: int, gated: bool = True) -> ExpertLayout:
    return ExpertLayout(hidden, inner, gated, (kind,) * (3 if gated else 2))


def run(
    layout: ExpertLayout,
    x: Tensor,
    ids: Tensor,
    records: list[tuple[int, Tensor]],
    threads: int | None = None,
) -> Tensor:
    out = torch.full((ids.numel(), layout.hidden), UNTOUCHED)
    run_experts(layout, x, ids, records, out, threads)
    return out


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_twin(kind: str, gated: bool) -> None:
    torch.manual_seed(31)
    for hidden, inner in SIZES[kind]:
        layout = layout_of(kind, hidden, inner, gated)
        records = records_of(layout, 9)
        for tokens, top_k in ((1, 1), (1, 8), (2, 3), (5, 2), (17, 4), (70, 6)):
            x, ids = torch.randn(tokens, hidden), choices(tokens, 12, top_k)
            got, want = run(layout, x, ids, records), torch.full((ids.numel(), hidden), UNTOUCHED)
            run_experts_torch(layout, x, ids, records, want)
            here = (ids.flatten() < 9).nonzero()[:, 0]  # experts 9..11 are not in the table
            away = (ids.flatten() >= 9).nonzero()[:, 0]
            assert (got[away] == UNTOUCHED).all() and (want[away] == UNTOUCHED).all()
            scale = want[here].abs().max() if len(here) else torch.ones(())
            assert ((got - want).abs().max() / scale) < tolerance(kind)


def test_the_twin_is_the_formula() -> None:
    torch.manual_seed(32)
    for gated in (True, False):
        layout = layout_of("fp32", 24, 40, gated)
        parts = expert_parts(layout)
        x = torch.randn(3, 24)
        values = {k: v if isinstance(v, Tensor) else dense(v) for k, v in parts.items()}
        if gated:
            inner = functional.silu(x @ values["gate"].T) * (x @ values["up"].T)
            want = inner @ values["down"].T
        else:
            first = x @ values["fc1"].T + values["fc1_bias"]
            inner = first * 0.5 * (1 + torch.erf(first / 2**0.5))
            want = inner @ values["fc2"].T + values["fc2_bias"]
        ids = torch.zeros(3, 1, dtype=torch.int32)
        out = torch.empty(3, 24)
        run_experts_torch(layout, x, ids, [(0, record_of(layout, parts))], out)
        assert torch.allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_company(kind: str) -> None:
    torch.manual_seed(33)
    hidden, inner = SIZES[kind][-1]
    layout = layout_of(kind, hidden, inner)
    records = records_of(layout, 5)
    x, ids = torch.randn(150, hidden), choices(150, 5, 3)
    whole = run(layout, x, ids, records)
    for threads in (1, 3):
        assert torch.equal(run(layout, x, ids, records, threads), whole)
    # some rows alone, one expert at a time, in any order
    for first, count in ((0, 1), (3, 2), (20, 13), (7, 70)):
        rows = slice(first, first + count)
        parts = torch.full((count * 3, hidden), UNTOUCHED)
        for record in reversed(records):
            run_experts(layout, x[rows], ids[rows], [record], parts)
        assert torch.equal(parts, whole[first * 3 : (first + count) * 3])


def test_parts_of_several_kinds() -> None:
    torch.manual_seed(35)
    layout = ExpertLayout(256, 512, True, ("q4_k", "bf16", "q6_k"))
    records = records_of(layout, 2)
    x, ids = torch.randn(20, 256), choices(20, 2, 2)
    want = torch.empty(40, 256)
    run_experts_torch(layout, x, ids, records, want)
    got = run(layout, x, ids, records)
    assert ((got - want).abs().max() / want.abs().max()) < max(map(tolerance, layout.kinds))


def test_a_table_equals_a_list() -> None:
    torch.manual_seed(36)
    layout = layout_of("bf16", 64, 32)
    records = records_of(layout, 6)
    x, ids = torch.randn(11, 64), choices(11, 6, 4)
    table = RecordTable(6)
    for expert, record in records:
        table.set(expert, record)
    out = torch.empty(44, 64)
    run_experts(layout, x, ids, table, out)
    assert torch.equal(out, run(layout, x, ids, records))
    some = torch.full((44, 64), UNTOUCHED)
    run_experts(layout, x, ids, table, some, only=[1, 4])
    assert torch.equal(some, run(layout, x, ids, [records[1], records[4]]))
    table.clear(4)
    some.fill_(UNTOUCHED)
    run_experts(layout, x, ids, table, some)
    assert torch.equal(some, run(layout, x, ids, [r for r in records if r[0] != 4]))


def test_nothing_to_do() -> None:
    layout = layout_of("fp32", 16, 16)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    out = torch.full((2, 16), UNTOUCHED)
    run_experts(layout, torch.randn(2, 16), ids, [], out)
    run_experts(layout, torch.randn(2, 16), ids, RecordTable(4), out)
    run_experts(layout, torch.randn(2, 16), ids, records_of(layout, 2)[1:], out)
    assert (out == UNTOUCHED).all()
    run_experts(layout, torch.randn(0, 16), ids[:0], records_of(layout, 1), out[:0])


def test_refuses_what_the_native_call_cannot_take() -> None:
    layout = layout_of("fp32", 16, 16)
    records, x = records_of(layout, 1), torch.randn(2, 16)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    for out in (torch.empty(3, 16), torch.empty(2, 16).half(), torch.empty(16, 2).T):
        with pytest.raises(InternalError, match="fp32 row"):
            run_experts(layout, x, ids, records, out)
    with pytest.raises(InternalError, match="int32"):
        run_experts(layout, x, ids.long(), records, torch.empty(2, 16))


def test_rows_of_bf16_are_widened() -> None:
    torch.manual_seed(37)
    layout = layout_of("fp32", 32, 16)
    records = records_of(layout, 2)
    x, ids = torch.randn(4, 32).bfloat16(), choices(4, 2, 1)
    assert torch.equal(run(layout, x, ids, records), run(layout, x.float(), ids, records))


def test_combine_adds_in_order() -> None:
    torch.manual_seed(38)
    for tokens, top_k, width in ((1, 1, 5), (3, 8, 64), (70, 2, 1031)):
        rows, weights = torch.randn(tokens * top_k, width), torch.rand(tokens, top_k)
        want = rows.view(tokens, top_k, width)[:, 0] * weights[:, :1]
        for k in range(1, top_k):
            want = want + rows.view(tokens, top_k, width)[:, k] * weights[:, k : k + 1]
        assert torch.equal(combine(rows, weights), want)
        assert torch.equal(combine(rows, weights, 1, dtype=torch.bfloat16), want.bfloat16())
