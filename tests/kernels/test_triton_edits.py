"""Edits of logits and logprobs by Triton kernels are those of the plain twins and of the engine, in
Triton's interpreter, on fresh random inputs; see test_triton_sample.

Among equal logits the lower id is the better alternative. torch leaves that open, so the engine's
alternatives are compared by their logprobs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kernels.hopper import compiled, some_every_time, usage
from tests.helpers.kernels.triton_interpreter import interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

CASES = [
    "edits/copy",
    "edits/in place",
    "edits/engine",
    "notes",
    "scores/20",
    "scores/1",
    "scores/0",
]


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_the_twin(differences: dict[str, float], case: str) -> None:
    assert differences[case] == 0


KERNELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "_edit": (
        "logit_edits",
        4,
        {"VOCAB": 151936, "WIDTH": 512, "WORDS": 4748, "CHUNK": 1024, "ENTRIES": 128}
        | {"IN_PLACE": False, "PDL": True},
    ),
    "_note": ("logit_edits", 1, {"WIDTH": 512, "ENTRIES": 128, "PDL": True}),
    "_score": (
        "scores",
        8,
        {"VOCAB": 151936, "CHUNK": 4096, "CHUNKS": 38, "PADDED": 64, "TOP": 20}
        | {"TOP_PADDED": 32, "PDL": True},
    ),
}
TYPES = {
    **dict.fromkeys(("tokens", "top_ids", "candidates"), "*i64"),
    **dict.fromkeys(("presences", "sums"), "*fp64"),
    **dict.fromkeys(("ids", "counts", "lengths", "mask", "masked", "counters"), "*i32"),
}


@pytest.mark.parametrize("name", some_every_time(KERNELS, ["_note"]))
def test_compiles_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, warps, constants = KERNELS[name]
    kernel = vars(import_module(f"coterie.kernels.triton.{module}"))[name]
    built = compiled(kernel, TYPES, constants, warps, other="*fp32")
    registers, stack = usage(built.asm["cubin"], tmp_path)
    assert registers <= 128 and stack == 0


def random_edits(rows: int, vocab: int, generator: Any) -> Any:
    """Row 0 has nothing, row 1 a list, row 2 a mask, the others both."""
    from coterie.kernels.draws import LogitEdits

    def draw(*size: int) -> Any:
        return torch.rand(size, generator=generator)

    edits = LogitEdits.empty(rows, 300, vocab, torch.device("cpu"))
    for r in range(rows):
        if r % 2 == 1 or r > 2:
            length = 170 + 10 * r
            edits.lengths[r] = length
            edits.ids[r, :length] = torch.randperm(vocab, generator=generator)[:length].int()
            edits.bias[r, :length] = (draw(length) - 0.5) * (draw(length) < 0.3)
            edits.bias[r, :length][draw(length) < 0.1] = -torch.inf
            edits.counts[r, :length] = (draw(length) * 5).int() - 1
            edits.repetition[r] = 1 + draw(1)[0]
            edits.frequency[r] = draw(1)[0] if r > 1 else 0.0
            edits.presence[r] = draw(1)[0]
        if r > 1:
            edits.masked[r] = 1
            edits.mask[r] = torch.randint(
                -(2**31), 2**31, edits.mask[r].shape, generator=generator, dtype=torch.int64
            ).int()
    return edits


def edit_differences(place: str, generator: Any) -> int:
    from coterie.kernels.reference import sample as reference
    from coterie.kernels.triton import logit_edits

    logits = torch.randn((4, 2500), generator=generator)
    edits = random_edits(4, 2500, generator)
    want = reference.edit_rows(logits, edits)
    out = logits.clone() if place == "in place" else torch.zeros_like(logits)
    logit_edits.edit_rows(out if place == "in place" else logits, edits, out)
    return int((out != want).sum())


def engine_differences(generator: Any) -> int:
    """Against the engine's own edits of a row: bias, penalties of prompt and output, bans."""
    import numpy as np

    from coterie.core.request import Sampling
    from coterie.engine.draw import DrawState, TokenPenalties
    from coterie.kernels.draws import LogitEdits
    from coterie.kernels.triton import logit_edits

    vocab = 1100
    tokens = torch.randint(0, 200, (150,), generator=generator).tolist()
    prompt, output = tokens[:100], tokens[100:]
    penalties = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.15)
    bias = {7: 1.5, prompt[0]: -2.25, output[0]: 3.0}
    banned = (1050, output[1])
    draw = DrawState(
        0,
        0,
        bias_ids=np.array(list(bias)),
        bias=np.array(list(bias.values()), dtype=np.float32),
        penalties=TokenPenalties(penalties, prompt, output[:30]),
        banned=banned,
        min_output=100,
    )
    for token in output[30:]:
        draw.produced(token)
    ids = sorted({*prompt, *output[:30], *bias, *banned})
    seen = {*prompt, *output[:30]}
    edits = LogitEdits.empty(1, 400, vocab, torch.device("cpu"))
    length = len(ids)
    edits.lengths[0] = length
    edits.ids[0, :length] = torch.tensor(ids)
    shifts = [-torch.inf if i in banned else bias.get(i, 0.0) for i in ids]
    edits.bias[0, :length] = torch.tensor(shifts)
    counts = [output[:30].count(i) if i in seen else -1 for i in ids]
    edits.counts[0, :length] = torch.tensor(counts)
    edits.repetition[0], edits.frequency[0], edits.presence[0] = 1.3, 0.15, 0.4
    for token in output[30:]:
        logit_edits.note_tokens(torch.tensor([token]), edits)
    logits = torch.randn((1, vocab), generator=generator) * 3
    want = logits[0].cpu().numpy().copy()
    draw.edit(want, tokens, len(prompt))
    out = torch.empty_like(logits)
    logit_edits.edit_rows(logits, edits, out)
    return int((out[0].cpu().numpy() != want).sum())


def note_differences(generator: Any) -> int:
    """Known ids, new ids, and a row without room."""
    import copy

    from coterie.kernels.reference import sample as reference
    from coterie.kernels.triton import logit_edits

    got = random_edits(5, 1000, generator)
    got.lengths[3] = 300
    want = copy.deepcopy(got)
    for _ in range(3):
        tokens = torch.randint(0, 1000, (5,), generator=generator)
        tokens[1], tokens[2] = got.ids[1, 150], 5
        logit_edits.note_tokens(tokens, got)
        reference.note_tokens(tokens, want)
    names = ("ids", "bias", "counts", "lengths")
    return sum(int((getattr(got, name) != getattr(want, name)).sum()) for name in names)


def score_differences(num_top: int, generator: Any) -> int:
    from coterie.engine.sampler import score
    from coterie.kernels.reference import sample as reference
    from coterie.kernels.triton import scores

    rows, vocab = 3, 5000
    logits = torch.randn((rows, vocab), generator=generator) * 3
    logits[1] = logits[1].round()
    logits[2, 30:] = -torch.inf
    tokens = torch.tensor([4999, 17, 3])
    own = torch.zeros(rows)
    ids = torch.zeros((rows, num_top), dtype=torch.int64)
    values = torch.zeros((rows, num_top))
    scratch = scores.ScoreScratch.empty(rows, vocab, logits.device)
    scores.score_rows(logits, tokens, own, ids, values, scratch)
    assert not scratch.counters.any()
    wanted = reference.score_rows(logits, tokens, num_top)
    total = int((ids != wanted[1]).sum())
    for got, want in ((own, wanted[0]), (values, wanted[2])):
        total += int((~torch.isclose(got, want, rtol=1e-6, atol=1e-6)).sum())
    for r, one in enumerate(score(logits, tokens.tolist(), num_top)):
        line = torch.tensor([one.logprob, *(value for _, value in one.top)])
        mine = torch.cat((own[r : r + 1], values[r]))
        total += int((~torch.isclose(line, mine, rtol=1e-5, atol=1e-5)).sum())
    return total


def measure(cases: list[str]) -> dict[str, float]:
    """Numbers of differences."""
    generator = torch.Generator()
    generator.seed()
    found = {}
    for case in cases:
        what, _, which = case.partition("/")
        if what == "notes":
            count = note_differences(generator)
        elif what == "scores":
            count = score_differences(int(which), generator)
        elif which == "engine":
            count = engine_differences(generator)
        else:
            count = edit_differences(which, generator)
        found[case] = float(count)
    return found
