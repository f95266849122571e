"""transformers `generate` on CPU. Arguments: model directory, dtype (fp32 or bf16), threads.

A model with experts runs with whichever of the library's expert implementations is fastest here,
chosen for decode and for prefill by a short trial at start.
"""

from __future__ import annotations

import sys
import time

import torch
from protocol import prompt_ids, serve
from transformers import AutoModelForCausalLM

EXPERTS = ("eager", "batched_mm", "grouped_mm")


class Peer:
    def __init__(self, path: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()
        # operation -> implementation; empty for a dense model
        self.best: dict[str, str] = {}
        if getattr(self.model.config, "num_experts", 0):
            self._choose()

    def _choose(self) -> None:
        rates: dict[str, dict[str, float]] = {"decode": {}, "prefill": {}}
        for name in EXPERTS:
            try:
                self.model.set_experts_implementation(name)
                self.prefill(16, 0)
                rates["prefill"][name] = self.prefill(64, 0)
                rates["decode"][name] = self.decode(8, 16, 0)
            except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
                # an implementation that this CPU or this version does not have
                print(f"{name}: {error}", file=sys.stderr)
        self.best = {case: max(found, key=found.__getitem__) for case, found in rates.items()}
        print(f"experts: {self.best} of {rates}", file=sys.stderr)

    def _use(self, case: str) -> None:
        if self.best:
            self.model.set_experts_implementation(self.best[case])

    def _generate(self, ids: torch.Tensor, tokens: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - begin

    def decode(self, prompt: int, tokens: int, seed: int) -> float:
        self._use("decode")
        ids = torch.tensor([prompt_ids(prompt, seed)])
        return tokens / (self._generate(ids, tokens + 1) - self._generate(ids, 1))

    def prefill(self, prompt: int, seed: int) -> float:
        self._use("prefill")
        ids = torch.tensor([prompt_ids(prompt, seed)])
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model(ids, logits_to_keep=1)
        return prompt / (time.perf_counter() - begin)

    def concurrent(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        ids = torch.tensor([prompt_ids(prompt, seed * 1000 + i) for i in range(streams)])
        return streams * tokens / self._generate(ids, tokens)

    def long_context(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        ids = torch.tensor([prompt_ids(prompt, seed * 1000 + i) for i in range(streams)])
        return streams * tokens / (self._generate(ids, tokens + 1) - self._generate(ids, 1))


serve(Peer(sys.argv[1], sys.argv[2], int(sys.argv[3])))
