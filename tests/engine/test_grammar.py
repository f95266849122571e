"""Answers held to a grammar while they are drawn: over the toy engine, every road to a token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.core.events import Delta, Failed, Finished
from coterie.core.plan import Admitted, Assignment, Rejected
from coterie.core.request import ResponseFormat
from coterie.engine import grammar
from coterie.engine.draw import uniform
from coterie.engine.engine import Engine
from coterie.engine.grammar import GrammarCache, allowed_tokens
from coterie.engine.sampler import SampleBatch, Sampler, mask_rows
from coterie.models.grammar.grammar import GrammarVocabulary
from tests.helpers.models.toy_grammars import NESTED, PATTERN, REGEX, constrained, run
from tests.helpers.models.toy_model import (
    EOS,
    VOCAB,
    ToyModel,
    ToySpec,
    ToyTokenizer,
    chain_logits,
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    taken_over,
    texts,
    true_output,
)

WORDS = ("CUB", "CUBED", "CUD", "HEED", "HEEDED", "HEEDING", "X")


def one_of(words: Sequence[str]) -> ResponseFormat:
    return ResponseFormat("regex", "|".join(map(re.escape, words)))


def spelled(assignment: Assignment, words: Sequence[str]) -> list[int]:
    """The output by the book: softmax over the letters that some word has next, or an end."""
    prompt, output = list(assignment.prompt_ids), list[int]()
    while True:
        text = ToyTokenizer().decode(output)
        nexts = {ord(w[len(text)]) - ord("A") for w in words if w.startswith(text) and w != text}
        if not nexts:
            return output
        allowed = sorted(nexts | ({EOS} if text in words else set()))
        chain = [*prompt, *output]
        logits = chain_logits(chain, range(len(chain))).astype(np.float64)[allowed]
        temperature = assignment.sampling.temperature or 0.0
        if temperature:
            sums = np.exp((logits - logits.max()) / temperature).cumsum()
            noise = uniform(assignment.sampling.seed or 0, 0, len(output)) * sums[-1]
            token = allowed[int((sums > noise).argmax())]
        else:
            token = allowed[int(logits.argmax())]
        output.append(token)
        if token == EOS:
            return output


@settings(max_examples=25, deadline=None)
@given(
    words=st.lists(st.text("BCDEFXYZabc", min_size=1, max_size=6), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
)
def test_tokens_are_those_of_the_masked_distribution(
    words: list[str], seed: int, temperature: float
) -> None:
    assignment = constrained("r", one_of(words), seed=seed, temperature=temperature)
    found = outputs(run(assignment))["r", 0]
    assert found == spelled(assignment, words)
    assert ToyTokenizer().decode(found) in words


def test_neighbours_and_preemption_change_nothing() -> None:
    work = [
        constrained(f"r{i}", (REGEX, NESTED, one_of(WORDS))[i % 3], seed=i, max_tokens=24)
        for i in range(9)
    ]
    free = [make_assignment(f"f{i}", range(1, 9 + i), max_tokens=20) for i in range(3)]
    alone = {key: ids for one in work for key, ids in outputs(run(one)).items()}
    together = outputs(run(*work, *free))
    engine = make_engine(make_lane(num_blocks=22, prefix_cache=False))
    for assignment in (*work, *free):
        engine.add(assignment)
    squeezed = outputs(drain(engine))
    assert engine.stats()["preemptions"] > 0
    assert {key: together[key] for key in alone} == alone
    assert squeezed == together
    for one in free:
        assert together[one.request_id, 0] == true_output(one)


@pytest.mark.parametrize("wanted", [REGEX, NESTED, one_of(WORDS)], ids=["regex", "lark", "words"])
def test_takeover_at_every_token_continues_the_same(wanted: ResponseFormat) -> None:
    whole = constrained("r", wanted, max_tokens=18, n=2, seed=3)
    deltas = [event for event in run(whole) if isinstance(event, Delta)]
    full, ends = outputs(deltas), {d.choice: d.finish_reason for d in deltas if d.finish_reason}
    engine = make_engine()
    for cut in range(len(deltas)):
        seen = deltas[:cut]
        assert isinstance(engine.add(taken_over(whole, seen)), Admitted)
        rest = drain(engine)
        assert outputs([*seen, *rest]) == full
        finished = rest[-1]
        assert isinstance(finished, Finished)
        assert (
            dict(enumerate(finished.choices)).items()
            >= {
                choice: reason
                for choice, reason in ends.items()
                if choice not in {d.choice for d in seen if d.finish_reason}
            }.items()
        )


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"typical_p": 0.6}, {"top_k": 3, "top_p": 0.9},
     {"repetition_penalty": 1.3, "presence_penalty": 0.5}, {"logit_bias": ((2, -80.0),)}],
    ids=str,
)  # fmt: skip
def test_filters_and_penalties_work_on_what_is_allowed(filters: dict[str, Any]) -> None:
    work = [constrained(f"r{i}", REGEX, seed=i, **filters) for i in range(8)]
    found = texts(run(*work))
    assert len(found) == 8
    for text in found.values():
        assert re.fullmatch(PATTERN, text), text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masking_whole_rows_draws_the_same(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """As a GPU does it, where few candidates are no cheaper than all."""
    work = [
        constrained("a", REGEX, temperature=temperature, seed=3),
        make_assignment("b", range(1, 20), temperature=temperature, seed=4),
        constrained("c", NESTED, temperature=temperature, seed=5),
    ]
    among_few = outputs(run(*work))

    def whole_rows(
        self: Sampler, logits: Tensor, batch: SampleBatch
    ) -> tuple[Tensor, dict[int, int]]:
        nothing = [()] * len(batch.constrained)
        allowed = allowed_tokens(batch.constraints, nothing, logits.shape[1])
        return mask_rows(logits, batch.constrained, allowed), {}

    monkeypatch.setattr(Sampler, "_constrain", whole_rows)
    assert outputs(run(*work)) == among_few


def test_choices_differ_and_all_match() -> None:
    found = texts(run(constrained("r", REGEX, n=6)))
    assert len(found) == 6 and len(set(found.values())) > 1
    assert all(re.fullmatch(PATTERN, text) for text in found.values())


def test_an_end_comes_exactly_where_the_grammar_may_end() -> None:
    work = [constrained(f"r{i}", one_of(("CUB", "CUBED")), seed=i) for i in range(12)]
    spelt = {ToyTokenizer().decode(ids): ids for ids in outputs(run(*work)).values()}
    # drawn behind a word that might go on, left out behind one that cannot
    assert spelt["CUB"][-1] == EOS and spelt["CUBED"][-1] != EOS


def test_min_tokens_put_an_end_off_as_far_as_the_grammar_goes() -> None:
    work = [constrained(f"r{i}", one_of(WORDS), seed=i, min_tokens=5) for i in range(10)]
    found = texts(run(*work))
    assert len(found) == 10
    for text in found.values():
        # those that end early are those that nothing continues
        assert text in ("CUBED", "HEEDED", "HEEDING", "CUD", "X"), text


def test_ignored_ends_are_left_out_where_more_may_follow() -> None:
    work = [
        constrained(f"r{i}", one_of(("CUB", "CUBED")), seed=i, ignore_eos=True) for i in range(8)
    ]
    assert set(texts(run(*work)).values()) == {"CUBED"}


def test_stop_strings_cut_and_logprobs_are_of_the_raw_logits() -> None:
    stopped = run(constrained("r", one_of(("HEEDING",)), stop=("ED",)))
    assert texts(stopped)["r", 0] == "HE"
    deltas = [e for e in run(constrained("r", REGEX, logprobs=3)) if isinstance(e, Delta)]
    prompt = list(range(1, 20))
    output = [token for delta in deltas for token in delta.token_ids]
    for index, delta in enumerate(deltas):
        chain = [*prompt, *output[:index]]
        logits = chain_logits(chain, range(len(chain))).astype(np.float64)
        true = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert delta.logprobs is not None
        assert delta.logprobs[0].logprob == pytest.approx(true[output[index]], abs=1e-4)
        assert len(delta.logprobs[0].top) == 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_tokens", [2, 3, 5, 17, 40, 90, 150])
def test_a_text_without_end_is_completed_in_time(max_tokens: int, seed: int) -> None:
    """The toy hardly ever closes a bracket by itself: the engine sees to it."""
    assignment = constrained("r", NESTED, max_tokens=max_tokens, seed=seed)
    events = run(assignment)
    text, last = texts(events)["r", 0], events[-1]
    assert text.count("[") == text.count("]") and text.endswith("]"), text
    assert re.fullmatch(r"[\[\]a-e_]+", text)
    assert len(outputs(events)["r", 0]) <= max_tokens
    assert last.choices == (("length" if len(outputs(events)["r", 0]) == max_tokens else "stop"),)


def test_what_cannot_be_completed_is_cut() -> None:
    events = run(constrained("r", ResponseFormat("regex", "[a-e]{50}X"), max_tokens=9))
    assert re.fullmatch("[a-e]{9}", texts(events)["r", 0])
    assert events[-1].choices == ("length",)


def test_a_grammar_that_fails_takes_nobody_along() -> None:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
    hostile = ResponseFormat("lark", f'start: "X" r0\n{rules}\nr40: "a"')
    neighbour = make_assignment("free", range(1, 9), max_tokens=12)
    events = run(constrained("bad", hostile), neighbour, constrained("good", REGEX))
    ends = {e.request_id: e for e in events if isinstance(e, Failed | Finished)}
    failed = ends["bad"]
    assert isinstance(failed, Failed) and failed.code == "invalid_request"
    assert "grammar" in failed.message
    assert outputs(events)["free", 0] == true_output(neighbour)
    assert re.fullmatch(PATTERN, texts(events)["good", 0])


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        (ResponseFormat("regex", "(a"), "unclosed"),
        (ResponseFormat("lark", "start: nowhere"), "nowhere"),
        (ResponseFormat("gbnf", "root ::= nowhere"), "nowhere"),
        (ResponseFormat("json_schema", '{"type": "thing"}'), "thing"),
        (ResponseFormat("json_schema", '{"uniqueItems": true}'), "uniqueItems"),
        (ResponseFormat("poem", ""), "poem"),
        (ResponseFormat("regex", "a" * 10_001), "10001"),
    ],
    ids=["regex", "lark", "gbnf", "type", "keyword", "kind", "size"],
)
def test_what_cannot_be_enforced_is_refused(wanted: ResponseFormat, word: str) -> None:
    engine = make_engine()
    verdict = engine.add(constrained("r", wanted))
    if isinstance(verdict, Rejected):
        code, reason = verdict.code, verdict.reason
    else:
        # it took longer than an engine waits
        failed = drain(engine)[-1]
        assert isinstance(failed, Failed)
        code, reason = failed.code, failed.message
    assert code == "invalid_request" and word in reason
    assert not engine.has_work()


def test_beams_and_a_grammar_are_refused_together() -> None:
    verdict = make_engine().add(constrained("r", REGEX, num_beams=2, temperature=0.0))
    assert isinstance(verdict, Rejected) and verdict.code == "unsupported"


def test_compiled_grammars_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILED", 3)
    compiled = list[str]()
    grammars = GrammarCache(ToyTokenizer(), VOCAB, [EOS])  # type: ignore[arg-type]
    whole = GrammarVocabulary.compile

    def counted(self: Any, wanted: ResponseFormat) -> Any:
        compiled.append(wanted.text)
        return whole(self, wanted)

    monkeypatch.setattr(GrammarVocabulary, "compile", counted)
    for text in ("B", "C", "B", "D", "E", "B", "C"):
        grammars._begin(ResponseFormat("regex", text), [])
    # C was the least recently used when E came
    assert compiled == ["B", "C", "D", "E", "C"]


def test_a_model_without_an_end_token_ends_where_the_grammar_does() -> None:
    class Endless(ToyTokenizer):
        eos_ids = ()  # type: ignore[assignment]

    model = ToyModel()
    model.spec = ToySpec(eos_ids=())
    engine = Engine(model, Endless(), (make_lane(),))  # type: ignore[arg-type]
    engine.add(constrained("ends", ResponseFormat("regex", "[C-F]{3}X")))
    engine.add(constrained("goes on", ResponseFormat("regex", "[C-F]+"), max_tokens=11))
    events = drain(engine)
    ends = {e.request_id: e.choices for e in events if isinstance(e, Finished)}
    assert ends == {"ends": ("stop",), "goes on": ("length",)}
    assert re.fullmatch("[C-F]{3}X", texts(events)["ends", 0])
    assert re.fullmatch("[C-F]{11}", texts(events)["goes on", 0])
