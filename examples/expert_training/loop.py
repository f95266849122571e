"""Trains one adapter, and generates greedy answers with it. Knows no task."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from examples.expert_training.batches import Batch, Encoded, batches, make_batch, padded
from examples.expert_training.modules import Adapted

WARM_SHARE, CLIP = 0.05, 1.0
_VALIDATION_ROWS = 64
_NOTE_EVERY = 100


@dataclass(frozen=True, slots=True)
class Plan:
    steps: int
    rows: int
    rate: float
    seed: int = 0


def loss_of(adapted: Adapted, batch: Batch) -> Tensor:
    """Mean cross entropy of the answers' tokens."""
    hidden = adapted.hidden(batch.ids).flatten(0, 1)[batch.at]
    return functional.cross_entropy(adapted.model.lm_head(hidden).float(), batch.target)


def rate_at(done: float) -> float:
    """Share of the highest rate: linear warm-up, then a cosine down to a tenth."""
    return min(1.0, (0.01 + done) / WARM_SHARE) * (0.55 + 0.45 * math.cos(math.pi * done))


def train(
    adapted: Adapted, rows: Sequence[Encoded], plan: Plan, note: Callable[[str], None]
) -> float:
    """The mean loss of the last tenth of the steps."""
    device = adapted.model.device
    optimizer = torch.optim.AdamW(
        adapted.parameters(), lr=plan.rate, weight_decay=0.0, fused=device.type == "cuda"
    )
    source = batches(rows, plan.rows, str(device), plan.seed)
    losses: list[Tensor] = []
    began = time.perf_counter()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * rate_at(step / plan.steps)
        loss = loss_of(adapted, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapted.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % _NOTE_EVERY == 0 or step + 1 == plan.steps:
            spent = time.perf_counter() - began
            note(f"step {step + 1}/{plan.steps}: loss {loss.item():.4f}, {spent:.0f} s")
    return float(torch.stack(losses[-max(1, plan.steps // 10) :]).mean())


@torch.no_grad()
def validate(adapted: Adapted, rows: Sequence[Encoded]) -> float:
    device = str(adapted.model.device)
    ordered = sorted(rows, key=len)
    groups = [
        ordered[at : at + _VALIDATION_ROWS] for at in range(0, len(ordered), _VALIDATION_ROWS)
    ]
    losses = [loss_of(adapted, make_batch(group, device)) for group in groups]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def answer(
    adapted: Adapted, prompts: Sequence[tuple[int, ...]], end: int, max_tokens: int
) -> list[list[int]]:
    """Greedy continuations, all prompts in one batch; the whole text is computed again at each
    step."""
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = list(range(len(prompts)))
    for _ in range(max_tokens):
        ids = padded(
            [(*prompts[row], *answers[row]) for row in open_rows], str(adapted.model.device)
        )
        last = torch.tensor(
            [len(prompts[row]) + len(answers[row]) - 1 for row in open_rows], device=ids.device
        )
        hidden = adapted.hidden(ids)[torch.arange(len(ids), device=ids.device), last]
        picked = adapted.model.lm_head(hidden).argmax(-1).tolist()
        for row, token in zip(open_rows, picked, strict=True):
            answers[row].append(token)
        open_rows = [row for row in open_rows if answers[row][-1] != end]
        if not open_rows:
            break
    return [[token for token in row if token != end] for row in answers]
