"""A causal language model ready to run, and how one is loaded.

`MODELS` names every architecture.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels import patched
from coterie.kernels.backend import best_backend
from coterie.kernels.batch import AttentionBatch
from coterie.models.arch import (
    carved,
    deepseek_v2,
    dwr,
    llama,
    mistral,
    mixtral,
    olmoe,
    qwen2,
    qwen3,
    qwen3_moe,
)
from coterie.models.build.assemble import AssembledModel, assemble
from coterie.models.build.cuda_graph import DecodeGraphs, PromptGraphs
from coterie.models.build.graph_memory import GraphMemory
from coterie.models.build.layers import Progress
from coterie.models.build.mixed_graph import MAX_WEIGHT_BYTES, MixedGraphs
from coterie.models.build.moe import MoeExperts, MoeFactory, MoeRequirements, MoeStack, moe_factory
from coterie.models.build.piece_graph import PieceGraphs
from coterie.models.build.reader import TensorPlacement, TensorReader, keeps
from coterie.models.config_fields import check_config, check_generation
from coterie.models.spec import ModelSpec, token_ids
from coterie.moe.runtime.budget import free_host_bytes
from coterie.weights.kinds import KEPT_AS
from coterie.weights.quantize import DTYPES

if TYPE_CHECKING:
    from coterie.adapters.base import AdaptableModel
    from coterie.core.lane import LaneConfig
    from coterie.core.moe import MoeSettings, MoeUsage
    from coterie.moe.runtime.device_pool import DevicePool
    from coterie.moe.runtime.memory_trade import MemoryTrade
    from coterie.weights.checkpoint import Checkpoint

__all__ = ["MODELS", "Architecture", "CausalLM", "ModelSpec", "load_model"]

# a cache line, as torch aligns its own tensors
_ALIGNMENT = 64

Read = Callable[[dict[str, Any], int | None], ModelSpec]
Build = Callable[[TensorReader, str, Progress], AssembledModel]


@dataclass(frozen=True, slots=True)
class Architecture:
    """`read` makes a spec from a config.json, `build` makes the model's parts from the tensors."""

    read: Read
    build: Build = assemble


MODELS: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(llama.read),
    "MistralForCausalLM": Architecture(mistral.read),
    "Qwen2ForCausalLM": Architecture(qwen2.read),
    "Qwen3ForCausalLM": Architecture(qwen3.read),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe.read),
    "MixtralForCausalLM": Architecture(mixtral.read),
    "OlmoeForCausalLM": Architecture(olmoe.read),
    "DeepseekV2ForCausalLM": Architecture(deepseek_v2.read),
    "DWRForCausalLM": Architecture(dwr.read, dwr.build),
    carved.ARCHITECTURE: Architecture(carved.read),
}

_log = logging.getLogger(__name__)

# the least context that is served; if memory is too small for it, the allocation of KV fails
_LEAST_POSITIONS = 4096

# the site of the LM head
_HEAD = (-1, "head")

_IN_LAYER = re.compile(r"(^|\.)(layers|blocks)\.\d")


class CausalLM:
    """Embedding, decoder stack, final norm and LM head of one loaded model."""

    def __init__(
        self, spec: ModelSpec, dtype: str, parts: AssembledModel, moe: MoeStack | None = None
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self.device = parts.device
        # of what is always in memory, without experts
        self.weight_bytes = parts.nbytes
        self.kv_dtype = kv_dtype(dtype)
        self._embed, self._head, self._norm = (
            parts.embedding_and_head.embedding,
            parts.embedding_and_head.head,
            parts.norm,
        )
        self._backbone, self._moe = parts.backbone, moe
        # what adapters may change; costs nothing before the first adapter
        self.targets: AdaptableModel = parts.targets
        # the whole model on a CUDA device, where its kernels support it
        self.device_decoder = parts.device_decoder
        # captured steps on CUDA; None runs every step eagerly
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.piece_graphs: PieceGraphs | None = None

    @property
    def experts(self) -> MoeExperts | None:
        return self._moe.experts if self._moe else None

    @property
    def memory_trade(self) -> MemoryTrade | None:
        """With elastic memory: what gives the KV cache memory of experts."""
        return None if self._moe is None else self._moe.experts.trade

    @property
    def chunk_tokens(self) -> int:
        """Rows that run through a group of layers together, where a strategy groups layers."""
        return self._moe.chunk_tokens if self._moe else 0

    @chunk_tokens.setter
    def chunk_tokens(self, tokens: int) -> None:
        if self._moe:
            self._moe.chunk_tokens = tokens

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """One layer's cache; a model needs `spec.num_layers` of them."""
        spec = self.spec
        return (spec.kv_planes, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)

    def new_kv(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """An empty cache of every layer; where it shares memory with experts, see `memory_trade`,
        that of so many blocks."""
        shape, trade = self.kv_shape(num_blocks, block_size), self.memory_trade
        if trade is not None:
            kv = trade.layout.kv
            if (num_blocks, block_size) != (trade.layout.num_blocks, kv.block_size):
                raise ConfigError(
                    f"elastic_memory divides {trade.layout.num_blocks} KV blocks of "
                    f"{kv.block_size} tokens, not {num_blocks} of {block_size}",
                    param="elastic_memory",
                )
            return trade.kv_views(self.kv_dtype, shape[0], shape[2:])
        return [_zeros(shape, self.kv_dtype, self.device) for _ in range(self.spec.num_layers)]

    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.spec, self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        logits_rows: Tensor,
    ) -> Tensor:
        """fp32 logits [R, V] of the rows in `logits_rows`, valid until the next call; writes the
        keys and values of all T rows."""
        # copies of experts take longer than launches: nothing is gained by a captured step
        special = self._moe.step_pool(batch) if self._moe is not None else None
        if special is not None:
            return self.compute(token_ids, batch, kv, logits_rows, special)[0]
        # graphs support only embeddings: rows of a prompt may be soft tokens, decoded rows are not
        pool = self._moe.pool if self._moe is not None else None
        captured = self._moe is None or pool is not None
        if self.graphs is not None and captured and (batch.phase == "decode" or not _soft(batch)):
            found = self.graphs.forward(token_ids, batch, kv, logits_rows)
            # padded rows would choose experts that travel
            prompts = pool is None or pool.is_whole
            if found is None and self.prompt_graphs is not None and batch.fresh and prompts:
                found = self.prompt_graphs.forward(token_ids, batch, kv, logits_rows)
            if found is None and self.mixed_graphs is not None and batch.phase != "decode":
                found = self.mixed_graphs.forward(token_ids, batch, kv, logits_rows)
            pieces = self.piece_graphs if batch.phase != "decode" and prompts else None
            if found is None and pieces is not None and pool is not None:
                found = pieces.forward(token_ids, batch, kv, logits_rows, pool)
            if found is not None:
                logits, routed = found
                if self._moe is not None and pool is not None and routed is not None:
                    self._moe.ran_on_device(routed, batch, pool)
                return logits
        return self.compute(token_ids, batch, kv, logits_rows)[0]

    def compute(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        rows: Tensor,
        pool: DevicePool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` without captured graphs; and the gates' choices [layers, T, K], of a step whose
        experts the device reads. `pool`: where they are in this step, if not where they usually
        are."""
        if pool is None and self._moe is not None:
            pool = self._moe.pool
        if pool is not None:
            pool = pool.of_step(batch)
        whole = self.device_decoder
        if whole is not None and whole.takes(batch, pool):
            logits, routed = whole.run(token_ids, batch, kv, rows, pool)
            if self._moe is not None and pool is not None and routed is not None:
                self._moe.ran_on_device(routed, batch, pool)
            return logits, routed
        hidden = self._mixed(token_ids, batch) if _soft(batch) else self._embed(token_ids)
        routed = None
        if self._moe is None:
            hidden = self._backbone(hidden, kv, batch, 0, self.spec.num_layers)
        else:
            hidden, routed = self._moe(hidden, kv, batch, pool)
        if len(rows) == 0:
            return hidden.new_empty((0, self.spec.vocab), dtype=torch.float32), routed
        normed = self._norm(hidden[rows])
        if not any(_HEAD in part.stack.patches for part in batch.patches):
            return self._head(normed).float(), routed
        patches = patched.pick(batch.patches, rows)
        parts = ((_HEAD[1], self.spec.vocab),)
        return patched.linear(self._head, normed, _HEAD[0], parts, patches).float(), routed

    def _mixed(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Embeddings; ids beyond the vocabulary are soft tokens of the row's stack."""
        vocab = self.spec.vocab
        hidden = self._embed(token_ids.clamp(max=vocab - 1))
        for first, last, stack in batch.patches:
            if stack.soft is None:
                continue
            place = token_ids[first:last] - vocab
            soft = stack.soft[place.clamp(min=0)].to(hidden.dtype)
            hidden[first:last] = torch.where(place[:, None] >= 0, soft, hidden[first:last])
        return hidden

    def limit_graphs(self, reserved: int) -> GraphMemory | None:
        """Let captured graphs take so many bytes together; with 0 nothing is captured."""
        if self.graphs is None or reserved == 0:
            self.graphs = self.prompt_graphs = self.mixed_graphs = self.piece_graphs = None
            return None
        memory = GraphMemory(self.device, reserved)
        self.graphs.memory = memory
        if self.prompt_graphs is not None:
            self.prompt_graphs.memory = memory
        return memory

    @torch.inference_mode()
    def prepare(
        self,
        kv: Sequence[Tensor],
        lane: LaneConfig,
        progress: Progress,
        adapters: bool = False,
    ) -> None:
        """Capture what the first steps with these caches would wait for (with `adapters`: also the
        steps whose rows have some). Calls `progress` with (graphs done, graphs)."""
        pool = self._moe.pool if self._moe is not None else None
        if self.graphs is None or (self._moe is not None and pool is None):
            return
        for done, total in self.graphs.prepare(kv, lane.block_size, lane.max_sequences, adapters):
            progress(done, total)
        if pool is not None and not pool.is_whole:
            return
        if self.prompt_graphs is not None:
            self.prompt_graphs.prepare(kv, lane.block_size, lane.max_step_tokens)
        if self.mixed_graphs is not None:
            for done, total in self.mixed_graphs.prepare(kv, lane, self.dtype):
                progress(done, total)
        if self.piece_graphs is not None and pool is not None:
            self.piece_graphs.prepare(lane.max_step_tokens, pool)

    @property
    def copies_experts(self) -> bool:
        """Whether steps with a prompt copy experts to the device."""
        pool = self._moe.pool if self._moe is not None else None
        return pool is not None and not pool.is_whole

    @property
    def is_captured(self) -> bool:
        """Whether decode steps may run as captured graphs, once experts are loaded."""
        return self.graphs is not None and (self._moe is None or self._moe.pool is not None)

    @property
    def is_loading(self) -> bool:
        """Whether a step may have to wait, layer by layer, for experts that are still loaded."""
        return self._moe is not None and self._moe.is_loading

    def ran_captured(self, routed: Tensor, batch: AttentionBatch) -> None:
        """A captured step was run outside of `forward`; `routed`: the choices of its gates."""
        pool = self._moe.pool if self._moe is not None else None
        if self._moe is not None and pool is not None:
            self._moe.ran_on_device(routed, batch, pool)

    def launched_usage(self) -> Callable[[], tuple[MoeUsage, list[MoeUsage]]] | None:
        """Where the last forward only enqueued its experts: what waits for them and returns their
        costs, as `take_usage` does where this is None."""
        return self._moe.launched_usage() if self._moe else None

    def take_usage(self) -> tuple[MoeUsage, list[MoeUsage]] | None:
        """The costs of the last forward's experts: in total, and by sequence. None when dense."""
        return self._moe.take_usage() if self._moe else None

    def close(self) -> None:
        if self._moe:
            self._moe.experts.close()


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    backend: str | None = None,
    max_context: int | None = None,
    progress: Progress | None = None,
    dispatch: MoeSettings | None = None,
    experts: MoeFactory | None = None,
) -> CausalLM:
    """Read `checkpoint` at `dtype` for `device`; calls `progress` with (layers done, layers).

    `dispatch` says where the experts of a MoE model live; `experts` opens them instead.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    kept = stored_dtype(checkpoint, device) if dtype == "auto" else dtype
    spec = _served_spec(checkpoint, kept, device, max_context)
    backend = backend or best_backend(device)
    on_cuda = torch.device(device).type == "cuda"
    products = backend if backend == "cpu" or on_cuda else "reference"
    placement = TensorPlacement(products, device, _hidden_dtype(kept, device))
    reader, report = TensorReader(checkpoint, spec, dtype, placement), progress or _silent
    parts = MODELS[spec.architecture].build(reader, backend, report)
    reader.finish()
    checkpoint.release()
    report(spec.num_layers + 1, spec.num_layers + 1)
    if spec.moe is None:
        model = CausalLM(spec, kept, parts)
        _capture(model, backend)
        return model
    wanted = MoeRequirements(
        checkpoint=checkpoint,
        moe=spec.moe,
        hidden=spec.hidden,
        dtype=dtype,
        device=device,
        kv_bytes=kv_bytes_per_token(spec, kept) * spec.max_positions,
        kv_plane_bytes=spec.num_kv_heads * spec.head_dim * kv_dtype(kept).itemsize,
        kv_planes=spec.kv_planes * spec.num_layers,
    )
    opened = (experts or moe_factory(dispatch))(wanted)
    try:
        layers, on_device = parts.moe_layers, None
        if backend == "triton" and parts.device.type == "cuda":
            from coterie.models.build.device_moe import DeviceMoeStack

            on_device = DeviceMoeStack(parts.backbone, layers, spec.num_layers).run
        moe = MoeStack(parts.backbone, layers, spec.num_layers, opened, parts.fused_moe, on_device)
    except WeightsError:
        opened.close()
        raise
    model = CausalLM(spec, kept, parts, moe)
    _capture(model, backend)
    return model


def _capture(model: CausalLM, backend: str) -> None:
    if backend == "triton" and model.device.type == "cuda":
        model.graphs = DecodeGraphs(model.compute, model.spec.max_positions, model.device)
        if model.device_decoder is not None and model.experts is not None:
            model.piece_graphs = PieceGraphs(
                model.device_decoder, model.graphs, model.spec, model.dtype
            )
        # kernels that need nothing of a prompt's rows from the host
        if model.device_decoder is not None and model.dtype != "fp32":
            model.prompt_graphs = PromptGraphs(model.compute, model.device)
            if model.experts is None and model.weight_bytes <= MAX_WEIGHT_BYTES:
                model.mixed_graphs = MixedGraphs(
                    model.compute, model.graphs, model.spec, model.weight_bytes
                )


def _soft(batch: AttentionBatch) -> bool:
    """Whether some row's stack has soft tokens."""
    return any(part.stack.soft is not None for part in batch.patches)


def _silent(done: int, total: int) -> None:
    """The default for `progress`."""


def kv_dtype(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "fp32" else torch.bfloat16


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU from calloc: the system gives each page when it is first written, while
    torch.zeros writes all of them at once (seconds for 2 GB)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).view(shape)


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    values = spec.kv_planes * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return values * kv_dtype(dtype).itemsize


def read_spec(checkpoint: Checkpoint, max_context: int | None = None) -> ModelSpec:
    config, path = dict(checkpoint.config), checkpoint.path
    inside = path.is_dir()
    check_config(config, str(path / "config.json") if inside else f"{path}: metadata")
    file = str(path / "generation_config.json") if inside else f"{path}: metadata"
    check_generation(checkpoint.generation, file)
    names = config.get("architectures") or ["(none)"]
    if names[0] not in MODELS:
        raise WeightsError(
            f"{checkpoint.path}: architecture {names[0]} is not supported; known: "
            + ", ".join(MODELS)
        )
    ends = token_ids(checkpoint.generation.get("eos_token_id"))
    if ends:
        config["eos_token_id"] = list(ends)
    try:
        return MODELS[names[0]].read(config, max_context)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise WeightsError(f"{path}: its config makes no sense ({error!r})") from error


def _served_spec(
    checkpoint: Checkpoint, dtype: str, device: str, max_context: int | None
) -> ModelSpec:
    """The model's shape at the served context. A file may name any number of positions; more than
    memory can hold keys and values for are of no use."""
    spec = read_spec(checkpoint, max_context)
    if max_context is not None:
        return spec
    free = free_host_bytes()
    if torch.device(device).type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    most = max(_LEAST_POSITIONS, free // kv_bytes_per_token(spec, dtype))
    if spec.max_positions <= most:
        return spec
    _log.warning(
        "%s names %d positions; memory holds the keys and values of %d at most",
        checkpoint.path.name, spec.max_positions, most,
    )  # fmt: skip
    return read_spec(checkpoint, most)


def stored_dtype(checkpoint: Checkpoint, device: str = "cpu") -> str:
    """The precision for "auto": that of most matrices in the file, by elements."""
    sizes: Counter[str] = Counter()
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if len(shape) >= 2 and _IN_LAYER.search(name):
            kept = KEPT_AS.get(checkpoint.stored_as(name), "fp32")
            sizes[kept if keeps(device, kept) else "fp32"] += math.prod(shape)
    return max(sizes, key=lambda kept: sizes[kept]) if sizes else "fp32"


def _hidden_dtype(dtype: str, device: str) -> torch.dtype:
    """fp32 on the CPU for all weights; the model's own type on an accelerator."""
    wide = dtype == "fp32" or torch.device(device).type == "cpu"
    return torch.float32 if wide else torch.bfloat16
