"""The kinds of adapters as stored in files: PEFT's name, the tensors, device memory.

No torch. `ADAPTERS` (adapters/kinds/table.py) adds how a kind is read and applied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError
from coterie.packages.paths import CONFIG, WEIGHTS
from coterie.packages.safetensors_header import read_header

# adapter_config.json
PeftConfig = Mapping[str, Any]
# header of a safetensors file: name -> dtype, shape, data_offsets
TensorHeader = Mapping[str, Mapping[str, Any]]

MAX_SOFT_TOKENS = 1 << 16
# PEFT writes this with an adapter of the output head: the base's own weight, which is not loaded
BASE_HEAD = "base_model.model.lm_head.base_layer.weight"

# alignment of a tensor, and of a stack (adapters/compose.py)
_TENSOR_ALIGN, _STACK_ALIGN = 64, 256
_WIDE, _NARROW = 4, 2


@dataclass(frozen=True, slots=True)
class DeviceSize:
    """Device memory in bytes; sizes of a stack add up."""

    # if stored in fp32
    wide: int
    # if all factors of the stack can stay in bf16; 0 = the factors of this adapter cannot
    narrow: int
    # extra bytes on a base with biases
    shifts: int


@dataclass(frozen=True, slots=True)
class AdapterFormat:
    """How one kind is stored."""

    peft_type: str
    # what follows a module's path in the names of its tensors
    suffixes: tuple[str, ...]
    # if several kinds have the same peft_type: the config key that only this kind sets
    option: str = ""
    # suffixes of tensors that scale a module's output: on a base with biases each of them also
    # needs a shift of the same length
    output_scales: tuple[str, ...] = ()
    # whether tensors stored in bf16 can stay in bf16: with this config, scaling them is exact
    keeps_bf16: Callable[[PeftConfig], bool] | None = None
    # the config key with the number of soft tokens
    tokens_option: str = ""

    def device_size(self, header: TensorHeader, config: PeftConfig) -> DeviceSize:
        """The size with every tensor in fp32, or all in bf16. A kind whose composed form is larger
        than what it stores overrides this."""
        shapes = {name: facts for name, facts in header.items() if name != BASE_HEAD}
        scales = [f for name, f in shapes.items() if name.endswith(self.output_scales)]
        narrow = 0
        if self.keeps_bf16 is not None and all(f["dtype"] == "BF16" for f in shapes.values()):
            narrow = _nbytes(shapes.values(), _NARROW) if self.keeps_bf16(config) else 0
        return DeviceSize(_nbytes(shapes.values(), _WIDE), narrow, _nbytes(scales, _WIDE))

    def soft_tokens(self, config: PeftConfig, where: str = CONFIG) -> int:
        if not self.tokens_option:
            return 0
        count = config.get(self.tokens_option)
        if type(count) is not int or not 0 < count <= MAX_SOFT_TOKENS:
            raise WeightsError(
                f"{where}: {self.tokens_option} must be a whole number from 1 to "
                f"{MAX_SOFT_TOKENS}, not {str(count)[:40]!r}"
            )
        return count


def is_exact(strength: float) -> bool:
    """Whether a bf16 number can be multiplied by it without rounding."""
    return abs(math.frexp(strength)[0]) == 0.5


def has_exact_scalings(config: PeftConfig) -> bool:
    """Whether every scaling that a LoRA's config can give a module is a power of two."""
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    alphas = [config.get("lora_alpha", 8), *(config.get("alpha_pattern") or {}).values()]
    if not all(type(n) in (int, float) for n in (*ranks, *alphas)):
        return False
    root = math.sqrt if config.get("use_rslora") else float
    return all(rank > 0 and is_exact(alpha / root(rank)) for rank in ranks for alpha in alphas)


LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
IA3_L = ".ia3_l"
PROMPT = "prompt_embeddings"

FORMATS: dict[str, AdapterFormat] = {
    "lora": AdapterFormat("LORA", (LORA_A, LORA_B), keeps_bf16=has_exact_scalings),
    "dora": AdapterFormat(
        "LORA", (LORA_A, LORA_B, MAGNITUDE), option="use_dora", output_scales=(MAGNITUDE,)
    ),
    "ia3": AdapterFormat("IA3", (IA3_L,), output_scales=(IA3_L,)),
    "soft_prompt": AdapterFormat("PROMPT_TUNING", (PROMPT,), tokens_option="num_virtual_tokens"),
}


def kind_of(config: PeftConfig, where: str = CONFIG) -> str:
    """The adapter's kind: a key of FORMATS and ADAPTERS."""
    peft_type = config.get("peft_type")
    matches = [
        name
        for name, stored in FORMATS.items()
        if stored.peft_type == peft_type and (not stored.option or config.get(stored.option))
    ]
    if not matches:
        supported = ", ".join(dict.fromkeys(stored.peft_type for stored in FORMATS.values()))
        raise WeightsError(
            f"{where}: peft_type={str(peft_type)[:40]!r} is not supported; one of {supported}"
        )
    # a kind with a matching option is preferred over one without
    return max(matches, key=lambda name: bool(FORMATS[name].option))


def device_size(folder: Path) -> DeviceSize:
    """For the adapter in a PEFT directory, from its config and the header of its tensor file."""
    config = json.loads((folder / CONFIG).read_bytes())
    return FORMATS[kind_of(config)].device_size(read_header(folder / WEIGHTS), config)


def _nbytes(tensors: Iterable[Mapping[str, Any]], width: int) -> int:
    sizes = (_round_up(width * math.prod(facts["shape"]), _TENSOR_ALIGN) for facts in tensors)
    return _round_up(sum(sizes), _STACK_ALIGN)


def _round_up(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
