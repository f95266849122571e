"""Rotary position embedding: every scaling variant of the family, as cos and sin tables.

The tables equal those of transformers, computed once for the longest served context. This module
knows nothing about attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """`parameters` are the file's own (factor, beta_fast, long_factor, ...)."""

    kind: str
    theta: float
    head_dim: int
    # positions that the model was made for, as the file says
    max_positions: int
    original_max_positions: int
    # positions that are served: some variants depend on this length
    served_positions: int
    parameters: dict[str, Any]

    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [served_positions, head_dim / 2], times the attention factor."""
        import torch

        frequencies, factor = VARIANTS[self.kind](self)
        angles = torch.arange(self.served_positions).float()[:, None] * frequencies
        return angles.cos() * factor, angles.sin() * factor

    def magnitude(self) -> float:
        """The factor of DeepSeek's queries and keys that is not in the tables (mscale_all_dim)."""
        all_dim = self.parameters.get("mscale_all_dim")
        if self.kind == "default" or not all_dim:
            return 1.0
        return _yarn_scale(float(self.parameters["factor"]), float(all_dim))


def read_rope(config: dict[str, Any], head_dim: int, served_positions: int) -> Rope:
    """From `rope_parameters` (new files) or `rope_scaling` and `rope_theta` (older ones)."""
    parameters, kind = _parameters(config), rope_kind(config)
    if kind not in VARIANTS:
        raise WeightsError(f"config: rope_type {kind!r} is not supported; known: {[*VARIANTS]}")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise WeightsError("config: partial_rotary_factor is not supported")
    if head_dim % 2:
        raise WeightsError(f"config: head_dim must be even for rotary embedding, not {head_dim}")
    for key in _REQUIRED.get(kind, ()):
        if parameters.get(key) is None:
            raise WeightsError(f"config: rope_type {kind!r} needs {key}")
    limit = config.get("max_position_embeddings") or 2048
    original = config.get("original_max_position_embeddings")
    original = original or parameters.get("original_max_position_embeddings") or limit
    return Rope(
        kind=kind,
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        head_dim=head_dim,
        max_positions=limit,
        original_max_positions=original,
        served_positions=served_positions,
        parameters=parameters,
    )


def rope_kind(config: dict[str, Any]) -> str:
    parameters = _parameters(config)
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _parameters(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def _powers(rope: Rope, theta: float) -> Tensor:
    """theta ** (2i / head_dim), in fp32 as in transformers."""
    import torch

    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim
    powers: Tensor = theta**exponents
    return powers


def _default(rope: Rope) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope, rope.theta), 1.0


def _linear(rope: Rope) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope, rope.theta) / rope.parameters["factor"], 1.0


def _dynamic(rope: Rope) -> tuple[Tensor, float]:
    """No change up to the model's own length; for a longer served length, scaled to it."""
    factor, length = rope.parameters["factor"], max(rope.served_positions, rope.max_positions)
    stretch = (factor * length / rope.max_positions) - (factor - 1)
    theta = rope.theta * stretch ** (rope.head_dim / (rope.head_dim - 2))
    return 1.0 / _powers(rope, theta), 1.0


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    given = rope.parameters
    factor = given.get("factor") or rope.max_positions / rope.original_max_positions
    powers = _powers(rope, rope.theta)
    ramp = _yarn_ramp(rope, given.get("beta_fast") or 32, given.get("beta_slow") or 1)
    mixed = (1.0 / (factor * powers)) * ramp + (1.0 / powers) * (1 - ramp)
    attention = given.get("attention_factor")
    if attention is None:
        scale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        attention = _yarn_scale(factor, 1)
        if scale and all_dim:
            attention = _yarn_scale(factor, scale) / _yarn_scale(factor, all_dim)
    return mixed, float(attention)


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_ramp(rope: Rope, fast: float, slow: float) -> Tensor:
    """0 where a dimension keeps its frequency, 1 where it is divided by the factor."""
    import torch

    def dimension(rotations: float) -> float:
        wavelengths = math.log(rope.original_max_positions / (rotations * 2 * math.pi))
        return rope.head_dim * wavelengths / (2 * math.log(rope.theta))

    low, high = dimension(fast), dimension(slow)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low)).clamp(0, 1)
    # the same operations as in transformers, so that the roundings are equal
    return 1 - (1 - ramp)


def _longrope(rope: Rope) -> tuple[Tensor, float]:
    """The long factors when the served context is longer than the original one, else the short
    ones."""
    import torch

    given = rope.parameters
    longer = rope.served_positions > rope.original_max_positions
    stretch = torch.tensor(given["long_factor" if longer else "short_factor"], dtype=torch.float32)
    if len(stretch) != rope.head_dim // 2:
        raise WeightsError(f"config: longrope factors must be {rope.head_dim // 2} numbers")
    attention = given.get("attention_factor")
    if attention is None:
        factor = given.get("factor") or rope.max_positions / rope.original_max_positions
        growth = math.log(factor) / math.log(rope.original_max_positions) if factor > 1 else 0.0
        attention = math.sqrt(1 + growth)
    return 1.0 / (stretch * _powers(rope, rope.theta)), float(attention)


def _llama3(rope: Rope) -> tuple[Tensor, float]:
    import torch

    given, original = rope.parameters, rope.original_max_positions
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    plain = 1.0 / _powers(rope, rope.theta)
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    mixed = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(between, mixed, scaled), 1.0


VARIANTS: dict[str, Callable[[Rope], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
