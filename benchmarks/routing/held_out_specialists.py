"""How often is the right specialist chosen? Measured on prompts that no router was trained on.

    python -m benchmarks.routing.held_out_specialists [ROUTER_FOLDER] [--json FILE]
    python -m benchmarks.routing.held_out_specialists keywords   # the baseline

Prints top-1 accuracy with its 95% interval, precision and recall per specialist, accuracy by kind
of prompt, the calibration error and the confusions. `general` is the reject class: none of the
experts is meant. Exits with 1 when top-1 is below the target of 96%. It never prints a prompt:
who reads the mistakes and repairs them one by one turns the held-out set into training data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coterie.packages.evaluate import EvalScore, score
from coterie.routing.classify.features import prompt_input
from coterie.routing.classify.trained import REJECT
from coterie.routing.classify.versions import RouterVersions, folder_of
from coterie.routing.match.embed import DEFAULT, EMBEDDERS

HELD_OUT = Path(__file__).parents[2] / "tests" / "routing" / "held_out_specialists.jsonl"
GENERAL = "general"
SPECIALISTS = (
    GENERAL,
    "commit-header",
    "intent",
    "iso-values",
    "json-extract",
    "sentiment",
    "text-to-sql",
    "url-slug",
)
KINDS = ("plain", "near_miss", "other_language", "long", "noisy")
TARGET = 0.96
BINS = 10

Classify = Callable[[str], tuple[str, float]]
"""A prompt's specialist and the confidence in it, 0 to 1."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    prompt: str
    specialist: str
    kind: str
    # the expert for this task, where its package does not serve the prompt's language
    task: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was right, what was chosen and how sure the router was of it."""

    expected: str
    chosen: str
    confidence: float
    kind: str

    @property
    def right(self) -> bool:
        return self.expected == self.chosen


@dataclass(frozen=True, slots=True)
class SpecialistScore:
    """Precision: of the prompts sent to it, those meant for it; recall: of those meant, sent."""

    prompts: int
    chosen: int
    precision: EvalScore
    recall: EvalScore


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """The choices with a confidence in one tenth: how sure, and how often right."""

    low: float
    n: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class SpecialistReport:
    top1: EvalScore
    false_accepts: EvalScore
    false_rejects: EvalScore
    specialists: dict[str, SpecialistScore]
    kinds: dict[str, EvalScore]
    calibration_error: float
    bins: list[CalibrationBin]
    confusions: list[tuple[str, str, int]]


def load_router(folder: str) -> Classify:
    """The version in use in a folder of `coterie router train`, as a function of the prompt."""
    router = RouterVersions(folder_of(folder, Path())).current()
    if router is None:
        raise SystemExit(f"no router is in use in {folder}")
    embedder = EMBEDDERS[DEFAULT]()

    def classify(prompt: str) -> tuple[str, float]:
        chances = router.probabilities(prompt_input(prompt, "", embedder))
        best = int(chances.argmax())
        label = router.labels[best]
        return GENERAL if label == REJECT else label, float(chances[best])

    return classify


KEYWORDS = {
    "text-to-sql": ("sql", "query", "select"),
    "json-extract": ("json",),
    "commit-header": ("commit",),
    "url-slug": ("slug", "url", "permalink"),
    "sentiment": ("sentiment", "positive", "negative", "polarity"),
    "intent": ("intent", "customer"),
    "iso-values": ("iso", "24-hour", "24h", "yyyy", "date"),
}


def keywords(prompt: str) -> tuple[str, float]:
    """The baseline: the first specialist one of whose words occurs, always fully sure."""
    text = prompt.casefold()
    for specialist, words in KEYWORDS.items():
        if any(word in text for word in words):
            return specialist, 1.0
    return GENERAL, 1.0


def read_held_out(file: Path = HELD_OUT) -> list[HeldOutPrompt]:
    with file.open(encoding="utf-8") as lines:
        return [HeldOutPrompt(**json.loads(line)) for line in lines if line.strip()]


def evaluate(classify: Classify, prompts: Sequence[HeldOutPrompt]) -> SpecialistReport:
    """Asks for every prompt once; a specialist outside the eight, or no share, is an error."""
    choices = []
    for item in prompts:
        chosen, confidence = classify(item.prompt)
        if chosen not in SPECIALISTS:
            raise ValueError(f"the router chose {chosen!r}, which is none of {SPECIALISTS}")
        if not 0.0 <= confidence <= 1.0:
            raise ValueError(f"the router's confidence is {confidence}, not between 0 and 1")
        choices.append(Choice(item.specialist, chosen, confidence, item.kind))
    return report(choices)


def report(choices: Sequence[Choice]) -> SpecialistReport:
    wrong = Counter((c.expected, c.chosen) for c in choices if not c.right)
    bins = calibration(choices)
    return SpecialistReport(
        top1=score([c.right for c in choices]),
        false_accepts=score([c.chosen != GENERAL for c in choices if c.expected == GENERAL]),
        false_rejects=score([c.chosen == GENERAL for c in choices if c.expected != GENERAL]),
        specialists={name: _specialist(choices, name) for name in SPECIALISTS},
        kinds={kind: score([c.right for c in choices if c.kind == kind]) for kind in KINDS},
        calibration_error=calibration_error(bins),
        bins=bins,
        confusions=[(e, c, n) for (e, c), n in sorted(wrong.items(), key=lambda x: (-x[1], x[0]))],
    )


def _specialist(choices: Sequence[Choice], name: str) -> SpecialistScore:
    sent = [c.right for c in choices if c.chosen == name]
    meant = [c.right for c in choices if c.expected == name]
    return SpecialistScore(len(meant), len(sent), score(sent), score(meant))


def calibration(choices: Sequence[Choice]) -> list[CalibrationBin]:
    """The choices in bins of equal width by confidence; empty bins are left out."""
    members: dict[int, list[Choice]] = {}
    for choice in choices:
        members.setdefault(min(BINS - 1, int(choice.confidence * BINS)), []).append(choice)
    return [
        CalibrationBin(
            low=index / BINS,
            n=len(group),
            confidence=sum(c.confidence for c in group) / len(group),
            accuracy=sum(c.right for c in group) / len(group),
        )
        for index, group in sorted(members.items())
    ]


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """The expected calibration error: the mean distance of confidence and accuracy, by weight."""
    total = sum(b.n for b in bins)
    return sum(b.n * abs(b.confidence - b.accuracy) for b in bins) / total if total else 0.0


def lines_of(result: SpecialistReport) -> list[str]:
    top1 = result.top1
    lines = [
        f"top-1: {_share(top1)}; lower bound {top1.low:.1%}, target {TARGET:.0%}",
        f"general sent to an expert: {_share(result.false_accepts)}",
        f"expert prompts sent to general: {_share(result.false_rejects)}",
        "",
        f"{'specialist':<16}{'prompts':>8}{'chosen':>8}{'precision':>11}{'recall':>9}",
    ]
    for name, s in result.specialists.items():
        precision = f"{s.precision.share:.1%}" if s.chosen else "-"
        recall = f"{s.recall.share:.1%}" if s.prompts else "-"
        lines.append(f"{name:<16}{s.prompts:>8}{s.chosen:>8}{precision:>11}{recall:>9}")
    lines += ["", "by kind of prompt:"]
    lines += [f"  {kind:<16}{_share(s)}" for kind, s in result.kinds.items()]
    lines += ["", f"calibration error (ECE, {BINS} bins): {result.calibration_error:.3f}"]
    for b in result.bins:
        lines.append(
            f"  from {b.low:.1f}: {b.n:>4}, sure {b.confidence:.3f}, right {b.accuracy:.3f}"
        )
    lines += ["", "confusions (expected -> chosen):"]
    lines += [f"  {n:>4}  {expected} -> {chosen}" for expected, chosen, n in result.confusions]
    return lines


def _share(s: EvalScore) -> str:
    return f"{s.share:.1%} ({s.low:.1%} to {s.high:.1%}), {s.right} of {s.n}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "router",
        nargs="?",
        default="shipped",
        help="a folder of routers, or `keywords` for the baseline",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args(arguments)
    classify = keywords if options.router == "keywords" else load_router(options.router)
    result = evaluate(classify, read_held_out())
    print("\n".join(lines_of(result)))
    if options.json:
        data = {"router": options.router, "target": TARGET, **asdict(result)}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0 if result.top1.share >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
