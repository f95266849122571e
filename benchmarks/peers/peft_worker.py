"""PEFT on transformers, fp32: one batch whose rows use different adapters.

Arguments: model directory, threads, PEFT directories.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from protocol import prompt_ids, serve
from transformers import AutoModelForCausalLM


class Peer:
    def __init__(self, path: str, threads: int, folders: list[str]) -> None:
        torch.set_num_threads(threads)
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.names = [f"a{index}" for index in range(len(folders))]
        self.model = PeftModel.from_pretrained(base, folders[0], adapter_name=self.names[0])
        for name, folder in zip(self.names[1:], folders[1:], strict=True):
            self.model.load_adapter(str(Path(folder)), adapter_name=name)
        self.model.eval()

    def decode(self, prompt: int, tokens: int, seed: int) -> float:
        return self.batch(1, prompt, tokens, seed, mixed=False)

    def batch(self, streams: int, prompt: int, tokens: int, seed: int, mixed: bool) -> float:
        """Decoding only: the time of a run with one token is subtracted."""
        ids = torch.tensor([prompt_ids(prompt, seed * 1000 + i) for i in range(streams)])
        # "__base__" is PEFT's name for a row without an adapter
        rows = [self.names[i % len(self.names)] if mixed else "__base__" for i in range(streams)]
        long, short = self._run(ids, tokens + 1, rows), self._run(ids, 1, rows)
        return streams * tokens / (long - short)

    def _run(self, ids: torch.Tensor, tokens: int, rows: list[str]) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                adapter_names=rows,
            )
        return time.perf_counter() - begin


serve(Peer(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
