"""Reads tensors from a checkpoint at one precision, for one backend and device.

Checks that every tensor exists, has the right shape and is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.kernels.backend import best_backend, make_linear
from coterie.kernels.linear import Linear
from coterie.kernels.reference.layers import HeadLinear
from coterie.models.build.targets import TargetMatrix, site_of
from coterie.weights.formats.gguf_blocks import NotFinite
from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Weight, convert, dense, split

if TYPE_CHECKING:
    from coterie.models.spec import ModelSpec
    from coterie.weights.checkpoint import Checkpoint

# what is packed need not stay mapped: loading takes hardly more than the packed model
_MOST_MAPPED_BYTES = 32 << 20

# Buffers in older files; they are computed here.
_COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


def keeps(device: str, kind: str) -> bool:
    """Whether products on this device read a kind of matrix; one that they do not is widened."""
    on_cpu = torch.device(device).type == "cpu"
    return kind not in BLOCK_KINDS or on_cpu or best_backend(device) == "triton"


class BiasedLinear:
    """A product with a bias, for the few models that have one after o or in the MLP."""

    def __init__(self, product: Linear, bias: Tensor) -> None:
        self.product, self.bias = product, bias
        self.in_features, self.out_features = product.in_features, product.out_features

    @property
    def nbytes(self) -> int:
        return self.product.nbytes + self.bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) + self.bias.to(x.dtype)


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """The products' backend, the device, and the type of activations."""

    backend: str
    device: str
    hidden_dtype: torch.dtype


class TensorReader:
    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, dtype: str, placement: TensorPlacement
    ) -> None:
        self.spec, self.dtype, self.placement = spec, dtype, placement
        self.device = torch.device(placement.device)
        # of all products
        self.product_bytes = 0
        # what adapters may change, by module path
        self.targets: dict[str, TargetMatrix] = {}
        self._checkpoint = checkpoint
        # tensors that were read since the last product was made
        self._taken: list[str] = []
        # bytes that were read since their pages were given back
        self._mapped_bytes = 0
        self._left = {name for name in checkpoint.names() if not name.endswith(_COMPUTED)}
        self._left -= _expert_names(spec, self._left)

    def finish(self) -> None:
        """Raise unless every tensor was read: leaving one out would change the model."""
        if self._left:
            raise WeightsError(
                f"{self._checkpoint.path}: {self.spec.architecture} has no place for the tensor "
                f"{min(self._left)!r} ({len(self._left)} such tensors)"
            )

    def drop(self, name: str) -> None:
        """Ignore a tensor that repeats another one (the head of a tied model)."""
        self._left.discard(name)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, biased: bool = False
    ) -> Linear:
        """One product of the rows of all `names`; with their biases if `biased`."""
        pairs = list(zip(names, rows, strict=True))
        product = self.product([self.matrix(name + ".weight", n, columns) for name, n in pairs])
        biases = [self.vector(name + ".bias", n) for name, n in pairs] if biased else []
        self.add_targets(product, names, rows, biases)
        return BiasedLinear(product, torch.cat(biases)) if biased else product

    def add_targets(
        self,
        product: Linear,
        names: Sequence[str],
        rows: Sequence[int],
        biases: Sequence[Tensor] = (),
        order: Tensor | None = None,
    ) -> None:
        """Let adapters change these modules, which are consecutive rows of `product`."""
        first = 0
        for place, (name, count) in enumerate(zip(names, rows, strict=True)):
            site = site_of(name)
            if site is not None:
                bias = biases[place] if biases else None
                read = self.reread(name + ".weight", self.dtype)
                self.targets[name] = TargetMatrix(site, product, first, count, read, bias, order)
            first += count

    def reread(self, name: str, dtype: str) -> Callable[[], Tensor]:
        """A function that reads the tensor again at `dtype` and returns it dense."""
        checkpoint = self._checkpoint
        return lambda: dense(convert(checkpoint.read(name), dtype))

    @contextmanager
    def naming(self, names: str) -> Iterator[None]:
        """Says which tensors have a scale that is not a finite number."""
        try:
            yield
        except NotFinite:
            raise NotFinite(f"{self._checkpoint.path}: {names}: ") from None

    def product(self, weights: Sequence[Weight]) -> Linear:
        with self.naming(", ".join(self._taken)):
            product = make_linear(weights, self.placement.backend, self.device)
        self._taken.clear()
        self.product_bytes += product.nbytes
        return product

    def per_head(self, weights: Sequence[Weight]) -> HeadLinear:
        product = HeadLinear(weights, self.placement.backend, self.device)
        self.product_bytes += product.nbytes
        return product

    def matrix(self, name: str, rows: int, columns: int, dtype: str | None = None) -> Weight:
        return self.fitted(self.take(name, (rows, columns)), dtype or self.dtype)

    def fitted(self, weight: Weight, dtype: str) -> Weight:
        """`weight` at `dtype`, in a form that the device's kernels read."""
        made = convert(weight, dtype)
        if isinstance(made, GgufBlocks) and not keeps(self.placement.device, made.kind):
            return DenseWeight(dense(made))
        on_cpu = self.device.type == "cpu" and self.placement.backend != "triton"
        return made if on_cpu else split(made)

    def exact(self, name: str, rows: int, columns: int) -> Linear:
        """A product that stays in fp32: a rounded gate would choose other experts."""
        return self.product([DenseWeight(dense(self.take(name, (rows, columns))))])

    def vector(self, name: str, size: int) -> Tensor:
        return dense(self.take(name, (size,)), self.placement.hidden_dtype).to(self.device)

    def has(self, name: str) -> bool:
        return name in self._left

    def rows(self, name: str) -> int:
        """Rows in the file, for tables of which the config may use only a part."""
        return self._checkpoint.shape(name)[0]

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        if name not in self._left:
            raise WeightsError(f"{self._checkpoint.path}: the tensor {name!r} is missing")
        self._left.discard(name)
        found = tuple(self._checkpoint.shape(name))
        if found != shape:
            raise WeightsError(
                f"{self._checkpoint.path}: {name!r} has shape {found}; config asks for {shape}"
            )
        self._taken.append(name)
        self._mapped_bytes += self._checkpoint.extent(name).nbytes
        if self._mapped_bytes > _MOST_MAPPED_BYTES:
            self._checkpoint.unmap()
            self._mapped_bytes = 0
        return self._checkpoint.read(name)


def _expert_names(spec: ModelSpec, names: set[str]) -> set[str]:
    """Tensors of the routed experts, single or stacked: the expert store reads them."""
    if spec.moe is None:
        return set()
    stems = {template.split("{expert}")[0] for template in spec.moe.parts.values()}
    prefixes = tuple(stem.format(layer=layer) for stem in stems for layer in spec.moe.layers)
    return {name for name in names if name.startswith(prefixes)}
