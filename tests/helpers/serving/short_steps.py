"""Long prompts where the system refuses memory for a step, in a process of its own.

    python -m tests.helpers.serving.short_steps

The address space may grow by GROWTH bytes, less than attention over the whole prompt at once needs.
Prints whether the answers are those with all the memory there is, how often memory was refused,
what a prompt gets in an engine of so many streams that its steps cannot be smaller, and whether
that answers when there is memory again.
"""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_runs import GREEDY, make_engine
from benchmarks.random_models import SHAPES, make_model, make_prompts, make_tokenizer, tiny
from coterie.core.events import Delta, Event, Failed
from coterie.core.lane import LaneConfig
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits
from coterie.engine.engine import Engine

PROMPT, OUTPUT = 2048, 4
GROWTH = 48 << 20


def answers(
    engine: Engine, name: str, prompts: list[list[int]], lanes: str = "m"
) -> tuple[list[list[int]], list[Failed]]:
    """Tokens of each prompt, in the lanes in turn, and the requests that failed."""
    for number, prompt in enumerate(prompts):
        limits, lane = Limits(max_tokens=OUTPUT, ignore_eos=True), lanes[number % len(lanes)]
        request = Assignment(
            f"{name}-{number}", lane, tuple(prompt), GREEDY, limits, (), "", "", None, 0.0
        )
        assert isinstance(engine.add(request), Admitted)
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in events:
        if isinstance(event, Delta):
            tokens[int(event.request_id.rsplit("-", 1)[1])] += event.token_ids
    return tokens, [event for event in events if isinstance(event, Failed)]


def limit_growth(growth: int) -> None:
    status = Path("/proc/self/status").read_text()
    size = int(status.split("VmSize:")[1].split()[0]) << 10
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + growth, hard))


def main() -> None:
    torch.set_num_threads(1)
    config: dict[str, Any] = tiny(SHAPES["Qwen3-0.6B"]) | {"max_position_embeddings": 2 * PROMPT}
    model = make_model(config, "cpu", dtype="fp32", backend="reference")
    tokenizer = make_tokenizer(model.spec.vocab)
    prompts = make_prompts(model.spec.vocab, [PROMPT, PROMPT // 2, 40], seed=3)
    engine = make_engine(model, tokenizer, 4, PROMPT + 64, PROMPT)
    few = LaneConfig("m", num_blocks=256, context=PROMPT + 64, max_step_tokens=PROMPT)
    crowded = Engine(model, tokenizer, [replace(few, max_sequences=PROMPT // 2)])
    several = Engine(model, tokenizer, [few, replace(few, name="n")])
    # what stays allocated
    for each in (engine, crowded, several):
        answers(each, "warm", prompts[2:])
    limit_growth(GROWTH)
    tokens, failed = answers(engine, "short", prompts)
    _, refused = answers(crowded, "none", prompts[:1])
    joined, lost = answers(several, "several", prompts, "nm")
    limit_growth(1 << 34)
    expected = answers(make_engine(model, tokenizer, 4, PROMPT + 64, PROMPT), "wide", prompts)[0]
    again = answers(crowded, "again", prompts)[0]
    shortages = engine.stats()["smaller_steps"]
    told = {
        "same": tokens == joined == expected, "failed": len(failed + lost),
        "shortages": shortages, "of_several": several.stats()["smaller_steps"],
        "refused": [(one.code, one.message) for one in refused], "again": again == expected,
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main()
