"""Turns a checkpoint's tensors into the parts a decoder runs: embedding, layers, LM head.

Owns the family's tensor names and the precision each tensor is kept at. Knows no architecture by
name, and not how the parts are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels import reference
from coterie.kernels.decoder import DecoderLayer
from coterie.kernels.linear import Linear, ReferenceLinear
from coterie.weights.quantize import Blocks, Dense, Int4, Int8, Weight, convert, dense

if TYPE_CHECKING:
    from coterie.models.reader import Reader

Progress = Callable[[int, int], None]


class Embedding:
    """Rows of a stored matrix; a quantised one is widened row by row, only where it is read."""

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = _moved(weight, device)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return dense(rows_of(self.weight, token_ids), self.dtype)


def _moved(weight: Weight, device: torch.device) -> Weight:
    match weight:
        case Dense(tensor):
            return Dense(tensor.to(device))
        case Int8(q, scale):
            return Int8(q.to(device), scale.to(device))
        case Int4(q, scale, minimum):
            return Int4(q.to(device), scale.to(device), minimum.to(device))
        case Blocks(kind, data):
            return Blocks(kind, data.to(device))


def rows_of(weight: Weight, index: Tensor) -> Weight:
    match weight:
        case Dense(tensor):
            return Dense(tensor[index])
        case Int8(q, scale):
            return Int8(q[index], scale[index])
        case Int4(q, scale, minimum):
            return Int4(q[index], scale[index], minimum[index])
        case Blocks(kind, data):
            return Blocks(kind, data[index])


@dataclass(frozen=True, slots=True)
class Ends:
    """The two tables of words around a decoder stack."""

    embedding: Embedding
    head: Linear

    @property
    def own_bytes(self) -> int:
        """Of the embedding, where it is not the head itself."""
        table, head = self.embedding.weight, self.head
        shared = (
            isinstance(head, ReferenceLinear)
            and isinstance(table, Dense)
            and table.tensor.data_ptr() == head.weight.data_ptr()
        )
        return 0 if shared else self.embedding.nbytes


class GatedMlp:
    """down(silu(gate(x)) * up(x)): a dense layer's MLP, or the expert that every token passes."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(reference.silu_mul(self.gate_up(x)))


def read_ends(
    reader: Reader, first: str = "model.embed_tokens.weight", last: str = "lm_head.weight"
) -> Ends:
    """Embedding and LM head. At int4 both stay at int8, as GGUF files keep them: they decide
    the token directly and are read once per step."""
    spec = reader.spec
    dtype = "int8" if reader.dtype == "int4" else reader.dtype
    stored = reader.take(first, (spec.vocab, spec.hidden))
    table = convert(stored, dtype)
    rows = table
    if spec.tied:
        reader.drop(last)
    else:
        rows = reader.matrix(last, spec.vocab, spec.hidden, dtype)
    head = reader.product([rows])
    if spec.tied and isinstance(head, ReferenceLinear):
        # one copy in memory: the rows of the head are the embedding
        table = Dense(head.weight)
    elif dtype == "fp32":
        # as stored is smaller and widens to the same values
        table = stored
    return Ends(Embedding(table, reader.device, reader.placement.hidden_dtype), head)


def read_mlp(reader: Reader, stem: str, width: int) -> GatedMlp:
    """`stem` is the MLP's name with its dot ("model.layers.0.mlp.")."""
    hidden, biased = reader.spec.hidden, reader.spec.mlp_bias
    gate_up = reader.linear([stem + "gate_proj", stem + "up_proj"], [width, width], hidden, biased)
    return GatedMlp(gate_up, reader.linear([stem + "down_proj"], [hidden], width, biased))


def read_layer(reader: Reader, index: int) -> DecoderLayer:
    """One block; where the layer has experts, its attention half."""
    spec, base = reader.spec, f"model.layers.{index}."
    attention = base + "self_attn."
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    names = [f"{attention}{part}_proj" for part in "qkv"]
    sizes = [q_size, kv_size, kv_size]
    routed = spec.moe is not None and index in spec.moe.layers
    mlp = None if routed else read_mlp(reader, base + "mlp.", spec.intermediate)
    q_norm, k_norm = _qk_norms(reader, attention, q_size, kv_size)
    return DecoderLayer(
        input_norm=reader.vector(base + "input_layernorm.weight", spec.hidden),
        qkv=reader.linear(names, sizes, spec.hidden),
        q_norm=q_norm,
        k_norm=k_norm,
        qkv_bias=_biases(reader, names, sizes) if spec.qkv_bias else None,
        o=reader.linear([attention + "o_proj"], [spec.hidden], q_size, spec.o_bias),
        post_norm=None if routed else reader.vector(post_norm(index), spec.hidden),
        gate_up=mlp.gate_up if mlp else None,
        down=mlp.down if mlp else None,
    )


def post_norm(index: int) -> str:
    return f"model.layers.{index}.post_attention_layernorm.weight"


def _qk_norms(
    reader: Reader, attention: str, q_size: int, kv_size: int
) -> tuple[Tensor | None, Tensor | None]:
    spec = reader.spec
    if not spec.qk_norm:
        return None, None
    sizes = (q_size, kv_size) if spec.flat_qk_norm else (spec.head_dim, spec.head_dim)
    q_norm = reader.vector(attention + "q_norm.weight", sizes[0])
    return q_norm, reader.vector(attention + "k_norm.weight", sizes[1])


def _biases(reader: Reader, names: list[str], sizes: list[int]) -> Tensor:
    pairs = zip(names, sizes, strict=True)
    return torch.cat([reader.vector(f"{name}.bias", size) for name, size in pairs])
