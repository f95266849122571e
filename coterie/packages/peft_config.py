"""What a registry needs to know from adapter_config.json: the kind, and a soft prompt's length.

Whether every option of it can be run is for `adapters/` to say; here it is only read safely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coterie.core.errors import WeightsError
from coterie.packages.strict_json import parse

MAX_BYTES = 4 << 20
_MAX_VIRTUAL_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    kind: str
    num_virtual_tokens: int
    base_model: str


def read_config(data: bytes, where: str) -> ConfigFacts:
    if len(data) > MAX_BYTES:
        raise WeightsError(f"{where}: refused, {len(data)} bytes are too many for a config.")
    config = parse(data, where)
    kind = _kind(config, where)
    base = config.get("base_model_name_or_path")
    tokens: Any = 0
    if kind == "soft_prompt":
        tokens = config.get("num_virtual_tokens")
        if type(tokens) is not int or not 0 < tokens <= _MAX_VIRTUAL_TOKENS:
            raise WeightsError(f"{where}: num_virtual_tokens is {tokens!r}; train it again.")
    return ConfigFacts(kind, tokens, base if isinstance(base, str) else "")


def _kind(config: dict[str, Any], where: str) -> str:
    peft_type = config.get("peft_type")
    if peft_type == "LORA":
        return "dora" if config.get("use_dora") is True else "lora"
    if peft_type == "IA3":
        return "ia3"
    if peft_type == "PROMPT_TUNING":
        return "soft_prompt"
    raise WeightsError(
        f"{where}: adapters of type {str(peft_type)[:40]!r} are not supported; LORA (with or "
        "without DoRA), IA3 and PROMPT_TUNING are."
    )
