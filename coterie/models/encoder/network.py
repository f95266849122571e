"""The networks of encoders on batches without padding.

The tokens of all sequences lie one after the other: every linear layer and norm runs over real
tokens alone. Sequences are ordered by length, and attention runs once for each length, without a
mask. So a vector does not depend on the other texts of its batch, except for the rounding of the
matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.models.encoder.spec import FAMILIES, EncoderModelSpec
from coterie.weights.checkpoint import Checkpoint, open_checkpoint
from coterie.weights.formats.safetensors import read_file
from coterie.weights.quantize import dense

Ids: TypeAlias = NDArray[np.int32]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
# BERT's names of a layer's tensors; other families translate theirs
_DISTIL_NAMES = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
_MPNET_NAMES = {
    "attention.self.query": "attention.attn.q",
    "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v",
    "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
}
_LAYER_NAMES = {"distilbert": _DISTIL_NAMES, "mpnet": _MPNET_NAMES}
_MPNET_BUCKETS, _MPNET_DISTANCE = 32, 128


@dataclass(frozen=True, slots=True)
class _Affine:
    """A linear layer or a norm."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Affine
    attention_out: _Affine
    attention_norm: _Affine
    inner: _Affine
    out: _Affine
    norm: _Affine


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences of one length: rows `start` to `start + count * length`."""

    start: int
    count: int
    length: int


class EncoderNetwork:
    def __init__(self, spec: EncoderModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.device, self.dtype = spec, device, dtype
        tensors = _Tensors(spec, device, dtype)
        self._act = _ACTIVATIONS[spec.activation]
        self._words = tensors.get("embeddings.word_embeddings.weight")
        if self._words.shape != (spec.vocab_size, spec.hidden):
            raise WeightsError(f"{spec.path}: the embeddings do not fit config.json.")
        self._positions = tensors.get("embeddings.position_embeddings.weight")
        self._types = tensors.find("embeddings.token_type_embeddings.weight")
        self._embedding_norm = tensors.affine("embeddings.LayerNorm")
        self._layers = [tensors.layer(index) for index in range(spec.layers)]
        self._head = _head(spec, tensors) if spec.is_cross else None
        self._dense = _dense_layers(spec, device, dtype)
        self._relative = tensors.find("encoder.relative_attention_bias.weight")
        self._biases: dict[int, Tensor] = {}
        self.num_bytes = tensors.num_bytes
        last = self._dense[-1][0].weight if self._dense else None
        self.dim = spec.hidden * len(spec.pooling) if last is None else int(last.shape[0])
        if spec.is_cross:
            self.dim = 1

    @torch.inference_mode()
    def encode(
        self, sequences: Sequence[Ids], splits: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """One row for each sequence: its pooled vector without normalisation, or its score.
        `splits`: where the second text of a pair begins."""
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        runs = list(_runs([len(sequences[index]) for index in order]))
        hidden = self._embed(sequences, splits, order)
        for layer in self._layers:
            hidden = self._layer(layer, hidden, runs)
        pooled = torch.cat([self._pooled(hidden, run) for run in runs])
        if self._head is not None:
            pooled = self._head(pooled)
            pooled = torch.sigmoid(pooled) if self.spec.sigmoid else pooled
        for affine, activation in self._dense:
            pooled = activation(affine(pooled))
        vectors = np.empty((len(sequences), self.dim), np.float32)
        vectors[order] = pooled.float().cpu().numpy()
        return vectors

    def _embed(
        self, sequences: Sequence[Ids], splits: Sequence[int] | None, order: list[int]
    ) -> Tensor:
        ids = np.concatenate([sequences[index] for index in order])
        first = self.spec.first_position
        positions = np.concatenate(
            [np.arange(first, first + len(sequences[index]), dtype=np.int32) for index in order]
        )
        hidden = F.embedding(self._on_device(ids), self._words)
        hidden = hidden + F.embedding(self._on_device(positions), self._positions)
        if self._types is not None:
            # the tokenizers of the other families tell no kinds
            if splits is None or self.spec.family != "bert":
                hidden = hidden + self._types[0]
            else:
                second = [np.arange(len(sequences[i]), dtype=np.int32) >= splits[i] for i in order]
                kinds = np.concatenate(second).astype(np.int32)
                hidden = hidden + F.embedding(self._on_device(kinds), self._types)
        return self._norm(hidden, self._embedding_norm)

    def _layer(self, layer: _Layer, hidden: Tensor, runs: Sequence[_Run]) -> Tensor:
        mixed = self._attention(layer.qkv(hidden), runs)
        hidden = self._norm(layer.attention_out(mixed).add_(hidden), layer.attention_norm)
        inner = self._act(layer.inner(hidden))
        return self._norm(layer.out(inner).add_(hidden), layer.norm)

    def _attention(self, qkv: Tensor, runs: Sequence[_Run]) -> Tensor:
        heads, width = self.spec.heads, self.spec.hidden // self.spec.heads
        mixed = torch.empty((qkv.shape[0], self.spec.hidden), dtype=qkv.dtype, device=qkv.device)
        for run in runs:
            rows = slice(run.start, run.start + run.count * run.length)
            parts = qkv[rows].view(run.count, run.length, 3, heads, width)
            query, key, value = (parts[:, :, index].transpose(1, 2) for index in range(3))
            bias = self._bias(run.length)
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            shape = (run.count, run.length, heads, width)
            mixed[rows].view(shape).copy_(found.transpose(1, 2))
        return mixed

    def _pooled(self, hidden: Tensor, run: _Run) -> Tensor:
        rows = hidden[run.start : run.start + run.count * run.length]
        tokens = rows.view(run.count, run.length, -1)
        if self.spec.is_cross:
            return tokens[:, 0]
        parts = [_POOL[name](tokens) for name in self.spec.pooling]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _bias(self, length: int) -> Tensor | None:
        """MPNet's bias by the distance of two tokens."""
        if self._relative is None:
            return None
        found = self._biases.get(length)
        if found is None:
            buckets = _mpnet_buckets(length).to(self.device)
            found = F.embedding(buckets, self._relative).permute(2, 0, 1)[None].contiguous()
            if len(self._biases) >= _MAX_BIASES:
                self._biases.clear()
            self._biases[length] = found
        return found

    def _norm(self, hidden: Tensor, norm: _Affine) -> Tensor:
        shape = (hidden.shape[-1],)
        return F.layer_norm(hidden, shape, norm.weight, norm.bias, self.spec.norm_eps)

    def _on_device(self, values: Ids) -> Tensor:
        return torch.from_numpy(values).to(self.device)


_MAX_BIASES = 64
_POOL: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda tokens: tokens[:, 0],
    "max": lambda tokens: tokens.amax(1),
    "mean": lambda tokens: tokens.mean(1),
    "mean_sqrt_len": lambda tokens: tokens.sum(1) / math.sqrt(tokens.shape[1]),
    "last": lambda tokens: tokens[:, -1],
}


def _runs(lengths: Sequence[int]) -> Iterator[_Run]:
    start = 0
    for length, members in groupby(lengths):
        count = len(list(members))
        yield _Run(start, count, length)
        start += count * length


class _Tensors:
    """The tensors of a checkpoint by BERT's names, with or without the prefix of a head."""

    def __init__(self, spec: EncoderModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self._file: Checkpoint = open_checkpoint(spec.path)
        self._names = {_current_name(name): name for name in self._file.names()}
        self._prefix = FAMILIES[spec.family].prefix
        self.num_bytes = 0

    def find(self, name: str) -> Tensor | None:
        stored = self._names.get(self._prefix + name) or self._names.get(name)
        if stored is None:
            return None
        found = dense(self._file.read(stored)).to(device=self._device, dtype=self._dtype)
        self.num_bytes += found.numel() * found.element_size()
        # the file is mapped: a copy keeps the pages of the process apart from it
        return found.clone() if found.device.type == "cpu" else found

    def get(self, name: str) -> Tensor:
        found = self.find(name)
        if found is None:
            raise WeightsError(f"{self._spec.path}: has no tensor {name!r}. Is it an encoder?")
        return found

    def affine(self, name: str) -> _Affine:
        return _Affine(self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def layer(self, index: int) -> _Layer:
        family, hidden, inner = self._spec.family, self._spec.hidden, self._spec.inner
        names = _LAYER_NAMES.get(family, {})
        stem = f"{'transformer' if family == 'distilbert' else 'encoder'}.layer.{index}."

        def part(name: str, rows: int, columns: int = 0) -> _Affine:
            found = self.affine(stem + names.get(name, name))
            shape = (rows, columns) if columns else (rows,)
            if found.weight.shape != shape or found.bias.shape != (rows,):
                raise WeightsError(f"{self._spec.path}: {name} of layer {index} has a wrong shape.")
            return found

        three = [part(f"attention.self.{it}", hidden, hidden) for it in ("query", "key", "value")]
        return _Layer(
            _Affine(torch.cat([it.weight for it in three]), torch.cat([it.bias for it in three])),
            part("attention.output.dense", hidden, hidden),
            part("attention.output.LayerNorm", hidden),
            part("intermediate.dense", inner, hidden),
            part("output.dense", hidden, inner),
            part("output.LayerNorm", hidden),
        )


def _current_name(name: str) -> str:
    """Old checkpoints call the parts of a norm gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _head(spec: EncoderModelSpec, tensors: _Tensors) -> Callable[[Tensor], Tensor]:
    """The score of a cross-encoder from the first token of the pair."""
    if spec.family == "bert":
        first, last = tensors.affine("pooler.dense"), tensors.affine("classifier")
    elif spec.family == "distilbert":
        first, last = tensors.affine("pre_classifier"), tensors.affine("classifier")
    else:
        first, last = tensors.affine("classifier.dense"), tensors.affine("classifier.out_proj")
    between = F.relu if spec.family == "distilbert" else torch.tanh
    if last.weight.shape[0] != 1:
        raise WeightsError(f"{spec.path}: its classifier has more than one score.")
    return lambda pooled: last(between(first(pooled)))


def _dense_layers(
    spec: EncoderModelSpec, device: torch.device, dtype: torch.dtype
) -> list[tuple[_Affine, Callable[[Tensor], Tensor]]]:
    layers: list[tuple[_Affine, Callable[[Tensor], Tensor]]] = []
    for item in spec.dense:
        tensors = read_file(spec.path / item.folder / "model.safetensors")
        if "linear.weight" not in tensors:
            raise WeightsError(f"{spec.path}: {item.folder} has no tensor 'linear.weight'.")
        weight = dense(tensors["linear.weight"]).to(device=device, dtype=dtype)
        bias = torch.zeros(weight.shape[0], device=device, dtype=dtype)
        if "linear.bias" in tensors:
            bias = dense(tensors["linear.bias"]).to(device=device, dtype=dtype)
        activation = torch.tanh if item.activation == "tanh" else _same
        layers.append((_Affine(weight, bias), activation))
    return layers


def _same(x: Tensor) -> Tensor:
    return x


def _mpnet_buckets(length: int) -> Tensor:
    """T5's buckets in both directions: exact for near tokens, logarithmic for distant ones."""
    places = torch.arange(length)
    distance = places[:, None] - places[None, :]
    half = _MPNET_BUCKETS // 2
    buckets = (distance < 0).long() * half
    distance, exact = distance.abs(), half // 2
    scaled = torch.log(distance.float() / exact) / math.log(_MPNET_DISTANCE / exact)
    far = exact + (scaled * (half - exact)).long()
    far = torch.minimum(far, torch.full_like(far, half - 1))
    return buckets + torch.where(distance < exact, distance, far)
