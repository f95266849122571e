"""What the GPU benchmarks share: cases that run alone, requests through an engine, times, limits.

A benchmark is a list of `Case`; `main` runs those that were asked for, and lists the others as not
run. Requests go through the whole engine: scheduler, model, sampler, detokeniser.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_models import make_prompts, make_tokenizer
from coterie.core.events import Delta, Failed
from coterie.core.lane import LaneConfig
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits, Sampling
from coterie.engine.engine import Engine
from coterie.kernels.batch import FRESH_ROWS, AttentionBatch
from coterie.models.base import CausalLM
from coterie.models.text.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, n=1, num_beams=1)
# tokens that one step computes at most
STEP_TOKENS = 8192
BLOCK = 16
# rounds of one measurement end early when they have taken this long together
ROUNDS_S = 25.0


# -- machine --------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Median seconds, by device events on CUDA."""
    work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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


@cache
def read_bandwidth(device: str) -> float:
    """Bytes per second of reading alone: the best of torch's reductions."""
    count = 1 << 20 if device == "cpu" else 1 << 30
    buffer = torch.ones(count, device=device)
    reductions: tuple[Callable[..., object], ...] = (torch.sum, torch.amax)
    return max(4 * count / timed(partial(reduce, buffer), device) for reduce in reductions)


@cache
def matmul_rate(device: str) -> float:
    """Operations per second of torch's bf16 matrix product."""
    size = 128 if device == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / timed(partial(torch.matmul, a, b), device)


class DeviceWaits:
    """Seconds in which the host waited for an event of the device, once `count` was called: the
    rest of a step is the host's own work."""

    seconds = 0.0

    @classmethod
    def count(cls) -> None:
        wait = torch.cuda.Event.synchronize

        def counted(event: torch.cuda.Event) -> None:
            begin = time.perf_counter()
            wait(event)
            cls.seconds += time.perf_counter() - begin

        torch.cuda.Event.synchronize = counted  # type: ignore[assignment, method-assign]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- the model alone ------------------------------------------------------------------------------


def make_batch(
    rows: Sequence[int], contexts: Sequence[int], device: str, block_size: int = BLOCK
) -> tuple[AttentionBatch, int]:
    """Sequences over a shuffled pool; every block belongs to one of them."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts)).int()
    tables = torch.zeros((len(contexts), max(counts)), dtype=torch.int32)
    positions, slots, used = [], [], 0
    for index, (count, context, new) in enumerate(zip(counts, contexts, rows, strict=True)):
        tables[index, :count] = order[used : used + count]
        used += count
        where = torch.arange(context - new, context)
        positions.append(where)
        slots.append(tables[index, where // block_size].long() * block_size + where % block_size)
    bounds = pairwise([0, *accumulate(rows)])
    whole = [new == context >= FRESH_ROWS for new, context in zip(rows, contexts, strict=True)]
    batch = AttentionBatch(
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        query_starts=torch.tensor([0, *rows]).cumsum(0).int().to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        block_size=block_size,
        phase="decode" if max(rows) == 1 else "prefill",
        fresh=tuple(pair for pair, begins in zip(bounds, whole, strict=True) if begins),
    )
    return batch, sum(counts)


def model_seconds(
    model: CausalLM, rows: Sequence[int], contexts: Sequence[int], repeats: int = 20
) -> float:
    """The median step of sequences with so many new rows and tokens in all, without scheduling,
    sampling and copies to the device."""
    device = model.device
    batch, blocks = make_batch(rows, contexts, str(device))
    kv = model.new_kv(blocks, batch.block_size)
    for each in kv:
        each.normal_()
    tokens = torch.arange(sum(rows), device=device) % (model.spec.vocab - 3) + 3
    last = batch.query_starts[1:].long() - 1
    seconds = timed(lambda: model.forward(tokens, batch, kv, last), device.type, repeats)
    # an engine takes the counts of each step; left here, the next engine would get them
    (model.launched_usage() or model.take_usage)()
    return seconds


# -- through the engine ---------------------------------------------------------------------------


def make_engine(
    model: CausalLM,
    tokenizer: Tokenizer,
    streams: int,
    context: int,
    step_tokens: int = STEP_TOKENS,
    mixed_tokens: int = 0,
) -> Engine:
    lane = LaneConfig(
        name="m",
        num_blocks=streams * -(-context // BLOCK) + BLOCK,
        context=min(context, model.spec.max_positions),
        block_size=BLOCK,
        max_queue=max(2 * streams, 16),
        max_sequences=streams,
        max_step_tokens=max(step_tokens, streams),
        max_mixed_tokens=mixed_tokens,
        prefix_cache=False,
    )
    return Engine(model, tokenizer, [lane])


@dataclass
class Stream:
    """One request: when it was sent and when each of its tokens came."""

    sent: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


class Streams:
    """Requests that run through one engine. `send` adds one, `step` runs one step for all."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.all: list[Stream] = []
        self.running: set[int] = set()

    def send(self, ids: Sequence[int], output: int, sampling: Sampling = GREEDY) -> Stream:
        number = len(self.all)
        seeded = Sampling(
            temperature=sampling.temperature, top_p=sampling.top_p, n=1, num_beams=1, seed=number
        )
        limits = Limits(max_tokens=output, ignore_eos=True)
        assignment = Assignment(
            str(number), "m", tuple(ids), seeded, limits, (), "s", "t", None, time.monotonic()
        )
        stream = Stream(time.perf_counter())
        verdict = self.engine.add(assignment)
        if not isinstance(verdict, Admitted):
            raise RuntimeError(verdict.reason)
        self.all.append(stream)
        self.running.add(number)
        return stream

    def step(self) -> int:
        """Returns how many requests ended."""
        events = self.engine.step()
        now, ended = time.perf_counter(), 0
        for event in events:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Delta):
                number = int(event.request_id)
                stream = self.all[number]
                stream.tokens += event.token_ids
                stream.times += [now] * len(event.token_ids)
                if event.finish_reason is not None:
                    self.running.discard(number)
                    ended += 1
        return ended

    def drain(self) -> None:
        while self.engine.has_work():
            self.step()


@dataclass(frozen=True)
class Drive:
    """All prompts sent at once and answered. `decode` is the part in which every stream had its
    first token already."""

    seconds: float
    decode_s: float
    decoded: int
    streams: list[Stream]
    # of that part: steps, seconds that the host waited for the device, and the milliseconds of a
    # step as the engine counts them
    steps: int
    waited_s: float
    host_ms: dict[str, float]

    @property
    def decode_tok_s(self) -> float:
        return self.decoded / self.decode_s

    @property
    def tok_s(self) -> float:
        return sum(len(stream.tokens) for stream in self.streams) / self.seconds


def drive(
    engine: Engine, prompts: Sequence[Sequence[int]], output: int, sampling: Sampling = GREEDY
) -> Drive:
    streams = Streams(engine)
    begin = time.perf_counter()
    for ids in prompts:
        streams.send(ids, output, sampling)
    while not all(stream.tokens for stream in streams.all):
        streams.step()
    before, decode_from = engine.stats(), time.perf_counter()
    waited = DeviceWaits.seconds
    already = sum(len(stream.tokens) for stream in streams.all)
    streams.drain()
    end, after = time.perf_counter(), engine.stats()
    steps = int(after["steps"] - before["steps"])
    decoded = sum(len(stream.tokens) for stream in streams.all) - already
    return Drive(
        end - begin,
        end - decode_from,
        decoded,
        streams.all,
        steps,
        DeviceWaits.seconds - waited,
        host_ms(before, after, steps),
    )


def host_ms(
    before: Mapping[str, float], after: Mapping[str, float], steps: int
) -> dict[str, float]:
    """Every time that the engine counts, in milliseconds per step."""
    names = [name for name in after if name.endswith("_s") and not name.startswith("moe_")]
    spent = {name[:-2]: after[name] - before.get(name, 0.0) for name in names}
    return {name: 1e3 * seconds / max(steps, 1) for name, seconds in spent.items() if seconds > 0}


def kernel_times(
    step: Callable[[], object], device: str, steps: int = 10, most: int = 16
) -> dict[str, list[float]]:
    """Kernel -> launches and microseconds in a step, the longest first, and what all take together.
    Without CUDA the operators of torch."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
        synchronize(device)
    kind = "self_device_time_total" if cuda else "self_cpu_time_total"
    found = {row.key[:70]: [row.count / steps, getattr(row, kind) / steps]
             for row in seen.key_averages()}  # fmt: skip
    longest = sorted(found, key=lambda name: -found[name][1])[:most]
    total = [sum(values) for values in zip(*found.values(), strict=True)]
    return {name: found[name] for name in longest} | {"all": total}


def profile_decode(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, device: str
) -> dict[str, list[float]]:
    """The kernels of decode steps through the engine."""
    steps, streams = 10, Streams(engine)
    for ids in prompts:
        streams.send(ids, steps + 8, sampling)
    while min(len(stream.tokens) for stream in streams.all) < 4:
        streams.step()
    found = kernel_times(streams.step, device, steps)
    streams.drain()
    return found


def rounds(work: Callable[[int], float], most: int) -> list[float]:
    """Figures of up to `most` rounds after one that does not count; fewer if they take long."""
    work(0)
    begin = time.perf_counter()
    found: list[float] = []
    while not found or (len(found) < most and time.perf_counter() - begin < ROUNDS_S):
        found.append(work(len(found) + 1))
    return found


def percentiles(seconds: Sequence[float], name: str) -> dict[str, float]:
    """p50, p99 and the longest, in milliseconds."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        f"{name}_{key}_ms": 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]
        for key, share in at.items()
    }


# -- cases of models ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of one run: the real ones, or those of a smoke test."""

    device: str
    prompt: int = 384
    output: int = 256
    rounds: int = 3
    # of the latency cases
    requests_per_stream: int = 3
    long_prompt: int = 8192
    # also the time of each kernel
    profile: bool = False

    @staticmethod
    def of(options: argparse.Namespace) -> Sizes:
        small = Sizes("cpu", 16, 8, 1, 1, 64)
        return replace(small if options.smoke else Sizes("cuda"), profile=options.profile)


def decode_case(
    model: CausalLM,
    tokenizer: Tokenizer,
    sizes: Sizes,
    streams: int,
    sampling: Sampling,
    before_round: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """tok/s of decoding through the engine, and where the time of a step goes. The context grows
    from `prompt` to `prompt + output`; bytes and limit are those of its middle."""
    engine = make_engine(model, tokenizer, streams, sizes.prompt + sizes.output)
    runs: list[Drive] = []

    def once(number: int) -> float:
        before_round()
        lengths = [sizes.prompt] * streams
        prompts = make_prompts(model.spec.vocab, lengths, seed=1000 * streams + number)
        runs.append(drive(engine, prompts, sizes.output, sampling))
        return runs[-1].decode_tok_s

    rates = rounds(once, sizes.rounds)
    chosen = min(runs[1:], key=lambda run: abs(run.decode_tok_s - statistics.median(rates)))
    answers = [stream.tokens for stream in chosen.streams]
    step_s = chosen.decode_s / max(chosen.steps, 1)
    found: dict[str, Any] = {
        "decode_tok_s": statistics.median(rates),
        "rounds": rates,
        # with the prompts
        "whole_tok_s": statistics.median(run.tok_s for run in runs[1:]),
        "step_ms": 1e3 * step_s,
        "host_busy_ms": 1e3 * (step_s - chosen.waited_s / max(chosen.steps, 1)),
        "host_ms": chosen.host_ms,
        # a stream that repeats itself would use the same experts again and again
        "repeated_tokens": statistics.mean(
            sum(a == b for a, b in pairwise(one)) / max(len(one) - 1, 1) for one in answers
        ),
    }
    if streams > 1:
        found |= fairness(runs[1:])
    context = sizes.prompt + sizes.output // 2
    if sizes.profile:
        prompts = make_prompts(model.spec.vocab, [sizes.prompt] * streams, seed=3)
        found["kernels"] = profile_decode(engine, prompts, sampling, sizes.device)
    found["model_ms"] = 1e3 * model_seconds(model, [1] * streams, [context] * streams)
    return found


def fairness(runs: Sequence[Drive]) -> dict[str, float]:
    """Whether a stream starves beside the others: the rate of the slowest one by that of the
    fastest, in the worst run; and the longest time that one waited for a token behind its first."""
    shares, gaps = [], [0.0]
    for run in runs:
        times = [stream.times for stream in run.streams]
        rates = [(len(one) - 1) / max(one[-1] - one[0], 1e-9) for one in times if len(one) > 1]
        shares += [min(rates) / max(rates)] if rates else []
        gaps += [later - early for one in times for early, later in pairwise(one)]
    return {"slowest_by_fastest": min(shares, default=1.0), "longest_gap_ms": 1e3 * max(gaps)}


def with_limit(
    found: dict[str, Any], step_bytes: float, streams: int, device: str
) -> dict[str, Any]:
    """Add the limit that the device's bandwidth sets."""
    bandwidth = read_bandwidth(device)
    limit = streams * bandwidth / step_bytes
    rate = found["decode_tok_s"]
    return found | {
        "step_bytes": int(step_bytes),
        "bandwidth": bandwidth,
        "limit": limit,
        "share": rate / limit,
        "TB_s": step_bytes * rate / streams / 1e12,
    }


def prefill_case(
    model: CausalLM, tokenizer: Tokenizer, sizes: Sizes, prompt: int
) -> dict[str, Any]:
    """tok/s from sending one prompt to its first token."""
    engine = make_engine(model, tokenizer, 1, prompt + BLOCK)

    def once(number: int) -> float:
        streams = Streams(engine)
        ids = make_prompts(model.spec.vocab, [prompt], seed=number)[0]
        stream = streams.send(ids, 1)
        streams.drain()
        return prompt / stream.first_s

    before = engine.stats()
    rates = rounds(once, 2 * sizes.rounds)
    after = engine.stats()
    seconds = model_seconds(model, [prompt], [prompt], 5)
    kernels = kernel_times(partial(once, 99), sizes.device, 2) if sizes.profile else {}
    return {
        "kernels": kernels,
        "tok_s": statistics.median(rates),
        "rounds": rates,
        "step_ms": 1e3 * prompt / statistics.median(rates),
        "host_ms": host_ms(before, after, int(after["steps"] - before["steps"])),
        "model_ms": 1e3 * seconds,
    }


# what a line of latencies says
WARM = "after a round like this one"


def latency_case(
    model: CausalLM, tokenizer: Tokenizer, sizes: Sizes, streams: int
) -> dict[str, Any]:
    """First-token and inter-token times of `streams` clients, each of which sends its next request
    when the last one is answered: prompts are computed beside running streams. A round of the same
    kind comes first, in which sizes of steps are captured and cuDNN plans their lengths."""
    engine = make_engine(model, tokenizer, streams, sizes.prompt + sizes.output)
    engine.capture(lambda done, total: None)
    _closed_loop(engine, model.spec.vocab, sizes, streams, seed=3)
    clients, seconds = _closed_loop(engine, model.spec.vocab, sizes, streams, seed=7)
    first = [stream.first_s for stream in clients.all]
    gaps = [gap for stream in clients.all for gap in stream.gaps]
    tokens = sum(len(stream.tokens) for stream in clients.all)
    return {
        "tok_s": tokens / seconds,
        "requests": len(clients.all),
        **percentiles(first, "first"),
        **percentiles(gaps, "between"),
        "note": WARM,
    }


def _closed_loop(
    engine: Engine, vocab: int, sizes: Sizes, streams: int, seed: int
) -> tuple[Streams, float]:
    """All requests of `streams` clients, and the seconds that they took."""
    total = max(streams * sizes.requests_per_stream, 8)
    prompts = make_prompts(vocab, [sizes.prompt] * total, seed=seed)
    # answers of different lengths, so that clients do not send at the same time
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randint(sizes.output // 2, sizes.output + 1, (total,), generator=draw).tolist()
    left = list(zip(prompts, outputs, strict=True))
    clients = Streams(engine)
    begin = time.perf_counter()
    for _ in range(streams):
        clients.send(*left.pop(), SAMPLED)
    while engine.has_work():
        for _ in range(min(clients.step(), len(left))):
            clients.send(*left.pop(), SAMPLED)
    return clients, time.perf_counter() - begin


def prefix_case(model: CausalLM, tokenizer: Tokenizer, sizes: Sizes, prompt: int) -> dict[str, Any]:
    """tok/s of the second half of a prompt, computed in a step of its own over the first half."""
    half = prompt // 2
    engine = make_engine(model, tokenizer, 1, prompt + BLOCK, half)

    def once(number: int) -> float:
        streams = Streams(engine)
        stream = streams.send(make_prompts(model.spec.vocab, [prompt], seed=number)[0], 1)
        while engine.stats()["prefill_tokens"] % prompt < half:
            streams.step()
        synchronize(sizes.device)
        begin = time.perf_counter()
        streams.drain()
        return half / (stream.times[0] - begin)

    rates = rounds(once, 2 * sizes.rounds)
    kernels = kernel_times(partial(once, 99), sizes.device, 1) if sizes.profile else {}
    return {"kernels": kernels, "tok_s": statistics.median(rates), "rounds": rates}


def gap_case(
    model: CausalLM, tokenizer: Tokenizer, sizes: Sizes, streams: int, mixed_tokens: int
) -> dict[str, Any]:
    """The longest gap of running streams while long prompts are computed beside them, of which a
    step takes `mixed_tokens` at most."""
    long, arrivals = sizes.long_prompt, 2
    # the streams must outlast the prompts, even if these run in many steps
    output = sizes.output + arrivals * long // min(mixed_tokens, 64)
    context = max(long + BLOCK, sizes.prompt + output)
    engine = make_engine(model, tokenizer, streams + arrivals, context, STEP_TOKENS, mixed_tokens)
    found: dict[str, float] = {}
    for number in range(2):  # the first round compiles and captures
        clients = Streams(engine)
        prompts = make_prompts(model.spec.vocab, [sizes.prompt] * streams, seed=number)
        for ids in prompts:
            clients.send(ids, output)
        while min(len(stream.tokens) for stream in clients.all) < sizes.output // 4:
            clients.step()
        usual = [gap for stream in clients.all for gap in stream.gaps[-8:]]
        at = [len(stream.times) - 1 for stream in clients.all]
        drawn = make_prompts(model.spec.vocab, [long] * arrivals, seed=100 + number)
        late = [clients.send(ids, 1) for ids in drawn]
        while not all(stream.tokens for stream in late):
            clients.step()
        # the gap in which the last part of a prompt ran ends with the next token
        for _ in range(2):
            clients.step()
        running = zip(clients.all, at, strict=False)
        gaps = [gap for stream, start in running for gap in stream.gaps[start:]]
        found = {
            **percentiles(gaps, "gap"),
            "usual_gap_ms": 1e3 * statistics.median(usual),
            "first_token_ms": 1e3 * late[0].first_s,
            "tok_s": arrivals * long / max(stream.first_s for stream in late),
        }
        clients.drain()
    return found


# -- transformers ---------------------------------------------------------------------------------


def generate(peer: Any, prompts: Sequence[Sequence[int]], output: int) -> tuple[list[Any], float]:
    """A static batch of transformers (prompts of one length): the answers, and seconds."""
    device = str(peer.device)
    given = torch.tensor(prompts, device=device)
    synchronize(device)
    begin = time.perf_counter()
    with torch.inference_mode():
        out = peer.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
    return out[:, given.shape[1] :].tolist(), time.perf_counter() - begin


# forms of experts that transformers has; and the seconds of the longest run of a case, which has
# three minutes with the model's start
PEER_EXPERTS = ("grouped_mm", "batched_mm", "eager")
PEER_S = 40.0


def use_fastest_experts(peer: Any, work: Callable[[], float]) -> dict[str, Any]:
    """Let transformers run experts in its fastest form for this work, which returns seconds. Empty
    for a dense model or a version with one form only."""
    if not getattr(peer.config, "num_experts", 0) or not hasattr(
        peer, "set_experts_implementation"
    ):
        return {}
    begin = time.perf_counter()
    seconds: dict[str, float] = {}
    for name in PEER_EXPERTS:
        if seconds and time.perf_counter() - begin > PEER_S:
            break
        try:
            peer.set_experts_implementation(name)
            work()
            seconds[name] = work()
        except (RuntimeError, ValueError, NotImplementedError, ImportError) as problem:
            # a form that this version lacks, or that takes too much memory
            print(f"# experts as {name}: {str(problem)[:200]}", file=sys.stderr)
        free_memory()
    best = min(seconds, key=lambda name: seconds[name])
    peer.set_experts_implementation(best)
    return {"note": f"experts as {best}"}


def peer_decode(peer: Any, sizes: Sizes, streams: int, output: int) -> dict[str, Any]:
    """tok/s of `generate` without its prefill, and with it; fewer tokens where they take long."""
    prompts = make_prompts(peer.config.vocab_size, [sizes.prompt] * streams)
    note = use_fastest_experts(peer, lambda: generate(peer, prompts, 3)[1])
    # the first of all takes longer: its prefill would be subtracted from a warm one
    generate(peer, prompts, 3)
    short = min(generate(peer, prompts, 1)[1] for _ in range(2))
    _, few = generate(peer, prompts, 3)
    output = min(output, max(4, int(PEER_S / max((few - short) / 2, 1e-3))))
    _, long = generate(peer, prompts, output)
    rate = streams * (output - 1) / (long - short)
    return {"decode_tok_s": rate, "whole_tok_s": streams * output / long, "tokens": output, **note}


def peer_prefill(peer: Any, sizes: Sizes, prompt: int) -> dict[str, Any]:
    device = str(peer.device)

    def seconds(number: int) -> float:
        ids = torch.tensor(make_prompts(peer.config.vocab_size, [prompt], seed=number))
        ids = ids.to(device)
        synchronize(device)
        begin = time.perf_counter()
        with torch.inference_mode():
            peer(ids, logits_to_keep=1, use_cache=True)
        synchronize(device)
        return time.perf_counter() - begin

    note = use_fastest_experts(peer, lambda: seconds(0))
    rates = rounds(lambda number: prompt / seconds(number), sizes.rounds)
    return {"tok_s": statistics.median(rates), "rounds": rates, **note}


# -- command --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    # cases with the same model run one after the other, and only one model is in memory
    model: str
    run: Callable[[Any], dict[str, Any]]
    # tok/s that others reach, and what is wanted here
    rivals: Mapping[str, float] = field(default_factory=dict)
    goal: float | None = None
    # another case whose figure this one is compared with, if both run
    beside: str = ""
    # the figure that counts
    figure: str = "tok_s"
    # of the limit, wanted: by round where the limit is tried before each
    share_goal: float | None = None


class Models:
    """Makes the model that a case needs, and frees the one before."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make
        self._name, self._model = "", None

    def get(self, name: str) -> Any:
        if name != self._name:
            self.free()
            begin = time.perf_counter()
            self._model, self._name = self._make(name), name
            # as a worker does: a collection of all that was loaded takes as long as a step
            gc.collect()
            gc.freeze()
            print(f"# {name}: ready in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        return self._model

    def free(self) -> None:
        if self._model is not None and hasattr(self._model, "close"):
            self._model.close()
        self._model, self._name = None, ""
        gc.unfreeze()
        free_memory()


@cache
def tokenizer_of(vocab: int) -> Tokenizer:
    return make_tokenizer(vocab)


def run_cases(cases: Sequence[Case], wanted: Sequence[str], models: Models) -> dict[str, Any]:
    """name -> figures, or {"error": ...}. Every case runs, whatever happens to the others."""
    results: dict[str, Any] = {}
    for case in cases:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for pattern in wanted):
            continue
        begin = time.perf_counter()
        try:
            results[case.name] = case.run(models.get(case.model))
        except Exception as problem:
            results[case.name] = {"error": f"{type(problem).__name__}: {problem}"[:500]}
            print(f"{case.name} FAILED\n{traceback.format_exc()}", file=sys.stderr)
        results[case.name]["case_s"] = round(time.perf_counter() - begin, 1)
        print(line(case, results[case.name]), flush=True)
        for name, (count, us) in results[case.name].get("kernels", {}).items():
            print(f"    {us:9.1f} us {count:7.1f}x  {name}", flush=True)
        free_memory()
    models.free()
    return results


def line(case: Case, found: Mapping[str, Any]) -> str:
    """A case's figures in one line."""
    if not found:
        return f"{case.name} | not run"
    if "error" in found:
        return f"{case.name} | FAILED: {found['error']}"
    cells = [case.name]
    rate = found[case.figure]
    cells.append(f"{rate:,.1f} tok/s")
    if case.goal is not None:
        cells.append(f"goal {case.goal:,.0f}: {'met' if rate >= case.goal else 'missed'}")
    if case.share_goal is not None:
        share = found.get("share_by_round", found["share"])
        met = "met" if share >= case.share_goal else "missed"
        cells.append(f"goal {case.share_goal:.0%} of the limit: {met}")
    for name, theirs in case.rivals.items():
        cells.append(f"{rate / theirs:.2f}x {name} ({theirs:,.0f})")
    if "share" in found:
        cells.append(f"{found['share']:.1%} of the limit {found['limit']:,.0f}")
    if "TB_s" in found:
        reads = f"{found['step_bytes'] / 1e9:.2f} GB a step"
        cells.append(f"{reads}, {found['TB_s']:.2f} TB/s of {found['bandwidth'] / 1e12:.2f}")
    if "step_ms" in found:
        host = ", ".join(f"{name} {ms:.3f}" for name, ms in found["host_ms"].items())
        alone = found["model_ms"]
        cells.append(f"step {found['step_ms']:.3f} ms (model alone {alone:.3f}; host: {host})")
    cells += [
        f"{name} {found[name]:,.2f}"
        for name in found
        if name.endswith("_ms") and name not in ("step_ms", "host_ms", "model_ms")
    ]
    cells += [
        f"{name} {found[name]:,.4g}" for name in REPORTED if name in found and name != case.figure
    ]
    cells += [str(found[name]) for name in ("note",) if name in found]
    cells.append(f"{found['case_s']} s")
    return " | ".join(cells)


ROUTING = ("experts_shared", "experts_distinct")
# of experts beyond the device
LINK = ("share_by_round", "hit_rate", "link_GB_s", "crossing_GB", "moved_GB", "swaps", "peak_GB")
RATES = ("decode_tok_s", "whole_tok_s", "TFLOP_s", "slowest_by_fastest", "repeated_tokens")
# figures that are printed by their names
REPORTED = (*RATES, *ROUTING, *LINK)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME",
        help="run this case; may be a pattern (bf16-*) and be given again; without: list them",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    return parser


def report(cases: Sequence[Case], results: dict[str, Any], device: str, file: Path | None) -> int:
    """Print ratios and what was not run, write the file; the exit status."""
    for case in cases:
        mine, other = (results.get(n, {}).get(case.figure) for n in (case.name, case.beside))
        if mine and other:
            print(f"{case.name}: {mine / other:.3f} of {case.beside}")
    missing = [case.name for case in cases if case.name not in results]
    if missing:
        print("not run:", ", ".join(missing))
    if file is not None:
        known = json.loads(file.read_text()) if file.exists() else {}
        listed = known.get("cases", {}) | {
            name: {"not run": True} for name in missing if name not in known.get("cases", {})
        }
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        found = {"device": name, "cases": listed | results}
        file.write_text(json.dumps(found, indent=1, default=str))
    return int(any("error" in found for found in results.values()))


def _selected(cases: Sequence[Case], patterns: Sequence[str]) -> list[str]:
    names = [case.name for case in cases]
    return [name for pattern in patterns for name in fnmatch.filter(names, pattern)]


def run_benchmark(
    cases: Sequence[Case], make: Callable[[str], Any], options: argparse.Namespace
) -> int:
    device = "cpu" if options.smoke else "cuda"
    if not options.case:
        for case in cases:
            print(line(case, {}))
        return 0
    unknown = [name for name in options.case if not _selected(cases, [name])]
    if unknown:
        print(f"no such case: {', '.join(unknown)}", file=sys.stderr)
        return 2
    if device == "cuda":
        if not any("-resident-" in name for name in _selected(cases, options.case)):
            # the kernels of the CPU are not used, and their compilation takes time
            os.environ.setdefault("COTERIE_NATIVE", "0")
        DeviceWaits.count()
        print(
            f"{torch.cuda.get_device_name()}; reads {read_bandwidth(device) / 1e12:.2f} TB/s, "
            f"bf16 product {matmul_rate(device) / 1e12:.0f} TFLOP/s; torch {torch.__version__}"
        )
        free_memory()
    results = run_cases(cases, options.case, Models(make))
    return report(cases, results, device, options.json)
