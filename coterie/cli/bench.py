"""`coterie bench`: how fast a model runs on this machine, compared with its memory bandwidth."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from coterie.cli.options import add_experts, add_model, add_moe, count
from coterie.cli.run import open_llm
from coterie.cli.specialist import add_specialist, specialists, use_specialist
from coterie.cli.terminal import facts, nbytes, note, table

if TYPE_CHECKING:
    from coterie.workers.embedded import LLM

HELP = "measure decode, prefill and concurrent speed on this machine"
EPILOG = """\
examples:
  coterie bench
  coterie bench --dtype int8 --concurrency 1,8,32
  coterie bench --json > result.json
  coterie bench --config coterie.toml --specialist sql      with its experts

with prompts: tokens answered a second; the time of the prompts counts too.
limit: what reading every weight once per token allows at the measured memory
bandwidth (of experts: those that one token passes).
"""

BANDWIDTH_BYTES = 512 * 1024 * 1024
WARM_TOKENS = 8
TOGETHER_PROMPT = 128


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_specialist(parser, "every one, each by itself")
    parser.add_argument("--decode", type=count, default=64, metavar="N", help="tokens decoded")
    parser.add_argument("--prefill", type=count, default=512, metavar="N", help="prompt tokens")
    parser.add_argument("--concurrency", type=counts, default=[8], metavar="A,B")
    parser.add_argument("--repeat", type=count, default=3, metavar="N", help="takes the median")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_experts(parser)
    add_moe(parser)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def execute(args: argparse.Namespace) -> int:
    names = specialists(args)
    reports = {name: _measured(use_specialist(args, name)) for name in names or [""]}
    if args.json:
        shown = reports if names else reports[""]
        print(json.dumps(shown, indent=1))
        return 0
    for name, report in reports.items():
        print(f"{name}\n{render(report)}\n" if name else render(report))
    return 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    note("loading")
    with open_llm(args) as llm:
        note("measuring")
        return measure(llm, args)


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    bench = BenchRunner(llm, args.repeat, args.expert or ())
    bench.decode(WARM_TOKENS)
    info = llm.info
    bandwidth = bandwidth_bytes_s(info.threads) if info.device == "cpu" else None
    token_bytes = info.weight_bytes + (info.experts.token_bytes if info.experts else 0)
    limit = bandwidth / token_bytes if bandwidth else None
    decode = bench.median(lambda: bench.decode(args.decode))
    rows = [{"what": "decode, 1 stream", "tokens_s": decode, "limit_tokens_s": limit}]
    prefill = bench.median(lambda: bench.prefill(args.prefill))
    rows.append({"what": f"prefill of {args.prefill}", "tokens_s": prefill, "limit_tokens_s": None})
    for streams in args.concurrency:
        rate = bench.median(partial(bench.together, streams, args.decode))
        what = f"{streams} streams, with prompts of {TOGETHER_PROMPT}"
        rows.append({"what": what, "tokens_s": rate, "limit_tokens_s": None})
    return {
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "threads": info.threads,
        "weight_bytes": info.weight_bytes,
        "bandwidth_bytes_s": bandwidth,
        "results": rows,
    }


class BenchRunner:
    """Uses random prompts, so that the prefix cache never has a hit."""

    def __init__(self, llm: LLM, repeat: int, experts: Sequence[str] = ()) -> None:
        self.llm = llm
        self.repeat = repeat
        self.random = random.Random(0)
        self.experts = list(experts)

    def median(self, take: Callable[[], float]) -> float:
        return sorted(take() for _ in range(self.repeat))[self.repeat // 2]

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(self.llm.tokenizer.vocab_size) for _ in range(tokens)]

    def decode(self, tokens: int) -> float:
        done = self.llm.generate(self.prompt(16), **self._greedy(tokens + 1))[0]
        return tokens / max(done.timings.decode_s, 1e-9)

    def prefill(self, tokens: int) -> float:
        prompt = self.prompt(tokens)
        started = time.perf_counter()
        self.llm.generate(prompt, **self._greedy(1))
        return tokens / (time.perf_counter() - started)

    def together(self, streams: int, tokens: int) -> float:
        """Tokens answered a second, the time of reading the prompts counted in."""
        prompts = [self.prompt(TOGETHER_PROMPT) for _ in range(streams)]
        started = time.perf_counter()
        self.llm.generate(prompts, **self._greedy(tokens))
        return streams * tokens / (time.perf_counter() - started)

    def _greedy(self, tokens: int) -> dict[str, Any]:
        fixed = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return fixed | {"experts": self.experts}


def bandwidth_bytes_s(threads: int) -> float:
    """Reads an array much larger than any cache; best of seven."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(BANDWIDTH_BYTES // 4, dtype=torch.float32)
        best = 0.0
        for _ in range(7):
            started = time.perf_counter()
            data.sum()
            best = max(best, BANDWIDTH_BYTES / (time.perf_counter() - started))
        return best
    finally:
        torch.set_num_threads(before)


def render(report: dict[str, Any]) -> str:
    pairs = [
        ("model", f"{report['architecture']}, {report['dtype']}"),
        ("weights", nbytes(report["weight_bytes"])),
        ("device", f"{report['device']}, {report['threads']} threads"),
    ]
    if report["bandwidth_bytes_s"]:
        pairs.append(("bandwidth", f"{report['bandwidth_bytes_s'] / 1e9:.1f} GB/s (reading)"))
    rows = []
    for row in report["results"]:
        limit = row["limit_tokens_s"]
        share = f"{100 * row['tokens_s'] / limit:.0f}%" if limit else "-"
        rows.append(
            (row["what"], f"{row['tokens_s']:.1f}", f"{limit:.0f}" if limit else "-", share)
        )
    return f"{facts(pairs)}\n\n{table(('', 'tok/s', 'limit', 'share'), rows)}"
