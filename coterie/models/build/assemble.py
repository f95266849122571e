"""From a checkpoint's tensors to something that runs: which parts a spec is made of and which
kernels run them.

Three ways run a stack: fused native, fused Triton, plain torch; models with attention of their own
are walked block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from coterie.kernels.batch import AttentionBatch
from coterie.kernels.decoder import DecoderLayer, DecoderShape
from coterie.kernels.expert_gate import ExpertGate
from coterie.kernels.reference import layers as reference
from coterie.models.build import mla
from coterie.models.build.layers import (
    BackendOps,
    BlockDecoder,
    DecoderBlock,
    EmbeddingAndHead,
    GatedMlp,
    HeadAttention,
    Progress,
    RotaryCache,
    ops_for,
    post_norm,
    read_embedding_and_head,
    read_layer,
    read_mlp,
)
from coterie.models.build.moe import Backbone, FusedMoeStack, MoeLayer
from coterie.models.build.targets import ModelTargets

if TYPE_CHECKING:
    from coterie.models.build.reader import TensorReader
    from coterie.models.spec import ModelSpec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """A model's backbone, ready to run, and its layers with experts."""

    ends: EmbeddingAndHead
    backbone: Backbone
    norm: Callable[[Tensor], Tensor]
    moe_layers: tuple[MoeLayer, ...]
    device: torch.device
    nbytes: int
    # what adapters may change
    targets: ModelTargets
    # all layers in one call, where the backbone is the native decoder and knows the experts' layers
    express: FusedMoeStack | None = None


def assemble(reader: TensorReader, backend: str, progress: Progress) -> AssembledModel:
    spec, ops = reader.spec, ops_for(backend)
    ends = read_embedding_and_head(reader)
    backbone = _read_backbone(reader, backend, progress)
    norm = reader.vector("model.norm.weight", spec.hidden)
    moe_layers = read_moe(reader, ops)
    return AssembledModel(
        ends,
        backbone,
        _bound(ops, norm, spec.eps),
        moe_layers,
        reader.device,
        reader.product_bytes + ends.own_bytes,
        ModelTargets(spec, reader.noted),
        _fused_moe_stack(backbone, moe_layers, spec.num_layers),
    )


def _fused_moe_stack(
    backbone: Backbone, layers: tuple[MoeLayer, ...], num_layers: int
) -> FusedMoeStack | None:
    decoder = getattr(getattr(backbone, "func", None), "__self__", None)
    if decoder is None or not layers or not FusedMoeStack.fits(layers):
        return None
    return FusedMoeStack(decoder, layers, num_layers)


def _bound(ops: BackendOps, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda hidden: ops.norm(hidden, weight, eps)


def read_moe(reader: TensorReader, ops: BackendOps) -> tuple[MoeLayer, ...]:
    """Routers, and what else of the layers with experts is not the store's."""
    spec, moe = reader.spec, reader.spec.moe
    if moe is None:
        return ()
    layers = []
    for index in moe.layers:
        name = moe.router.format(layer=index)
        router = ExpertGate(
            moe.routing, reader.exact(f"{name}.weight", moe.num_experts, spec.hidden)
        )
        norm = reader.vector(post_norm(index), spec.hidden)
        shared = None
        if moe.shared:
            shared = read_mlp(reader, index, moe.shared, shared=True)
        before = _bound(ops, norm, spec.eps)
        layers.append(MoeLayer(index, router, before, shared=shared, norm=norm))
    return tuple(layers)


def decoder_shape(spec: ModelSpec) -> DecoderShape:
    return DecoderShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        eps=spec.eps,
        attention_scale=spec.attention_scale,
    )


def _read_backbone(reader: TensorReader, backend: str, progress: Progress) -> Backbone:
    """The fused decoders where they know the attention, else block by block."""
    spec = reader.spec
    if spec.rope is None:
        raise TypeError(f"{spec.architecture} has no rotary positions")
    cos, sin = (table.to(reader.device) for table in spec.rope.tables())
    shape, ops, turns = decoder_shape(spec), ops_for(backend), RotaryCache(cos, sin)

    def each(read: Callable[[int], _T]) -> list[_T]:
        layers = []
        for index in range(spec.num_layers):
            progress(index + 1, spec.num_layers + 1)
            layers.append(read(index))
        return layers

    if spec.latent:
        blocks = each(lambda index: mla.read_block(reader, index, ops, turns))
        return BlockDecoder(blocks, ops, spec.eps).forward
    layers = each(lambda index: read_layer(reader, index))
    if spec.clip_qkv is not None:
        blocks = [
            _block(shape, layer, ops, turns, spec.clip_qkv, index)
            for index, layer in enumerate(layers)
        ]
        return BlockDecoder(blocks, ops, spec.eps).forward
    # the native decoder has no place for biases after o or in the MLP: those models run its
    # products from the torch path
    if backend == "cpu" and not (spec.o_bias or spec.mlp_bias):
        from coterie.kernels.cpu import layers as cpu

        # whatever comes in was made for this call
        return partial(cpu.NativeDecoder(shape, layers, cos, sin).forward, overwrite=True)
    decoder = _decoder(backend)

    def run(
        hidden: Tensor, kv: Sequence[Tensor], batch: AttentionBatch, first: int, last: int
    ) -> Tensor:
        own = layers[first:last]
        return decoder(shape, own, cos, sin, hidden, kv[first:last], batch, first=first)

    return run


def _decoder(backend: str) -> Callable[..., Tensor]:
    if backend == "triton":
        from coterie.kernels.triton.decoder import decoder

        return decoder
    return reference.decoder


def _block(
    shape: DecoderShape,
    layer: DecoderLayer,
    ops: BackendOps,
    turns: RotaryCache,
    clip: float | None,
    index: int,
) -> DecoderBlock:
    attend = HeadAttention(shape, layer, ops, turns, clip, index)
    if layer.gate_up is None or layer.down is None:
        return DecoderBlock(layer.input_norm, attend)
    mlp = GatedMlp(layer.gate_up, layer.down, index)
    return DecoderBlock(layer.input_norm, attend, layer.post_norm, mlp)
