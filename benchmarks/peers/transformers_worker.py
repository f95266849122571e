"""transformers `generate` on CPU. Arguments: model directory, dtype (fp32 or bf16), threads."""

from __future__ import annotations

import sys
import time

import torch
from protocol import prompt_ids, serve
from transformers import LlamaForCausalLM


class Peer:
    def __init__(self, path: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.model = LlamaForCausalLM.from_pretrained(path, dtype=kind).eval()

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
        ids = torch.tensor([prompt_ids(prompt, seed)])
        return tokens / (self._generate(ids, tokens + 1) - self._generate(ids, 1))

    def prefill(self, prompt: int, seed: int) -> float:
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
