"""JSON files of a model directory, with a sentence for each thing that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError

_MAX_BYTES = 64_000_000


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or a WeightsError."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise WeightsError(f"{path}: {size} bytes is too large for this file. Fetch it again.")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise WeightsError(
            f"{path}: missing. Give a directory with config.json, the tokenizer and safetensors."
        ) from error
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Check it.") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON. Fetch it again.") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object. Fetch it again.")
    return value
