"""A library of random LoRA adapters and a model of plain matrices, for the tests of the pool."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from coterie.adapters.base import TargetModule
from coterie.adapters.files import AdapterLibrary
from coterie.adapters.pool import AdapterPool
from coterie.core.adapters import AdaptableModules, AdapterSettings
from coterie.core.errors import WeightsError
from coterie.core.plan import AdapterChoice, stack_key
from coterie.kernels.patch import PatchStack, Site
from coterie.packages.paths import digest_of

WIDE, TALL, LAYERS = 48, 64, 2
PATHS = tuple(f"model.layers.{i}.self_attn.{p}_proj" for i in range(LAYERS) for p in "qv")


class PlainTarget:
    def __init__(self, site: Site, weight: Tensor) -> None:
        self.site, self._weight = site, weight
        self.out_features, self.in_features = weight.shape
        self.bias: Tensor | None = None
        self.order: Tensor | None = None

    def row_norms_squared(self) -> Tensor:
        return self._weight.double().square().sum(1)

    def project(self, x: Tensor) -> Tensor:
        return x @ self._weight.T


class PlainTargets:
    hidden = WIDE

    def __init__(self, wide: int = WIDE, tall: int = TALL, layers: int = LAYERS) -> None:
        draw = torch.Generator().manual_seed(0)
        self._targets: dict[str, TargetModule] = {}
        for layer in range(layers):
            for part in "qv":
                weight = torch.randn(tall, wide, generator=draw)
                path = f"model.layers.{layer}.self_attn.{part}_proj"
                self._targets[path] = PlainTarget((layer, part), weight)

    def modules(self) -> AdaptableModules:
        raise AssertionError("only checks without weights ask for these")

    def find(self, path: str) -> TargetModule:
        if path not in self._targets:
            raise WeightsError(f"{path}: the model has no such module")
        return self._targets[path]


def write_lora(
    root: Path, seed: int, rank: int = 4, paths: Sequence[str] = PATHS, wide: int = WIDE,
    tall: int = TALL, dtype: torch.dtype = torch.float32,
) -> str:  # fmt: skip
    """A random adapter in a library; its digest."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in paths:
        name = f"base_model.model.{path}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, wide, generator=draw).to(dtype)
        tensors[f"{name}.lora_B.weight"] = torch.randn(tall, rank, generator=draw).to(dtype)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "plain", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    return put_adapter(root, config, save(tensors), f"draft-{seed}")


def put_adapter(root: Path, config: dict[str, Any], weights: bytes, draft: str) -> str:
    folder = root / draft
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    digest = digest_of(folder)
    folder.rename(root / digest)
    return digest


def open_pool(root: Path, device_bytes: int = 10**6, host_bytes: int = 10**7, **more: Any) -> Any:
    settings = AdapterSettings(device_bytes=device_bytes, host_bytes=host_bytes)
    targets = more.pop("targets", None) or PlainTargets()
    device = torch.device(more.pop("device", "cpu"))
    return AdapterPool(AdapterLibrary(root), targets, settings, device, **more)


def choose(*digests: str, weight: float = 1.0) -> tuple[AdapterChoice, ...]:
    return tuple(AdapterChoice(digest[:8], digest, weight) for digest in digests)


def settle(pool: AdapterPool, key: str, timeout_s: float = 20.0) -> str:
    """The state once loading has ended."""
    until = time.monotonic() + timeout_s
    while (state := pool.state(key)) == "loading":
        assert time.monotonic() < until, "the load never ends"
        pool.wait(0.05)
    return state


def fetch(pool: AdapterPool, adapters: tuple[AdapterChoice, ...]) -> PatchStack:
    """Want, wait and take."""
    pool.want(adapters)
    key = stack_key(adapters)
    until = time.monotonic() + 60
    while (state := pool.state(key)) != "ready":
        assert state != "failed", pool.failure(key)
        assert time.monotonic() < until, f"still {state}"
        pool.wait(0.05)
    return pool.take(key)


def delta(stack: PatchStack, path: str = PATHS[0]) -> Tensor:
    """What the stack adds to a matrix: [out, in]."""
    layer, part = int(path.split(".")[2]), path.split(".")[4][0]
    patch = stack.patches[layer, part]
    assert patch.a is not None and patch.b is not None
    return (patch.b.float().T @ patch.a.float()).cpu()


def stored_delta(root: Path, digest: str, path: str = PATHS[0], weight: float = 1.0) -> Tensor:
    """The same from the file."""
    from safetensors.torch import load_file

    tensors = load_file(root / digest / "adapter_model.safetensors")
    name = f"base_model.model.{path}"
    return weight * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
