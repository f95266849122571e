"""Rows with adapters on the device: greedy answers equal to those of transformers with the adapters
merged into its weights, in fp32. Each kind alone, and all in one batch; steps captured, captured
without early starts, and eager; rows alone (kernels of one row) and together; and through an engine
that runs ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Failed
from coterie.core.lane import LaneConfig
from coterie.core.plan import AdapterChoice, Admitted, Assignment, stack_key
from coterie.core.request import Limits
from coterie.engine.engine import Engine
from coterie.kernels.patch import PARTS, Patch, PatchStack, Segment
from coterie.models.base import CausalLM
from coterie.models.build.assemble import decoder_shape
from coterie.models.text.tokenizer import load_tokenizer
from tests.cuda import answers
from tests.cuda.suite import Check, NotHere
from tests.helpers.kernels.patch_inputs import random_stack
from tests.helpers.models.paged_model import Paged
from tests.helpers.serving.greedy_engine import CLEAR, GREEDY, oracle_for

NEW_TOKENS = 24
MODELS = ("llama", "llama odd", "qwen3", "qwen3_moe")
MODES = ("captured", "in order", "eager")
HALF, FULL = torch.bfloat16, torch.float32
# the adapters of the rows; "" has none
ROWS = {
    "lora": ("lora", "", "lora"),
    "dora": ("dora", "", "dora"),
    "ia3": ("ia3", "", "ia3"),
    "mixed": ("lora", "", "dora", "ia3", "deep", "few", "lora"),
}
MODULES = {
    **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def checks(device: str) -> Iterator[Check]:
    for name in MODELS:
        for kind in ROWS:
            for mode in MODES:
                call = partial(_equals_merged, device, name, kind, mode)
                yield Check(f"adapters {name}", f"adapters/{kind}/{mode}/{name}", call)
        call = partial(_engine_equals_merged, device, name)
        yield Check(f"adapters {name}", f"adapters/mixed/engine/{name}", call)


@cache
def _stack(name: str, device: str, kind: str, seed: int) -> PatchStack:
    """Experts have no adapters: of a model with experts, attention alone."""
    spec = answers._model(device, name).spec
    shape, layers = decoder_shape(spec), range(spec.num_layers)
    parts = PARTS if spec.moe is None else PARTS[:4]
    torch.manual_seed(seed)

    def drawn(rank: int, kept: torch.dtype, *fields: str, only: tuple[str, ...] = PARTS) -> Any:
        chosen = tuple(part for part in only if part in parts)
        return random_stack(shape, layers, rank, kept, fields, chosen).patches

    patches = {
        "lora": lambda: drawn(16, HALF, "low_rank"),
        "few": lambda: drawn(3, HALF, "low_rank", only=("q", "v", "down")),
        "deep": lambda: drawn(40, HALF, "low_rank"),
        "dora": lambda: drawn(5, FULL, "low_rank", "out_scale"),
        "ia3": lambda: {
            **drawn(1, FULL, "out_scale", only=("k", "v")),
            **drawn(1, FULL, "in_scale", only=("down",)),
        },
    }[kind]()
    moved = {site: _moved(patch, device) for site, patch in patches.items()}
    return PatchStack(f"{kind}-{seed}", seed, moved)


def _moved(patch: Patch, device: str) -> Patch:
    fields = ("a", "b", "in_scale", "out_scale", "shift")
    given = {field: getattr(patch, field) for field in fields}
    return replace(patch, **{k: None if v is None else v.to(device) for k, v in given.items()})


@cache
def _merged(name: str, device: str, kind: str, seed: int) -> Any:
    model = deepcopy(oracle_for(answers._checkpoint(name)).model)
    if not kind:
        return model
    with torch.no_grad():
        for (layer, part), patch in _stack(name, device, kind, seed).patches.items():
            module = model.get_submodule(f"model.layers.{layer}.{MODULES[part]}")
            module.weight.copy_(_changed(module.weight, patch))
    return model


def _changed(weight: Tensor, patch: Patch) -> Tensor:
    """out_scale * W * in_scale + b^T a."""
    if patch.in_scale is not None:
        weight = weight * patch.in_scale.cpu()
    if patch.out_scale is not None:
        weight = weight * patch.out_scale.cpu()[:, None]
    if patch.a is not None and patch.b is not None:
        weight = weight + patch.b.cpu().float().T @ patch.a.cpu().float()
    return weight


def _equals_merged(device: str, name: str, kind: str, mode: str) -> str:
    if device == "cpu" and mode != "eager":
        raise NotHere("nothing is captured without CUDA")
    model = answers._model(device, name, mode=mode)
    kinds = ROWS[kind]
    stacks = [_stack(name, device, each, seed) if each else None for seed, each in enumerate(kinds)]
    draw = torch.Generator().manual_seed(len(kinds))
    prompts = [
        torch.randint(4, 384, (5 + 7 * at,), generator=draw).tolist() for at in range(len(kinds))
    ]
    together = _decoded(model, prompts, stacks)
    alone = [_decoded(model, [ids], [stack])[0] for ids, stack in zip(prompts, stacks, strict=True)]
    if device == "cuda" and mode != "eager":
        assert model.graphs is not None and model.graphs.adapts, "rows with adapters ran eagerly"
    for seed, each in enumerate(kinds):
        oracle = _merged(name, device, each, seed)
        for how, tokens in (("together", together[seed]), ("alone", alone[seed])):
            _check_greedy(oracle, prompts[seed], tokens, f"row {seed} ({each or 'none'}) {how}")
    return f"{2 * len(kinds)} answers"


def _decoded(
    model: CausalLM, prompts: list[list[int]], stacks: list[PatchStack | None]
) -> list[list[int]]:
    """Prompts one by one, then all rows in one step, again and again."""
    count = len(prompts)
    paged = Paged(model, count, max(map(len, prompts)) + NEW_TOKENS)
    found: list[list[int]] = []
    for at, (ids, stack) in enumerate(zip(prompts, stacks, strict=True)):
        patches = (Segment(0, len(ids), stack),) if stack is not None else ()
        found.append([int(paged.step([(at, ids)], patches)[0][-1].argmax())])
    cut = tuple(Segment(at, at + 1, stack) for at, stack in enumerate(stacks) if stack is not None)
    for _ in range(NEW_TOKENS - 1):
        logits = paged.step([(at, tokens[-1:]) for at, tokens in enumerate(found)], cut)
        for tokens, row in zip(found, logits, strict=True):
            tokens.append(int(row[0].argmax()))
    (model.launched_usage() or model.take_usage)()
    return found


class FixedStacks:
    """A pool for the engine: stacks that are always ready, by digest."""

    def __init__(self, stacks: dict[str, PatchStack]) -> None:
        self._stacks, self._digests = stacks, dict[str, str]()

    def describe(self, adapters: Sequence[AdapterChoice]) -> Any:
        key = stack_key(adapters)
        self._digests[key] = adapters[0].digest
        return SimpleNamespace(key=key, num_virtual_tokens=0)

    def stack(self, key: str) -> PatchStack:
        return self._stacks[self._digests[key]]

    def take(self, key: str) -> PatchStack:
        return self.stack(key)

    def state(self, key: str) -> str:
        return "ready"

    def stack_bytes(self, key: str) -> int:
        return 0

    def resident(self) -> tuple[str, ...]:
        return tuple(self._digests)

    def stats(self) -> dict[str, float]:
        return {}

    def want(self, adapters: Sequence[AdapterChoice]) -> None:
        """Nothing has to be loaded."""

    def prefer(self, key: str) -> None:
        """All have room."""

    def release(self, key: str) -> None:
        """They stay."""

    def wait(self, timeout_s: float) -> None:
        """Nothing changes."""

    def failure(self, key: str) -> CoterieError:
        raise AssertionError("nothing fails")


def _engine_equals_merged(device: str, name: str) -> str:
    model, kinds = answers._model(device, name), ROWS["mixed"]
    stacks = {
        f"{kind}-{seed}": _stack(name, device, kind, seed)
        for seed, kind in enumerate(kinds)
        if kind
    }
    lane = LaneConfig(name="m", num_blocks=512, max_sequences=8, context=model.spec.max_positions)
    path = answers._checkpoint(name)
    pool = FixedStacks(stacks)
    engine = Engine(model, load_tokenizer(path), [lane], adapters=pool)
    draw = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, 384, (3 + 9 * at,), generator=draw).tolist() for at in range(7)]
    for seed, (kind, ids) in enumerate(zip(kinds, prompts, strict=True)):
        digest = f"{kind}-{seed}"
        chosen = (AdapterChoice(digest, digest),) if kind else ()
        verdict = engine.add(
            Assignment(
                request_id=str(seed), lane="m", prompt_ids=tuple(ids), sampling=GREEDY,
                limits=Limits(max_tokens=NEW_TOKENS, ignore_eos=True), adapters=chosen,
                session="s", tenant="t", deadline=None, arrived_at=time.monotonic(),
            )
        )  # fmt: skip
        assert isinstance(verdict, Admitted), verdict
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                found[int(event.request_id)] += event.token_ids
    for seed, kind in enumerate(kinds):
        assert len(found[seed]) == NEW_TOKENS
        oracle = _merged(name, device, kind, seed)
        _check_greedy(oracle, prompts[seed], found[seed], f"row {seed} ({kind or 'none'})")
    return f"{len(kinds)} answers"


@torch.no_grad()
def _check_greedy(oracle: Any, ids: list[int], tokens: list[int], told: str) -> None:
    logits = oracle(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    for place, (mine, row) in enumerate(zip(tokens, logits, strict=True)):
        behind = float(row.max() - row[mine])
        if behind == 0.0:
            continue
        assert behind < CLEAR, f"{told}: token {place} is behind by {behind:.3g}"
        # a rounding decided between two tokens: what follows is another answer
        return
