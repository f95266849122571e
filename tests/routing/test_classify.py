"""The choice of a specialist: rules, a router trained here, its files, and the router's plan."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.core.errors import ConfigError, Conflict, InvalidRequest, NotFound
from coterie.core.plan import ClassifierInput
from coterie.core.request import Chat, InferenceRequest, Limits, Message, RouteHints, Sampling, Text
from coterie.core.settings import RoutingSettings
from coterie.routing.classify import train as trainer
from coterie.routing.classify.decide import ServedIntents, decide
from coterie.routing.classify.evaluate import calibration_error, evaluate
from coterie.routing.classify.features import decoded, encoded, prompt_input
from coterie.routing.classify.structure import structures
from coterie.routing.classify.traffic import (
    LabelledPrompt,
    input_hash,
    read_labels,
    read_traffic,
)
from coterie.routing.classify.trained import TrainedRouter, unpacked
from coterie.routing.classify.versions import RouterVersions, folder_of, gate
from coterie.routing.match.embed import static
from coterie.routing.resolve import Specialist
from coterie.routing.router import Router
from coterie.service.answer import expert_plan

THINGS = (
    "rivers", "lakes", "bridges", "trains", "birds", "songs", "films", "towns", "boats", "trees",
    "cars", "books",
)  # fmt: skip
SERVED = ServedIntents.of([("base", ()), ("sql", ("query",)), ("words", ("translate", "diff"))])


def prompts(first: int, last: int) -> list[tuple[str, str]]:
    rows = []
    for number in range(first, last):
        thing, other = THINGS[number % 12], THINGS[(number * 5 + 1) % 12]
        rows += [
            (f"Write SQL: how many {thing} are older than {number}? {thing}(name, age)", "query"),
            (f"Translate into French: I like {thing} and {number} {other}.", "translate"),
            (f"What do you know about {thing} in {number} {other}?", "reject"),
            (f"Tell me a story with {other} and {thing}, chapter {number}.", "reject"),
        ]
    return rows


def labelled(rows: list[tuple[str, str]], group: str = "") -> list[LabelledPrompt]:
    made = []
    for number, (text, label) in enumerate(rows):
        name = f"{group}{number % 9}" if group else ""
        made.append(LabelledPrompt(given(text), label, input_hash(given(text)), name))
    return made


@pytest.fixture(scope="module")
def trained() -> TrainedRouter:
    return unpacked(trainer.train(labelled(prompts(0, 24))).packed())


def asking(text: str, document: str = "", **hints: Any) -> InferenceRequest:
    wish = RouteHints(instruction=text, document=document, **hints)
    prompt = Chat((Message("user", text),))
    return InferenceRequest("r", prompt, Sampling(), Limits(), wish, None, None, "t", 0.0)


def given(text: str, declared: str = "") -> ClassifierInput:
    return prompt_input(text, "", static(), declared)


def router_of(trained: TrainedRouter | None, **settings: Any) -> Router:
    specialists = [
        Specialist("base"),
        Specialist("sql", intents=("query",)),
        Specialist("words", intents=("translate", "diff")),
    ]
    return Router(specialists, settings=RoutingSettings(**settings), trained=trained)


SQL = "Write SQL: how many castles are older than 300? castles(name, age)"


def test_a_trained_router_finds_the_specialist_and_rejects(trained: TrainedRouter) -> None:
    found = evaluate(trained, labelled(prompts(40, 60)))
    assert found["right"]["share"] > 0.97 and found["right"]["low_95"] < found["right"]["share"]
    assert 0 <= found["calibration_error"] < 0.2
    decision = decide(given(SQL), SERVED, trained)
    assert (decision.specialist, decision.intent) == ("sql", "query")
    assert 0.5 < decision.confidence <= 1 and trained.version in decision.reason
    other = decide(given("Tell me a story with owls."), SERVED, trained)
    assert (other.specialist, other.intent) == ("base", "")


def test_calibrated_on_others_and_started_from_a_version(trained: TrainedRouter) -> None:
    others = labelled(prompts(60, 80))
    again = trainer.train(labelled(prompts(0, 24)), others, trained)
    assert again.record.report.keys() == {"calibrated_on"}
    for text, _ in prompts(40, 44):
        one, other = again.logits(given(text)), trained.logits(given(text))
        assert one.argmax() == other.argmax() and np.abs(one - other).max() < 1.0
    with pytest.raises(ConfigError, match="0 prompts for the calibration"):
        trainer.train(labelled(prompts(0, 24)), labelled(prompts(0, 24)))


def test_a_decision_depends_on_its_arguments_alone(trained: TrainedRouter) -> None:
    again = unpacked(trained.packed())
    assert again.version == trained.version
    for text, _ in prompts(3, 9):
        stored = decoded(encoded(given(text)))
        assert stored == given(text)
        assert decide(stored, SERVED, again) == decide(given(text), SERVED, trained)
    # the order of sums does not matter: weights and features are integers
    raw, word = trained.weights.joint, trained.weights.words
    assert raw.dtype == np.int16 and word.dtype == np.int8


@pytest.mark.parametrize(
    "text", ["", "[]", "nonsense", '["a", [], "x", "?", "", ""]', '["", [], "f", "QQ==", "", ""]']
)
def test_a_stored_input_of_others_is_refused(text: str, trained: TrainedRouter) -> None:
    with pytest.raises(InvalidRequest):
        decoded(text)
    with pytest.raises(InvalidRequest, match="reads"):
        trained.logits(ClassifierInput("", (), "other"))
    with pytest.raises(InvalidRequest, match="damaged"):
        trained.logits(ClassifierInput("", (), trained.features, b"1234"))


def test_rules_are_above_the_trained_router(trained: TrainedRouter) -> None:
    declared = decide(given(SQL, "translate"), SERVED, trained)
    assert (declared.specialist, declared.confidence) == ("words", 1.0)
    assert declared.alternates[0].specialist == "sql" and declared.alternates[0].viable
    diff = "What is this?\n\ndiff --git a/x b/x\n@@ -1,2 +1,2 @@\n-a\n+b"
    found = decide(given(diff), SERVED, trained)
    assert (found.specialist, found.intent, found.confidence) == ("words", "diff", 0.9)
    assert decide(given(diff), ServedIntents.of([("base", ())]), None).specialist == "base"
    with pytest.raises(InvalidRequest, match="no specialist serves the intent 'x'") as refused:
        decide(given(SQL, "x"), SERVED, trained)
    assert refused.value.param == "intent"


def test_viable_alternates_are_likely_enough(trained: TrainedRouter) -> None:
    for text, _ in prompts(30, 34):
        decision = decide(given(text), SERVED, trained)
        chances = [item.probability for item in decision.alternates]
        assert chances == sorted(chances, reverse=True) and len(chances) <= 3
        for item in decision.alternates:
            assert item.viable == (item.probability >= trained.calibration.viable_at)
    both = ServedIntents.of([("base", ()), ("a", ("query",)), ("b", ("query",))])
    first = decide(given(SQL), both, trained)
    assert first.specialist == "a"
    assert first.alternates[0].specialist == "b" and first.alternates[0].viable


def test_a_tenant_gets_only_what_it_may_use(trained: TrainedRouter) -> None:
    limited = SERVED.limited_to(("words", "base"))
    decision = decide(given(SQL), limited, trained)
    assert decision.specialist == "base"
    # not that no specialist was for it
    assert "classified as query, for which the caller has no specialist" in decision.reason
    with pytest.raises(InvalidRequest):
        decide(given("x", "query"), limited, trained)
    assert SERVED.limited_to(("words",)).default == "words"


def test_coverage_of_viable_alternates() -> None:
    logits = np.log(np.array([[0.6, 0.3, 0.1]] * 99 + [[0.5, 0.2, 0.3]]))
    truth = np.array([0] * 90 + [1] * 9 + [2])
    found = trainer.fit_calibration(logits, truth)
    assert 0.05 <= found.viable_at <= 0.5 and 0.2 <= found.temperature <= 5
    sure, right = np.array([0.9] * 10 + [0.6] * 10), np.array([True] * 19 + [False])
    assert calibration_error(sure, right) == pytest.approx(0.5 * 0.1 + 0.5 * 0.3)


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nValueError: x'
JAVA = 'Exception in thread "main" java.lang.Error\n\tat a.B.c(B.java:4)'
CPP = "template <typename T> struct A { using type = std::vector<T>; };"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (TRACE, ("stack-trace",)),
        (JAVA, ("stack-trace",)),
        ("thread 'main' panicked at src/main.rs:4", ("stack-trace",)),
        ("TypeError: x\n    at f (/a/b.js:10:5)\n    at g (/a/b.js:11:5)", ("stack-trace",)),
        ("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b", ("diff",)),
        ("FROM python:3.11\nRUN pip install x", ("build-file",)),
        ("all: main.o\n\tcc -o main main.o", ("build-file",)),
        ("cmake_minimum_required(VERSION 3.1)", ("build-file",)),
        ('{"name": "x", "dependencies": {"a": "1"}}', ("build-file", "json")),
        (CPP, ("cpp-templates",)),
        ("SELECT a FROM b WHERE c = 1;", ("sql",)),
        ("insert into t (a) values (1)", ("sql",)),
        ("2024-05-01 10:00:01 INFO start\n2024-05-01 10:00:02 ERROR no", ("log",)),
        ('{"a": 1, "b": {"c": 2}}', ("json",)),
        ("Select a gift from the list for my aunt", ()),
        ("Look at this (nice) photo: {smile}", ()),
        ("We met on 2024-05-01 10:00.", ()),
        ("A template letter, please", ()),
        ("", ()),
    ],
)
def test_structures(text: str, names: tuple[str, ...]) -> None:
    assert structures(text) == names


def test_structures_take_linear_time() -> None:
    began = time.thread_time()
    for text in ("select " * 300, "<" * 2400, "a: b\n\t" * 400, '"a":' * 600, " at " * 600):
        structures(text)
    assert time.thread_time() - began < 0.5


def test_versions_are_promoted_only_if_not_worse(tmp_path: Path, trained: TrainedRouter) -> None:
    store = RouterVersions(tmp_path / "router")
    assert store.current() is None and store.names() == []
    with pytest.raises(Conflict):
        store.rollback()
    held_out = labelled(prompts(40, 60))
    good = store.add(trained)
    # trained on the opposite labels
    swapped = {"query": "translate", "translate": "query", "reject": "reject"}
    bad = store.add(
        trainer.train([replace(i, label=swapped[i.label]) for i in labelled(prompts(0, 12))])
    )
    figures = store.promote(good.version[:6], held_out)
    assert figures["current"] is None and figures["candidate"]["right"]["n"] == 80
    with pytest.raises(Conflict, match="not promoted"):
        store.promote(bad.version, held_out)
    with pytest.raises(Conflict, match="in use"):
        store.promote(good.version, held_out)
    with pytest.raises(Conflict, match="0 of 96 held-out prompts were not trained on"):
        gate(good, None, labelled(prompts(0, 24)))
    assert store.current() is not None and store.promoted() == [good.version]
    changed = store.add(trainer.recalibrated(good, held_out))
    assert changed.record.parent == good.version and changed.version != good.version
    store.promote(changed.version, held_out)
    assert store.rollback() == good.version and store.promoted() == [good.version]
    assert store.rollback() == "" and store.current() is None
    history = [
        json.loads(line) for line in (store.folder / "history.jsonl").read_text().splitlines()
    ]
    assert [entry["action"] for entry in history] == ["promote", "promote", "rollback", "rollback"]
    with pytest.raises(NotFound):
        store.read("zz")


def test_a_damaged_file_is_refused(tmp_path: Path, trained: TrainedRouter) -> None:
    store = RouterVersions(tmp_path)
    path = tmp_path / f"{store.add(trained).version}.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="damaged"):
        store.read(path.stem)
    for wrong in (b"", b"PK\x03\x04", b"x" * 100, bytes(data)):
        with pytest.raises(ConfigError):
            unpacked(wrong)
    (tmp_path / "current.json").write_text("[]")
    with pytest.raises(ConfigError):
        store.current()
    assert folder_of("", tmp_path) == tmp_path / "router" and folder_of("shipped", tmp_path).name


@pytest.mark.parametrize(
    "line",
    [
        "[]", "x", "{}", '{"prompt": "a"}', '{"prompt": 5, "specialist": "a"}',
        '{"prompt": "a", "specialist": ""}', '{"prompt": "", "specialist": "a"}',
        '{"input": "a", "specialist": "a"}', '{"prompt": "a", "intent": ["a"]}',
    ],
)  # fmt: skip
def test_a_wrong_line_of_traffic_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "intent": "b"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:3"):
        read_traffic([file], static())


def test_traffic_may_hold_features_in_place_of_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [
        {"prompt": SQL, "specialist": "sql"},
        {"input": encoded(given(SQL)), "intent": "sql"},
        {"prompt": "hello", "specialist": "general", "group": "me"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    text, stored, greeting = read_traffic([file], static())
    assert text.given == stored.given and text.hash == stored.hash
    assert (greeting.label, greeting.group) == ("reject", "me")
    with pytest.raises(ConfigError, match="each label needs 8 prompts"):
        trainer.train([text, greeting])


def calibration_row(at: float, primary: str = "doctor", **more: Any) -> dict[str, Any]:
    row = {"input": encoded(given(SQL)), "specialist": "recipe", "primary": primary}
    return {**row, "shadow": "cook", "at": at, "judged": "one_check", **more}


def test_labels_of_an_unhealthy_time_are_refused_and_the_rest_is_used(tmp_path: Path) -> None:
    log, written = tmp_path / "calibration.jsonl", tmp_path / "traffic.jsonl"
    lines = [
        calibration_row(10.0),
        calibration_row(20.0),
        calibration_row(25.0, primary="cook", shadow="doctor"),
        calibration_row(26.0, primary="lawyer"),
        {"unhealthy": "doctor", "since": 20.0, "until": 30.0},
        calibration_row(31.0),
        # a server that judged each answer by other checks wrote no `judged`
        calibration_row(40.0, judged=""),
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    written.write_text(json.dumps({"prompt": SQL, "specialist": "sql"}))
    used, refused = read_labels([written, log], static())
    assert [item.label for item in used] == ["sql", "recipe", "recipe", "recipe"]
    assert [(item.place, item.reason, item.specialist) for item in refused] == [
        ("calibration.jsonl:2", "unhealthy", "doctor"),
        ("calibration.jsonl:3", "unhealthy", "doctor"),
        ("calibration.jsonl:7", "other_checks", "doctor"),
    ]
    # whatever order the files have
    assert len(read_labels([log, written], static())[1]) == 3
    for line in ({"unhealthy": "doctor", "since": "x", "until": 1}, calibration_row(True)):
        log.write_text(json.dumps(line))
        with pytest.raises(ConfigError, match=r"calibration\.jsonl:1: `(since|at)` must be"):
            read_labels([log], static())


def test_groups_are_left_out_together() -> None:
    items = labelled(prompts(0, 20), group="author")
    folds = trainer._folds(items, 0)
    by_group: dict[str, set[int]] = {}
    for item, fold in zip(items, folds.tolist(), strict=True):
        by_group.setdefault(item.group, set()).add(fold)
    assert len(by_group) == 9 and all(len(found) == 1 for found in by_group.values())


def test_the_plan_says_who_and_why(trained: TrainedRouter) -> None:
    plan = router_of(trained).plan(asking(SQL))
    assert (plan.specialist, plan.intent) == ("sql", "query")
    assert plan.confidence > 0.5 and plan.alternates and plan.trace is not None
    assert plan.trace.router_version == trained.version
    assert plan.trace.classified == given(SQL)
    assert "classified" not in expert_plan(plan)["reasoning_trace"]
    assert "classified as query" in plan.reasons[0] and plan.trace.timings_ms["classify"] > 0
    served = router_of(trained).served_intents(RouteHints())
    assert decide(plan.trace.classified, served, trained).specialist == plan.specialist


def test_names_and_declared_intents_come_first(trained: TrainedRouter) -> None:
    router = router_of(trained)
    named = router.plan(asking(SQL, model="words", intent="query"))
    assert (named.specialist, named.intent, named.alternates) == ("words", "query", ())
    assert named.trace is None
    declared = router.plan(asking(SQL, intent="translate"))
    assert (declared.specialist, declared.intent) == ("words", "translate")
    raw = replace(asking(SQL, intent="query"), prompt=Text(SQL))
    assert router.plan(raw).specialist == router.specialist(raw.hints, raw.prompt) == "sql"
    for hints in ({"intent": "x"}, {"intent": "x", "model": "sql"}):
        with pytest.raises(InvalidRequest, match="there is: base, diff, query"):
            router.plan(asking(SQL, **hints))
    off = router_of(trained, enabled=False)
    assert off.plan(asking(SQL)).specialist == "base"
    assert off.plan(asking(SQL, intent="query")).specialist == "sql"


def test_without_a_trained_router_nothing_changes(trained: TrainedRouter) -> None:
    plan = router_of(None).plan(asking(SQL))
    assert (plan.specialist, plan.confidence) == ("base", 1.0)
    one = Router([Specialist("base")], trained=trained).plan(asking(SQL))
    assert one.trace is not None and one.trace.classified is None and not one.intent
