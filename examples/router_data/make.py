"""Makes the training set of the shipped router: one labelled prompt a line.

    python -m examples.router_data.make > train.jsonl
    coterie router train train.jsonl

From the texts of the packages (examples/expert_data/routing, by ten hands), the ordinary prompts of
the matcher, the items in other languages, and written.jsonl, which is by one hand in many styles.
Some prompts are added once more with a long text in place of their material: the material between
other sentences of its kind, below the request, above it, or as a document. The same lines on every
run. Nothing of routing_set/ is in it.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from coterie.routing.match.probes import ordinary_prompts
from examples.expert_data.cards import ABOUT, routing_texts

HERE = Path(__file__).parent
LANGUAGES = HERE.parent / "expert_data" / "languages.jsonl"
REJECT = "reject"
# languages that a package says it serves; the others serve English
SERVED = {"commit-header": ("en", "zh"), "sentiment": ("en", "fr", "zh")}
# prompts that are next to each other in a file are mostly of one author
BLOCK = 60
# share of the prompts with material that are added with a long text, for a specialist and for none
LONG, LONG_REJECTED = 0.45, 0.3
# number of other sentences in a long text
MIN_SENTENCES, MAX_SENTENCES = 3, 22
_QUOTED = re.compile(r"[\"“]([^\"”\n]{8,300})[\"”]")
# material that is part of a request
_ASKS = re.compile(
    r"[:|/]|\b(?:commit|header|labels?|categor|bucket|intent|sentiment|positive|negative|neutral)",
    re.I,
)
_AFTER_COLON = re.compile(r"^([^:\n]{10,160}:)[ \n]+([^\n]{6,300})$")


@dataclass(frozen=True, slots=True)
class TrainingLine:
    prompt: str
    specialist: str
    group: str
    body: str = ""


def lines(with_long: bool = True) -> list[TrainingLine]:
    """Each prompt once; what was written for this set counts if two say something else."""
    known = {(line.prompt, line.body): line for line in _all()}
    if not with_long:
        return list(known.values())
    for line in _long(list(known.values()), random.Random(0)):
        known.setdefault((line.prompt, line.body), line)
    return list(known.values())


def _long(known: list[TrainingLine], dice: random.Random) -> Iterator[TrainingLine]:
    prose = (HERE / "prose.txt").read_text(encoding="utf-8").splitlines()
    own: dict[str, list[str]] = {}
    for line in known:
        parts = _parts(line)
        is_kind = line.specialist in ("sentiment", "intent", "commit-header")
        if parts is not None and is_kind and not _ASKS.search(parts[1]):
            own.setdefault(line.specialist, []).append(parts[1].rstrip(".") + ".")
    kinds = [prose, *own.values()]
    for line in known:
        parts = _parts(line)
        share = LONG_REJECTED if line.specialist == REJECT else LONG
        if parts is None or dice.random() >= share:
            continue
        request, material = parts
        others = own.get(line.specialist) or dice.choice(
            kinds if line.specialist == REJECT else [prose]
        )
        text = dice.sample(others, min(len(others), dice.randint(MIN_SENTENCES, MAX_SENTENCES)))
        text.insert(dice.randint(0, len(text)), material)
        document = dice.choice((" ", " ", "\n", "\n\n")).join(text)
        form = dice.randrange(3)
        if form == 0:
            yield TrainingLine(request, line.specialist, line.group, document)
        else:
            halves = (request, document) if form == 1 else (document, request)
            yield TrainingLine("\n\n".join(halves), line.specialist, line.group)


def _parts(line: TrainingLine) -> tuple[str, str] | None:
    """(request, material), if the prompt quotes something or has it after a colon or below."""
    if line.body:
        return line.prompt, line.body
    text = line.prompt
    found = _AFTER_COLON.match(text)
    if found is not None:
        return found.group(1), found.group(2)
    found = _QUOTED.search(text)
    if found is not None:
        before, after = text[: found.start()].rstrip(" :"), text[found.end() :].strip()
        request = f"{before} {after}".strip()
        return (request, found.group(1)) if len(request) >= 10 else None
    request, cut, material = text.partition("\n")
    return (request, material.strip()) if cut and len(request) >= 10 and material.strip() else None


def _all() -> Iterator[TrainingLine]:
    for name in sorted(ABOUT):
        texts = routing_texts(name)
        for number, text in enumerate(texts["counterexamples"]):
            yield TrainingLine(text, REJECT, f"{name} other {number // BLOCK}")
        for number, text in enumerate(texts["examples"]):
            yield TrainingLine(text, name, f"{name} {number // BLOCK}")
    for number, text in enumerate(ordinary_prompts()):
        yield TrainingLine(text, REJECT, f"ordinary {number // BLOCK}")
    for item in _read(LANGUAGES):
        served = item["language"] in SERVED.get(item["expert"], ("en",))
        label = item["expert"] if served else REJECT
        group = f"language {item['language']}"
        yield TrainingLine(item["prompt"], label, group, item.get("body") or "")
    for item in _read(HERE / "written.jsonl"):
        yield TrainingLine(item["prompt"], item["specialist"], item["group"])


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    for line in lines():
        sys.stdout.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
