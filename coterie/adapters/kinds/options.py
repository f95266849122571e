"""Options of PEFT's configs: which are understood, which mean nothing here, and which are refused.

Every option is in one of the three sets, so that no adapter runs with a part of its meaning
missing. Also the matching of module names, as PEFT does it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from coterie.core.errors import WeightsError

PeftConfig = Mapping[str, Any]


def keys(*lines: str) -> frozenset[str]:
    """Names of options, several to a line."""
    return frozenset(name for line in lines for name in line.split())


# written by every kind of config; no matter for what is computed
_NEUTRAL = keys(
    "peft_type peft_version auto_mapping base_model_name_or_path revision inference_mode task_type"
)
_MAX_PATTERN = 400
_PLAIN = re.compile(r"[\w.\-]*")
# letters, classes, groups and alternatives; a quantifier is refused behind a group, and more than
# three are: matching stays cheap whatever the file says
_SAFE = re.compile(r"[\w.\-\\()|\[\]^$*+?{},:=!]*")


def check(config: PeftConfig, understood: frozenset[str], refused: Mapping[str, str]) -> None:
    """Refuses by name every option that is set and not `understood`; `refused` has the reasons."""
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
    """rank_pattern and the like: an object, or nothing."""
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


def pick(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The first pattern's value that matches the end of `path`, as PEFT's get_pattern_key."""
    for key, value in patterns.items():
        if path.endswith(key) and (len(key) == len(path) or path[-len(key) - 1] == "."):
            return value
        if not _PLAIN.fullmatch(key) and matcher(rf"(.*\.)?({key})$", key)(path):
            return value
    return default


def targeting(targets: list[str] | str | None) -> Callable[[str], bool]:
    """Tells whether PEFT would adapt the module at a path."""
    if targets is None or targets == "all-linear":
        return lambda path: True
    if isinstance(targets, str):
        return matcher(f"(?:{targets})$", targets)
    whole, ends = frozenset(targets), tuple(f".{name}" for name in targets)
    return lambda path: path.endswith(ends) or path in whole


def matcher(pattern: str, shown: str) -> Callable[[str], bool]:
    """Tells whether a path matches from its start. Patterns come with files: only cheap ones."""
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
