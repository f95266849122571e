"""PEFT directories and packages for tests, written byte by byte: no torch, no peft."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

from coterie.packages.archive import Package, pack, repack
from coterie.packages.directory import collect
from coterie.packages.manifest import from_document
from coterie.packages.signing import new_key, signed

FINGERPRINT = "ab" * 32


def safetensors(tensors: dict[str, tuple[list[int], bytes]], dtype: str = "F32") -> bytes:
    header: dict[str, Any] = {}
    reached = 0
    for name, (shape, data) in tensors.items():
        offsets = [reached, reached + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        reached += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(d for _, d in tensors.values())


def lora_directory(path: Path, seed: int = 0, floats: int = 64) -> Path:
    """What PEFT's save_pretrained writes, with random weights of `floats` numbers."""
    rng = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    half = floats // 2
    tensors = {
        name.format(part): (shape, struct.pack(f"<{half}f", *(rng.gauss() for _ in range(half))))
        for part, shape in (("A", [4, half // 4]), ("B", [half // 4, 4]))
    }
    (path / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "README.md").write_text("# An expert\n")
    return path


def document(name: str = "sql", version: str = "1.0.0", **more: Any) -> dict[str, Any]:
    base = {"name": "tiny", "fingerprint": FINGERPRINT}
    return {
        "schema_version": "2.0", "name": name, "version": version, "base_models": [base], **more,
    }  # fmt: skip


def package(
    folder: Path,
    name: str = "sql",
    version: str = "1.0.0",
    seed: int = 0,
    floats: int = 64,
    **more: Any,
) -> Package:
    """An unsigned package; its file is `.source`."""
    directory = lora_directory(folder / f"{name}-{version}-{seed}", seed, floats)
    out = folder / f"{name}-{version}-{seed}.expert"
    return pack(collect(directory).files, from_document(document(name, version, **more)), out)


def signed_file(folder: Path, key: Path, **options: Any) -> Path:
    if not key.exists():
        new_key(key)
    made = package(folder, **options)
    assert isinstance(made.source, Path)
    repack(made, signed(made, key.read_bytes()), made.source)
    return made.source
