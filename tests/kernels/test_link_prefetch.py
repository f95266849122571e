"""What a device reads ahead over its link, in Triton's interpreter, on fresh random inputs: the
guess, the copied tiles, and a layer that reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, relative
from tests.kernels.test_triton_gemv import random_pool

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(600)

CASES = ["fp32", "int4"]
MORE = ["int8", "bf16", "fp32", "int8", "int4"]
EXPERTS, HIDDEN, INNER, TOP_K, TILES = 6, 64, 96, 3, 6


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_reads_what_was_copied(found: dict[str, float], case: str) -> None:
    assert found[case] < 1e-5


@pytest.mark.parametrize(
    "what", ["guesses", "hints alone", "bytes", "tiles", "sums", "late copies", "decisions"]
)
def test_nothing_else_happens(found: dict[str, float], what: str) -> None:
    assert found[f"wrong {what}"] == 0


@pytest.mark.full
def test_every_kind() -> None:
    more = interpreted(__file__, MORE)
    assert all(more[case] < (1e-2 if case == "bf16" else 1e-5) for case in MORE)
    assert all(count == 0 for name, count in more.items() if name.startswith("wrong"))


class Ahead:
    """Two layers with the same random experts, of which most are not on the device."""

    def __init__(self, kind: str) -> None:
        from coterie.kernels.cpu.share import HINT_WORDS
        from coterie.kernels.triton import expert_gemv as kernels
        from coterie.kernels.triton.link_prefetch import SUMS, LinkPrefetch

        def draw(*size: int, std: float = 0.2) -> Any:
            return torch.randn(size) * std

        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        self.pool = random_pool(kind, EXPERTS, HIDDEN, INNER, draw)
        size = self.pool.record.nbytes
        self.hint = torch.zeros(HINT_WORDS, dtype=torch.int32)
        self.buffer = torch.zeros(size + 64, dtype=torch.uint8)
        self.ahead = LinkPrefetch.new(
            self.pool.base, self.buffer, self.pool.record, 3,
            torch.zeros(SUMS, dtype=torch.int64), self.hint,
        )  # fmt: skip
        self.x, self.gain = draw(1, HIDDEN, std=1.0).to(dtype), (1 + draw(HIDDEN)).to(dtype)
        self.gate = draw(EXPERTS, HIDDEN)
        self.tiers = (torch.rand(EXPERTS) < 0.7).to(torch.int8)
        self.tiers[torch.randint(EXPERTS, ())] = 1
        self.scratch = torch.empty(EXPERTS), torch.zeros(1, dtype=torch.int32)
        self.penalty = torch.zeros(EXPERTS) if kind in ("int4", "int8") else None
        if self.penalty is not None:
            self.penalty[torch.nonzero(self.tiers == 0)[:1]] = -1
        self.slots = torch.tensor([7, -1])
        self.routed = kernels.RoutedRows.empty(1, TOP_K, "cpu")
        self.routed.weights.copy_(torch.rand(1, TOP_K))

    def choose(self, *, right: bool) -> int:
        """Guess, and choose experts with the guess or without. Returns the guess, -2 if it or its
        hint is not the twin's."""
        guess = self.ahead.layer(1)
        order, is_told = self.route(guess, 1)
        want = order[0] if order else -1
        others = [expert for expert in torch.randperm(EXPERTS).tolist() if expert != want]
        chosen = [*others[: TOP_K - 1], want if right else others[-1]]
        self.routed.ids.copy_(torch.tensor([chosen]))
        self.routed.places.copy_(self.pool.places[self.routed.ids.long()])
        return want if int(guess.state[1]) == want and is_told else -2

    def hints_alone_are_wrong(self) -> bool:
        """Without a buffer the hint has the best expert too, and no more than are missing."""
        before, state = self.tiers.clone(), self.ahead.state.clone()
        alone, wrong = replace(self.ahead, buffer=None, state=state).layer(2), 0
        for missing in (EXPERTS, TOP_K, TOP_K - 1, 1, 0):
            self.tiers.zero_()
            possible = torch.arange(EXPERTS)
            if self.penalty is not None:
                possible = possible[self.penalty >= 0]
            self.tiers[possible[torch.randperm(len(possible))[:missing]]] = 1
            wrong += not self.route(alone, 0)[1]
        self.tiers.copy_(before)
        return wrong > 0

    def route(self, guess: Any, first: int) -> tuple[list[int], bool]:
        """What is missing of the layer of `guess`, best first, and whether the hint has it from
        number `first` on."""
        from coterie.kernels.expert_gate import GateRule
        from coterie.kernels.triton import expert_gemv as kernels

        out, other = kernels.RoutedRows.empty(1, TOP_K, "cpu"), torch.randn(EXPERTS, HIDDEN)
        scratch = torch.empty(1, EXPERTS), torch.zeros(1, dtype=torch.int32)
        own = self.x, self.gain, 1e-6, other, GateRule(TOP_K, True), None, self.pool.places
        following = kernels.NextGate(
            self.gain, self.gate, self.penalty, self.tiers, self.scratch, guess
        )
        kernels.route(*own, scratch, out, following=following)
        alone = kernels.RoutedRows.empty(1, TOP_K, "cpu")
        kernels.route(*own, scratch, alone)
        order = kernels.guess_torch(self.x, self.gain, self.gate, self.tiers, self.penalty)
        hinted = order[first:TOP_K]
        hint = [guess.row, int(guess.state[0]), len(hinted), *hinted]
        same = self.hint[: len(hint)].tolist() == hint and torch.equal(out.ids, alone.ids)
        return order, same

    def tile(self, memory: Any, number: int) -> Any:
        """The bytes of one tile of a record, as one tensor."""
        record = self.pool.record
        scales = memory[record.gate_up_scales_at : record.down_scales_at]
        parts = memory[: record.gate_up_bytes].chunk(2) + scales.chunk(2)
        return torch.cat([part.reshape(TILES, -1)[number] for part in parts])

    def record_of(self, expert: int) -> Any:
        begin = int(self.pool.places[expert]) * 16
        return self.pool.base[begin : begin + self.pool.record.nbytes]

    def spoil(self, own: Any, tiles: list[int]) -> None:
        record = self.pool.record
        scales = own[record.gate_up_scales_at : record.down_scales_at]
        for part in (*own[: record.gate_up_bytes].chunk(2), *scales.chunk(2)):
            for number in tiles:
                if len(part):
                    part.view(TILES, -1)[number] = 255

    def layer_error(self) -> float:
        """Some tiles arrived, and some did not."""
        from coterie.kernels.triton import expert_gemv as kernels

        guess = int(self.ahead.state[1, 1])
        want = kernels.experts_torch(self.x, self.routed.ids, self.routed.weights, self.pool)
        self.ahead.state[1, 3:][torch.arange(TILES) % 2 == 0] -= 1
        # what was copied is nowhere else, and what was not is not in the buffer
        self.spoil(self.record_of(guess), [n for n in range(TILES) if n % 2])
        self.spoil(self.buffer, [n for n in range(TILES) if n % 2 == 0])
        acts = torch.empty((TOP_K, INNER), dtype=self.x.dtype)
        hidden = torch.zeros(1, HIDDEN, dtype=self.x.dtype)
        sizes = kernels.PairSizes(16, 1, 16, 1, 64)
        own = self.ahead.layer(1)
        kernels.pair_gate_up(self.x, self.routed, self.pool, acts, sizes, guess=own)
        kernels.pair_down(acts, self.routed, self.pool, hidden, sizes)
        return relative(hidden.float(), want)

    def is_divided_wrong(self) -> bool:
        """The CPU takes the guess last, and less of the rest."""
        from coterie.kernels.triton import cpu_share
        from tests.kernels.test_cpu_share import bell_of

        share = cpu_share.ShareState.new(bell_of(4, 12, HIDDEN), EXPERTS * INNER, "cpu")
        share.table.copy_(torch.arange(len(share.table)) * 3 // 4 * 32)
        taken = torch.full((1, TOP_K), -1, dtype=torch.int32)
        tiers = torch.ones(EXPERTS, dtype=torch.int8)
        guess, ids = self.ahead.layer(1), self.routed.ids
        own = tiers, 1, INNER, share, taken
        cpu_share.ring(self.x, ids, self.routed.weights, *own, guess=guess)
        want = cpu_share.taken_torch(ids, tiers, share.table, INNER, guess=guess)
        plain = cpu_share.taken_torch(ids, tiers, share.table, INNER)
        return not torch.equal(taken, want) or int(want.sum()) >= int(plain.sum())


def measure(cases: list[str]) -> dict[str, float]:
    torch.seed()
    counts = dict.fromkeys(
        ("guesses", "hints alone", "bytes", "tiles", "sums", "late copies", "decisions"), 0
    )
    found: dict[str, float] = {}
    for kind in cases:
        case = Ahead(kind)
        ahead, state = case.ahead, case.ahead.state
        counts["hints alone"] += case.hints_alone_are_wrong()
        guess = case.choose(right=True)
        counts["guesses"] += guess < 0
        ahead.start(1, case.pool.places)
        for number in range(TILES):
            got, want = case.tile(case.buffer, number), case.tile(case.record_of(guess), number)
            counts["bytes"] += not torch.equal(got, want)
        counts["tiles"] += int((state[1, 3:] != state[1, 0]).sum())
        counts["decisions"] += case.is_divided_wrong()
        # the third layer's copies count what the second's guess was good for
        count_before(case, ahead)
        counts["sums"] += ahead.told.tolist() != [1, 1, TILES, 0]
        # a padded row is no guess
        case.slots[0] = -1
        count_before(case, ahead)
        case.slots[0] = 3
        counts["sums"] += ahead.told.tolist() != [1, 1, TILES, 0]
        found[kind] = case.layer_error()
        counts["late copies"] += copies_behind_its_gate(case)
        case.choose(right=False)
        ahead.start(1, case.pool.places)
        count_before(case, ahead)
        counts["sums"] += ahead.told.tolist() != [2, 1, TILES, TILES]
        # nothing is missing: no guess
        case.tiers.zero_()
        counts["guesses"] += case.choose(right=False) != -1
    return found | {f"wrong {name}": float(count) for name, count in counts.items()}


def count_before(case: Ahead, ahead: Any) -> None:
    """The third layer has no guess, so that nothing is copied for it."""
    ahead.start(2, case.pool.places, (case.routed.ids, case.slots))


def copies_behind_its_gate(case: Ahead) -> bool:
    """Whether anything is copied once the layer's gate has begun."""
    from coterie.kernels.expert_gate import GateRule
    from coterie.kernels.triton import expert_gemv as kernels

    case.choose(right=True)
    ahead, scratch = case.ahead, (torch.empty(1, EXPERTS), torch.zeros(1, dtype=torch.int32))
    out = kernels.RoutedRows.empty(1, TOP_K, "cpu")
    own = case.x, case.gain, 1e-6, case.gate, GateRule(TOP_K, True), None
    kernels.route(*own, case.pool.places, scratch, out, guess=ahead.layer(1))
    before = case.buffer.clone(), ahead.state.clone()
    case.buffer.add_(1)
    ahead.start(1, case.pool.places)
    same = torch.equal(case.buffer - 1, before[0]) and torch.equal(ahead.state, before[1])
    return not same
