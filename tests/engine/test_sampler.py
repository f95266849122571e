"""The sampler against transformers' processors, against its own definition, and for invariance."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from coterie.core.request import TokenRules
from coterie.engine import sampler as filters_module
from coterie.engine.draw import make_draw, uniform
from coterie.engine.sampler import ModelOutput, Sampler, read_draws
from coterie.engine.sequence import Sequence, SequenceAdapters
from tests.helpers.kernels.twin_draws import TwinDraws
from tests.helpers.models.toy_model import make_assignment

VOCAB = 300

sample = Sampler().sample


def sequence(prompt: list[int], output: list[int], choice: int = 0, **settings: Any) -> Sequence:
    assignment = make_assignment("r", prompt, **settings)
    draw = make_draw(assignment, choice, output, [3, 5])
    return Sequence(
        "r",
        choice,
        [*prompt, *output],
        len(prompt),
        10_000,
        SequenceAdapters(),
        b"",
        (0, 0.0, 0, 0),
        draw,
    )


def random_logits(rows: int, seed: int, ties: bool, vocab: int = VOCAB) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if ties else logits


def support(logits: torch.Tensor, one: Sequence) -> set[int]:
    """Every token the row can give: noise is swept over a fine grid."""
    found: set[int] = set()
    params = filters_module.make_filters([one.draw], logits.device)
    grid = torch.linspace(0, 1 - 1e-9, 600, dtype=torch.float64).unsqueeze(1)
    rows = logits.expand(len(grid), -1)
    many = filters_module.SampleFilters(*(values.expand(len(grid), 1) for values in params))
    found.update(filters_module.draw_filtered(rows, many, grid).tolist())
    return found


# names of transformers' warpers; in the order of its lists
WARPERS = {"top_k": "TopK", "top_p": "TopP", "min_p": "MinP", "typical_p": "Typical"}
CASES: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_k": 40},
    {"top_p": 0.7},
    {"top_p": 0.2},
    {"min_p": 0.1},
    {"typical_p": 0.4},
    {"typical_p": 0.8},
    {"top_k": 30, "top_p": 0.6},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_filters_keep_what_transformers_keeps(number: int, ties: bool, temperature: float) -> None:
    import transformers

    settings = CASES[number]
    oracle = [
        getattr(transformers, f"{WARPERS[name]}LogitsWarper")(value)
        for name, value in settings.items()
    ]
    for seed in range(3):
        logits = random_logits(1, seed, ties)
        warpers = transformers.LogitsProcessorList(
            [transformers.TemperatureLogitsWarper(temperature), *oracle]
        )
        scores = warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone())
        weights = torch.softmax(scores.double(), dim=1)[0]
        # a grid of 600 finds every token of some weight
        certain = {i for i, w in enumerate(weights.tolist()) if w > 1 / 500}
        allowed = {i for i, s in enumerate(scores[0].tolist()) if s > -math.inf}
        found = support(logits, sequence([1], [], temperature=temperature, **settings))
        if ties and "top_p" in settings:
            # which of several equal tokens stays is open there: compare what they are worth
            values = logits[0].tolist()
            assert Counter(values[i] for i in certain) <= Counter(values[i] for i in found)
            assert Counter(values[i] for i in found) <= Counter(values[i] for i in allowed)
        else:
            assert certain <= found <= allowed


@pytest.mark.parametrize("ties", [False, True])
def test_narrow_and_whole_sort_agree(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(64, 3, ties)
    rows = [
        sequence([1], [2] * i, temperature=0.9, top_p=0.3 + 0.01 * (i % 60), top_k=i % 7 * 5)
        for i in range(64)
    ]
    results = []
    for tiers in ((4, 64), (8,), (256, 512), ()):
        monkeypatch.setattr(filters_module, "NUM_CANDIDATES", tiers)
        results.append(sample(logits, rows, range(64)).tokens)
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) > 16


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, output = [4, 9, 9, 30], [7, 9, 7]
    for seed in range(5):
        logits = random_logits(1, seed, ties=False)
        ids = torch.tensor([prompt + output])
        expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
        row = logits[0].clone().numpy()
        one = sequence(prompt, output, repetition_penalty=1.7)
        one.draw.edit(row, one.tokens, one.num_prompt)
        assert torch.equal(torch.from_numpy(row), expected[0])


def test_presence_and_frequency_count_the_output() -> None:
    one = sequence([4, 9, 9], [7, 9, 7], presence_penalty=0.5, frequency_penalty=0.25)
    row = np.zeros(VOCAB, dtype=np.float32)
    one.draw.edit(row, one.tokens, one.num_prompt)
    expected = np.zeros(VOCAB, dtype=np.float32)
    expected[7], expected[9] = -0.5 - 2 * 0.25, -0.5 - 0.25
    assert np.array_equal(row, expected)
    assert one.draw.penalties is not None
    one.draw.penalties.produced(30)
    row[:] = 0
    one.draw.edit(row, [*one.tokens, 30], one.num_prompt)
    assert row[30] == np.float32(-0.75)


def test_penalties_grow_past_their_first_arrays() -> None:
    one = sequence(list(range(250)), list(range(100, 300)), frequency_penalty=1.0)
    row = np.zeros(VOCAB, dtype=np.float32)
    one.draw.edit(row, one.tokens, one.num_prompt)
    assert row[100:300].tolist() == [-1.0] * 200 and not row[:100].any() and not row[300:].any()


def counted_last(
    prompt: list[int], output: list[int], window: int, logits: np.ndarray, **penalties: float
) -> np.ndarray:
    """The definition: only the last `window` tokens count, those of the output where the output
    counts."""
    last = (prompt + output)[-window:]
    made = output[-window:]
    row = logits.copy()
    for token in set(last):
        scale = np.float32(penalties["repetition_penalty"])
        row[token] = row[token] * scale if row[token] < 0 else row[token] / scale
        times = made.count(token)
        row[token] -= penalties["frequency_penalty"] * times
        row[token] -= penalties["presence_penalty"] * (times > 0)
    return row


@pytest.mark.parametrize("window", [1, 2, 5, 64])
def test_penalties_count_the_last_tokens(window: int) -> None:
    """Token by token, and of a sequence that another worker began."""
    rng = random.Random(window)
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5,
    }  # fmt: skip
    prompt = [rng.randint(0, 9) for _ in range(7)]
    one = sequence(prompt, [], penalty_window=window, **penalties)
    logits = random_logits(1, window, ties=False)[0].numpy()
    for _ in range(90):
        output = one.tokens[one.num_prompt :]
        expected = counted_last(prompt, output, window, logits, **penalties)
        fresh = sequence(prompt, output, penalty_window=window, **penalties)
        for made in (one, fresh):
            row = logits.copy()
            made.draw.edit(row, made.tokens, made.num_prompt)
            np.testing.assert_allclose(row, expected, rtol=1e-6)
        token = rng.randint(0, 12)
        one.tokens.append(token)
        one.draw.produced(token)
    # what a device gets
    assert one.draw.needs_host and not one.draw.is_host_drawn


def test_a_window_over_everything_changes_nothing() -> None:
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.25}
    prompt, output = [4, 9, 9, 30], [7, 9, 7]
    rows = []
    for window in (None, 7, 2**31 - 1):
        one = sequence(prompt, output, penalty_window=window, **penalties)
        rows.append(random_logits(1, 3, ties=False)[0].numpy())
        one.draw.edit(rows[-1], one.tokens, one.num_prompt)
    assert all(np.array_equal(row, rows[0]) for row in rows)


def test_bias_and_early_ends() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 10.0
    biased = sequence([1], [], logit_bias=((11, 20.0), (3, 5.0)))
    assert sample(logits, [biased], [0]).tokens == [11]
    early = sequence([1], [8], min_tokens=2)
    assert sample(logits, [early], [0]).tokens == [0]
    due = sequence([1], [8, 8], min_tokens=2)
    assert sample(logits, [due], [0]).tokens == [3]
    assert logits[0, 3] == 10.0 and logits[0, 0] == 0.0


def test_a_row_never_depends_on_the_others() -> None:
    rng = np.random.default_rng(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 9, "min_p": 0.05},
        {"temperature": 1.0, "typical_p": 0.6, "repetition_penalty": 1.2},
        {"temperature": 0.9, "presence_penalty": 1.0, "logit_bias": ((2, 4.0),), "logprobs": 0},
    ]
    # wider than the reduction grain at which torch splits a single row over threads
    logits = random_logits(21, 1, ties=False, vocab=40_000)
    rows = [
        sequence([1, 2], rng.integers(0, VOCAB, i % 5).tolist(), seed=i, **kinds[i % len(kinds)])
        for i in range(21)
    ]
    together = sample(logits, rows, range(21))
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row], [0])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.scores.get(0) == together.scores.get(i)
    order = rng.permutation(21).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order], range(21))
    assert shuffled.tokens == [together.tokens[i] for i in order]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 4,000 draws of one row, each with its own seed and position."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5, -1.0, 1.5, 0.2, -0.4]])
    count = 4000
    for settings, kept in (({}, range(8)), ({"top_k": 4}, (1, 2, 3, 5))):
        rows = [
            sequence([1], [0] * (i % 10), choice=i % 3, seed=i, temperature=1.0, **settings)
            for i in range(count)
        ]
        tokens = sample(logits.expand(count, -1), rows, range(count)).tokens
        scores = logits[0].double().numpy()
        weights = np.array([math.exp(scores[i]) if i in kept else 0.0 for i in range(8)])
        expected = weights / weights.sum() * count
        seen = np.bincount(tokens, minlength=8)
        assert seen[expected == 0].sum() == 0
        used = expected > 0
        statistic = ((seen - expected)[used] ** 2 / expected[used]).sum()
        # 99.9% points of chi-square with 7 and 3 degrees of freedom
        assert statistic < (24.3 if len(kept) == 8 else 16.3)


def test_noise_is_uniform_and_depends_on_all_its_parts() -> None:
    values = np.array([uniform(s, c, p) for s in range(20) for c in range(5) for p in range(50)])
    assert len(set(values.tolist())) == len(values)
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 250) ** 2 / 250).sum() < 43.8  # 99.9% point, 19 degrees of freedom
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0) != uniform(1, 0, 0)


def test_the_highest_noise_still_gives_a_token_with_weight() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, :3] = torch.tensor([0.1, 0.2, 0.3])
    top = torch.tensor([[1 - 2.0**-52]], dtype=torch.float64)
    plain = filters_module.make_filters([sequence([1], [], temperature=1.0).draw], top.device)
    assert filters_module.draw_plain(logits, plain, top).tolist() == [2]
    assert filters_module.draw_filtered(logits, plain, top).tolist() == [2]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(2, 9, ties=False)
    rows = [
        sequence([1], [], temperature=0.3, top_k=2, logprobs=4, logit_bias=((17, 100.0),)),
        sequence([1], [], logprobs=0),
    ]
    result = sample(logits, rows, range(2))
    expected = torch.log_softmax(logits, dim=1)
    assert result.tokens[0] == 17
    assert result.scores[0].logprob == pytest.approx(expected[0, 17].item(), abs=1e-6)
    best = expected[0].topk(4)
    assert [token for token, _ in result.scores[0].top] == best.indices.tolist()
    assert [value for _, value in result.scores[0].top] == pytest.approx(best.values.tolist())
    assert result.scores[1].top == ()


def test_tiny_temperature_is_greedy() -> None:
    logits = random_logits(1, 2, ties=False)
    rows = [sequence([1], [], temperature=1e-9)]
    assert sample(logits, rows, [0]).tokens == [int(logits.argmax())]


def random_draws(rng: random.Random, ahead: int = 1) -> tuple[list[Sequence], list[int]]:
    """Draws that need nothing from the host, some of them from the same row."""
    kinds: list[dict[str, Any]] = [
        {}, {"logprobs": 3}, {"min_tokens": 4}, {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 9}, {"temperature": 1.5, "top_p": 0.8, "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.05}, {"repetition_penalty": 1.4, "logprobs": 2},
        {"presence_penalty": 1.1, "frequency_penalty": 0.3, "temperature": 1.0},
        {"logit_bias": ((3, 6.0), (7, -2.0), (2, 5.0)), "min_tokens": 9, "repetition_penalty": 0.8},
        {"rules": TokenRules(allowed_ids=(3, 5, 8, 200)), "min_tokens": 5},
        {"rules": TokenRules(allowed_ids=(3, 5)), "min_tokens": 9, "presence_penalty": -0.5},
    ]  # fmt: skip
    if not ahead:
        # which token leaves a window, a device does not know
        kinds.append({"repetition_penalty": 1.4, "presence_penalty": 0.6, "penalty_window": 3})
    draws = []
    for kind in rng.choices(kinds, k=rng.randint(1, 12)):
        output = [rng.randint(0, 12) for _ in range(rng.randint(1, 9))]
        prompt = [rng.randint(0, 12) for _ in range(rng.randint(1, 9))]
        draws.append(sequence(prompt, output, rng.randint(0, 3), **kind))
    return draws, sorted(max(place - rng.randint(0, 1), 0) for place in range(len(draws)))


@pytest.mark.parametrize("seed", range(60))
def test_launched_draws_are_those_of_the_host(seed: int) -> None:
    rng = random.Random(seed)
    ahead = rng.randint(0, 1)
    draws, rows = random_draws(rng, ahead)
    logits = random_logits(len(set(rows)), seed, ties=False)
    output = ModelOutput(torch.device("cpu"), VOCAB)
    launcher = Sampler(device=TwinDraws())
    inputs = launcher.inputs(draws, rows, output, ahead)
    assert inputs is not None
    unknown = torch.tensor([rng.randint(0, 15) for _ in draws]) if ahead else None
    tensors = [torch.from_numpy(one) for one in inputs]
    launched = launcher.launch(logits.clone(), draws, tensors, unknown)
    for one, token in zip(draws, unknown.tolist() if unknown is not None else (), strict=False):
        one.tokens.append(token)
        one.draw.produced(token)
    expected = sample(logits, draws, rows)
    assert launched.tokens.tolist() == expected.tokens
    assert read_draws(launched) == expected


def test_unknown_tokens_are_only_counted_on_the_device() -> None:
    """What does not depend on the output is drawn ahead by the host as well."""
    for seed in range(20):
        draws, rows = random_draws(random.Random(seed))
        if all(one.draw.may_run_ahead(one.num_output) for one in draws):
            logits = random_logits(len(set(rows)), seed, ties=False)
            found = sample(logits, draws, rows, ahead=1)
            for one in draws:
                one.tokens.append(3)
            assert found == sample(logits, draws, rows)


@pytest.mark.parametrize("settings", [{"temperature": 1.0, "typical_p": 0.5}, {"num_beams": 2}])
def test_the_host_takes_part_in_other_draws(settings: dict[str, Any]) -> None:
    output = ModelOutput(torch.device("cpu"), VOCAB)
    draws = [sequence([1], [2]), sequence([1], [2], **settings)]
    if "num_beams" in settings:
        draws[1].draw = replace(draws[1].draw, num_continuations=4)
    launcher = Sampler(device=TwinDraws())
    assert launcher.inputs(draws, [0, 1], output, 0) is None
    assert launcher.inputs(draws[:1], [0], output, 0) == []
    sampled = [sequence([1], [2], temperature=1.0)]
    assert launcher.inputs(sampled, [0], output, 0) is not None
    assert Sampler().inputs(sampled, [0], output, 0) is None
    biased = [sequence([1], [2], logit_bias=((3, 1.0),))]
    assert Sampler().inputs(biased, [0], output, 0) is None
