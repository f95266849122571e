"""Chooses the kernels of a device, and makes products of that backend from stored weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from coterie.core.errors import ConfigError
from coterie.kernels.linear import Linear, ReferenceLinear
from coterie.weights.quantize import Weight


def best_backend(device: torch.device | str) -> str:
    """ "cpu" (native kernels) where the module is available, "triton" on CUDA, else "reference"."""
    from coterie.kernels.cpu.build import native

    kind = torch.device(device).type
    if kind == "cuda" and find_spec("triton"):
        return "triton"
    return "cpu" if kind == "cpu" and native() else "reference"


def make_linear(
    weights: Sequence[Weight], backend: str, device: torch.device | str = "cpu"
) -> Linear:
    """One product over the concatenated rows of `weights` (q, k, v or gate, up)."""
    if backend == "reference":
        return ReferenceLinear(weights, device)
    if backend == "cpu":
        from coterie.kernels.cpu.layers import PackedLinear

        return PackedLinear(weights)
    if backend == "triton":
        from coterie.kernels.triton.quant_linear import quantised

        return quantised(weights, device) or ReferenceLinear(weights, device)
    raise ConfigError(f"unknown kernel backend {backend!r}; use 'reference', 'cpu' or 'triton'")
