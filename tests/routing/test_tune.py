"""routing/router.py through the router: whose value stands, formats, templates, token limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coterie.core.adapters import AdapterProfile
from coterie.core.request import (
    AdapterHint,
    Chat,
    InferenceRequest,
    Limits,
    Message,
    ResponseFormat,
    RouteHints,
    Sampling,
    Text,
)
from coterie.core.sampling import ModelRecommendation, sampling_sources
from coterie.routing.router import TASK_VALUES, Router, Specialist
from tests.helpers.adapters.profiles import BASE, Answers, Fleet, Matched, asking, profile

GENERATION = {"temperature": 0.9, "top_k": 20, "min_p": 0.05}
SPECIALIST = Specialist("tiny", GENERATION, BASE)
STORY = "Write a story about a dragon"


def router(*profiles: AdapterProfile, chance: float = 0.9) -> Router:
    answers = Answers([Matched(p, chance, chance) for p in profiles])
    return Router([SPECIALIST], Fleet(list(profiles), answers))


def test_caller_then_adapter_then_task_then_model_then_vendor() -> None:
    judged = profile("a", decoding={"temperature": 0.0, "top_k": 7.0})
    request = replace(asking(STORY), sampling=Sampling(top_p=0.5))
    vendor = Sampling(temperature=1.0, top_p=1.0, n=1, num_beams=1, typical_p=0.77)
    got = router(judged).plan(request, vendor).sampling
    # caller, adapter, adapter, no penalty where the adapter names none, model, vendor
    assert (got.top_p, got.temperature, got.top_k) == (0.5, 0.0, 7) and isinstance(got.top_k, int)
    assert (got.repetition_penalty, got.min_p, got.typical_p) == (1.0, 0.05, 0.77)
    task = TASK_VALUES["creative_writing"]
    base = router(judged, chance=0.1).plan(request, vendor).sampling
    assert base.temperature == task["temperature"] == 0.8
    assert (base.repetition_penalty, base.top_k) == (task["repetition_penalty"], 20)


def test_the_seeds_own_table() -> None:
    kept = ("temperature", "max_tokens", "top_p", "repetition_penalty")
    seed = {
        "json_parsing": (0.2, 2048, 0.95, 1.0),
        "creative_writing": (0.8, 4096, 0.95, 1.1),
        "code_generation": (0.4, 8192, 0.95, 1.05),
        "conversation": (0.6, 2048, 0.95, 1.1),
    }
    for task, values in seed.items():
        assert tuple(TASK_VALUES[task][name] for name in kept) == values


def test_who_is_tuned() -> None:
    made = router(profile("a", decoding={"temperature": 0.3}))
    assert made.plan(asking(STORY, model="auto")).sampling.temperature == 0.3
    # a caller that names somebody gets the model's own values, unless it asks to be tuned
    assert made.plan(asking(STORY, model="tiny")).sampling.temperature == 0.9
    assert made.plan(asking(STORY, model="a")).sampling.temperature == 0.9
    named = made.plan(asking(STORY, model="tiny", tune=True))
    assert named.sampling.temperature == 0.8 and not named.adapters
    assert named.trace is not None and named.trace.task_type == "creative_writing"
    named = made.plan(asking(STORY, adapters=(AdapterHint("a"),), tune=True))
    assert named.sampling.temperature == 0.3 and named.trace is not None
    assert named.trace.candidates == () and named.reasons == ("named by the caller",)
    # texts and tokens for a model are not read
    plain = replace(asking(), prompt=Text(STORY))
    assert made.plan(plain).sampling.temperature == 0.9 and made.plan(plain).trace is None


def test_what_an_adapter_is_for_decides_the_task() -> None:
    stated = profile("a", capabilities=("task:code_generation", "tech:sql", "task"))
    plan = router(stated).plan(asking(STORY, tune=True))
    assert plan.trace is not None and plan.trace.task_type == "code_generation"
    assert plan.trace.features["code_language"] == "sql" and plan.tuned.max_tokens == 8192
    for unknown in (profile("a", capabilities=("task:magic", "tech:neo4j")), profile("a")):
        trace = router(unknown).plan(asking(STORY)).trace
        assert trace is not None and trace.task_type == "creative_writing"
        assert trace.features["code_language"] == ""
    # only of one that was chosen
    trace = router(stated, chance=0.1).plan(asking(STORY)).trace
    assert trace is not None and trace.task_type == "creative_writing"


def test_max_tokens_only_where_none_was_given_and_tuning_was_asked_for() -> None:
    made = router(profile("a", decoding={"max_tokens": 77.0}), chance=0.1)
    assert made.plan(asking(STORY)).tuned.max_tokens is None
    assert made.plan(asking(STORY, tune=True)).tuned.max_tokens == 4096
    given = replace(asking(STORY, tune=True), limits=Limits(max_tokens=5))
    assert made.plan(given).tuned.max_tokens is None
    made = router(profile("a", decoding={"max_tokens": 77.0}))
    assert made.plan(asking(STORY, tune=True)).tuned.max_tokens == 77


def test_an_adapters_format_is_for_that_adapter_alone() -> None:
    formatted = profile("a", response_format=ResponseFormat("gbnf", "root ::= [a-z]"))
    made = router(formatted)
    assert made.plan(asking()).tuned.response_format == formatted.response_format
    own = replace(asking(), response_format=ResponseFormat("json_object"))
    # the request's own stands: the pipeline takes it where the plan has none
    assert made.plan(own).tuned.response_format is None
    tools = ({"name": "f", "description": "", "parameters": {}},)
    with_tools = replace(asking(), prompt=Chat((Message("user", "hi"),), tools=tools))
    assert made.plan(with_tools).tuned.response_format is None
    two = router(formatted, profile("b"))
    assert len(two.plan(asking(max_adapters=2)).adapters) == 2
    assert two.plan(asking(max_adapters=2)).tuned.response_format is None
    assert two.plan(asking(max_adapters=1)).tuned.response_format is not None
    assert made.plan(asking(model="a")).tuned.response_format is None
    assert made.plan(asking(model="a", tune=True)).tuned.response_format is not None
    assert router(formatted, chance=0.1).plan(asking()).tuned.response_format is None


def rewritten(template: str, request: InferenceRequest) -> str | None:
    prompt = router(profile("a", template=template)).plan(request).tuned.prompt
    assert prompt is None or isinstance(prompt, Chat)
    return None if prompt is None else prompt.messages[-1].content


@pytest.mark.parametrize(
    ("template", "text", "hints", "out"),
    [
        ("Q: {prompt}", "hi", {}, "Q: hi"),
        (
            "{body}\n-- {prompt}",
            "do\n\ndoc",
            {"instruction": "do", "document": "doc"},
            "doc\n-- do",
        ),
        # a template without a place for the document loses none of it
        ("Q: {prompt}", "do\n\ndoc", {"instruction": "do", "document": "doc"}, "Q: do\n\ndoc"),
        # what a caller writes is filled in once and never read as a template
        ("{prompt}|{body}", "{body} {0}", {}, "{body} {0}|"),
        # the caller's own template stands
        ("Q: {prompt}", "T: do", {"instruction": "do"}, None),
        ("", "hi", {}, None),
    ],
)
def test_templates(template: str, text: str, hints: dict[str, Any], out: str | None) -> None:
    assert rewritten(template, asking(text, **hints)) == out


def test_a_template_changes_the_last_turn_alone() -> None:
    turns = (Message("system", "s"), Message("user", "one"), Message("assistant", "two"))
    request = replace(asking(), prompt=Chat((*turns, Message("user", "three"))))
    made = router(profile("a", template="<{prompt}>"))
    prompt = made.plan(request).tuned.prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages == (*turns, Message("user", "<three>"))
    # an assistant's turn that is to be continued is not the caller's to rewrite
    assert made.plan(replace(request, prompt=Chat((*turns,)))).tuned.prompt is None


def test_a_plan_is_the_same_for_the_same_request() -> None:
    made = router(profile("a", decoding={"temperature": 0.3}, template="{prompt}!"))
    request = asking(STORY, tune=True)
    one, two = made.plan(request), made.plan(request)
    assert one.sampling.seed != two.sampling.seed
    fixed = Sampling(seed=1)
    one, two = (made.plan(replace(request, sampling=fixed)) for _ in range(2))
    assert one.trace is not None and two.trace is not None
    assert replace(one, trace=replace(one.trace, timings_ms={})) == replace(
        two, trace=replace(two.trace, timings_ms={})
    )
    assert RouteHints() == RouteHints() and one.trace.timings_ms["total"] > 0


def test_a_task_type_is_no_wilder_than_the_models_authors() -> None:
    """A small model writes nonsense above their temperature, and with a penalty that they leave
    out."""
    advice = ModelRecommendation("tiny", "its card", {"temperature": 0.3, "top_p": 0.9})
    known = Router([Specialist("base", recommended=advice)])
    request = replace(asking(STORY), hints=RouteHints("base", tune=True))
    plan = known.plan(request)
    assert plan.sampling.temperature == 0.3 and plan.sampling.repetition_penalty is None
    # what a task type makes less wild is tuned, and what they do not recommend
    assert plan.sampling.top_p == TASK_VALUES["creative_writing"]["top_p"]
    sources = sampling_sources(
        plan.sampling, request.sampling, {}, advice.sampling, plan.tuned.sampling
    )
    assert {name: item.source for name, item in sources.items()} == {
        "temperature": "recommended",
        "top_p": "tuned",
    }
    colder = replace(asking("Classify this text as spam or ham: buy now"), hints=request.hints)
    assert known.plan(colder).sampling.temperature == TASK_VALUES["classification"]["temperature"]
    warm = replace(request, sampling=Sampling(temperature=0.9))
    assert known.plan(warm).sampling.temperature == 0.9
