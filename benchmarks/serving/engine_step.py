"""The engine's own time per step: schedule, batch assembly, sampling bookkeeping, commit.

    python -m benchmarks.serving.engine_step [--sequences 32] [--steps 400]

The model is replaced by one that returns fixed logits at once, and the time inside it and inside
the sampling mathematics (argmax, softmax, sort) is subtracted. `bookkeeping` is schedule, commit
and the rest of sampling: the limit is 0.5 ms at 32 sequences. `step` adds the assembly of the
model's inputs. The mathematics reads 6 MB of logits, so all of it is measured with cold caches, as
after a real forward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from coterie.core.lane import LaneConfig
from coterie.core.plan import Assignment
from coterie.core.request import Limits, Sampling
from coterie.engine import sampler
from coterie.engine.engine import Engine

VOCAB = 49_152
PROMPT_TOKENS = 128
LIMIT_US = 500
PARTS = ("schedule", "sample", "commit")
CASES = {
    "greedy": Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=1),
    "sampled": Sampling(temperature=0.8, top_p=0.95, n=1, num_beams=1, seed=1),
}


class Stopwatch:
    """Measures the time outside of bookkeeping: in the model and in the mathematics of sampling."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.sampling_s = 0.0

    def around(self, function: Callable[..., Any], *, sampling: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            passed = time.perf_counter() - started
            self.spent_s += passed
            self.sampling_s += passed * sampling
            return result

        return timed


class FixedModel:
    """Random logits that are made once: a forward pass is only a slice."""

    def __init__(self, max_rows: int) -> None:
        self.spec = SimpleNamespace(vocab=VOCAB, num_layers=1, eos_ids=())
        self.device = torch.device("cpu")
        self.experts = self.memory_trade = None
        self._logits = torch.randn(max_rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 6

    def prepare(
        self, kv: Sequence[Tensor], block_size: int, max_sequences: int, adapters: bool = False
    ) -> None:
        """There is nothing to compile."""

    def launched_usage(self) -> None:
        return None

    def take_usage(self) -> None:
        """There are no experts."""

    def new_kv(self, num_blocks: int, block_size: int) -> list[Tensor]:
        return [torch.zeros((2, num_blocks, 1, block_size, 1))]

    def forward(self, token_ids: Tensor, batch: Any, kv: Any, logits_rows: Tensor) -> Tensor:
        return self._logits[: len(logits_rows)]


class WordTokenizer:
    """Every token is a short word, so text takes as long as with a real vocabulary."""

    vocab_size, eos_ids, bos_id = VOCAB, (), None

    def token_bytes(self, token_id: int) -> bytes:
        return f" w{token_id}".encode()

    def is_special(self, token_id: int) -> bool:
        return False

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()


def measure(sampling: Sampling, num_sequences: int, num_steps: int) -> dict[str, float]:
    """Median microseconds per decode step, without the model and the sampling mathematics."""
    context = PROMPT_TOKENS + num_steps + 64
    lane = LaneConfig(
        name="lane",
        num_blocks=num_sequences * (context // 16 + 2),
        context=context,
        max_sequences=num_sequences,
        max_step_tokens=512,
    )
    model = FixedModel(num_sequences)
    watch = Stopwatch()
    maths = ("argmax", "draw_filtered", "draw_plain")
    originals = {name: getattr(sampler, name) for name in maths}
    for name, function in originals.items():
        setattr(sampler, name, watch.around(function, sampling=True))
    model.forward = watch.around(model.forward, sampling=False)  # type: ignore[method-assign]
    engine = Engine(model, WordTokenizer(), [lane])  # type: ignore[arg-type]
    try:
        _fill(engine, sampling, num_sequences, num_steps)
        return _decode(engine, watch, num_sequences, num_steps)
    finally:
        for name, function in originals.items():
            setattr(sampler, name, function)


def _fill(engine: Engine, sampling: Sampling, num_sequences: int, num_steps: int) -> None:
    for number in range(num_sequences):
        prompt = tuple(range(number, number + PROMPT_TOKENS))
        limits = Limits(max_tokens=num_steps + 32)
        verdict = engine.add(
            Assignment(f"r{number}", "lane", prompt, sampling, limits, (), "", "t", None, 0.0)
        )
        assert type(verdict).__name__ == "Admitted", verdict
    while engine.stats()["waiting"] or engine.stats()["prefill_tokens"] < (
        num_sequences * PROMPT_TOKENS
    ):
        engine.step()


def _decode(
    engine: Engine, watch: Stopwatch, num_sequences: int, num_steps: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {"bookkeeping": [], "step": [], "schedule": [], "commit": []}
    for _ in range(num_steps):
        watch.spent_s = watch.sampling_s = 0.0
        before = engine.stats()
        started = time.perf_counter()
        events = engine.step()
        times["step"].append(time.perf_counter() - started - watch.spent_s)
        after = engine.stats()
        assert len(events) == num_sequences
        spent = {part: after[f"{part}_s"] - before[f"{part}_s"] for part in PARTS}
        times["schedule"].append(spent["schedule"])
        times["commit"].append(spent["commit"])
        times["bookkeeping"].append(sum(spent.values()) - watch.sampling_s)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    table = {name: measure(case, options.sequences, options.steps) for name, case in CASES.items()}
    print(f"microseconds per decode step, median; bookkeeping is promised under {LIMIT_US}")
    columns = list(next(iter(table.values())))
    print(f"{'case':10}" + "".join(f"{column:>14}" for column in columns))
    for name, figures in table.items():
        print(f"{name:10}" + "".join(f"{figures[column]:14.0f}" for column in columns))
    print(json.dumps({"sequences": options.sequences, "limit_us": LIMIT_US, "cases": table}))


if __name__ == "__main__":
    main()
