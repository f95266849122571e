"""A causal language model ready to run, and how one is loaded.

`MODELS` names every architecture. Two paths run the same parts: the fused native decoder on a CPU
with compiled kernels, plain torch (with Triton on CUDA) everywhere else. Knows no requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels import linear, reference
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.decoder import DecoderShape
from coterie.models import llama, mistral, qwen3
from coterie.models.cuda_graph import DecodeGraphs
from coterie.models.layers import PartReader, Parts, Placement, Progress
from coterie.models.spec import ModelSpec, token_ids
from coterie.weights.quantize import DTYPES

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint

__all__ = ["MODELS", "CausalLM", "ModelSpec", "load_model"]

MODELS: dict[str, Callable[[dict[str, Any], int | None], ModelSpec]] = {
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "Qwen3ForCausalLM": qwen3.read,
}

# How a file's tensor types are kept under "auto": GGUF's other quantised forms are widened exactly.
_KEPT_AS = {"BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run the parts: `stack` is (hidden [T, D], caches, batch) -> hidden [T, D], `norm`
    is (hidden, weight, eps) -> hidden."""

    stack: Callable[[Tensor, Sequence[Tensor], AttentionBatch], Tensor]
    norm: Callable[[Tensor, Tensor, float], Tensor]


class CausalLM:
    """Embedding, decoder stack, final norm and LM head of one loaded model."""

    def __init__(self, spec: ModelSpec, parts: Parts, dtype: str, run: Backend) -> None:
        self.spec, self.dtype = spec, dtype
        self.device = parts.norm.device
        self.weight_bytes = parts.weight_bytes
        self.kv_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        self._parts, self._run = parts, run
        # captured decode steps on CUDA; None runs every step eagerly
        self.graphs: DecodeGraphs | None = None

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """One layer's cache; a model needs `spec.num_layers` of them."""
        return (2, num_blocks, self.spec.num_kv_heads, block_size, self.spec.head_dim)

    def kv_bytes_per_token(self) -> int:
        values = 2 * self.spec.num_layers * self.spec.num_kv_heads * self.spec.head_dim
        return values * self.kv_dtype.itemsize

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        logits_rows: Tensor,
    ) -> Tensor:
        """fp32 logits [R, V] of the rows asked for, valid until the next call; writes the keys and
        values of all T rows."""
        if self.graphs is not None:
            logits = self.graphs.forward(token_ids, batch, kv, logits_rows)
            if logits is not None:
                return logits
        return self.compute(token_ids, batch, kv, logits_rows)

    def compute(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> Tensor:
        """`forward` without captured graphs."""
        hidden = self._run.stack(self._parts.embedding(token_ids), kv, batch)
        if len(rows) == 0:
            return hidden.new_empty((0, self.spec.vocab), dtype=torch.float32)
        picked = self._run.norm(hidden[rows], self._parts.norm, self.spec.eps)
        return self._parts.head(picked).float()

    @torch.inference_mode()
    def prepare(self, kv: Sequence[Tensor], block_size: int, max_sequences: int) -> None:
        """Do now what the first steps over these caches would otherwise wait for."""
        if self.graphs is not None:
            self.graphs.prepare(kv, block_size, max_sequences)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    backend: str | None = None,
    max_context: int | None = None,
    progress: Progress | None = None,
) -> CausalLM:
    """Read `checkpoint` at `dtype` for `device`; `progress` hears (layers done, layers)."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    spec = read_spec(checkpoint, max_context)
    kept = stored_dtype(checkpoint) if dtype == "auto" else dtype
    backend = backend or best_backend(device)
    products = "cpu" if backend == "cpu" else "reference"
    hidden_dtype = _hidden_dtype(kept, device)
    reader = PartReader(checkpoint, spec, dtype, Placement(products, device, hidden_dtype))
    parts = reader.read(progress)
    model = CausalLM(spec, parts, kept, _make_backend(backend, spec, parts))
    if backend == "triton" and model.device.type == "cuda":
        model.graphs = DecodeGraphs(model.compute, spec.max_positions, model.device)
    return model


def read_spec(checkpoint: Checkpoint, max_context: int | None = None) -> ModelSpec:
    config = dict(checkpoint.config)
    names = config.get("architectures") or ["(none)"]
    if names[0] not in MODELS:
        raise WeightsError(
            f"{checkpoint.path}: architecture {names[0]} is not supported; known: "
            + ", ".join(MODELS)
        )
    ends = token_ids(checkpoint.generation.get("eos_token_id"))
    if ends:
        config["eos_token_id"] = list(ends)
    return MODELS[names[0]](config, max_context)


def stored_dtype(checkpoint: Checkpoint) -> str:
    """What "auto" comes to: how the file keeps most of its matrices, by elements."""
    sizes: Counter[str] = Counter()
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if len(shape) == 2 and ".layers." in name:
            sizes[_KEPT_AS.get(checkpoint.stored_as(name), "fp32")] += shape[0] * shape[1]
    return max(sizes, key=lambda kept: sizes[kept]) if sizes else "fp32"


def _hidden_dtype(dtype: str, device: str) -> torch.dtype:
    """fp32 on the CPU whatever the weights are; the model's own type on an accelerator."""
    wide = dtype == "fp32" or torch.device(device).type == "cpu"
    return torch.float32 if wide else torch.bfloat16


def best_backend(device: str) -> str:
    """ "cpu" (native kernels), "triton" on CUDA, "reference" (plain torch) otherwise."""
    if torch.device(device).type == "cuda" and find_spec("triton"):
        return "triton"
    return linear.best_backend(device)


def _make_backend(backend: str, spec: ModelSpec, parts: Parts) -> Backend:
    cos, sin = (table.to(parts.norm.device) for table in spec.rope.tables())
    shape = DecoderShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        eps=spec.eps,
        attention_scale=spec.attention_scale,
    )
    if backend == "triton":
        from coterie.kernels import triton_layers

        stack = partial(triton_layers.decoder, shape, parts.layers, cos, sin)
        return Backend(stack, triton_layers.rms_norm)
    # the native decoder has no place for biases after o or in the MLP: those models run its
    # products from the torch path
    if backend == "cpu" and not (spec.o_bias or spec.mlp_bias):
        from coterie.kernels import cpu

        return Backend(cpu.NativeDecoder(shape, parts.layers, cos, sin).forward, cpu.rms_norm)
    return Backend(partial(reference.decoder, shape, parts.layers, cos, sin), reference.rms_norm)
