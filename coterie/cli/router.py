"""`coterie router`: which experts a prompt would get, and why; and routers that are trained.

Needs no server and no model.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli import router_replay, router_versions
from coterie.cli.expert.state import experts_dir
from coterie.cli.terminal import ActionMenu, choose, facts, note, show, width
from coterie.core.errors import ConfigError, CoterieError
from coterie.core.sampling import TUNED_FIELDS

if TYPE_CHECKING:
    from coterie.core.config import Config
    from coterie.core.plan import Candidate, RoutePlan, RouteTrace
    from coterie.routing.protocols import OutcomeRates
    from coterie.routing.router import Router, Specialist
    from coterie.service.adapters.catalog import AdapterCatalog

HELP = "say who would answer a prompt, and why; train routers"
EPILOG = """\
examples:
  coterie router explain "How many users are older than 30? Write SQL."
  coterie router explain "Extract name and age as JSON" --body letter.txt
  coterie router train traffic.jsonl
  coterie router promote 3f2a --held-out held_out.jsonl
  coterie router replay --config new.toml

coterie router ACTION --help says more.
"""
_EXPLAIN = """\
examples:
  coterie router explain "Is this review positive or negative? It broke."
  coterie router explain "Extract name and age as JSON" --body letter.txt
  cat prompt.txt | coterie router explain -
  coterie router explain "Make a slug: Hello World" --max-experts 3 --json

Uses the experts that are installed here, as a server with default settings (or
with those of --config) would for a request that names none of them. Columns:
sim(ilarity), succ(ess) and mem(ory) are the three terms of the score;
prob(ability) decides.
"""
MAX_PROMPT_BYTES = 2_000_000
_FIGURES = ("sim", "succ", "mem", "score", "prob")
# width of a figure, and the least width for a name and a reason
_FIGURE = 5
MIN_WORDS = 28


def configure(parser: argparse.ArgumentParser) -> None:
    menu = ActionMenu(parser)
    action = menu.add(
        "explain", explain, "the candidates for a prompt, their scores, why", _EXPLAIN
    )
    action.add_argument("prompt", metavar="PROMPT", help="what is asked; - reads it from stdin")
    action.add_argument("--body", metavar="FILE", help="the document beside it; - reads stdin")
    action.add_argument("--max-experts", type=int, metavar="N", help="most experts, 1 to 10")
    action.add_argument("--exclude", action="append", metavar="NAME", help="never this one")
    action.add_argument("--rows", type=int, default=10, metavar="N", help="candidates shown (10)")
    action.add_argument("--config", metavar="FILE", help="TOML settings: among its specialists")
    action.add_argument("--json", action="store_true", help="print JSON")
    router_versions.add_actions(menu)
    router_replay.add_action(menu)


execute = choose


def explain(args: argparse.Namespace) -> int:
    if args.prompt == "-" and args.body == "-":
        raise ConfigError("PROMPT and --body cannot both be read from stdin", param="body")
    if args.max_experts is not None and not 1 <= args.max_experts <= 10:
        raise ConfigError("--max-experts must be from 1 to 10", param="max_experts")
    prompt = _printable(_read("-") if args.prompt == "-" else args.prompt)
    if not prompt.strip():
        raise ConfigError("the prompt is empty", param="prompt")
    body = "" if args.body is None else _printable(_read(args.body))
    plan = asyncio.run(_plan(args, prompt, body))
    report = _report(plan)
    if args.config is not None:
        report |= {
            "specialist": plan.specialist,
            "intent": plan.intent,
            "alternates": [asdict(item) for item in plan.alternates],
        }
    return show(args, report, _text(plan, args.rows, args.config is not None))


def _read(source: str) -> str:
    try:
        if source == "-":
            return sys.stdin.read(MAX_PROMPT_BYTES)
        with Path(source).open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_PROMPT_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}", param="body") from error


def _printable(text: str) -> str:
    """Bytes that are not UTF-8 arrive as single surrogates, which cannot be written."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def _plan(args: argparse.Namespace, prompt: str, body: str) -> RoutePlan:
    from coterie.core.config import load
    from coterie.routing.classify.versions import folder_of, read_current
    from coterie.routing.router import Router
    from coterie.service.adapters.catalog import AdapterCatalog
    from coterie.weights.home import state_dir

    config = load(args.config)
    catalog = AdapterCatalog(experts_dir())
    await catalog.start()
    try:
        await catalog.settled()
        trained = None
        known = _bases(catalog, config.adapters.device_bytes)
        if args.config is not None:
            known = _specialists(config, catalog, known[0].fingerprint)
            trained = read_current(folder_of(config.ensemble.router, state_dir()))
        router = Router(known, catalog, config.routing, _outcomes(), trained=trained)
        return _planned(router, args, prompt, body)
    finally:
        await catalog.close()


def _specialists(config: Config, catalog: AdapterCatalog, base: str) -> list[Specialist]:
    """The specialists of a file. No model is read: the base of one is that of its own experts, or
    of the experts of another with the same model; otherwise `base`."""
    from coterie.routing.router import Specialist
    from coterie.service.adapters.fixed import fixed_adapters
    from coterie.service.config_check import check, expected_names

    names = expected_names(config)
    check(config, names)
    fixed = fixed_adapters(config, names, catalog)
    listed = list(zip(names, config.specialists, strict=True))
    by_model = {
        settings.model: card_base
        for name, settings in listed
        for item in fixed.get(name, ())
        for card_base in item.profile.card.bases[:1]
    }
    return [
        Specialist(
            name,
            fingerprint=by_model.get(settings.model, base),
            adapter_bytes=config.adapters.device_bytes,
            fixed=fixed.get(name, ()),
            intents=settings.intents,
        )
        for name, settings in listed
    ]


def _bases(catalog: AdapterCatalog, adapter_bytes: int) -> list[Specialist]:
    """One specialist for every base model that an installed expert was made for; none is loaded."""
    from coterie.routing.router import Specialist

    fingerprints = sorted({base for card in catalog.cards() for base in card.bases})
    return [
        Specialist(f"base {base[:12]}".rstrip(), fingerprint=base, adapter_bytes=adapter_bytes)
        for base in fingerprints or [""]
    ]


class _RecordedOutcomes:
    """Outcomes that servers have recorded in this home folder."""

    def __init__(self, rates: Mapping[str, tuple[int, int]]) -> None:
        self._rates = rates

    def rate(self, digest: str) -> tuple[int, int]:
        return self._rates.get(digest, (0, 0))


def _outcomes() -> OutcomeRates | None:
    from coterie.weights.home import state_dir

    path = state_dir() / "records.db"
    if not path.is_file():
        return None
    from coterie.service.records.store import RecordStore

    try:
        store = RecordStore(path, 1)
        try:
            return _RecordedOutcomes(store.rates())
        finally:
            store.close()
    except CoterieError as error:
        # the rest of the explanation needs no outcomes
        note(f"coterie: {error.message}")
        return None


def _planned(router: Router, args: argparse.Namespace, prompt: str, body: str) -> RoutePlan:
    from coterie.core.request import Chat, InferenceRequest, Limits, Message, RouteHints, Sampling

    content = f"{prompt}\n\n{body}" if body else prompt
    return router.plan(
        InferenceRequest(
            id="explain",
            prompt=Chat((Message("user", content),)),
            sampling=Sampling(),
            limits=Limits(),
            hints=RouteHints(
                exclude=tuple(args.exclude or ()),
                max_adapters=args.max_experts,
                tune=True,
                instruction=prompt,
                document=body,
            ),
            response_format=None,
            session=None,
            tenant="",
            arrived_at=0.0,
        )
    )


def _report(plan: RoutePlan) -> dict[str, Any]:
    from coterie.service.answer import expert_plan

    return expert_plan(plan)


def _text(plan: RoutePlan, rows: int, names_specialist: bool) -> str:
    trace = plan.trace
    if trace is None:
        raise CoterieError("the router told nothing about this prompt")
    chosen = ", ".join(adapter.name for adapter in plan.adapters) or "none: the base model alone"
    pairs = [("specialist", plan.specialist)] if names_specialist else []
    pairs += [("experts", chosen), ("confidence", f"{plan.confidence:.3f}")]
    others = [
        f"{item.specialist} {item.probability:.3f}{' (viable)' if item.viable else ''}"
        for item in plan.alternates
    ]
    pairs += [("alternates", ", ".join(others))] if others else []
    pairs += [("why", reason) for reason in plan.reasons]
    pairs += [("task", _task(trace)), ("sampling", _sampling(plan))]
    pairs += [("degraded", note) for note in trace.degraded]
    timings_ms = trace.timings_ms
    stages = [
        f"{name} {timings_ms[name]:.3f}"
        for name in ("features", "match", "decide")
        if name in timings_ms
    ]
    pairs.append(("took", f"{timings_ms['total']:.3f} ms ({', '.join(stages)})"))
    parts = [facts(pairs)]
    if trace.candidates:
        shown = trace.candidates[: max(rows, 1)]
        more = len(trace.candidates) - len(shown)
        title = f"candidates, by score; threshold of prob {trace.threshold:.2f}:"
        parts.append(f"{title}\n{candidates_table(shown)}")
        if more:
            parts[-1] += f"\n... and {more} more (--rows)"
    return "\n\n".join(parts)


def _task(trace: RouteTrace) -> str:
    features = trace.features
    language = "unknown language" if trace.language == "und" else f"language {trace.language}"
    extras = [name for name in ("has_json", "has_code", "has_document") if features.get(name)]
    code = [f"code {features['code_language']}"] if features.get("code_language") else []
    return ", ".join([trace.task_type, f"intent {features['intent']}", language, *code, *extras])


def _sampling(plan: RoutePlan) -> str:
    values = [
        f"{name} {getattr(plan.sampling, name):g}"
        for name in TUNED_FIELDS
        if getattr(plan.sampling, name) is not None
    ]
    return ", ".join([*values, f"max_tokens {plan.tuned.max_tokens}"])


def candidates_table(candidates: Sequence[Candidate]) -> str:
    """Never wider than the terminal: long names are cut, long reasons wrapped; one block per
    candidate if the terminal is too narrow for columns."""
    rows = [(item, _figures(item)) for item in candidates]
    room = width() - len(_FIGURES) * (_FIGURE + 2) - 2
    if room < MIN_WORDS:
        return "\n\n".join(
            facts([("expert", item.name), *zip(_FIGURES, row, strict=True), ("why", item.why)])
            for item, row in rows
        )
    names = min(max(len(item.name) for item in candidates) + 2, room * 3 // 5)
    whys = room - names
    heads = [title.rjust(_FIGURE) for title in _FIGURES]
    lines = ["  ".join(["expert".ljust(names), *heads, "why"])]
    for item, row in rows:
        name = _cut(("* " if item.chosen else "  ") + item.name, names).ljust(names)
        first, *rest = textwrap.wrap(item.why, whys, break_on_hyphens=False) or [""]
        lines.append("  ".join([name, *row, first]))
        lines += [" " * (width() - whys) + text for text in rest]
    return "\n".join(line.rstrip() for line in lines)


def _figures(item: Candidate) -> list[str]:
    values = (item.similarity, item.success, item.memory, item.score, item.probability)
    return [f"{value:.3f}".rjust(_FIGURE) for value in values]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
