"""Beam search equals transformers' on tiny random models, alone, in company and when preempted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coterie.core.events import Delta, Finished
from coterie.core.plan import Admitted, Assignment, Rejected
from coterie.engine.engine import Engine
from coterie.models.base import load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.models.toy_model import drain, make_assignment, make_lane, outputs, texts

PATH = tiny_checkpoint("llama", seed=3)


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(open_checkpoint(PATH), dtype="fp32", backend="reference")


def make_engine(model: Any, **lane: Any) -> Engine:
    settings = {"num_blocks": 400, "context": 512, "max_sequences": 16, "max_step_tokens": 64}
    return Engine(model, load_tokenizer(PATH), [make_lane(**(settings | lane))])


def beam_request(name: str, prompt: list[int], **settings: Any) -> Assignment:
    return make_assignment(name, prompt, **({"max_tokens": 16, "ignore_eos": False} | settings))


def expected(oracle: Any, assignment: Assignment, eos_ids: list[int]) -> list[list[int]]:
    sampling = assignment.sampling
    ids = torch.tensor([assignment.prompt_ids])
    penalty = sampling.repetition_penalty
    found = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=sampling.num_beams,
        num_return_sequences=sampling.n,
        do_sample=False,
        early_stopping=False,
        max_new_tokens=assignment.limits.max_tokens,
        length_penalty=1.0 if sampling.length_penalty is None else sampling.length_penalty,
        repetition_penalty=1.0 if penalty is None else penalty,
        eos_token_id=eos_ids,
        pad_token_id=2,
    )
    rows = []
    for row in found[:, ids.shape[1] :].tolist():
        ends = [place for place, token in enumerate(row) if token in eos_ids]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows


CASES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "n": 4},
    {"num_beams": 5, "n": 2, "length_penalty": 0.0},
    {"num_beams": 3, "length_penalty": 2.0},
    {"num_beams": 3, "n": 3, "length_penalty": -1.0},
    {"num_beams": 4, "n": 2, "repetition_penalty": 1.4},
    {"num_beams": 8, "n": 8, "max_tokens": 5},
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_transformers(number: int, oracle: Any, model: Any) -> None:
    generator = torch.Generator().manual_seed(number)
    for length in (1, 7, 33):
        prompt = torch.randint(4, 384, (length,), generator=generator).tolist()
        # several frequent tokens end a hypothesis, so that ends of different lengths compete
        stops = torch.randint(4, 384, (30,), generator=generator).tolist()
        assignment = beam_request("b", prompt, stop_token_ids=tuple(stops), **CASES[number])
        engine = make_engine(model)
        assert isinstance(engine.add(assignment), Admitted)
        events = drain(engine)
        found = outputs(events)
        rows = expected(oracle, assignment, sorted({1, *stops}))
        for choice, row in enumerate(rows):
            assert found["b", choice] == row
        assert isinstance(events[-1], Finished)
        assert engine.stats()["kv_usage"] == 0


def test_company_and_pressure_change_nothing(oracle: Any, model: Any) -> None:
    engine = make_engine(model, num_blocks=26, max_sequences=6, prefix_cache=False)
    beams = [
        beam_request(f"b{i}", list(range(20 + i, 30 + i)), num_beams=3, n=2, max_tokens=14)
        for i in range(3)
    ]
    others = [make_assignment(f"o{i}", range(40 + i, 50), max_tokens=20) for i in range(3)]
    for assignment in (*beams, *others):
        assert isinstance(engine.add(assignment), Admitted)
    found = outputs(drain(engine))
    assert engine.stats()["preemptions"] > 0
    for assignment in beams:
        for choice, row in enumerate(expected(oracle, assignment, [1])):
            assert found[assignment.request_id, choice] == row


def test_stop_strings_cut_the_emitted_text(model: Any) -> None:
    engine = make_engine(model)
    engine.add(beam_request("b", [5, 6, 7], num_beams=2))
    whole = texts(drain(engine))["b", 0]
    stop = whole[3:5]
    engine.add(beam_request("c", [5, 6, 7], num_beams=2, stop=(stop,)))
    events = drain(engine)
    assert texts(events)["c", 0] == whole[: whole.index(stop)]
    ends = [e for e in events if isinstance(e, Delta) and e.finish_reason]
    assert [(e.finish_reason, e.stop_match) for e in ends] == [("stop", stop)]


def test_what_cannot_fit_is_refused(model: Any) -> None:
    engine = make_engine(model, num_blocks=8, max_sequences=4)
    verdicts = [
        engine.add(beam_request("a", [5] * 10, num_beams=4)),
        engine.add(beam_request("b", [5], num_beams=5, max_tokens=1)),
        engine.add(beam_request("c", [5], num_beams=2, n=3, max_tokens=1)),
        engine.add(beam_request("d", [5], num_beams=2, logprobs=1, max_tokens=1)),
    ]
    codes = [verdict.code for verdict in verdicts if isinstance(verdict, Rejected)]
    assert codes == ["context_length_exceeded", "invalid_request", "invalid_request", "unsupported"]
