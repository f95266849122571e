"""How useful each embedding method is for the router, on routing_set/dev.jsonl.

    python -m benchmarks.routing.embeddings [--table FILE ...] [--json FILE]

One ridge probe per shipped expert, with the rows, weights and kernel of coterie/routing: over the
embedding alone, with words and shape features in addition, and with embedding times shape (as
shipped). The calibration curve and threshold of every cell are fitted on four fifths, as in
benchmarks.routing.accuracy. The held-out part is never read. Needs torch and transformers for the
oracle and numpy for the rest.
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
    """The training data of one expert's probe: rows of all texts, their weights and targets."""

    expert: str
    rows: NDArray[np.int64]
    worth: NDArray[np.float64]
    wanted: NDArray[np.float64]


def courses(profiles: Sequence[AdapterProfile]) -> tuple[list[str], list[Course]]:
    """All texts, and which of them each expert uses: as coterie/routing/match/probes."""
    texts = list(ordinary_prompts())
    background = np.arange(len(texts))
    own: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for profile in profiles:
        example_lists = [
            list(profile.examples)[:MAX_EXAMPLES],
            list(profile.counterexamples)[:MAX_EXAMPLES],
        ]
        first, second = (np.arange(len(part)) for part in example_lists)
        own.append((len(texts) + first, len(texts) + len(first) + second))
        texts += [*example_lists[0], *example_lists[1]]
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
    """The training texts and the test texts, and their similarity without the embedding."""

    def __init__(self, items: Sequence[Item], profiles: Sequence[AdapterProfile]) -> None:
        self.items = items
        training_texts, self.courses = courses(profiles)
        self.training_texts = [bounded(text) for text in training_texts]
        self.test_texts = [bounded(routed_text(item.prompt, item.body)) for item in items]
        none = HashedEmbedder(1)
        rows = SketchRows([sketch(text, none) for text in (*self.training_texts, *self.test_texts)])
        word_weights = rows._word_weights.T
        count = len(self.training_texts)
        # [all texts, training texts]
        self.words: Matrix = word_weights @ word_weights[:count].T
        self.form: Matrix = rows.form @ rows.form[:count].T

    def scored(self, kernel: Matrix) -> list[Scored]:
        """Each item with its likeliest expert and the score, from -1 to 1 as a matcher's."""
        count = len(self.training_texts)
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


def quality_of(entries: Sequence[Scored]) -> dict[str, Any]:
    """Quality of these scores. `top1`: the likeliest expert is the right one, even if its score is
    below the threshold."""
    related = [(item, name) for item, name, _ in entries if item.expert is not None]
    shown = routing_set.quality_of(cross_validated(entries, [])[0])
    return {
        "top1": routing_set.share(sum(i.expert == name for i, name in related), len(related)),
        "right": shown["related"],
        "false": shown["false_activation"],
    }


def embedded(made: Made, bench: Bench) -> tuple[Matrix, dict[str, float]]:
    """Vectors of all texts, and milliseconds per test text."""
    vectors: list[Vector] = [made.embedder.embed(text) for text in bench.training_texts]
    wall, own = [], []
    for text in bench.test_texts:
        started_at, used = time.perf_counter(), time.thread_time()
        vectors.append(made.embedder.embed(text))
        own.append((time.thread_time() - used) * 1e3)
        wall.append((time.perf_counter() - started_at) * 1e3)
    took = {"p50": float(np.median(wall)), "cpu_p50": float(np.median(own))}
    return np.stack(vectors), {name: round(value, 4) for name, value in took.items()}


def measured(candidate: Candidate, bench: Bench) -> dict[str, Any]:
    made = candidate.make()
    vectors, took = embedded(made, bench)
    kernels = bench.kernels(vectors @ vectors[: len(bench.training_texts)].T)
    parts = {name: quality_of(bench.scored(kernel)) for name, kernel in kernels.items()}
    return {"meaning": candidate.name, "ms": took, "bytes": made.nbytes, "parts": parts}


def without_meaning(bench: Bench) -> dict[str, Any]:
    kernels = {
        "words alone": bench.words,
        "words and shape": bench.words + SHAPE_WEIGHT * bench.form,
    }
    parts = {name: quality_of(bench.scored(kernel)) for name, kernel in kernels.items()}
    return {"meaning": "none", "ms": {"p50": 0.0, "cpu_p50": 0.0}, "bytes": 0, "parts": parts}


def show(entry: dict[str, Any]) -> None:
    took = entry["ms"]
    print(
        f"{entry['meaning']}: {took['p50']} ms (cpu {took['cpu_p50']}), "
        f"{entry['bytes'] / 1e6:.2f} MB"
    )
    for name, part in entry["parts"].items():
        print(
            f"  {name:22} top-1 {part['top1']['share']:6.1%}  right {part['right']['share']:6.1%} "
            f"[{part['right']['low_95']:.1%}, {part['right']['high_95']:.1%}]  "
            f"false {part['false']['share']:5.2%} [{part['false']['low_95']:.2%}, "
            f"{part['false']['high_95']:.2%}]",
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
    whole = quality_of(scored(matcher, items))
    report.append({"meaning": f"the matcher itself ({DEFAULT})", "parts": {"as shipped": whole}})
    shown = ", ".join(f"{name} {share['share']:.2%}" for name, share in whole.items())
    print(f"the matcher itself, for comparison: {shown}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
