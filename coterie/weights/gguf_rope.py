"""Rope scaling in GGUF metadata, as the `rope_scaling` of config.json. Refuses other kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.core.errors import WeightsError
from coterie.weights.gguf_keys import Keys, short

ROPE_FACTORS = "rope_freqs.weight"


def rope_scaling(
    keys: Keys, head_dim: int, factors: Sequence[float] | None
) -> dict[str, Any] | None:
    if factors is not None:
        return _from_factors(keys, head_dim, factors)
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.real("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(keys)
    raise WeightsError(
        f"{keys.file.path}: rope scaling {str(kind)[:60]!r} is not supported in GGUF files. "
        "Use the safetensors directory of the model."
    )


def _yarn(keys: Keys) -> dict[str, Any]:
    factor = keys.real("rope.scaling.factor")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = keys.real(f"rope.scaling.yarn_{key}")
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if multiplier:
        # DeepSeek: a tenth of mscale_all_dim, and mscale is taken to be the same
        both = short(keys.real("rope.scaling.yarn_log_multiplier") * 10)
        scaling |= {"mscale": both, "mscale_all_dim": both}
    if keys.get("rope.scaling.attn_factor") is not None:
        # GGUF stores what is multiplied onto the usual magnitude, HF the whole product
        usual = 0.1 * math.log(factor) + 1.0
        scaling["attention_factor"] = keys.real("rope.scaling.attn_factor") * usual
    return scaling


def _from_factors(keys: Keys, head_dim: int, factors: Sequence[float]) -> dict[str, Any] | None:
    """What the divisors of the rotary frequencies mean in HF words.

    Llama 3 scaling when its formula gives these divisors, else longrope with them for any length.
    """
    values = np.asarray(factors, dtype=np.float64)
    sound = values.shape == (head_dim // 2,) and bool(np.all((values > 0) & (values < 1e6)))
    if not sound:
        raise WeightsError(
            f"{keys.file.path}: tensor {ROPE_FACTORS!r} must hold {head_dim // 2} positive "
            "numbers. Convert the model again."
        )
    if np.all(values == 1.0):
        return None
    original = keys.whole("rope.scaling.original_context_length", 8192)
    llama3 = {
        "rope_type": "llama3",
        "factor": short(float(values.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    theta = keys.real("rope.freq_base", 10_000.0)
    expected = _llama3_factors(theta, head_dim, float(values.max()), original)
    if np.allclose(values, expected, rtol=1e-5):
        return llama3
    return {
        "rope_type": "longrope",
        "short_factor": values.tolist(),
        "long_factor": values.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": keys.whole("context_length"),
    }


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> Any:
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
