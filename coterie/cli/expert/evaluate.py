"""`coterie expert test`: runs an expert's held-out items with and without it.

Greedy, all items in one batch, compared with the figures in its manifest. The metrics are in
packages/evaluate.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coterie.cli.options import add_model, count, fetch
from coterie.cli.specialist import add_specialist, use_specialist
from coterie.cli.terminal import facts, narrate, note, show, table
from coterie.core.errors import NotFound

if TYPE_CHECKING:
    from coterie.packages.evaluate import EvalComparison, EvalItem
    from coterie.workers.embedded import LLM

HELP = "run an expert's held-out items: does it do what its manifest says?"
EPILOG = """\
examples:
  coterie expert test json-extract               all items, base and expert
  coterie expert test ./sql.expert --items 40    the first 40, which is quicker
  coterie expert test sql --show 5 --json        with answers that were wrong
  coterie expert test sentiment --language de    its German items
  coterie expert test sentiment --language all   one row per language
  coterie expert test sql --language fr --from mine.jsonl   items of your own

Exit code 1 when base or expert is not what the manifest says, but for the
tolerance that it states. An expert is worth routing to in a language when it
is better there than the base: say so with language:CODE in its capabilities.
"""
ALL = "all"


class StatedEvaluation(NamedTuple):
    """Items to run, and the figures that a package states for them: None = no figures."""

    name: str
    metric: str
    items: list[EvalItem]
    figures: EvalComparison | None


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "expert", metavar="NAME_OR_FILE", help="an installed expert (NAME@VERSION) or a package"
    )
    add_model(parser)
    add_specialist(parser)
    parser.add_argument("--items", type=count, metavar="N", help="the first N only")
    parser.add_argument(
        "--language", metavar="CODE", help="its items in a language (de), or `all` of them"
    )
    parser.add_argument(
        "--from", dest="source", metavar="FILE",
        help="items of your own instead: JSON lines as in tests/eval.jsonl",
    )  # fmt: skip
    parser.add_argument("--show", type=count, metavar="N", help="print N answers that are wrong")
    parser.add_argument("--allow-unsigned", action="store_true", help="even if nobody signed it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    args = use_specialist(args)
    several = read_stated(args.expert, args.language, args.source)
    with _open(args) as llm:
        llm.prepare([args.expert])
        reports = {code: _run_items(llm, args, stated) for code, stated in several.items()}
    if args.language == ALL:
        show(args, list(reports.values()), _by_language(reports))
    else:
        (report,) = reports.values()
        show(args, report, _text(report))
    return 0 if all(report["reproduced"] is not False for report in reports.values()) else 1


def _run_items(llm: LLM, args: argparse.Namespace, stated: StatedEvaluation) -> dict[str, Any]:
    items = stated.items[: args.items or None]
    started = time.perf_counter()
    texts = (answers(llm, items), answers(llm, items, args.expert))
    seconds = time.perf_counter() - started
    measured = judged(stated.metric, items, *texts)
    stated_figures = None if stated.figures is None else stated.figures.first(len(items))
    return {
        "expert": stated.name,
        "language": items[0].language,
        "better": measured.is_better,
        # null = the manifest has no figures for these items
        "reproduced": None if stated_figures is None else measured.reproduces(stated_figures),
        "seconds": round(seconds, 2),
        "measured": measured.section(),
        "manifest": None if stated_figures is None else stated_figures.section(),
        "wrong": _wrong(items, texts[1], measured)[: args.show or 0],
    }


def _open(args: argparse.Namespace) -> LLM:
    from coterie.workers.embedded import LLM

    narrate()
    return LLM(
        str(fetch(args.model)),
        dtype=args.dtype or "auto",
        device=args.device or "auto",
        threads=args.threads or 0,
        kv_bytes=args.kv_bytes or 0,
        allow_unsigned=args.allow_unsigned,
    )


def read_stated(
    reference: str, language: str | None = None, source: str | None = None
) -> dict[str, StatedEvaluation]:
    """By language, from a package, from an installed expert's files, or from a file."""
    from coterie.packages.evaluate import (
        ITEMS,
        LANGUAGE_ITEMS,
        read_figures,
        read_items,
        read_languages,
    )

    file = ITEMS if language is None else LANGUAGE_ITEMS
    manifest, data = _package(reference, file)
    name, section = f"{manifest.name}@{manifest.version}", manifest.section("evaluation")
    whole = read_figures(section, name)
    figures = {"": whole} if language is None else read_languages(section, name)
    if source is not None:
        file, data, figures = source, Path(source).expanduser().read_bytes(), {}
    if data is None:
        raise NotFound(f"{name}: has no {file}, so there is nothing to test")
    items = read_items(data, file)
    if language is None:
        return {"": StatedEvaluation(name, whole.metric, items, figures.get(""))}
    written = list(dict.fromkeys(item.language for item in items))
    languages = written if language == ALL else [language]
    if missing := set(languages) - set(written):
        available = ", ".join(filter(None, written)) or "none"
        raise NotFound(f"{name}: no items in {', '.join(missing)}; there are {available}")
    return {
        code: StatedEvaluation(
            name, whole.metric, [item for item in items if item.language == code], figures.get(code)
        )
        for code in languages
    }


def _package(reference: str, file: str) -> tuple[Any, bytes | None]:
    """The manifest, and one other file."""
    from coterie.cli.expert.state import open_registry
    from coterie.packages.archive import inspect

    path = Path(reference).expanduser()
    if path.is_file():
        package = inspect(path)
        return package.manifest, package.contents.get(file)
    registry = open_registry()
    name, _, version = reference.partition("@")
    card = registry.find(name, version or None)
    path_of_file = registry.files(card) / file
    return registry.manifest(card), path_of_file.read_bytes() if path_of_file.is_file() else None


def answers(llm: LLM, items: Sequence[EvalItem], expert: str | None = None) -> list[str]:
    """Greedy answers to all items, batched; in the order of the items."""
    from coterie.core.request import Chat, Message

    def ids(item: EvalItem) -> list[int]:
        turns = tuple(Message(m["role"], m["content"]) for m in item.messages)
        # the base reads what the expert was trained with
        return llm.tokenizer.encode_prompt(Chat(turns, adds_system=False))

    experts = [] if expert is None else [expert]
    texts = [""] * len(items)
    for limit in sorted({item.max_tokens for item in items}):
        indexes = [index for index, item in enumerate(items) if item.max_tokens == limit]
        prompts = [ids(items[index]) for index in indexes]
        done = llm.generate(prompts, temperature=0.0, max_tokens=limit, experts=experts)
        for index, completion in zip(indexes, done, strict=True):
            texts[index] = completion.text
        if sys.stderr.isatty():
            note(f"coterie: {len(indexes)} items {'with the expert' if expert else 'by the base'}")
    return texts


def judged(
    metric: str, items: Sequence[EvalItem], base: Sequence[str], expert: Sequence[str]
) -> EvalComparison:
    from coterie.packages.evaluate import EvalComparison, judge

    def verdicts(texts: Sequence[str]) -> tuple[bool, ...]:
        pairs = zip(texts, items, strict=True)
        return tuple(judge(metric, text, item.expected) for text, item in pairs)

    return EvalComparison(metric, verdicts(base), verdicts(expert))


def _wrong(
    items: Sequence[EvalItem], texts: Sequence[str], comparison: EvalComparison
) -> list[dict[str, Any]]:
    return [
        {"prompt": item.messages[-1]["content"], "expected": item.expected, "answer": text}
        for item, text, right in zip(items, texts, comparison.expert, strict=True)
        if not right
    ]


def _text(report: dict[str, Any]) -> str:
    measured, stated = report["measured"], report["manifest"]
    head = ("", "measured [95%]") if stated is None else ("", "measured [95%]", "manifest [95%]")
    rows = [
        [who, *(_shown(side[name]) for side in (measured, stated) if side is not None)]
        for who, name in (("base", "base"), ("with expert", "expert"))
    ]
    ends = {True: "reproduced", False: "NOT reproduced", None: "the manifest says nothing of these"}
    lines = [
        f"{report['expert']}: {measured['metric']}, {measured['n']} items, "
        f"{report['seconds']:.0f} s",
        "",
        table(head, rows),
        "",
        ends[report["reproduced"]],
    ]
    for item in report["wrong"]:
        pairs = [(name, str(item[name])) for name in ("prompt", "expected", "answer")]
        lines += ["", facts(pairs)]
    return "\n".join(lines)


def _by_language(reports: dict[str, dict[str, Any]]) -> str:
    rows = []
    for code, report in reports.items():
        measured = report["measured"]
        marks = {True: "yes", False: "NO", None: "-"}
        rows.append(
            [
                code or "-",
                str(measured["n"]),
                _shown(measured["base"]),
                _shown(measured["expert"]),
                "yes" if report["better"] else "no",
                marks[report["reproduced"]],
            ]
        )
    heads = ("language", "items", "base [95%]", "expert [95%]", "better", "as stated")
    return table(heads, rows)


def _shown(side: dict[str, Any]) -> str:
    return f"{side['score']:.2f} [{side['low_95']:.2f}, {side['high_95']:.2f}]"
