"""The identity of an adapter: one digest of its config and its weights.

Names, versions and manifests do not enter it: the same bytes are the same adapter, whoever ships
them. Reads files; knows no package and no registry.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from coterie.core.errors import WeightsError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_CHUNK_BYTES = 1 << 20


def adapter_digest(config_sha256: str, weights_sha256: str) -> str:
    """Of the two files' own sha256, in hex."""
    text = f"coterie-adapter-1\n{CONFIG}:{config_sha256}\n{WEIGHTS}:{weights_sha256}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(directory: Path) -> str:
    return adapter_digest(file_sha256(directory / CONFIG), file_sha256(directory / WEIGHTS))


def file_sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    return hasher.hexdigest()
