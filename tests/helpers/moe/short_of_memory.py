"""Loads experts where the system gives less memory than was asked for, in a process of its own.

    python -m tests.helpers.moe.short_of_memory SHARE STRATEGY

From when experts are opened, the address space may grow by that share of all of them. Prints what
runs then, and whether the tokens are those of a machine with room.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path

import torch

from coterie.models.build.moe import MoeRequirements
from coterie.moe.runtime.runtime import ExpertRuntime
from tests.helpers.moe.dispatched_model import PROMPTS, DispatchedModel, Setting
from tests.helpers.moe.tiny_moe import checkpoint_of

# 24 experts of 2.7 MB: far more than threads and torch take beside them
INNER = 3584


class Cramped(DispatchedModel):
    """From the moment its experts are opened."""

    growth: int

    def _open(self, wanted: MoeRequirements) -> ExpertRuntime:
        status = Path("/proc/self/status").read_text()
        limit = (int(status.split("VmSize:")[1].split()[0]) << 10) + self.growth
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return super()._open(wanted)


def main(share: float, strategy: str) -> None:
    threading.stack_size(256 << 10)
    torch.set_num_threads(1)
    path = checkpoint_of("qwen3_moe", moe_intermediate_size=INNER)
    setting = Setting(path, strategy, 0 if strategy == "cpu_only" else 24, "100%", "fp32")
    with DispatchedModel(setting) as dispatched:
        expected = dispatched.generate(PROMPTS, 8)[1].tolist()
        nbytes = dispatched.runtime.parts.store.expert_bytes
    Cramped.growth = int(nbytes * share)
    with Cramped(setting) as dispatched:
        tokens = dispatched.generate(PROMPTS, 8)[1].tolist()
        report = dispatched.runtime.report()
    told = {name: report[name] for name in ("strategy", "asked", "fallback", "shortages")}
    held = sum(tier["budget_bytes"] for tier in report["tiers"].values())
    print(json.dumps(told | {"same": tokens == expected, "held": held / nbytes}))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
