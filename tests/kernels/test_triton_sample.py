"""Tokens drawn by Triton kernels are those of the plain twin and of the engine's sampler, in
Triton's interpreter, on fresh random inputs.

Ties: at top-k's cut all equal logits are kept; at top-p's cut equal logits are kept from the
highest id on, as many as the mass needs; the greedy token is the lowest id among equals.

What the interpreter cannot tell, the compiler does: every kernel compiles for sm_90 and keeps its
values in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kernels.hopper import compiled, some_every_time, usage
from tests.helpers.kernels.triton_interpreter import interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

VOCAB = 600
# temperature, top-k, top-p, min-p
GREEDY = (0.0, 0, 1.0, 0.0)
MIXED = [GREEDY, (0.8, 0, 0.95, 0.0), (0.7, 20, 0.9, 0.0), (1.3, 0, 1.0, 0.1), (1.0, 0, 1.0, 0.0)]
KINDS = ("flat", "peaked", "ties", "masked")
CASES = ["mixed/ties", "by one program"]
# the interpreter is slow: `make test` runs those above
MORE = ["mixed/flat", "mixed/peaked", "mixed/masked", "alone", "borders", "no filters"]


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_twin(differences: dict[str, float], case: str) -> None:
    assert differences[case] == 0


@pytest.mark.full
def test_more_tokens_are_those_of_the_twin() -> None:
    assert not any(interpreted(__file__, MORE).values())


# Qwen3's vocabulary
SIZES = {"VOCAB": 151936, "CHUNK": 1024, "CHUNKS": 149, "PADDED": 256, "PDL": True}
KERNELS: dict[str, dict[str, Any]] = {
    "_best": {**SIZES, "WAYS": 16},
    "_narrow": {**SIZES, "WAYS": 16, "LISTED": 256, "FIRST": False},
    "_finish": {**SIZES, "WAYS": 16, "LISTED": 256},
    "_draw": {**SIZES, "FIRST": False},
}
TYPES = {
    **dict.fromkeys(("logits", "temperatures", "bests", "leasts"), "*fp32"),
    **dict.fromkeys(("top_ps", "min_ps", "noise", "floats", "masses"), "*fp64"),
    "out": "*i64",
}
EVERY_TIME = ("_best",)


@pytest.mark.parametrize("name", some_every_time(KERNELS, EVERY_TIME))
def test_compiles_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from coterie.kernels.triton import sample

    built = compiled(vars(sample)[name], TYPES, KERNELS[name], 4, other="*i32")
    registers, stack = usage(built.asm["cubin"], tmp_path)
    assert registers <= 168 and stack == 0
    assert "ld.global.v4" in built.asm["ptx"]


def random_logits(kind: str, rows: int, generator: Any) -> Any:
    logits = torch.randn((rows, VOCAB), generator=generator)
    if kind == "peaked":
        return logits * 5
    if kind == "ties":
        return (logits * 4).round() / 4
    if kind == "masked":
        hidden = torch.rand((rows, VOCAB), generator=generator) < 0.9
        return logits.masked_fill(hidden, -torch.inf)
    return logits


def parameters_of(rows: list[tuple[float, int, float, float]]) -> Any:
    from coterie.kernels.draws import DrawParameters

    types = (torch.float32, torch.int32, torch.float64, torch.float64)
    columns = zip(zip(*rows, strict=True), types, strict=True)
    return DrawParameters(*(torch.tensor(values, dtype=dtype) for values, dtype in columns))


def engine_token(row: Any, one: tuple[float, int, float, float], noise: Any) -> int:
    from coterie.engine import sampler
    from coterie.engine.draw import DrawState

    state = DrawState(0, 0, *one)
    if state.is_greedy:
        return sampler.argmax(row.unsqueeze(0))[0]
    draw = sampler.draw_filtered if state.has_filters else sampler.draw_plain
    filters = sampler.make_filters([state], row.device)
    return int(draw(row.unsqueeze(0), filters, noise.reshape(1, 1))[0])


def kept_differences(logits: Any, rows: list[tuple[float, int, float, float]], ints: Any) -> int:
    """Tokens that only one of kernel and twin keeps, by the cut that the kernels have found."""
    from coterie.kernels.reference.sample import kept_tokens
    from coterie.kernels.triton import sample

    total = 0
    for row, (temperature, top_k, top_p, _), state in zip(logits, rows, ints, strict=True):
        if temperature == 0:
            continue
        scaled = row / torch.tensor(temperature)
        bits = (scaled + 0.0).view(torch.int32)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ties = (order == state[sample._CUT.value]).nonzero().flatten().flip(0)
        got = order > state[sample._CUT.value]
        got[ties[: int(state[sample._TIES.value])]] = True
        weights = (scaled - scaled.max()).double().exp()
        total += int((got != kept_tokens(scaled, weights, top_k, top_p)).sum())
    return total


def count_differences(
    logits: Any, rows: list[tuple[float, int, float, float]], generator: Any, levels: int = 5,
    need: Any = "filtered", chunk: int = 256, noise: Any = None,
) -> tuple[int, Any, Any]:  # fmt: skip
    """Differences to twin and engine, the tokens, and the states at the end."""
    from coterie.kernels.reference import sample as reference
    from coterie.kernels.triton import sample

    parameters = parameters_of(rows)
    if noise is None:
        noise = torch.rand(len(rows), dtype=torch.float64, generator=generator)
    out = torch.full((len(rows),), -1)
    size = sample.SampleSize(chunk, ways=8, levels=levels, listed=16)
    scratch = sample.SampleScratch.empty(len(rows), logits.shape[1], logits.device, size)
    before = logits.clone()
    sample.sample_rows(logits, parameters, noise, out, scratch, need)
    assert torch.equal(logits, before)
    assert not scratch.counters.any() and not scratch.listed[:, 0].any()
    twin = reference.sample_rows(logits, parameters, noise)
    engine = [engine_token(*each) for each in zip(logits, rows, noise, strict=True)]
    total = int((out != twin).sum()) + int((out != torch.tensor(engine)).sum())
    return total + kept_differences(logits, rows, scratch.ints), out, scratch.ints


def borders(generator: Any) -> int:
    """Rows at the edges of what is allowed, with a vocabulary of one chunk."""
    logits = torch.randn((9, 100), generator=generator)
    logits[0] = 1.25
    logits[1] = (logits[1] * 2).round()
    logits[2] = -torch.inf
    logits[2, 37] = -3.0
    logits[3] = torch.tensor([0.0, -0.0]).repeat(50)
    logits[4, 5:] = -1e30
    logits[8, 50:] = -torch.inf
    rows = [
        (0.9, 0, 0.335, 0.0),
        (0.9, 0, 0.0, 0.0),
        (0.5, 7, 0.9, 0.0),
        (1.0, 5, 0.415, 0.0),
        (1.0, 3, 0.8, 0.2),
        (1e-4, 0, 0.9, 0.0),
        (1.0, 1000, 0.9999, 0.0),
        (30.0, 1, 0.5, 1.0),
        (1.0, 60, 1.0, 0.0),
    ]
    total, *_ = count_differences(logits, rows, generator, levels=3, chunk=128)
    return total


def by_one_program(generator: Any) -> int:
    """Too few levels: the last program of a row must finish alone."""
    from coterie.kernels.triton import sample

    rows = [(0.8, 0, 0.95, 0.0), (0.7, 20, 0.9, 0.0)]
    total, _, ints = count_differences(random_logits("flat", 2, generator), rows, generator, 1)
    assert (ints[:, sample._PASSES.value] > 0).all()
    return total


def alone(generator: Any) -> int:
    """Rows draw the same alone and together, bit for bit."""
    logits = random_logits("flat", 3, generator)
    rows = [(0.8, 0, 0.95, 0.0), (0.9, 40, 1.0, 0.0), (0.7, 0, 0.5, 0.01)]
    noise = torch.rand(3, dtype=torch.float64, generator=generator)
    total, tokens, ints = count_differences(logits, rows, generator, noise=noise)
    for r in range(3):
        one = slice(r, r + 1)
        own, token, state = count_differences(logits[one], rows[one], generator, noise=noise[one])
        total += own + int(token != tokens[one]) + int((state != ints[one]).sum())
    return total


def no_filters(generator: Any) -> int:
    """Batches of which the host knows that they need less draw the same as without that."""
    logits = random_logits("ties", 3, generator)
    total, *_ = count_differences(logits, [GREEDY] * 3, generator, need="greedy")
    rows = [GREEDY, (0.8, 0, 1.0, 0.0), (1.2, 0, 1.0, 0.05)]
    noise = torch.rand(3, dtype=torch.float64, generator=generator)
    more, tokens, _ = count_differences(logits, rows, generator, need="plain", noise=noise)
    again, same, _ = count_differences(logits, rows, generator, noise=noise)
    return total + more + again + int((tokens != same).sum())


def mixed(kind: str, generator: Any) -> int:
    total, *_ = count_differences(random_logits(kind, 5, generator), MIXED, generator)
    return total


def measure(cases: list[str]) -> dict[str, float]:
    """Numbers of differences."""
    generator = torch.Generator()
    generator.seed()
    count_of: dict[str, Callable[[Any], int]] = {
        **{f"mixed/{kind}": partial(mixed, kind) for kind in KINDS},
        "alone": alone,
        "by one program": by_one_program,
        "borders": borders,
        "no filters": no_filters,
    }
    return {case: float(count_of[case](generator)) for case in cases}
