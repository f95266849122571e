"""Evaluates trained experts: answers the held-out items with and without each of them.

    python -m examples.judge_experts --base MODEL.gguf --trained DIR [--only NAME] [--base-only]

DIR has one PEFT directory per expert. Answers come from the engine (greedy) and are stored in
DIR/answers, where examples.pack_experts reads them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from coterie import LLM
from coterie.cli.expert.evaluate import answers, judged
from coterie.packages import archive
from coterie.packages.evaluate import EvalComparison, read_items, score, shown
from coterie.packages.paths import digest_of
from examples.expert_data.table import EXPERTS, Recipe


class Trial:
    """Answers of the engine, cached in a folder as long as items and weights are the same."""

    def __init__(self, base: Path, cache: Path) -> None:
        self._base, self._cache = base, cache
        self._open = ExitStack()
        self._llm: LLM | None = None

    def figures(self, recipe: Recipe, directory: Path) -> EvalComparison:
        lines = eval_lines(recipe)
        base, expert = self.texts(lines, None), self.texts(lines, directory)
        return judged(recipe.metric, read_items(lines), base, expert)

    def close(self) -> None:
        self._open.close()

    def texts(self, lines: bytes, directory: Path | None) -> list[str]:
        who = "base" if directory is None else digest_of(directory)[:16]
        path = self._cache / f"{archive.PackageFile.of(lines).sha256[:16]}.{who}.json"
        if not path.is_file():
            named = None if directory is None else str(directory)
            texts = answers(self._engine(), read_items(lines), named)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(texts, indent=1))
        stored: list[str] = json.loads(path.read_text())
        return stored

    def _engine(self) -> LLM:
        if self._llm is None:
            library = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
            self._llm = self._open.enter_context(
                LLM(str(self._base), device="cpu", library=library)
            )
        return self._llm


def eval_lines(recipe: Recipe) -> bytes:
    lines = [json.dumps(item.record(), ensure_ascii=False) for item in recipe.held_out()]
    return ("\n".join(lines) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=list(EXPERTS))
    parser.add_argument("--base-only", action="store_true")
    args = parser.parse_args()
    trial = Trial(args.base, args.trained / "answers")
    for name in args.only or EXPERTS:
        recipe, began = EXPERTS[name], time.perf_counter()
        if args.base_only:
            trial.texts(eval_lines(recipe), None)
            result = "base answered"
        else:
            figures = trial.figures(recipe, args.trained / name)
            result = f"base {shown(score(figures.base))} expert {shown(score(figures.expert))}"
        print(f"{name:14} {result}, {time.perf_counter() - began:.0f} s", flush=True)
    trial.close()


if __name__ == "__main__":
    main()
