"""llama.cpp through llama-cpp-python's C bindings.

Arguments: GGUF file, flash attention (0 off, 1 on, -1 auto), threads.
Batches are a static loop over `llama_decode`, one sequence id each; the sampler is argmax. The file
is mapped and keys and values are fp16, as its defaults are.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as ll
import numpy as np
from protocol import clock, prompt_ids, serve

# rows of a batch that run through the layers together
UBATCHES = (128, 256, 512)
DEFAULT_UBATCH = 512
# rows whose logits are kept at a time
LOGIT_ROWS = 128


class Peer:
    def __init__(self, path: str, flash: int, threads: int) -> None:
        ll.llama_backend_init()
        # ggml logs to stderr by default; a benchmark wants silence
        self._quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self._quiet, ctypes.c_void_p(0))
        parameters = ll.llama_model_default_params()
        parameters.load_mode = ll.LLAMA_LOAD_MODE_MMAP
        self.model = ll.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.flash, self.threads = flash, threads
        self.ubatch, self.unified = DEFAULT_UBATCH, False

    def choose(self) -> dict[str, object]:
        """Takes the settings that are fastest here, by a short trial."""
        prefill: dict[int, float] = {}
        for self.ubatch in UBATCHES:
            prefill[self.ubatch] = self.prefill(512, 0)
        self.ubatch = max(prefill, key=prefill.__getitem__)
        decode: dict[bool, float] = {}
        for self.unified in (False, True):
            decode[self.unified] = self.decode(32, 8, 0, streams=8)
        self.unified = decode[True] > decode[False]
        return {
            "ubatch": self.ubatch,
            "unified_kv": self.unified,
            "prefill_tok_s_by_ubatch": prefill,
            "decode_tok_s_by_unified_kv": decode,
        }

    def _context(self, tokens: int, sequences: int) -> ctypes.c_void_p:
        parameters = ll.llama_context_default_params()
        parameters.n_ctx = (tokens + 63) // 64 * 64 * sequences
        parameters.n_batch = 2048
        parameters.n_ubatch = self.ubatch
        parameters.n_seq_max = sequences
        parameters.n_threads = self.threads
        parameters.n_threads_batch = self.threads
        parameters.flash_attn_type = self.flash
        parameters.kv_unified = self.unified
        return ll.llama_init_from_model(self.model, parameters)

    def _feed(self, context: ctypes.c_void_p, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: (token, position, sequence, wants logits)."""
        batch = ll.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = ll.llama_decode(context, batch)
        ll.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _argmax(self, context: ctypes.c_void_p, row: int) -> int:
        logits = ll.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())

    def _prompts(self, context: ctypes.c_void_p, prompts: list[list[int]]) -> list[int]:
        last = []
        for sequence, ids in enumerate(prompts):
            for start in range(0, len(ids), 2048):
                part = ids[start : start + 2048]
                final = start + len(part) == len(ids)
                rows = [
                    (t, start + i, sequence, final and i == len(part) - 1)
                    for i, t in enumerate(part)
                ]
                self._feed(context, rows)
            last.append(self._argmax(context, -1))
        return last

    def _run(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        context = self._context(len(prompts[0]) + tokens + 1, len(prompts))
        try:
            begin = clock()
            current = self._prompts(context, prompts)
            middle = clock()
            for step in range(tokens):
                position = len(prompts[0]) + step
                self._feed(context, [(t, position, s, True) for s, t in enumerate(current)])
                current = [self._argmax(context, row) for row in range(len(prompts))]
            return middle - begin, clock() - middle
        finally:
            ll.llama_free(context)

    def decode(self, prompt: int, tokens: int, seed: int, streams: int = 1) -> float:
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / self._run(prompts, tokens)[1]

    def prefill(self, prompt: int, seed: int) -> float:
        return prompt / self._run([prompt_ids(prompt, seed)], 0)[0]

    def concurrent(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / sum(self._run(prompts, tokens - 1))

    def long_context(self, streams: int, prompt: int, tokens: int, seed: int) -> float:
        prompts = [prompt_ids(prompt, seed * 1000 + i) for i in range(streams)]
        return streams * tokens / self._run(prompts, tokens)[1]

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """The answer of each prompt alone; tokens behind an end are not cut."""
        answers = []
        for ids in prompts:
            context = self._context(len(ids) + tokens, 1)
            try:
                answer = self._prompts(context, [ids])
                for step in range(tokens - 1):
                    self._feed(context, [(answer[-1], len(ids) + step, 0, True)])
                    answer.append(self._argmax(context, -1))
            finally:
                ll.llama_free(context)
            answers.append(answer)
        return answers

    def logits(self, ids: list[int], path: str) -> int:
        """Writes those of every position to `path`, as a numpy array of fp32."""
        context = self._context(len(ids), 1)
        try:
            parts = []
            for start in range(0, len(ids), LOGIT_ROWS):
                part = ids[start : start + LOGIT_ROWS]
                self._feed(context, [(t, start + i, 0, True) for i, t in enumerate(part)])
                found = ll.llama_get_logits(context)
                parts.append(np.ctypeslib.as_array(found, (len(part), self.vocab)).copy())
            np.save(path, np.concatenate(parts))
        finally:
            ll.llama_free(context)
        return len(ids)


serve(Peer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
