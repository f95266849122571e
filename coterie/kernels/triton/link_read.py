"""How fast the kernels of few rows read experts that are not in the device's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coterie.kernels.triton.expert_gemv import ExpertPool, RoutedRows
from coterie.kernels.triton.expert_groups import ExpertScratch, run_experts_many
from coterie.kernels.triton.sizes import launches_early

# the first run compiles kernels
_RUNS = 3


@torch.inference_mode()
def measure_reads(pool: ExpertPool, experts: Sequence[int], top_k: int) -> float:
    """Bytes per second. `experts`: some of a layer, as many as its gate chooses for a row or
    more."""
    record, device = pool.record, pool.places.device
    rows = len(experts) // top_k
    dtype = torch.float32 if record.kind == "fp32" else torch.bfloat16
    routed = RoutedRows.empty(rows, top_k, device)
    chosen = torch.tensor(list(experts)[: rows * top_k], dtype=torch.int32)
    routed.ids.copy_(chosen.view(rows, top_k))
    x = torch.zeros((rows, record.hidden), dtype=dtype, device=device)
    out = torch.zeros_like(x)
    scratch = ExpertScratch.empty(rows, top_k, len(pool.places), record, dtype, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = 0.0
    for _ in range(_RUNS):
        begin.record()
        run_experts_many(x, routed, pool, out, scratch, dependent=launches_early(device))
        end.record()
        end.synchronize()
        best = max(best, rows * top_k * record.nbytes / max(1e-9, begin.elapsed_time(end) / 1e3))
    return best
