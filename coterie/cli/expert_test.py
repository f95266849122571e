"""`coterie expert test`: an expert's held-out items through the engine, without it and with it.

Greedy, all items together, compared with the figures in its manifest. Judges nothing itself: see
packages/evaluate.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coterie.cli.menu import show
from coterie.cli.options import add_model, count, fetch
from coterie.cli.terminal import facts, narrate, note, table
from coterie.core.errors import NotFound

if TYPE_CHECKING:
    from coterie.packages.evaluate import EvalItem
    from coterie.packages.figures import Figures
    from coterie.workers.embedded import LLM

HELP = "run an expert's held-out items: does it do what its manifest says?"
EPILOG = """\
examples:
  coterie expert test json-extract               all items, base and expert
  coterie expert test ./sql.expert --items 40    the first 40: minutes become seconds
  coterie expert test sql --show 5 --json        with answers that were wrong

Exit code 1 when base or expert is not what the manifest says, but for the
tolerance that it states.
"""


class Stated(NamedTuple):
    """What a package says of itself, and the items to try."""

    name: str
    items: list[EvalItem]
    figures: Figures


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "expert", metavar="NAME_OR_FILE", help="an installed expert (NAME@VERSION) or a package"
    )
    add_model(parser)
    parser.add_argument("--items", type=count, metavar="N", help="the first N only")
    parser.add_argument("--show", type=count, metavar="N", help="print N answers that are wrong")
    parser.add_argument("--allow-unsigned", action="store_true", help="even if nobody signed it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    stated = read_stated(args.expert)
    items = stated.items[: args.items or None]
    with _open(args) as llm:
        llm.prepare([args.expert])
        began = time.perf_counter()
        texts = (answers(llm, items), answers(llm, items, args.expert))
        seconds = time.perf_counter() - began
    found = judged(stated.figures.metric, items, *texts)
    said = stated.figures.first(len(items))
    reproduced = found.reproduces(said)
    report = {
        "expert": stated.name,
        "reproduced": reproduced,
        "seconds": round(seconds, 2),
        "measured": found.section(),
        "manifest": said.section(),
        "wrong": _wrong(items, texts[1], found)[: args.show or 0],
    }
    show(args, report, _text(report, found, said))
    return 0 if reproduced else 1


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


def read_stated(reference: str) -> Stated:
    """From a package, or from what came along with an installed expert."""
    from coterie.packages.archive import inspect
    from coterie.packages.evaluate import read_items
    from coterie.packages.figures import ITEMS, read_figures

    path = Path(reference).expanduser()
    if path.is_file():
        package = inspect(path)
        manifest, data = package.manifest, package.kept.get(ITEMS)
    else:
        manifest, data = _installed(reference)
    name = f"{manifest.name}@{manifest.version}"
    if data is None:
        raise NotFound(f"{name}: has no {ITEMS}, so there is nothing to test")
    return Stated(name, read_items(data), read_figures(manifest.section("evaluation"), name))


def _installed(reference: str) -> tuple[Any, bytes | None]:
    from coterie.cli.expert_state import open_registry
    from coterie.packages.figures import ITEMS

    registry = open_registry()
    name, _, version = reference.partition("@")
    card = registry.find(name, version or None)
    items = registry.files(card) / ITEMS
    return registry.manifest(card), items.read_bytes() if items.is_file() else None


def answers(llm: LLM, items: Sequence[EvalItem], expert: str | None = None) -> list[str]:
    """Greedy answers to all items, batched; in their order."""
    from coterie.core.request import Chat, Message

    def ids(item: EvalItem) -> list[int]:
        turns = tuple(Message(m["role"], m["content"]) for m in item.messages)
        return llm.tokenizer.encode_prompt(Chat(turns))

    experts = [] if expert is None else [expert]
    texts = [""] * len(items)
    for limit in sorted({item.max_tokens for item in items}):
        places = [at for at, item in enumerate(items) if item.max_tokens == limit]
        prompts = [ids(items[at]) for at in places]
        done = llm.generate(prompts, temperature=0.0, max_tokens=limit, experts=experts)
        for at, completion in zip(places, done, strict=True):
            texts[at] = completion.text
        if sys.stderr.isatty():
            note(f"coterie: {len(places)} items {'with the expert' if expert else 'by the base'}")
    return texts


def judged(
    metric: str, items: Sequence[EvalItem], base: Sequence[str], expert: Sequence[str]
) -> Figures:
    from coterie.packages.evaluate import judge
    from coterie.packages.figures import Figures

    def verdicts(texts: Sequence[str]) -> tuple[bool, ...]:
        pairs = zip(texts, items, strict=True)
        return tuple(judge(metric, text, item.expected) for text, item in pairs)

    return Figures(metric, verdicts(base), verdicts(expert))


def _wrong(items: Sequence[EvalItem], texts: Sequence[str], found: Figures) -> list[dict[str, Any]]:
    return [
        {"prompt": item.messages[-1]["content"], "expected": item.expected, "answer": text}
        for item, text, right in zip(items, texts, found.expert, strict=True)
        if not right
    ]


def _text(report: dict[str, Any], found: Figures, said: Figures) -> str:
    from coterie.packages.evaluate import score
    from coterie.packages.figures import shown

    rows = [
        [who, shown(score(own)), shown(score(stated))]
        for who, own, stated in (
            ("base", found.base, said.base),
            ("with expert", found.expert, said.expert),
        )
    ]
    lines = [
        f"{report['expert']}: {found.metric}, {len(found.base)} items, {report['seconds']:.0f} s",
        "",
        table(("", "measured [95%]", "manifest [95%]"), rows),
        "",
        "reproduced" if report["reproduced"] else "NOT reproduced",
    ]
    for item in report["wrong"]:
        pairs = [(name, str(item[name])) for name in ("prompt", "expected", "answer")]
        lines += ["", facts(pairs)]
    return "\n".join(lines)
