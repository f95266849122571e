"""From a `WorkerSpec` to a running engine: weights, tokenizer, threads, KV budget, lanes.

The only place that reads a checkpoint for serving. Knows no transport.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coterie.core.errors import ConfigError
from coterie.engine.engine import Engine, LaneConfig
from coterie.models.base import CausalLM, load_model
from coterie.models.tokenizer import Tokenizer, load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from coterie.workers import memory
from coterie.workers.base import LaneSpec, ReplicaInfo, WorkerSpec

# generation_config keys that mean something to a request; the rest never leaves the worker
GENERATION_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "eos_token_id",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Host:
    engine: Engine
    tokenizer: Tokenizer
    info: ReplicaInfo


def build_engine(spec: WorkerSpec, progress: Progress | None = None) -> Host:
    device = _device(spec.device)
    threads = spec.threads or memory.cores()
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(Path(spec.model))
    asked = [lane.context for lane in spec.lanes]
    model = load_model(
        checkpoint,
        dtype=spec.dtype,
        device=device,
        max_context=max(asked) if all(asked) else None,
        progress=progress,
    )
    kv_bytes = spec.kv_bytes or _auto_kv_bytes(spec, model)
    lanes = plan_lanes(spec.lanes, model, kv_bytes)
    tokenizer = load_tokenizer(Path(spec.model))
    engine = Engine(model, tokenizer, lanes, replica=spec.name)
    info = ReplicaInfo(
        name=spec.name,
        pid=os.getpid(),
        architecture=model.spec.architecture,
        dtype=model.dtype,
        device=str(model.device),
        threads=threads,
        weight_bytes=model.weight_bytes,
        kv_bytes=sum(lane.num_blocks * _block_bytes(lane, model) for lane in lanes),
        fingerprint=checkpoint.fingerprint(),
        contexts={lane.name: lane.max_context for lane in lanes},
        max_sequences={lane.name: lane.max_sequences for lane in lanes},
        generation=_generation(checkpoint.generation),
        kv_budget=kv_bytes,
    )
    return Host(engine, tokenizer, info)


def plan_lanes(
    lanes: tuple[LaneSpec, ...], model: CausalLM, kv_bytes: int
) -> tuple[LaneConfig, ...]:
    """Divide the budget by share. A lane's context never exceeds what its quota can hold."""
    shares = sum(lane.share for lane in lanes)
    return tuple(_lane(lane, model, int(kv_bytes * lane.share / shares)) for lane in lanes)


def _lane(spec: LaneSpec, model: CausalLM, kv_bytes: int) -> LaneConfig:
    num_blocks = kv_bytes // _block_bytes(spec, model)
    if num_blocks < 2:
        raise ConfigError(
            f"{kv_bytes} bytes of KV hold {num_blocks} blocks of {spec.block_size} tokens for "
            f"{spec.name}; at least two are needed",
            param="engine.kv_bytes",
        )
    longest = model.spec.max_positions
    return LaneConfig(
        name=spec.name,
        block_size=spec.block_size,
        num_blocks=num_blocks,
        max_context=min(spec.context or longest, longest, num_blocks * spec.block_size),
        max_queue=spec.max_queue,
        max_sequences=spec.max_sequences,
        max_step_tokens=spec.max_step_tokens,
        kv_cache_slots=spec.kv_cache_slots,
        prefix_cache=spec.prefix_cache,
        weight=spec.share,
    )


def _block_bytes(lane: LaneSpec | LaneConfig, model: CausalLM) -> int:
    return model.kv_bytes_per_token() * lane.block_size


def _auto_kv_bytes(spec: WorkerSpec, model: CausalLM) -> int:
    """The machine's share, but no more than every sequence at full length could ever fill."""
    longest = model.spec.max_positions
    useful = sum(lane.max_sequences * (lane.context or longest) for lane in spec.lanes)
    return min(memory.auto_kv_bytes(str(model.device)), useful * model.kv_bytes_per_token())


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {asked!r} and there is no CUDA device here")
    return asked


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in GENERATION_KEYS if config.get(key) is not None}
