"""Quality and latency of the trained router that chooses among specialists.

    python -m benchmarks.routing.specialists [--held-out FILE] [--router FOLDER] [--retrain]
                                             [--json FILE]

Asks the router of this release about the held-out parts of routing_set/, which nothing was learnt
from, and about FILE, labelled prompts as `coterie router eval` reads them. Goals: right at least
96%, features and decision under 1 ms at p99 on one core.

`--retrain` shows what a calibration log is worth: a router is trained on a third of the training
set, without those of examples/router_data/written.jsonl. Half of the styles of these arrive as
traffic; prompts that it is wrong about, or less sure of than `shadow_below`, go to a log, as
features without text. It is trained again with that log. Both answer the other half of the styles
and routing_set/, which neither saw.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.routing import questions
from coterie.core.ensemble import IntentSettings
from coterie.routing.classify.decide import ServedIntents, decide
from coterie.routing.classify.evaluate import evaluate
from coterie.routing.classify.features import classifier_input, encoded, prompt_input
from coterie.routing.classify.traffic import LabelledPrompt, input_hash, read_traffic
from coterie.routing.classify.train import train
from coterie.routing.classify.trained import REJECT, TrainedRouter
from coterie.routing.classify.versions import RouterVersions, folder_of
from coterie.routing.features.features import extract, routed_text
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from examples.router_data.make import HERE, TrainingLine, lines

PARTS = ("held_out", "near_miss_held_out")
WARM_UP = 200
REPEATS = 4
# of the training set, one in so many prompts is used for the router before
SPARSE = 3
LONG = "Read this and tell me what it is about. " + "It was a quiet day on the river. " * 90


def routing_set(name: str) -> list[LabelledPrompt]:
    items = questions.read(questions.FOLDER / f"{name}.jsonl")
    return [labelled(item.prompt, item.expert or REJECT, item.body) for item in items]


def labelled(prompt: str, label: str, body: str = "", group: str = "") -> LabelledPrompt:
    given = prompt_input(prompt, body, EMBEDDERS[DEFAULT]())
    return LabelledPrompt(given, label, input_hash(given), group)


def latency(router: TrainedRouter) -> dict[str, Any]:
    """Features, input and decision of one prompt, milliseconds: wall and CPU time of the first time
    it is asked, and the least wall time of several, which other processes disturb less."""
    embedder = EMBEDDERS[DEFAULT]()
    served = ServedIntents.of([("general", ()), *((label, ()) for label in router.labels[1:])])
    items = [item for name in PARTS for item in questions.read(questions.FOLDER / f"{name}.jsonl")]
    texts = [(item.prompt, item.body) for item in items]

    def ask(prompt: str, body: str) -> tuple[float, float]:
        began, used = time.perf_counter(), time.thread_time()
        features = extract(prompt, body)
        given = classifier_input(routed_text(prompt, body), features, embedder)
        decide(given, served, router)
        return (time.perf_counter() - began) * 1e3, (time.thread_time() - used) * 1e3

    for prompt, body in texts[:WARM_UP]:
        ask(prompt, body)
    gc.collect()
    took: dict[str, list[float]] = {"wall": [], "cpu": [], "least": []}
    for number, (prompt, body) in enumerate(texts):
        wall, cpu = ask(prompt, body)
        least = wall
        for again in range(REPEATS):
            # what is kept from one request to the next is of others
            for other in range(4):
                ask(*texts[(number + 1 + other + again) % len(texts)])
            least = min(least, ask(prompt, body)[0])
        for kind, value in zip(took, (wall, cpu, least), strict=True):
            took[kind].append(value)
    report = {
        f"{kind}_p{p}": round(float(np.percentile(values, p)), 3)
        for kind, values in took.items()
        for p in (50, 90, 99)
    }
    long = min(ask(f"{LONG} {number}", "")[0] for number in range(20))
    return report | {"long_prompt_least": round(long, 3)}


def retrained() -> dict[str, Any]:
    every = lines(with_long=False)
    own = {item["prompt"] for item in _written()}
    known = [_item(line) for line in every if line.prompt not in own][::SPARSE]
    traffic = [line for line in every if line.prompt in own]
    styles = sorted({line.group for line in traffic})
    arriving = [_item(line) for line in traffic if line.group in styles[::2]]
    unseen = [_item(line) for line in traffic if line.group not in styles[::2]]
    before = train(known)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calibration.jsonl"
        log.write_text("".join(_logged(before, arriving)), encoding="utf-8")
        learnt = read_traffic([log], EMBEDDERS[DEFAULT]())
    after = train([*known, *learnt])
    report: dict[str, Any] = {"traffic": len(arriving), "logged": len(learnt)}
    parts = {"other_styles": unseen} | {name: routing_set(name) for name in PARTS}
    for name, items in parts.items():
        report[name] = {"before": evaluate(before, items), "after": evaluate(after, items)}
        shares = [report[name][when]["right"] for when in ("before", "after")]
        print(f"{name:20} {_shown(shares[0])}  ->  {_shown(shares[1])}", flush=True)
    return report


def _written() -> list[dict[str, str]]:
    text = (HERE / "written.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _item(line: TrainingLine) -> LabelledPrompt:
    return labelled(line.prompt, line.specialist, line.body, line.group)


def _logged(router: TrainedRouter, items: Sequence[LabelledPrompt]) -> list[str]:
    """Lines for the prompts that a shadow would have answered otherwise."""
    below = IntentSettings().shadow_below
    rows = []
    for item in items:
        chances = router.probabilities(item.given)
        best = int(chances.argmax())
        if router.labels[best] != item.label or chances[best] < below:
            row = {"specialist": item.label, "input": encoded(item.given), "group": "shadow"}
            rows.append(json.dumps(row) + "\n")
    return rows


def _shown(entry: dict[str, Any]) -> str:
    return (
        f"{entry['share']:7.2%} [{entry['low_95']:.2%}, {entry['high_95']:.2%}] "
        f"({entry['count']} of {entry['n']})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--held-out", type=Path, action="append", metavar="FILE", default=[])
    parser.add_argument("--router", default="shipped", metavar="FOLDER")
    parser.add_argument("--retrain", action="store_true")
    parser.add_argument("--json", type=Path, help="for benchmarks/results")
    args = parser.parse_args()
    router = RouterVersions(folder_of(args.router, Path())).current()
    if router is None:
        raise SystemExit(f"no router is in use in {args.router}")
    report: dict[str, Any] = {"version": router.version, "bytes": len(router.packed())}
    parts = {name: routing_set(name) for name in PARTS}
    for file in args.held_out:
        parts[file.stem] = read_traffic([file], EMBEDDERS[DEFAULT]())
    for name, items in parts.items():
        report[name] = found = evaluate(router, items)
        error = found["calibration_error"]
        print(f"{name:20} {_shown(found['right'])} calibration error {error:.3f}", flush=True)
        for label, entry in found["by_label"].items():
            print(f"  {label:18} {_shown(entry)}")
    report["latency_ms"] = latency(router)
    print(f"features and decision, ms: {report['latency_ms']}", flush=True)
    if args.retrain:
        report["retrained"] = retrained()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
