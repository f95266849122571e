"""How often the first answers of a model are right, by temperature and top-p.

    python -m benchmarks.serving.first_answer [--model MODEL] [--seeds 20] [--json FILE]

Asks the questions of easy_questions.toml once for every seed, temperature and top-p, and once
with the sampling that a request gets which sets nothing. An answer is right if it contains the
expected words. At temperature 0 the seed changes nothing: one answer stands for all.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie import LLM
from coterie.core.adapters import AdapterSettings

FILE = Path(__file__).with_name("easy_questions.toml")
TEMPERATURES = (0.0, 0.2, 0.5, 0.7, 1.0)
TOP_PS = (0.9, 1.0)
SEEDS = 20
MAX_TOKENS = 60
# that run together
STREAMS = 20
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class EasyQuestion:
    text: str
    answer: re.Pattern[str]

    def is_right(self, text: str) -> bool:
        return self.answer.search(text) is not None


def read_questions() -> list[EasyQuestion]:
    items = tomllib.loads(FILE.read_text(encoding="utf-8"))["questions"]
    return [EasyQuestion(item["text"], re.compile(item["answer"], re.IGNORECASE)) for item in items]


def answers(
    llm: LLM, question: EasyQuestion, seeds: Iterable[int], options: dict[str, Any]
) -> list[str]:
    """One answer for each seed."""

    def ask(seed: int) -> str:
        turns = [{"role": "user", "content": question.text}]
        return llm.chat(turns, seed=seed, max_tokens=MAX_TOKENS, **options).text

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(ask, seeds))


def measured(llm: LLM, questions: Sequence[EasyQuestion], num_seeds: int) -> dict[str, list[int]]:
    """By settings: how many answers of each question were right."""
    settings: dict[str, dict[str, Any]] = {
        f"{temperature:g} / {top_p:g}": {"temperature": temperature, "top_p": top_p}
        for temperature in TEMPERATURES
        for top_p in TOP_PS
    }
    settings[DEFAULT] = {}
    counts: dict[str, list[int]] = {}
    for name, options in settings.items():
        seeds = range(1 if options.get("temperature") == 0 else num_seeds)
        share = num_seeds // len(seeds)
        counts[name] = []
        for question in questions:
            texts = answers(llm, question, seeds, options)
            counts[name].append(share * sum(map(question.is_right, texts)))
        print(f"{name:12} {counts[name]}", flush=True)
    return counts


def table(questions: Sequence[EasyQuestion], counts: dict[str, list[int]]) -> str:
    head = ["question", *counts]
    rows = [
        [question.text, *(str(column[place]) for column in counts.values())]
        for place, question in enumerate(questions)
    ]
    rows.append(["all", *(str(sum(column)) for column in counts.values())])
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the default model if left out")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    questions = read_questions()
    with LLM(args.model, adapters=AdapterSettings(device_bytes=0)) as llm:
        counts = measured(llm, questions, args.seeds)
    print(f"\nright of {args.seeds}, by temperature / top-p\n\n{table(questions, counts)}")
    if args.json is not None:
        facts = {"seeds": args.seeds, "questions": [item.text for item in questions]}
        args.json.write_text(json.dumps({**facts, "right": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
