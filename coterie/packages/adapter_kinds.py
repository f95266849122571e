"""How many bytes an adapter takes beside a model, told from its file's header. No torch.

Adds up over a stack, as the pool composes it (adapters/kinds/patch_builder.py): factors stay bf16
where they are stored so and scaling loses nothing, everything else is fp32.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.packages.paths import CONFIG, WEIGHTS
from coterie.packages.safetensors_header import read_header

# tensors lie at multiples of the one, stacks at multiples of the other (adapters/compose.py)
_TENSOR_ALIGN, _STACK_ALIGN = 64, 256
_WIDE, _NARROW = 4, 2
# what PEFT writes beside the adapter of a head: the base's own weight, which is not loaded
_BASE = ".base_layer.weight"
_FACTORS = (".lora_A.weight", ".lora_B.weight")
# a scale of a module's output brings a shift of the same length along where there is a bias
_SCALES = (".ia3_l", ".lora_magnitude_vector")


@dataclass(frozen=True, slots=True)
class DeviceSize:
    # in fp32
    wide: int
    # in a stack whose factors can all stay in bf16; 0 = this one's cannot
    narrow: int
    # more on a base with biases
    shifts: int


def device_size(folder: Path) -> DeviceSize:
    header = read_header(folder / WEIGHTS)
    shapes = {name: facts for name, facts in header.items() if not name.endswith(_BASE)}
    wide = sum(_nbytes(facts, _WIDE) for facts in shapes.values())
    shifts = sum(_nbytes(f, _WIDE) for name, f in shapes.items() if name.endswith(_SCALES))
    narrow = 0
    if all(n.endswith(_FACTORS) and f["dtype"] == "BF16" for n, f in shapes.items()) and _is_exact(
        folder / CONFIG
    ):
        narrow = sum(_nbytes(facts, _NARROW) for facts in shapes.values())
    return DeviceSize(_up(wide, _STACK_ALIGN), _up(narrow, _STACK_ALIGN), _up(shifts, _STACK_ALIGN))


def is_exact(strength: float) -> bool:
    """Multiplying bf16 by it changes no digit."""
    return abs(math.frexp(strength)[0]) == 0.5


def _is_exact(config: Path) -> bool:
    """Every scaling that the config may give a module is a power of two."""
    facts: dict[str, Any] = json.loads(config.read_bytes())
    ranks = [facts.get("r"), *(facts.get("rank_pattern") or {}).values()]
    alphas = [facts.get("lora_alpha", 8), *(facts.get("alpha_pattern") or {}).values()]
    if facts.get("use_dora") or not all(type(n) in (int, float) for n in (*ranks, *alphas)):
        return False
    root = math.sqrt if facts.get("use_rslora") else float
    return all(rank > 0 and is_exact(alpha / root(rank)) for rank in ranks for alpha in alphas)


def _nbytes(facts: dict[str, Any], width: int) -> int:
    return _up(width * math.prod(facts["shape"]), _TENSOR_ALIGN)


def _up(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
