"""Options of PEFT's configs: understood, without effect here, or refused.

Every option is in one of the three sets, so that no adapter runs with an option ignored by mistake.
Also maps tensors to modules, by PEFT's names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import AdapterFormat, PeftConfig

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."


def keys(*lines: str) -> frozenset[str]:
    """Names of options, several in one text."""
    return frozenset(name for line in lines for name in line.split())


# in configs of every kind; no effect on what is computed
_NEUTRAL = keys(
    "peft_type peft_version auto_mapping base_model_name_or_path revision inference_mode task_type"
)
_MAX_PATTERN = 400
_PLAIN = re.compile(r"[\w.\-]*")
# letters, classes, groups and alternatives. A quantifier after a group and more than three
# quantifiers are refused, so that matching is always fast
_SAFE = re.compile(r"[\w.\-\\()|\[\]^$*+?{},:=!]*")


def check(config: PeftConfig, understood: frozenset[str], refused: Mapping[str, str]) -> None:
    """Refuses by name every option that is set but not `understood`; `refused` has the reasons."""
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise WeightsError(
            f"adapter_config.json: task_type={config['task_type']!r}; only CAUSAL_LM adapters run"
        )
    for key, value in config.items():
        if key in understood or key in _NEUTRAL or value is None or value in (False, "", [], {}):
            continue
        reason = refused.get(key, "this option is not known here, and may change what is computed")
        raise WeightsError(f"adapter_config.json: {key}={_short(value)} is not supported: {reason}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def flag(config: PeftConfig, key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise WeightsError(f"adapter_config.json: {key} must be true or false, not {_short(value)}")
    return bool(value)


def whole(config: PeftConfig, key: str, low: int, high: int) -> int:
    value = config.get(key)
    if type(value) is not int or not low <= value <= high:
        raise WeightsError(
            f"adapter_config.json: {key} must be a whole number from {low} to {high}, "
            f"not {_short(value)}"
        )
    return value


def number(value: object, key: str) -> float:
    good = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if not good:
        raise WeightsError(f"adapter_config.json: {key} must be a number, not {_short(value)}")
    return float(value)  # type: ignore[arg-type]


def table(config: PeftConfig, key: str) -> Mapping[str, Any]:
    """rank_pattern and similar: an object, or nothing."""
    value = config.get(key) or {}
    if not isinstance(value, dict) or len(value) > 100_000:
        raise WeightsError(f"adapter_config.json: {key} must be an object, not {_short(value)}")
    return value


def names(config: PeftConfig, key: str) -> list[str] | str | None:
    """A list of module names, one regular expression, or nothing."""
    value = config.get(key)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise WeightsError(
            f"adapter_config.json: {key} must be a list of names or one pattern, "
            f"not {_short(value)}"
        )
    return value


def modules(
    config: PeftConfig, tensors: Mapping[str, Tensor], stored: AdapterFormat
) -> dict[str, dict[str, Tensor]]:
    """The tensors of each module: path -> suffix -> tensor. Every tensor must belong to a module
    that target_modules names, and every module must have all of its tensors."""
    is_target = targeting(names(config, "target_modules"))
    by_path: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        suffix = next((end for end in stored.suffixes if name.endswith(end)), "")
        if not suffix or not name.startswith(PREFIX):
            raise WeightsError(
                f"{name!r} is no tensor of a {stored.peft_type} adapter as PEFT saves one"
            )
        path = name[len(PREFIX) : -len(suffix)]
        if path not in by_path and not is_target(path):
            raise WeightsError(f"{name!r}: target_modules does not name {path}")
        by_path.setdefault(path, {})[suffix] = tensor
    for path, parts in by_path.items():
        if len(parts) < len(stored.suffixes):
            missing = next(end for end in stored.suffixes if end not in parts)
            raise WeightsError(f"{path}: lacks {missing[1:]}")
    return by_path


def pick(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of `path`, as PEFT's get_pattern_key."""
    for key, value in patterns.items():
        if path.endswith(key) and (len(key) == len(path) or path[-len(key) - 1] == "."):
            return value
        if not _PLAIN.fullmatch(key) and matcher(rf"(.*\.)?({key})$", key)(path):
            return value
    return default


def targeting(targets: list[str] | str | None) -> Callable[[str], bool]:
    """A function that tells whether PEFT would adapt the module at a path."""
    if targets is None or targets == "all-linear":
        return lambda path: True
    if isinstance(targets, str):
        return matcher(f"(?:{targets})$", targets)
    whole, ends = frozenset(targets), tuple(f".{name}" for name in targets)
    return lambda path: path.endswith(ends) or path in whole


def matcher(pattern: str, shown: str) -> Callable[[str], bool]:
    """A function that tells whether a path matches from its start. Patterns come from files: only
    fast ones are allowed."""
    quantifiers = len(re.findall(r"[*+{]", shown))
    nested = re.search(r"\)[*+{]", shown)
    if len(shown) > _MAX_PATTERN or not _SAFE.fullmatch(shown) or quantifiers > 3 or nested:
        raise WeightsError(
            f"adapter_config.json: the pattern {_short(shown)} is too involved; name the modules"
        )
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise WeightsError(
            f"adapter_config.json: {_short(shown)} is not a pattern ({error})"
        ) from error
    return lambda path: compiled.match(path) is not None
