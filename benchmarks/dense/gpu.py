"""Dense decoding on one CUDA device: first correctness, then speed against transformers and the
limit.

    python3 -m benchmarks.dense.gpu [--json FILE] [--smoke]

Makes its own random weights (shapes of SmolLM2-135M and Qwen3-0.6B), needs torch, triton,
transformers, safetensors and tokenizers, and takes under five minutes. If a part fails, this is
reported and the other parts still run. `--smoke` runs a tiny version on the CPU.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.dense.gpu_checks import attention_errors, cast, decode_step, teacher_forced
from coterie.core.events import Delta, Failed
from coterie.core.lane import LaneConfig
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits, Sampling
from coterie.engine.engine import Engine
from coterie.models.base import CausalLM, load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": (
        "LlamaForCausalLM",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-0.6B": (
        "Qwen3ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 384,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
TINY_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")


class Setting:
    """Sizes of one run."""

    def __init__(self, smoke: bool) -> None:
        self.device = "cpu" if smoke else "cuda"
        self.streams = (1, 4) if smoke else (1, 256)
        self.prompt, self.output = (16, 8) if smoke else (128, 128)
        self.rounds = 1 if smoke else 3
        self.shapes = dict(SHAPES)
        if smoke:
            self.shapes = {f"{n} (tiny)": (c, TINY) for n, (c, _) in SHAPES.items()}


# -- models ---------------------------------------------------------------------------------------


def make_peer(name: str, settings: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """A transformers model with random weights, made on the device."""
    import transformers

    model_class = getattr(transformers, name)
    keys = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, **settings}
    if name.startswith("Mistral"):
        keys["sliding_window"] = None
    torch.manual_seed(0)
    with torch.device(device):
        return cast(model_class(model_class.config_class(**keys)), dtype).eval()


def save(peer: Any) -> Path:
    """Write the model to a directory, with a byte-level tokenizer of its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = Path(tempfile.mkdtemp(prefix="coterie-bench-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    peer.save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", "<pad>", *letters]
    words += [f"w{index}" for index in range(peer.config.vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(path / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    return path


def make_engine(model: CausalLM, path: Path, streams: int, context: int) -> Engine:
    blocks = streams * (-(-context // 16)) + 16
    lane = LaneConfig(
        name="m",
        num_blocks=blocks,
        context=min(context, model.spec.max_positions),
        max_queue=max(streams, 16),
        max_sequences=streams,
        max_step_tokens=max(8192, streams) if model.device.type == "cuda" else 512,
        prefix_cache=False,
    )
    return Engine(model, load_tokenizer(path), [lane])


def prompts_for(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def drive(engine: Engine, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]:
    """Run all prompts at once, greedily. Returns tokens, seconds, and the seconds of decoding
    only."""
    sampling = Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=0)
    limits = Limits(max_tokens=output, ignore_eos=True)
    begin = time.perf_counter()
    for index, ids in enumerate(prompts):
        assignment = Assignment(
            str(index), "m", tuple(ids), sampling, limits, (), "s", "t", None, time.monotonic()
        )
        verdict = engine.add(assignment)
        if not isinstance(verdict, Admitted):
            raise RuntimeError(verdict.reason)
    tokens: list[list[int]] = [[] for _ in prompts]
    decode_from, decoded = 0.0, 0
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Delta):
                tokens[int(event.request_id)] += event.token_ids
                decoded += len(event.token_ids) if decode_from else 0
        if not decode_from and all(tokens):
            # the last prompt has its first token: from now on every step only decodes
            decode_from = time.perf_counter()
    end = time.perf_counter()
    return {"tokens": tokens, "seconds": end - begin, "decode_tok_s": decoded / (end - decode_from)}


def alone_and_together(
    model: CausalLM, path: Path, prompts: Sequence[Sequence[int]], output: int
) -> tuple[list[list[int]], list[list[int]]]:
    engine = make_engine(model, path, len(prompts), 256)
    alone = [drive(engine, [ids], output)["tokens"][0] for ids in prompts]
    return alone, drive(engine, prompts, output)["tokens"]


def generate(peer: Any, prompts: Sequence[Sequence[int]], output: int) -> tuple[list[Any], float]:
    """A static batch of transformers (prompts of one length)."""
    given = torch.tensor(prompts, device=peer.device)
    begin = time.perf_counter()
    out = peer.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=output,
        min_new_tokens=output,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    )
    found = out[:, given.shape[1] :].tolist()
    return found, time.perf_counter() - begin


# -- parts ----------------------------------------------------------------------------------------


def read_bandwidth(setting: Setting) -> dict[str, Any]:
    """Bytes per second of reading alone: the best of torch's reductions."""
    count = 1 << 20 if setting.device == "cpu" else 1 << 30
    buffers = [torch.randn(count, device=setting.device) for _ in range(2)]
    rates = {}
    reductions: dict[str, Callable[..., object]] = {"sum": torch.sum, "amax": torch.amax}
    for name, reduce in reductions.items():
        seconds = timed(partial(_reduce_all, reduce, buffers), setting.device)
        rates[name] = 2 * count * 4 / seconds
    seconds = timed(lambda: buffers[0].copy_(buffers[1]), setting.device)
    return {"read_bytes_s": max(rates.values()), **rates, "copy_bytes_s": 2 * count * 4 / seconds}


def _reduce_all(reduce: Callable[..., object], buffers: list[torch.Tensor]) -> None:
    for buffer in buffers:
        reduce(buffer)


def timed(work: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Median seconds, by device events on CUDA."""
    work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1000)
        else:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def kernel_errors(setting: Setting) -> dict[str, Any]:
    """Triton attention against its torch twin in fp32, on new random inputs, with outputs that
    start as NaN."""
    if setting.device != "cuda":
        return {"skipped": "needs a CUDA device (the interpreter tests cover the CPU)"}
    return attention_errors()


def greedy_equality(setting: Setting) -> dict[str, Any]:
    """fp32, tiny models: whether tokens equal those of transformers, one stream and 16 streams,
    captured and eager."""
    found: dict[str, Any] = {}
    lengths = [3 + 11 * i % 70 for i in range(16)]
    for name in TINY_CLASSES:
        peer = make_peer(name, TINY, torch.float32, setting.device)
        path = save(peer)
        prompts = prompts_for(384, lengths)
        output = 8 if setting.device == "cpu" else 64
        want = [generate(peer, [ids], output)[0][0] for ids in prompts]
        model = load_model(open_checkpoint(path), dtype="fp32", device=setting.device)
        for mode in ("captured", "eager"):
            if mode == "eager":
                model.graphs = None
            alone, together = alone_and_together(model, path, prompts, output)
            found[f"{name} {mode}"] = {
                "alone": sum(a == b for a, b in zip(alone, want, strict=True)),
                "together": sum(a == b for a, b in zip(together, want, strict=True)),
                "of": len(want),
                "distinct": min(len(set(tokens)) for tokens in want),
            }
    return found


def bf16_distance(setting: Setting) -> dict[str, Any]:
    """Teacher-forced logits of both in bf16 against transformers in fp32, and how often a greedy
    answer differs between one stream and 16 streams."""
    name, (model_class, settings) = next(iter(setting.shapes.items()))
    settings = {**settings, "initializer_range": settings.get("initializer_range", 0.06)}
    peer = make_peer(model_class, settings, torch.bfloat16, setting.device)
    path = save(peer)
    model = load_model(open_checkpoint(path), dtype="bf16", device=setting.device)
    ids = prompts_for(model.spec.vocab, [setting.prompt * 2])[0]
    report: dict[str, Any] = {"model": name, **teacher_forced(model, peer, ids)}
    prompts = prompts_for(model.spec.vocab, [5 + 7 * i for i in range(16)], seed=3)
    output = setting.output // 2
    alone, together = alone_and_together(model, path, prompts, output)
    differ = sum(a != b for a, b in zip(alone, together, strict=True))
    return {**report, "requests_that_differ_in_a_batch_of_16": f"{differ} of 16"}


def speed(setting: Setting, name: str, limit: float | None) -> dict[str, Any]:
    """tok/s of both, interleaved. `decode` does not include prefill; the limit applies to it."""
    model_class, settings = setting.shapes[name]
    peer = make_peer(model_class, settings, torch.bfloat16, setting.device)
    path = save(peer)
    begin = time.perf_counter()
    model = load_model(open_checkpoint(path), dtype="bf16", device=setting.device)
    report: dict[str, Any] = {"load_s": time.perf_counter() - begin}
    rows: dict[str, list[float]] = {}
    context = setting.prompt + setting.output
    engines = {n: make_engine(model, path, n, context) for n in setting.streams}
    batches = {
        n: prompts_for(model.spec.vocab, [setting.prompt] * n, seed=n) for n in setting.streams
    }
    for streams, engine in engines.items():
        drive(engine, batches[streams], setting.output)
        generate(peer, batches[streams], 4)
    for _ in range(setting.rounds):
        for streams, engine in engines.items():
            total = streams * setting.output
            mine = drive(engine, batches[streams], setting.output)
            _, theirs = generate(peer, batches[streams], setting.output)
            rows.setdefault(f"{streams} coterie", []).append(total / mine["seconds"])
            rows.setdefault(f"{streams} coterie decode", []).append(mine["decode_tok_s"])
            rows.setdefault(f"{streams} transformers", []).append(total / theirs)
    report |= {key: statistics.median(values) for key, values in rows.items()}
    for streams in setting.streams:
        middle = setting.prompt + setting.output // 2
        step_bytes = model.weight_bytes + streams * middle * model.kv_bytes_per_token()
        report[f"{streams} step_bytes"] = step_bytes
        # the step of the model alone, without scheduling, copies to the device and sampling
        forward = decode_step(model, streams, middle)
        report[f"{streams} forward_s"] = timed(forward, setting.device, 50)
        report[f"{streams} ratio"] = (
            report[f"{streams} coterie"] / report[f"{streams} transformers"]
        )
        if limit:
            best = streams * limit / step_bytes
            report[f"{streams} limit"] = best
            report[f"{streams} share"] = report[f"{streams} coterie decode"] / best
    return report


# -- report ---------------------------------------------------------------------------------------


def attempt(results: dict[str, Any], name: str, part: Callable[[], dict[str, Any]]) -> None:
    begin = time.perf_counter()
    try:
        results[name] = part()
    except Exception:
        results[name] = {"error": traceback.format_exc()}
        print(f"{name} FAILED\n{traceback.format_exc()}", file=sys.stderr)
    results[name]["part_s"] = round(time.perf_counter() - begin, 1)
    print(f"# {name}: {results[name]['part_s']} s", file=sys.stderr, flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(results: dict[str, Any], setting: Setting) -> str:
    lines = [f"device: {results['device']}"]
    for part in ("bandwidth", "kernels", "greedy", "bf16"):
        lines.append(f"{part}: {json.dumps(results[part], default=str)[:1500]}")
    lines.append("tok/s; ms: the model's step alone. share: decode over the bandwidth limit")
    head = "model | streams | coterie | decode | transformers | ratio | limit | share | ms"
    lines.append(head)
    for name in setting.shapes:
        found = results[f"speed {name}"]
        if "error" in found:
            lines.append(f"{name} | {found['error'].splitlines()[-1]}")
            continue
        for n in setting.streams:
            cells = [
                f"{found[f'{n} coterie']:.0f}",
                f"{found[f'{n} coterie decode']:.0f}",
                f"{found[f'{n} transformers']:.0f}",
                f"{found[f'{n} ratio']:.1f}x",
                f"{found.get(f'{n} limit', float('nan')):.0f}",
                f"{found.get(f'{n} share', float('nan')):.1%}",
                f"{found[f'{n} forward_s'] * 1e3:.2f}",
            ]
            lines.append(" | ".join([name, str(n), *cells]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--smoke", action="store_true", help="a tiny run on the CPU")
    parser.add_argument("--json", type=Path, help="where the figures go (default: $OUT)")
    options = parser.parse_args()
    setting = Setting(options.smoke)
    cuda = setting.device == "cuda"
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "cpu"}
    attempt(results, "bandwidth", lambda: read_bandwidth(setting))
    attempt(results, "kernels", lambda: kernel_errors(setting))
    attempt(results, "greedy", lambda: greedy_equality(setting))
    attempt(results, "bf16", lambda: bf16_distance(setting))
    limit = results["bandwidth"].get("read_bytes_s")
    for name in setting.shapes:
        attempt(results, f"speed {name}", partial(speed, setting, name, limit))
    target = options.json
    if target is None and os.environ.get("OUT"):
        target = Path(os.environ["OUT"]) / "dense_gpu.json"
    if target is not None:
        target.write_text(json.dumps(results, indent=1, default=str))
    print(table(results, setting))
    return int(any("error" in part for part in results.values() if isinstance(part, dict)))


if __name__ == "__main__":
    sys.exit(main())
