"""Turns a checkpoint's tensors into the parts a decoder runs: embedding, layers, LM head.

Owns the family's tensor names and the precision each tensor is kept at. Knows no architecture by
name, and not how the parts are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.kernels.decoder import DecoderLayer
from coterie.kernels.linear import Linear, ReferenceLinear, make_linear
from coterie.weights.quantize import Dense, Int4, Int8, Weight, convert, dense

if TYPE_CHECKING:
    from coterie.models.spec import ModelSpec
    from coterie.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]

# Buffers that older files carry; they are computed here.
_COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


class BiasedLinear:
    """A product with a bias behind it, for the few models that have one after o or in the MLP."""

    def __init__(self, product: Linear, bias: Tensor) -> None:
        self.product, self.bias = product, bias
        self.in_features, self.out_features = product.in_features, product.out_features

    @property
    def nbytes(self) -> int:
        return self.product.nbytes + self.bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) + self.bias.to(x.dtype)


class Embedding:
    """Rows of a stored matrix; a quantised one is widened row by row, only where it is read."""

    def __init__(self, weight: Weight, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = _moved(weight, device)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return dense(_rows(self.weight, token_ids), self.dtype)


def _moved(weight: Weight, device: torch.device) -> Weight:
    match weight:
        case Dense(tensor):
            return Dense(tensor.to(device))
        case Int8(q, scale):
            return Int8(q.to(device), scale.to(device))
        case Int4(q, scale, minimum):
            return Int4(q.to(device), scale.to(device), minimum.to(device))


def _rows(weight: Weight, index: Tensor) -> Weight:
    match weight:
        case Dense(tensor):
            return Dense(tensor[index])
        case Int8(q, scale):
            return Int8(q[index], scale[index])
        case Int4(q, scale, minimum):
            return Int4(q[index], scale[index], minimum[index])


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts live: the products' backend, the device, the type of activations."""

    backend: str
    device: str
    hidden_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Parts:
    """What a dense decoder is made of."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    weight_bytes: int


class PartReader:
    """Reads a checkpoint at one precision for one backend and device."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, dtype: str, placement: Placement
    ) -> None:
        self._checkpoint, self._spec, self._dtype = checkpoint, spec, dtype
        self._placement = placement
        self._device = torch.device(placement.device)
        self._left = {name for name in checkpoint.names() if not name.endswith(_COMPUTED)}

    def read(self, progress: Progress | None = None) -> Parts:
        spec = self._spec
        embedding, head = self._ends()
        total = spec.num_layers + 1
        layers = []
        for index in range(spec.num_layers):
            if progress:
                progress(index + 1, total)
            layers.append(self._layer(index))
        norm = self._vector("model.norm.weight", spec.hidden)
        if self._left:
            raise WeightsError(
                f"{self._checkpoint.path}: {spec.architecture} has no place for the tensor "
                f"{min(self._left)!r} ({len(self._left)} such tensors)"
            )
        if progress:
            progress(total, total)
        own_copy = 0 if _shared(embedding, head) else embedding.nbytes
        size = own_copy + head.nbytes + sum(_layer_bytes(layer) for layer in layers)
        return Parts(embedding, tuple(layers), norm, head, size)

    def _ends(self) -> tuple[Embedding, Linear]:
        """Embedding and LM head. At int4 both stay at int8, as GGUF files keep them: they decide
        the token directly and are read once per step."""
        spec, name = self._spec, "model.embed_tokens.weight"
        dtype = "int8" if self._dtype == "int4" else self._dtype
        stored = self._take(name, (spec.vocab, spec.hidden))
        table = convert(stored, dtype)
        last = table
        if spec.tied:
            self._left.discard("lm_head.weight")
        else:
            last = self._matrix("lm_head.weight", spec.vocab, spec.hidden, dtype)
        head = make_linear([last], self._placement.backend, self._device)
        if spec.tied and isinstance(head, ReferenceLinear):
            # one copy in memory: the rows of the head are the embedding
            table = Dense(head.weight)
        elif dtype == "fp32":
            # as stored is smaller and widens to the same values
            table = stored
        return Embedding(table, self._device, self._placement.hidden_dtype), head

    def _layer(self, index: int) -> DecoderLayer:
        spec, base = self._spec, f"model.layers.{index}."
        attention, mlp = base + "self_attn.", base + "mlp."
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        normed = spec.qk_norm
        return DecoderLayer(
            input_norm=self._vector(base + "input_layernorm.weight", spec.hidden),
            qkv=self._product(
                [
                    self._matrix(attention + "q_proj.weight", q_size, spec.hidden),
                    self._matrix(attention + "k_proj.weight", kv_size, spec.hidden),
                    self._matrix(attention + "v_proj.weight", kv_size, spec.hidden),
                ]
            ),
            q_norm=self._vector(attention + "q_norm.weight", spec.head_dim) if normed else None,
            k_norm=self._vector(attention + "k_norm.weight", spec.head_dim) if normed else None,
            qkv_bias=self._qkv_bias(attention, q_size, kv_size) if spec.qkv_bias else None,
            o=self._with_bias([attention + "o_proj"], (spec.hidden,), q_size, spec.o_bias),
            post_norm=self._vector(base + "post_attention_layernorm.weight", spec.hidden),
            gate_up=self._with_bias(
                [mlp + "gate_proj", mlp + "up_proj"],
                (spec.intermediate, spec.intermediate),
                spec.hidden,
                spec.mlp_bias,
            ),
            down=self._with_bias(
                [mlp + "down_proj"], (spec.hidden,), spec.intermediate, spec.mlp_bias
            ),
        )

    def _with_bias(
        self, names: Sequence[str], rows: Sequence[int], columns: int, biased: bool
    ) -> Linear:
        product = self._product(
            [self._matrix(n + ".weight", r, columns) for n, r in zip(names, rows, strict=True)]
        )
        if not biased:
            return product
        biases = [self._vector(n + ".bias", r) for n, r in zip(names, rows, strict=True)]
        return BiasedLinear(product, torch.cat(biases))

    def _qkv_bias(self, attention: str, q_size: int, kv_size: int) -> Tensor:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        return torch.cat([self._vector(f"{attention}{n}_proj.bias", s) for n, s in sizes.items()])

    def _product(self, weights: Sequence[Weight]) -> Linear:
        return make_linear(weights, self._placement.backend, self._device)

    def _matrix(self, name: str, rows: int, columns: int, dtype: str | None = None) -> Weight:
        return convert(self._take(name, (rows, columns)), dtype or self._dtype)

    def _vector(self, name: str, size: int) -> Tensor:
        return dense(self._take(name, (size,)), self._placement.hidden_dtype).to(self._device)

    def _take(self, name: str, shape: tuple[int, ...]) -> Weight:
        if name not in self._left:
            raise WeightsError(f"{self._checkpoint.path}: the tensor {name!r} is missing")
        self._left.discard(name)
        found = tuple(self._checkpoint.shape(name))
        if found != shape:
            raise WeightsError(
                f"{self._checkpoint.path}: {name!r} has shape {found}; config asks for {shape}"
            )
        return self._checkpoint.read(name)


def _shared(embedding: Embedding, head: Linear) -> bool:
    table = embedding.weight
    return (
        isinstance(head, ReferenceLinear)
        and isinstance(table, Dense)
        and table.tensor.data_ptr() == head.weight.data_ptr()
    )


def _layer_bytes(layer: DecoderLayer) -> int:
    return sum(product.nbytes for product in (layer.qkv, layer.o, layer.gate_up, layer.down))
