"""What each way to take the meaning of a prompt is worth to the router, on routing_set/dev.jsonl.

    python -m benchmarks.routing.embeddings [--table FILE ...] [--json FILE]

One ridge probe per shipped expert, with the rows, weights and kernel of coterie/routing, over the
meaning alone, with words and shape beside it, and with meaning times shape (as shipped). Curve and
threshold of every cell are learnt on four fifths, as benchmarks.routing.accuracy does. The
held-out part is never read. Needs torch and transformers for the oracle and numpy for the rest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing import questions as routing_set
from benchmarks.routing.accuracy import Scored, cross_validated, scored
from benchmarks.routing.candidates import CANDIDATES, Candidate, Made, table
from benchmarks.routing.catalogs import shipped
from benchmarks.routing.questions import Item
from coterie.core.adapters import AdapterProfile
from coterie.core.errors import WeightsError
from coterie.routing.features.features import routed_text
from coterie.routing.features.instruction import bounded
from coterie.routing.match.embed import DEFAULT, EMBEDDERS, HashedEmbedder, Vector
from coterie.routing.match.matcher import Matcher
from coterie.routing.match.probes import AGAINST, FOR, MAX_EXAMPLES, MAX_OTHERS, ordinary_prompts
from coterie.routing.match.sketch import SHAPE_WEIGHT, SketchRows, sketch

RIDGE = 0.1
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Course:
    """What one expert's probe learns from: rows of all texts, what each counts and should give."""

    expert: str
    rows: NDArray[np.int64]
    worth: NDArray[np.float64]
    wanted: NDArray[np.float64]


def courses(profiles: Sequence[AdapterProfile]) -> tuple[list[str], list[Course]]:
    """All texts, and of each expert which of them count: as coterie/routing/lessons has it."""
    texts = list(ordinary_prompts())
    background = np.arange(len(texts))
    own: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for profile in profiles:
        said = [list(profile.examples)[:MAX_EXAMPLES], list(profile.counterexamples)[:MAX_EXAMPLES]]
        first, second = (np.arange(len(part)) for part in said)
        own.append((len(texts) + first, len(texts) + len(first) + second))
        texts += [*said[0], *said[1]]
    share = MAX_OTHERS // (len(profiles) - 1)
    made = []
    for number, profile in enumerate(profiles):
        examples, against = own[number]
        others = [rows[:share] for at, (rows, _) in enumerate(own) if at != number]
        parts = [(examples, FOR), (against, AGAINST), *((o, FOR) for o in others), (background, 1)]
        rows = np.concatenate([part for part, _ in parts])
        worth = np.concatenate([np.full(len(part), weight) for part, weight in parts])
        wanted = np.where(np.arange(len(rows)) < len(examples), 1.0, -1.0)
        made.append(Course(profile.card.name, rows, worth, wanted))
    return texts, made


class Bench:
    """The texts that are learnt from and asked about, and how alike they are but for meaning."""

    def __init__(self, items: Sequence[Item], profiles: Sequence[AdapterProfile]) -> None:
        self.items = items
        learnt, self.courses = courses(profiles)
        self.learnt = [bounded(text) for text in learnt]
        self.asked = [bounded(routed_text(item.prompt, item.body)) for item in items]
        none = HashedEmbedder(1)
        rows = SketchRows([sketch(text, none) for text in (*self.learnt, *self.asked)])
        said = rows._word_weights.T
        count = len(self.learnt)
        # [all texts, learnt texts]
        self.words: Matrix = said @ said[:count].T
        self.form: Matrix = rows.form @ rows.form[:count].T

    def scored(self, kernel: Matrix) -> list[Scored]:
        """Each item with its likeliest expert and the score, within -1 and 1 as a matcher's."""
        count = len(self.learnt)
        columns = []
        for course in self.courses:
            inside = kernel[np.ix_(course.rows, course.rows)].astype(np.float64) + 1.0
            share = np.linalg.solve(inside + np.diag(RIDGE / course.worth), course.wanted)
            columns.append((kernel[count:, course.rows] + np.float32(1.0)) @ share)
        table = np.stack(columns, axis=1)
        best = table.argmax(axis=1)
        top = table.max(axis=1).clip(-1.0, 1.0).tolist()
        names = [self.courses[at].expert for at in best]
        return list(zip(self.items, names, top, strict=True))

    def kernels(self, meaning: Matrix) -> dict[str, Matrix]:
        beside = self.words + SHAPE_WEIGHT * self.form
        return {
            "alone": meaning,
            "with words and shape": meaning + beside,
            "and meaning x shape": meaning + beside + meaning * self.form,
        }


def judged(found: Sequence[Scored]) -> dict[str, Any]:
    """`top1`: the likeliest expert is the right one, whether or not it reaches the threshold."""
    related = [(item, name) for item, name, _ in found if item.expert is not None]
    told = routing_set.judged(cross_validated(found, [])[0])
    return {
        "top1": routing_set.share(sum(i.expert == name for i, name in related), len(related)),
        "right": told["related"],
        "false": told["false_activation"],
    }


def embedded(made: Made, bench: Bench) -> tuple[Matrix, dict[str, float]]:
    """Vectors of all texts, and milliseconds per prompt of the set after those learnt from."""
    vectors: list[Vector] = [made.embedder.embed(text) for text in bench.learnt]
    wall, own = [], []
    for text in bench.asked:
        begun, used = time.perf_counter(), time.thread_time()
        vectors.append(made.embedder.embed(text))
        own.append((time.thread_time() - used) * 1e3)
        wall.append((time.perf_counter() - begun) * 1e3)
    took = {"p50": float(np.median(wall)), "cpu_p50": float(np.median(own))}
    return np.stack(vectors), {name: round(value, 4) for name, value in took.items()}


def measured(candidate: Candidate, bench: Bench) -> dict[str, Any]:
    made = candidate.make()
    vectors, took = embedded(made, bench)
    kernels = bench.kernels(vectors @ vectors[: len(bench.learnt)].T)
    parts = {name: judged(bench.scored(kernel)) for name, kernel in kernels.items()}
    return {"meaning": candidate.name, "ms": took, "bytes": made.nbytes, "parts": parts}


def without_meaning(bench: Bench) -> dict[str, Any]:
    kernels = {
        "words alone": bench.words,
        "words and shape": bench.words + SHAPE_WEIGHT * bench.form,
    }
    parts = {name: judged(bench.scored(kernel)) for name, kernel in kernels.items()}
    return {"meaning": "none", "ms": {"p50": 0.0, "cpu_p50": 0.0}, "bytes": 0, "parts": parts}


def show(entry: dict[str, Any]) -> None:
    took = entry["ms"]
    print(
        f"{entry['meaning']}: {took['p50']} ms (cpu {took['cpu_p50']}), "
        f"{entry['bytes'] / 1e6:.2f} MB"
    )
    for name, told in entry["parts"].items():
        print(
            f"  {name:22} top-1 {told['top1']['share']:6.1%}  right {told['right']['share']:6.1%} "
            f"[{told['right']['low_95']:.1%}, {told['right']['high_95']:.1%}]  "
            f"false {told['false']['share']:5.2%} [{told['false']['low_95']:.2%}, "
            f"{told['false']['high_95']:.2%}]",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, nargs="*", default=[], help="more word tables")
    parser.add_argument("--json", type=Path, help="for benchmarks/results")
    args = parser.parse_args()
    items = routing_set.read(routing_set.FOLDER / "dev.jsonl")
    profiles = shipped()
    bench = Bench(items, profiles)
    report = [without_meaning(bench)]
    show(report[0])
    for candidate in (*CANDIDATES, *map(table, args.table)):
        try:
            report.append(measured(candidate, bench))
        except (WeightsError, OSError, ImportError) as error:
            print(f"{candidate.name}: skipped ({error})", flush=True)
            continue
        show(report[-1])
    matcher = Matcher.build(profiles, EMBEDDERS[DEFAULT]())
    whole = judged(scored(matcher, items))
    report.append({"meaning": f"the matcher itself ({DEFAULT})", "parts": {"as shipped": whole}})
    told = ", ".join(f"{name} {share['share']:.2%}" for name, share in whole.items())
    print(f"the matcher itself, for comparison: {told}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
