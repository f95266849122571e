"""Coterie's engine, in process. Arguments: model path, dtype, threads, and for a model with experts
`MoeSettings` as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from protocol import clock, prompt_ids, serve

from coterie.core.events import Delta, Failed
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings
from coterie.core.plan import Assignment, Rejected
from coterie.core.request import Limits, Sampling
from coterie.engine.engine import Engine
from coterie.models.base import load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint


class Peer:
    def __init__(self, path: str, dtype: str, threads: int, experts: str = "{}") -> None:
        torch.set_num_threads(threads)
        dispatch = MoeSettings(**json.loads(experts))
        model = load_model(open_checkpoint(Path(path)), dtype=dtype, dispatch=dispatch)
        # every measurement uses new prompts, so the prefix cache would only cost time
        lane = LaneConfig(
            name="bench",
            num_blocks=2400,
            context=min(8192, model.spec.max_positions),
            prefix_cache=False,
            max_sequences=64,
            max_step_tokens=1024,
        )
        self.engine = Engine(model, load_tokenizer(Path(path)), [lane])
        self.count = 0

    def _add(self, ids: list[int], tokens: int) -> None:
        self.count += 1
        verdict = self.engine.add(
            Assignment(
                request_id=f"r{self.count}",
                lane="bench",
                prompt_ids=tuple(ids),
                sampling=Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=0),
                limits=Limits(max_tokens=tokens, ignore_eos=True),
                adapters=(),
                session=f"s{self.count}",
                tenant="bench",
                deadline=None,
                arrived_at=time.monotonic(),
            )
        )
        if isinstance(verdict, Rejected):
            raise RuntimeError(verdict.reason)

    def _run(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """(seconds until every prompt gave its first token, seconds after that)."""
        begin = middle = clock()
        for ids in prompts:
            self._add(ids, tokens)
        started: set[str] = set()
        while self.engine.has_work():
            for event in self.engine.step():
                if isinstance(event, Failed):
                    raise RuntimeError(event.message)
                if isinstance(event, Delta) and event.request_id not in started:
                    started.add(event.request_id)
                    middle = clock()
        return middle - begin, clock() - middle

    def decode(self, prompt: int, tokens: int, seed: int, streams: int = 1) -> float:
        """All prompts fit into one step, so that every stream decodes from the first token on."""
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / self._run(prompts, tokens + 1)[1]

    def prefill(self, prompt: int, seed: int) -> float:
        return prompt / self._run([prompt_ids(prompt, seed)], 1)[0]

    def concurrent(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / sum(self._run(prompts, tokens))

    def long_context(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        """Decoding only: the time of prefill is subtracted from the run with tokens + 1."""
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / (sum(self._run(prompts, tokens + 1)) - sum(self._run(prompts, 1)))


if __name__ == "__main__":
    serve(Peer(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
