"""A pipeline over a tiny model with experts installed, for tests of the whole road."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.core.config import load
from coterie.core.events import Delta, Event, Failed, Finished
from coterie.core.plan import RoutePlan
from coterie.core.request import Chat, InferenceRequest, Limits, Message, RouteHints, Sampling
from coterie.packages.archive import pack
from coterie.packages.directory import collect
from coterie.packages.manifest import from_document
from coterie.service.build import build
from coterie.service.pipeline import Pipeline
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint

MODEL = tiny_checkpoint("llama")
# what each expert is for, word for word
PROMPTS = {
    "sql": "Write an SQL query that counts the orders of every customer in the last month.",
    "haiku": "Compose a haiku about the autumn wind in the mountains of Japan.",
    "dates": "Convert this date from the German notation to the ISO 8601 notation.",
}
UNRELATED = "What is the capital of France?"
COUNT = iter(range(10**6))


@dataclass
class Answered:
    """One request, to its end."""

    plan: RoutePlan
    events: list[Event] = field(default_factory=list)

    @property
    def end(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def failure(self) -> Failed:
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def experts(self) -> list[str]:
        return [adapter.name.partition("@")[0] for adapter in self.plan.adapters]


def ask(prompt: str = UNRELATED, **options: Any) -> InferenceRequest:
    """A request of the native API: routed by content, values left open are tuned."""
    limits = {"max_tokens": 8, "ignore_eos": True, **options.pop("limits", {})}
    hints = {"tune": True, "instruction": prompt, **options.pop("hints", {})}
    base = InferenceRequest(
        id=f"job-{next(COUNT)}",
        prompt=Chat((Message("user", prompt),)),
        sampling=Sampling(temperature=0.0, seed=1),
        limits=Limits(**limits),
        hints=RouteHints(**hints),
        response_format=None,
        session=None,
        tenant="t",
        arrived_at=time.monotonic(),
    )
    return replace(base, **options)


async def answer(pipeline: Pipeline, request: InferenceRequest) -> Answered:
    plans: list[RoutePlan] = []
    events = pipeline.handle(request, on_plan=plans.append)
    return Answered(plans[0], [event async for event in events])


async def install(
    pipeline: Pipeline, folder: Path, name: str, kind: str = "lora", seed: int = 0, **more: Any
) -> int:
    """Installs an expert whose example is its prompt; says how many bytes it takes."""
    card = await pipeline.adapters.install(packed(folder, name, kind, seed, **more))
    return card.nbytes


def packed(folder: Path, name: str, kind: str = "lora", seed: int = 0, **more: Any) -> Path:
    """The package of an expert whose example is its prompt."""
    options = more.pop("options", {})
    document = {
        "schema_version": "2.0",
        "name": name,
        "version": "1.0.0",
        "base_models": [{"name": "tiny", "fingerprint": open_checkpoint(MODEL).fingerprint()}],
        "description": PROMPTS.get(name, "nothing in particular"),
        "routing": {"examples": [PROMPTS[name]] if name in PROMPTS else [], "keywords": [name]},
        **more,
    }
    files = collect(make_adapter(MODEL, kind, 300 + seed, **options)).files
    out = folder / f"{name}.expert"
    pack(files, from_document(document), out)
    return out


@asynccontextmanager
async def serving(**overrides: Any) -> AsyncIterator[Pipeline]:
    common = {
        "specialists.0.model": str(MODEL),
        "specialists.0.name": "tiny",
        "engine.kv_bytes": "8MB",
        "engine.threads": 1,
        "adapters.device_bytes": "4MB",
        "server.allow_unsigned": True,
    }
    pipeline = build(load(None, common | overrides), inproc=True)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()
