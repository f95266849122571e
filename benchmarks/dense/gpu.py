"""Dense models on one CUDA device: decoding of few and of many streams, beside transformers.

    python3 -m benchmarks.dense.gpu                       # lists the cases
    python3 -m benchmarks.dense.gpu --case 'smollm2-*' --case 'transformers-*' --json FILE
    python3 -m benchmarks.dense.gpu --case smollm2-1 --profile   # with the time of each kernel
    python3 -m benchmarks.dense.gpu --case '*-latency-*'  # through HTTP
    python3 -m benchmarks.dense.gpu --case '*' --smoke    # tiny, on the CPU

Random bf16 weights with the shapes of SmolLM2-135M and Qwen3-0.6B, made in memory; 128 tokens in,
128 out. The figure is all tokens over all seconds, prompts included, through the whole engine; the
share of the limit is that of decoding alone. latency: first-token and inter-token times of clients
of `coterie serve`, which loads the model from a temporary folder; where the packages of the server
are missing, of `coterie.LLM`, and the case says so.
Correctness on the device: `python3 -m tests.cuda`. Adapters: `benchmarks.adapters.gpu`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu_clients import Front, client_case, open_front
from benchmarks.gpu_runs import (
    GREEDY,
    SAMPLED,
    Case,
    Sizes,
    arguments,
    decode_case,
    peer_decode,
    run_benchmark,
    tokenizer_of,
    with_limit,
)
from benchmarks.random_models import SHAPES, make_model, make_peer, tiny
from coterie.core.request import Sampling
from coterie.models.base import CausalLM

MODELS = {"smollm2": "SmolLM2-135M", "qwen3-0.6b": "Qwen3-0.6B"}
PEER = "transformers"
FRONT = "server"
STREAMS = (1, 256)
CLIENTS = (1, 8, 64)
GOALS = {
    "smollm2-1": 1_800,
    "smollm2-256": 130_000,
    "qwen3-0.6b-1": 1_300,
    "qwen3-0.6b-256": 70_000,
}


def decode(sizes: Sizes, streams: int, sampling: Sampling, model: CausalLM) -> dict[str, Any]:
    found = decode_case(model, tokenizer_of(model.spec.vocab), sizes, streams, sampling)
    context = sizes.prompt + sizes.output // 2
    step_bytes = model.weight_bytes + streams * context * model.kv_bytes_per_token()
    return with_limit(found, step_bytes, streams, sizes.device)


def latency(sizes: Sizes, streams: int, front: Front) -> dict[str, Any]:
    return client_case(front, sizes, streams)


def generate(sizes: Sizes, streams: int, peer: Any) -> dict[str, Any]:
    return peer_decode(peer, sizes, streams, sizes.output)


def cases(sizes: Sizes, real: bool) -> list[Case]:
    found = []
    streams = STREAMS if real else (1, 4)
    for name in MODELS:
        for n in streams:
            goal = GOALS.get(f"{name}-{n}") if real else None
            run, sampled = (partial(decode, sizes, n, how) for how in (GREEDY, SAMPLED))
            plain, peer = f"{name}-{n}", f"{PEER}-{name}-{n}"
            found += [
                Case(plain, name, run, goal=goal, beside=peer, figure="whole_tok_s"),
                Case(f"{plain}-sampled", name, sampled, beside=plain, figure="whole_tok_s"),
            ]
    for name in MODELS:
        for n in CLIENTS if real else (1, 2):
            run = partial(latency, sizes, n)
            found.append(Case(f"{name}-latency-{n}", f"{FRONT}-{name}", run))
    for name in MODELS:
        for n in streams:
            run = partial(generate, sizes, n)
            found.append(Case(f"{PEER}-{name}-{n}", f"{PEER}-{name}", run, figure="whole_tok_s"))
    return found


def main() -> int:
    assert __doc__ is not None
    options = arguments(__doc__).parse_args()
    sizes = Sizes.of(options)
    if not options.smoke:
        sizes = replace(sizes, prompt=128, output=128)

    def make(name: str) -> Any:
        config = SHAPES[MODELS[name.removeprefix(f"{PEER}-").removeprefix(f"{FRONT}-")]]
        config = tiny(config) if options.smoke else config
        if name.startswith(FRONT):
            return open_front(config, sizes.device, CLIENTS[-1])
        of = make_peer if name.startswith(PEER) else make_model
        return of(config, sizes.device)

    return run_benchmark(cases(sizes, not options.smoke), make, options)


if __name__ == "__main__":
    sys.exit(main())
