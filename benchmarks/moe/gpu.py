"""Qwen3-30B-A3B's shape on one CUDA device, every expert resident: decode, prefill, latency; and
DeepSeek-V2-Lite's (latent attention, shared experts) in the cases `mla-*`; and the first with only
some experts on the device in `*-resident-SHARE-*` (`gpu_beyond`).

    python3 -m benchmarks.moe.gpu                        # lists the cases
    python3 -m benchmarks.moe.gpu --case bf16-decode-1 --case 'transformers-*' --json FILE
    python3 -m benchmarks.moe.gpu --case bf16-decode-1 --profile   # with the time of each kernel
    python3 -m benchmarks.moe.gpu --case '*' --quick     # 4 layers, to see that all of it runs
    python3 -m benchmarks.moe.gpu --case '*' --smoke     # tiny, on the CPU

Random weights are made in memory (`random_models`); needs torch, triton, tokenizers, and
transformers for its own cases. Each case takes less than three minutes, its model's start included.
Only one model is in memory: transformers comes after ours, with all layers, in the same run.

decode: tok/s while all streams decode, context 512 in the middle; host and device parts of a step;
the share of the limit, which is the bytes a step must read over the bandwidth measured in the run.
prefill: from sending a prompt to its first token. latency: first-token and inter-token times of
clients that send one request after the other, to the engine itself; clients: the same through
`coterie.LLM` (no server loads a model that is only in memory). gap: the gaps of 8
streams while two prompts of 8,192 tokens are computed beside them, with so many prompt tokens a
step. prefix: the second half of a prompt, in a step of its own over the first.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

from benchmarks.gpu_clients import LlmFront, client_case
from benchmarks.gpu_runs import (
    GREEDY,
    SAMPLED,
    Case,
    Sizes,
    Streams,
    arguments,
    decode_case,
    gap_case,
    latency_case,
    make_engine,
    matmul_rate,
    peer_decode,
    peer_prefill,
    prefill_case,
    prefix_case,
    read_bandwidth,
    run_benchmark,
    tokenizer_of,
    with_limit,
)
from benchmarks.moe.gpu_beyond import BeyondModel, beyond_cases
from benchmarks.random_models import (
    SHAPES,
    make_model,
    make_peer,
    make_prompts,
    tiny,
    weight_bytes,
)
from coterie.core.moe import PREDICTIONS
from coterie.core.request import Sampling
from coterie.models.base import CausalLM
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.runtime import ExpertRuntime

SHAPE = "Qwen3-30B-A3B"
LATENT, LATENT_SHAPE = "mla", "DeepSeek-V2-Lite"
# name -> precision of the rest, and of the experts
KINDS = {
    "bf16": ("bf16", "bf16"),
    "int8": ("bf16", "int8"),
    "int4": ("bf16", "int4"),
    "all-int4": ("int4", "int4"),
    LATENT: ("bf16", "bf16"),
}
PEER = "transformers"
STREAMS = (1, 8, 64)
PROMPTS = (512, 2048, 8192)
QUICK_LAYERS = 4

# tok/s, measured on the same machine (one H200) with the same shape
FREETOKEN, LLAMACPP = "FreeToken bf16", "llama.cpp Q4_0"
DECODE_RIVALS = {FREETOKEN: 247.6, LLAMACPP: 323.0}
PREFILL_RIVALS = {
    512: {FREETOKEN: 7_270.0, LLAMACPP: 11_852.0},
    2048: {FREETOKEN: 30_046.0, LLAMACPP: 13_460.0},
    8192: {FREETOKEN: 33_788.0, LLAMACPP: 12_320.0},
}
GOALS = {
    "bf16-decode-1": 430,
    "bf16-decode-8": 940,
    "bf16-decode-64": 3_600,
    "int4-decode-1": 525,
    "int4-decode-8": 1_320,
    "int4-decode-64": 4_300,
    "all-int4-decode-1": 570,
    "bf16-prefill-512": 35_000,
    "bf16-prefill-2048": 60_000,
    "bf16-prefill-8192": 57_000,
}


def runtime_of(model: CausalLM) -> ExpertRuntime:
    return cast(ExpertRuntime, model.experts)


def routing(
    model: CausalLM, sizes: Sizes, streams: int, sampling: Sampling, steps: int = 16
) -> dict[str, float]:
    """How many experts of a layer a decode step uses; with one stream also the share of them that
    the token before used too. Counted in a run of its own."""
    runtime, vocab = runtime_of(model), model.spec.vocab
    engine = make_engine(model, tokenizer_of(vocab), streams, sizes.prompt + 2 * steps)
    clients = Streams(engine)
    for ids in make_prompts(vocab, [sizes.prompt] * streams, seed=5):
        clients.send(ids, steps, sampling)
    runtime.heatmap = heatmap = Heatmap(runtime.geometry)
    used = []
    try:
        while engine.has_work():
            before = heatmap.counts.copy()
            clients.step()
            rows = heatmap.counts - before
            # whole decode steps: neither with a prompt nor after the first streams have ended
            if (rows.sum(axis=1) == streams * runtime.geometry.top_k).all():
                used.append(rows > 0)
    finally:
        runtime.heatmap = None
    if len(used) < 2:
        return {}
    found = {"experts_distinct": statistics.mean(float(rows.sum(axis=1).mean()) for rows in used)}
    if streams == 1:
        pairs = [(now & before).sum() / now.sum() for before, now in pairwise(used)]
        found["experts_shared"] = statistics.mean(map(float, pairs))
    return found


def uniform_distinct(model: CausalLM, streams: int) -> float:
    """Distinct experts of a layer in a step of `streams` tokens, if all are equally likely."""
    geometry = runtime_of(model).geometry
    count = geometry.num_experts
    return count * (1 - (1 - geometry.top_k / count) ** streams)


def backbone_bytes(model: CausalLM) -> int:
    """What every step reads of the backbone: of a separate embedding only a few rows."""
    return model.weight_bytes - (0 if model.spec.tied else model._embed.nbytes)


def decode(model: CausalLM, sizes: Sizes, streams: int, sampling: Sampling) -> dict[str, Any]:
    found = decode_case(model, tokenizer_of(model.spec.vocab), sizes, streams, sampling)
    try:
        found |= routing(model, sizes, streams, sampling)
    except Exception as problem:  # the figures before are still valid
        found["note"] = f"routing not recorded ({problem})"
    distinct = found.get("experts_distinct", uniform_distinct(model, streams))
    runtime, context = runtime_of(model), sizes.prompt + sizes.output // 2
    experts = len(runtime.geometry.layers) * distinct * runtime.parts.store.slot_bytes
    kv = streams * context * model.kv_bytes_per_token()
    whole = backbone_bytes(model)
    if model.dtype == "int4" and whole > 1.5 * _int4_bytes(model):
        found["note"] = "the backbone is widened: only experts are int4"
    return with_limit(found, whole + experts + kv, streams, sizes.device)


def _backbone_elements(model: CausalLM) -> int:
    """Of all products but the head and the experts."""
    spec = model.spec
    if spec.latent is not None:
        # also of shared experts; everything is bf16 except gates
        return backbone_bytes(model) // 2 - spec.vocab * spec.hidden
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.num_layers * spec.hidden * (2 * q + 2 * kv)


def _int4_bytes(model: CausalLM) -> float:
    """Of a backbone whose products are int4 and whose head is int8, both in groups of 32."""
    head = model.spec.vocab * model.spec.hidden
    return _backbone_elements(model) * 20 / 32 + head * 34 / 32


def prefill(model: CausalLM, sizes: Sizes, prompt: int) -> dict[str, Any]:
    found = prefill_case(model, tokenizer_of(model.spec.vocab), sizes, prompt)
    spec, runtime = model.spec, runtime_of(model)
    moe = spec.moe
    assert moe is not None
    expert = 3 * spec.hidden * moe.intermediate
    active = _backbone_elements(model) + len(moe.layers) * moe.gate_rule.top_k * expert
    # every token sees half of the prompt on average; two products, two operations each
    attention = 2 * prompt**2 * spec.num_layers * spec.num_heads * spec.head_dim
    if spec.latent is not None:
        width = spec.latent.nope + spec.latent.rope + spec.latent.value
        attention = prompt**2 * spec.num_layers * spec.num_heads * width
    operations = 2 * prompt * active + attention + 2 * spec.vocab * spec.hidden
    reading = backbone_bytes(model) + runtime.parts.store.expert_bytes
    seconds = max(operations / matmul_rate(sizes.device), reading / read_bandwidth(sizes.device))
    limit = prompt / seconds
    return found | {
        "limit": limit,
        "share": found["tok_s"] / limit,
        "TFLOP_s": operations / prompt * found["tok_s"] / 1e12,
    }


def cases(sizes: Sizes, real: bool) -> list[Case]:
    """`real`: the whole shape, so that figures of others and goals apply."""
    found: list[Case] = []

    def add(kind: str, what: str, run: Any, rivals: dict[str, float] | None = None) -> None:
        name = f"{kind}-{what}"
        others, goal = (rivals or {}, GOALS.get(name)) if real else ({}, None)
        # sampled beside greedy, ours beside transformers
        greedy = what.removesuffix("-sampled")
        beside = f"{kind if greedy != what else PEER}-{greedy}"
        beside = "" if beside == name or kind == LATENT else beside
        figure = "decode_tok_s" if what.startswith("decode") else "tok_s"
        found.append(Case(name, kind, run, others, goal, beside, figure))

    prompts: Sequence[int] = PROMPTS if sizes.device == "cuda" else (16, 64)
    streams = STREAMS if sizes.device == "cuda" else (1, 3)
    for kind in KINDS:
        for n in streams if kind != "int8" else streams[:1]:
            rivals = DECODE_RIVALS if n == 1 and kind != LATENT else {}
            add(kind, f"decode-{n}", partial(_decode, sizes, n, GREEDY), rivals)
            if kind in ("bf16", "int4"):
                add(kind, f"decode-{n}-sampled", partial(_decode, sizes, n, SAMPLED), rivals)
        if kind in ("bf16", "int4", LATENT):
            for n in prompts:
                rivals = PREFILL_RIVALS.get(n, {}) if kind != LATENT else {}
                add(kind, f"prefill-{n}", partial(_prefill, sizes, n), rivals)
        if kind == "bf16":
            for n in streams:
                add(kind, f"latency-{n}", partial(_latency, sizes, n))
                add(kind, f"clients-{n}", partial(_clients, sizes, n))
            for n in (8192, 4096, 2048):
                add(kind, f"gap-{n}", partial(_gap, sizes, n))
            add(kind, f"prefix-{prompts[-1]}", partial(_prefix, sizes, prompts[-1]))
    for n in streams:
        add(PEER, f"decode-{n}", partial(_peer_decode, sizes, n))
    for n in prompts:
        add(PEER, f"prefill-{n}", partial(_peer_prefill, sizes, n))
    return found


def _decode(sizes: Sizes, streams: int, sampling: Sampling, model: CausalLM) -> dict[str, Any]:
    return decode(model, sizes, streams, sampling)


def _prefill(sizes: Sizes, prompt: int, model: CausalLM) -> dict[str, Any]:
    return prefill(model, sizes, prompt)


def _latency(sizes: Sizes, streams: int, model: CausalLM) -> dict[str, Any]:
    few = replace(sizes, output=sizes.output // 2)
    return latency_case(model, tokenizer_of(model.spec.vocab), few, streams)


def _prefix(sizes: Sizes, prompt: int, model: CausalLM) -> dict[str, Any]:
    return prefix_case(model, tokenizer_of(model.spec.vocab), sizes, prompt)


def _clients(sizes: Sizes, streams: int, model: CausalLM) -> dict[str, Any]:
    few = replace(sizes, output=sizes.output // 2)
    front = LlmFront.of(model, streams, few.prompt + few.output)
    try:
        return client_case(front, few, streams)
    finally:
        front.close()


def _gap(sizes: Sizes, mixed_tokens: int, model: CausalLM) -> dict[str, Any]:
    few = 8 if sizes.device == "cuda" else 2
    return gap_case(model, tokenizer_of(model.spec.vocab), sizes, few, mixed_tokens)


def _peer_decode(sizes: Sizes, streams: int, peer: Any) -> dict[str, Any]:
    return peer_decode(peer, sizes, streams, min(sizes.output, 32))


def _peer_prefill(sizes: Sizes, prompt: int, peer: Any) -> dict[str, Any]:
    return peer_prefill(peer, sizes, prompt)


def main() -> int:
    assert __doc__ is not None
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers instead of 48")
    parser.add_argument(
        "--strategy", default="adaptive",
        help="which experts are in slots, in cases *-resident-*; A,B,... compares them",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="the first N layers")
    parser.add_argument(
        "--predict", default="auto", choices=PREDICTIONS,
        help="what guesses at the next layer's experts are used for, in cases *-resident-*",
    )  # fmt: skip
    parser.add_argument(
        "--routing", choices=("uniform", "zipf"), default="uniform", help="what gates prefer"
    )
    options = parser.parse_args()
    sizes = Sizes.of(options)
    layers = QUICK_LAYERS if options.quick else options.layers
    if layers:
        print(f"{layers} layers: these are no figures of the whole model")

    def make(name: str) -> Any:
        shape = SHAPES[LATENT_SHAPE if name == LATENT else SHAPE]
        config = tiny(shape) if options.smoke else dict(shape)
        if layers:
            config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
        if name == PEER:
            return make_peer(config, sizes.device)
        beyond = BeyondModel.parse(name)
        dtype, experts = KINDS[name if beyond is None else beyond.kind]
        dispatch = None
        if beyond is not None:
            weights = weight_bytes(config)
            dispatch = beyond.settings(options.strategy, weights, options.predict)
        return make_model(
            config, sizes.device, dtype=dtype, experts=experts, dispatch=dispatch,
            skewed=options.routing == "zipf",
        )  # fmt: skip

    real = not (options.smoke or layers)
    several = options.strategy.split(",") if "," in options.strategy else []
    every = [*cases(sizes, real), *beyond_cases(sizes, real, several)]
    return run_benchmark(every, make, options)


if __name__ == "__main__":
    sys.exit(main())
