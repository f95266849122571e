"""Whether answers are right on a CUDA device: from a bare checkout, without pytest.

    python3 -m tests.cuda [--only NAME]... [--list] [--prompts 20] [--jobs 6]

Needs torch, triton, transformers, safetensors and tokenizers. One line per check, then a summary;
the exit status is 1 if one failed. Without CUDA the checks that need it are skipped and the others
run on the CPU, so that this program itself is tested where there is no device.

greedy: tokens equal to transformers in fp32, for every architecture, with steps captured, captured
without kernels that start early ("in order"), and eager; alone, in batches, in odd chunks, under
pressure. capture, pieces: the same answers whatever is captured. launch: the same bits with and
without early starts. batch: how many answers change in a batch, by precision. sampled: the same for
seeded draws. kernels: against their twins. blocks: models of GGUF's types, whose bits are kept.
adapters: logits against torch, and greedy answers against transformers with merged weights. bank:
the answers again with a quarter of the experts on the device, for every strategy. share: with a
part of them computed by the CPU. prefetch: with some read ahead. prompts: the bits of prompts
there. crash: the worker is killed in the middle of 8 streams. slow: at least 95% of a slow
request's time is explained. shortage: CUDA refuses memory, on load and to a step. elastic: the
answers while KV and experts trade memory, `--seconds` of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

# before anything reads them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from tests.cuda import (
    adapters,
    answers,
    bank,
    blocks,
    crash,
    elastic,
    kernels,
    prefetch,
    prompts,
    share,
    shortage,
    slow,
)
from tests.cuda.suite import run_here, run_in_processes, summary, wanted


def main() -> int:
    options = _arguments()
    begin = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        # the kernels of the CPU are not used, and their compilation takes time
        os.environ.setdefault("COTERIE_NATIVE", "0")
    checks = [*kernels.checks(device), *answers.checks(device, options.prompts)]
    checks += [*blocks.checks(device), *adapters.checks(device)]
    checks += [*bank.checks(device, options.prompts)]
    checks += [
        *share.checks(device),
        *prefetch.checks(device),
        *prompts.checks(device),
        *crash.checks(device),
    ]
    checks += [*slow.checks(device), *shortage.checks(device)]
    checks += [*elastic.checks(device, options.prompts, options.seconds)]
    checks = wanted(checks, options.only)
    if options.list:
        print("\n".join(check.name for check in checks))
        return 0
    if options.group is not None:
        checks = [check for check in checks if check.group == options.group]
    elif device == "cuda":
        print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}", flush=True)
        again = [word for name in options.only for word in ("--only", name)]
        again += ["--prompts", str(options.prompts), "--seconds", str(options.seconds)]
        counts = run_in_processes(checks, options.jobs, again)
        return summary(counts, time.perf_counter() - begin)
    return summary(run_here(checks), time.perf_counter() - begin)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a part of a check's name"
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--prompts", type=int, default=20, help="of each model")
    parser.add_argument("--seconds", type=float, default=20.0, help="of growing contexts")
    parser.add_argument("--jobs", type=int, default=6, help="groups of checks at one time, on CUDA")
    parser.add_argument("--group", help="run this group in this process")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
