"""Builds a runnable model from a checkpoint's tensors: its parts, and the kernels that run them.

There are three decoders: fused native, fused Triton and plain torch. Models with another kind of
attention run block by block.
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
    from coterie.kernels.cpu.layers import NativeDecoder
    from coterie.models.build.device_decoder import DeviceDecoder
    from coterie.models.build.reader import TensorReader
    from coterie.models.spec import ModelSpec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """A model's backbone, ready to run, and its layers with experts."""

    embedding_and_head: EmbeddingAndHead
    backbone: Backbone
    norm: Callable[[Tensor], Tensor]
    moe_layers: tuple[MoeLayer, ...]
    device: torch.device
    nbytes: int
    # what adapters may change
    targets: ModelTargets
    # runs all layers in one call, where the backbone is the native decoder and supports them
    fused_moe: FusedMoeStack | None = None
    # runs the whole model on a CUDA device, where its kernels support it
    device_decoder: DeviceDecoder | None = None


def assemble(reader: TensorReader, backend: str, progress: Progress) -> AssembledModel:
    spec, ops = reader.spec, ops_for(backend)
    embedding_and_head = read_embedding_and_head(reader)
    backbone = _read_backbone(reader, backend, progress)
    norm = reader.vector("model.norm.weight", spec.hidden)
    moe_layers = read_moe(reader, ops)
    on_device = None
    if backend == "triton" and reader.device.type == "cuda" and backbone.layers:
        on_device = _device_decoder(spec, backbone, embedding_and_head, norm, moe_layers)
    return AssembledModel(
        embedding_and_head,
        backbone.run,
        _bound(ops, norm, spec.eps),
        moe_layers,
        reader.device,
        reader.product_bytes + embedding_and_head.embedding.nbytes,
        ModelTargets(spec, reader.targets),
        _fused_moe_stack(backbone.native, moe_layers, spec.num_layers),
        on_device,
    )


def _device_decoder(
    spec: ModelSpec,
    backbone: _ReadBackbone,
    ends: EmbeddingAndHead,
    norm: Tensor,
    moe_layers: tuple[MoeLayer, ...],
) -> DeviceDecoder | None:
    from coterie.models.build.device_decoder import DeviceDecoder
    from coterie.models.build.device_latent import LatentDecoder

    shape, layers = decoder_shape(spec), backbone.layers
    kind = LatentDecoder if spec.latent else DeviceDecoder
    if not kind.fits(shape, layers, moe_layers, ends.head):
        return None
    return kind(shape, layers, backbone.turn, ends, norm, moe_layers)


def _fused_moe_stack(
    decoder: NativeDecoder | None, layers: tuple[MoeLayer, ...], num_layers: int
) -> FusedMoeStack | None:
    if decoder is None or not layers or not FusedMoeStack.fits(layers):
        return None
    return FusedMoeStack(decoder, layers, num_layers)


def _bound(ops: BackendOps, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda hidden: ops.norm(hidden, weight, eps)


def read_moe(reader: TensorReader, ops: BackendOps) -> tuple[MoeLayer, ...]:
    """The parts of MoE layers that the expert store does not have: gates, norms, shared experts."""
    spec, moe = reader.spec, reader.spec.moe
    if moe is None:
        return ()
    layers = []
    for index in moe.layers:
        name = moe.gate.format(layer=index)
        gate = ExpertGate(
            moe.gate_rule, reader.exact(f"{name}.weight", moe.num_experts, spec.hidden)
        )
        norm = reader.vector(post_norm(index), spec.hidden)
        shared = None
        if moe.shared:
            shared = read_mlp(reader, index, moe.shared, shared=True)
        before = _bound(ops, norm, spec.eps)
        layers.append(MoeLayer(index, gate, before, shared=shared, norm=norm))
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


@dataclass(frozen=True, slots=True)
class _ReadBackbone:
    run: Backbone
    # cos and sin by position
    turn: tuple[Tensor, Tensor]
    # the native decoder, where that is used
    native: NativeDecoder | None = None
    # the layers, where one of the torch decoders runs them
    layers: Sequence[DecoderLayer] = ()


def _read_backbone(reader: TensorReader, backend: str, progress: Progress) -> _ReadBackbone:
    """A fused decoder where it supports the attention, otherwise block by block."""
    spec = reader.spec
    cos, sin = (table.to(reader.device) for table in spec.rotary.tables())
    shape, ops, rotary = decoder_shape(spec), ops_for(backend), RotaryCache(cos, sin)

    def each(read: Callable[[int], _T]) -> list[_T]:
        layers = []
        for index in range(spec.num_layers):
            progress(index + 1, spec.num_layers + 1)
            layers.append(read(index))
        return layers

    if spec.latent:
        blocks = each(lambda index: mla.read_block(reader, index, ops, rotary))
        forward = BlockDecoder(blocks, ops, spec.eps).forward
        on_device = backend == "triton" and reader.device.type == "cuda"
        joined = mla.joined_layers(blocks) if on_device else ()
        return _ReadBackbone(forward, (cos, sin), layers=joined)
    layers = each(lambda index: read_layer(reader, index))
    if spec.clip_qkv is not None:
        blocks = [
            _block(shape, layer, ops, rotary, spec.clip_qkv, index)
            for index, layer in enumerate(layers)
        ]
        return _ReadBackbone(BlockDecoder(blocks, ops, spec.eps).forward, (cos, sin))
    # the native decoder does not support biases after o or in the MLP: such models use its
    # products in the torch decoder
    if backend == "cpu" and not (spec.o_bias or spec.mlp_bias):
        from coterie.kernels.cpu import layers as cpu

        native = cpu.NativeDecoder(shape, layers, cos, sin)
        # the input was made for this call and may be overwritten
        return _ReadBackbone(partial(native.forward, overwrite=True), (cos, sin), native)
    decoder = _decoder(backend)

    def run(
        hidden: Tensor, kv: Sequence[Tensor], batch: AttentionBatch, first: int, last: int
    ) -> Tensor:
        own = layers[first:last]
        return decoder(shape, own, cos, sin, hidden, kv[first:last], batch, first=first)

    return _ReadBackbone(run, (cos, sin), layers=layers)


def _decoder(backend: str) -> Callable[..., Tensor]:
    if backend == "triton":
        from coterie.kernels.triton.decoder import decoder

        return decoder
    return reference.decoder


def _block(
    shape: DecoderShape,
    layer: DecoderLayer,
    ops: BackendOps,
    rotary: RotaryCache,
    clip: float | None,
    index: int,
) -> DecoderBlock:
    attend = HeadAttention(shape, layer, ops, rotary, clip, index)
    if layer.gate_up is None or layer.down is None:
        return DecoderBlock(layer.input_norm, attend)
    mlp = GatedMlp(layer.gate_up, layer.down, index)
    return DecoderBlock(layer.input_norm, attend, layer.post_norm, mlp)
