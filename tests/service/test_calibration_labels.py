"""What a server writes into the calibration log, and what `coterie router train` refuses of it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coterie.cli.main import main
from coterie.core.config import SpecialistSettings
from coterie.core.ensemble import EnsembleSettings
from coterie.core.plan import AdapterChoice, RoutePlan
from coterie.core.request import InferenceRequest, Limits, RouteHints, Sampling, Text
from coterie.core.snapshot import EnsembleConfig
from coterie.obs.metrics import MetricRegistry
from coterie.service.breaker.control import EnsembleControl
from coterie.service.breaker.watch import WatchedSpecialist
from coterie.service.canary import CanarySpec
from coterie.service.ensemble import EnsembleService
from coterie.service.plan import RequestRun
from coterie.service.shadow.calibration import SpecialistHealth
from coterie.service.shadow.dispatch import DONE, ShadowTask
from coterie.service.slo.evidence import whole
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, own_home

# `sound`: every answer is valid. `check_broken`: the doctor's check finds no answer valid.
# `doctor_broken`: both checks find the doctor's answers invalid.
CHECK = """#!/bin/sh
# without other programs: a validator has no PATH
read -r answer
read -r mode < {folder}/mode
case "$1:$mode" in
doctor:check_broken) exit 1 ;;
*:doctor_broken) ;;
*) exit 0 ;;
esac
while read -r known; do
    [ "$known" = "$answer" ] && exit 0
done < {folder}/of_cook
exit 1
"""
SETTINGS = """
[engine]
kv_bytes = "8MB"
threads = 1
[ensemble]
min_judged = 8
fresh_shadow = 0.0
shadow_sample = 0.0
router = "{folder}/router"
[[intents]]
name = "medical"
shadow_below = 1.0
[[intents]]
name = "cooking"
shadow_below = 0.0
[[tenants]]
name = "local"
keep_prompts = true
[[validators]]
name = "of_doctor"
command = ["{folder}/check.sh", "doctor"]
[[validators]]
name = "of_cook"
command = ["{folder}/check.sh", "cook"]
[[specialists]]
name = "general"
model = "{model}"
[[specialists]]
name = "doctor"
model = "{model}"
checks = ["of_doctor"]
intents = ["medical"]
fallback = "cook"
[specialists.slo]
correctness = 0.8
[[specialists]]
name = "cook"
model = "{other}"
checks = ["of_cook"]
intents = ["cooking"]
"""
NUMBER = {"type": "integer", "minimum": 1, "maximum": 99_999}
THINGS = ("bread", "soup", "cake", "rice", "fish", "beans", "pasta", "salad", "pie", "stew")
PARTS = ("shin", "knee", "back", "neck", "foot", "hand", "ear", "eye", "arm", "hip")


def traffic(path: Path, first: int, last: int) -> str:
    rows: list[dict[str, str]] = []
    for number in range(first, last):
        thing, part = THINGS[number % 10], PARTS[number % 10]
        rows += [
            {"prompt": f"Why does my {part} burn after running? {number}", "intent": "medical"},
            {"prompt": f"Give me a recipe for {thing} with {number} eggs", "intent": "cooking"},
            {"prompt": f"Who was born in the year {number}?", "intent": "reject"},
        ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def router(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    assert main(["router", *arguments, "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


class Drill:
    """A doctor and a cook behind one router; the checks of both do what `mode` says."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.mode("sound")

    def mode(self, name: str) -> None:
        (self.folder / "mode").write_text(f"{name}\n")

    def ask(self, model: str, prompt: str) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "response_format": form,
            "temperature": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
        }
        answer = self.served.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        if model == "auto":
            assert answer.headers["x-coterie-specialist"] == "doctor", answer.headers
        return str(answer.json["choices"][0]["message"]["content"])

    def labels(self) -> dict[str, int]:
        text = self.served.get("/metrics").body.decode()
        metric = r'^coterie_calibration_labels_total\{model_name="doctor",result="(\w+)"\} (\d+)'
        return {name: int(count) for name, count in re.findall(metric, text, re.MULTILINE)}

    def shadows(self) -> list[str]:
        """What became of the shadows."""
        text = self.served.get("/metrics").body.decode()
        return re.findall(r"^coterie_shadows_total.*", text, re.MULTILINE)

    def shadowed(self, prompts: list[str]) -> dict[str, int]:
        """The new labels when all shadows of these have ended."""
        before = self.labels()
        for prompt in prompts:
            known = sum(self.labels().values())
            self.ask("auto", prompt)
            deadline = time.monotonic() + 30
            while sum(self.labels().values()) == known:
                assert time.monotonic() < deadline, self.shadows()
                time.sleep(0.05)
        return {
            name: count - before.get(name, 0)
            for name, count in self.labels().items()
            if count > before.get(name, 0)
        }


@pytest.fixture
def drill(capsys: pytest.CaptureFixture[str]) -> Iterator[Drill]:
    # validators run as a user of their own, who may read this
    folder = Path(tempfile.mkdtemp(prefix="coterie-drill-"))
    folder.chmod(0o755)
    try:
        with prepared(folder, capsys) as found:
            yield found
    finally:
        shutil.rmtree(folder)


@contextmanager
def prepared(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Drill]:
    script = folder / "check.sh"
    script.write_text(CHECK.format(folder=folder))
    script.chmod(0o755)
    (folder / "mode").write_text("sound\n")
    (folder / "of_cook").write_text("")
    versions = ("--router", str(folder / "router"))
    made, _ = router(capsys, "train", traffic(folder / "traffic.jsonl", 0, 10), *versions)
    held_out = traffic(folder / "held_out.jsonl", 60, 80)
    router(capsys, "promote", made["version"], "--held-out", held_out, *versions)
    model, other = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    file = folder / "coterie.toml"
    file.write_text(SETTINGS.format(folder=folder, model=model, other=other))
    own = own_home(folder / "home")
    served = Served("--config", str(file), COTERIE_HOME=str(own))
    try:
        yield Drill(served, folder)
    finally:
        served.stop()


def test_health_of_a_specialist_says_since_when_it_is_bad() -> None:
    health = SpecialistHealth(floor=0.9, least=10)
    assert not health.is_healthy()
    for at in range(60):
        assert not health.add(float(at), True)
    assert health.is_healthy() and not health.is_bad
    # single faults leave it healthy
    assert not health.add(60.0, False) and health.is_healthy()
    for at in range(61, 80):
        health.add(float(at), True)
    became = [at for at in range(80, 100) if health.add(float(at), at % 5 == 0)]
    assert len(became) == 1 and became[0] < 90 and health.is_bad and not health.is_healthy()
    assert health.bad_since(100.0) == 81.0
    # nothing is known of the time before
    always = SpecialistHealth(floor=0.9, least=10)
    for at in range(20):
        always.add(float(at), False)
    assert always.bad_since(20.0) == 0.0
    # without a promise half of its answers must be valid
    free = SpecialistHealth(floor=0.0, least=10)
    for at in range(10):
        free.add(float(at), at % 3 > 0)
    assert free.is_healthy()


@pytest.mark.parametrize("is_canary", [False, True])
def test_faults_of_a_version_under_test_are_no_labels(is_canary: bool) -> None:
    """An expert's new version fails on a prompt, and its shadow does not: the prompt is not the
    shadow's for that. Neither is the specialist unhealthy for it."""
    registry, offered = MetricRegistry(), list[ShadowTask]()
    service = EnsembleService(cast(Any, SimpleNamespace(registry=registry)), cast(Any, None))
    service._inputs = EnsembleConfig(ensemble=EnsembleSettings(min_judged=8))
    service._control = EnsembleControl([WatchedSpecialist("base"), WatchedSpecialist("cook")])
    service._shadows = cast(Any, SimpleNamespace(offer=offered.append))
    named = {"base": SpecialistSettings(), "cook": SpecialistSettings()}
    snapshot = SimpleNamespace(config=EnsembleConfig(specialists=named))
    old, new = AdapterChoice("sql@1", "o" * 64), AdapterChoice("sql@2", "n" * 64)
    service.control.start_canary(
        CanarySpec("adapter", "sql", new.digest, old.digest, 0.2, "sql@2"), "ann"
    )

    def answer(adapter: AdapterChoice, *, valid: bool, shadow: str = "") -> None:
        plan = RoutePlan("r", "base", (adapter,), Sampling(), 0.9, (), shadow=shadow, trace=None)
        request = InferenceRequest(
            "r", Text("How many?"), Sampling(), Limits(), RouteHints(), None, None, "t", 0.0
        )
        run = SimpleNamespace(
            plan=plan, request=request, outcome=valid, judged=whole(valid), routed=None,
            shadow_why="unsure", replica="", max_tokens=None, tenant=None, snapshot=snapshot,
            shows_specialist=adapter is old,
        )  # fmt: skip
        service.answered(cast(RequestRun, run), Sampling())

    for _ in range(8):
        answer(old, valid=True)
    answer(new if is_canary else old, valid=False, shadow="cook")
    [task] = offered
    task.one_check = True
    task.on_end(DONE, whole(True))
    found = "unhealthy" if is_canary else "not_kept"
    assert f'result="{found}"}} 1' in registry.render()
    for _ in range(8):
        answer(new, valid=False)
    assert service._is_healthy("base", 0.0)


@pytest.mark.full
def test_labels_of_a_broken_check_or_specialist_reach_no_router(
    drill: Drill, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"Does my {part} burn? Soup, {90 + n} eggs" for n, part in enumerate(PARTS)]
    of_cook = {prompt: drill.ask("cook", prompt) for prompt in prompts}
    of_doctor = {prompt: drill.ask("doctor", prompt) for prompt in prompts}
    (drill.folder / "of_cook").write_text("\n".join(of_cook.values()) + "\n")
    prompts = [prompt for prompt in prompts if of_doctor[prompt] not in of_cook.values()]
    assert len(prompts) >= 5
    # a healthy doctor that is wrong once: its own check finds the cook's answer right
    drill.mode("doctor_broken")
    assert drill.shadowed(prompts[:1]) == {"written": 1}
    drill.mode("sound")
    for prompt in prompts * 2:
        drill.ask("doctor", prompt)
    # its check is broken: the cook's own check says nothing about the doctor's answers
    drill.mode("check_broken")
    assert drill.shadowed(prompts[:5]) == {"other_checks": 5}
    drill.mode("sound")
    for prompt in prompts * 2:
        drill.ask("doctor", prompt)
    # the doctor itself is broken: only the first answers are labelled, until that is noticed
    drill.mode("doctor_broken")
    found = drill.shadowed((prompts * 2)[:6])
    assert found["unhealthy"] >= 3 and found["written"] <= 3 and sum(found.values()) == 6
    drill.served.stop()
    [log] = drill.folder.rglob("calibration.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    labels = [row for row in rows if "unhealthy" not in row]
    assert len(labels) == 1 + found["written"]
    assert all((row["primary"], row["specialist"]) == ("doctor", "cooking") for row in labels)
    assert all(row["unhealthy"] == "doctor" for row in rows if row not in labels)
    # those of the time in which the doctor was broken are refused, and the rest is used
    report, said = router(
        capsys, "train", str(drill.folder / "traffic.jsonl"), str(log),
        "--router", str(drill.folder / "again"),
    )  # fmt: skip
    assert report["refused"] == {"unhealthy doctor": found["written"]}
    assert report["trained_on"] == {"cooking": 11, "medical": 10, "reject": 10}
    asked = 31 + found["written"]
    assert f"{found['written']} of {asked} prompts are refused: they were labelled while" in said
