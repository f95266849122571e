"""Small models with experts for tests of stores: safetensors in three spellings, GGUF stacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from coterie.kernels.cpu.expert_record import rounded, unpack_record
from coterie.moe.store.base import ExpertGeometry, ExpertNames, ExpertStore, Key
from coterie.moe.store.checkpoint import open_store
from coterie.weights.checkpoint import Checkpoint, GGUFCheckpoint, open_checkpoint
from coterie.weights.formats.gguf import read_gguf
from coterie.weights.formats.gguf_tensors import map_files
from coterie.weights.quantize import DenseWeight, dense
from tests.helpers.models.gguf_files import add_tensor, finish

HIDDEN, INNER, EXPERTS, LAYERS, TOP_K = 64, 96, 6, (0, 2), 2
STEM = "model.layers.{layer}.mlp.experts.{expert}."
NAMES = ExpertNames({part: f"{STEM}{part}_proj.weight" for part in ("gate", "up", "down")})
PLAIN_NAMES = ExpertNames(
    {
        "fc1": f"{STEM}fc1.weight",
        "fc1_bias": f"{STEM}fc1.bias",
        "fc2": f"{STEM}fc2.weight",
        "fc2_bias": f"{STEM}fc2.bias",
    }
)
GEOMETRY = ExpertGeometry(LAYERS, EXPERTS, TOP_K)

Weights = dict[Key, dict[str, Tensor]]


def draw(dtype: torch.dtype = torch.float32, *, gated: bool = True, seed: int = 0) -> Weights:
    random = torch.Generator().manual_seed(seed)

    def one(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * 0.1).to(dtype)

    shapes: dict[str, tuple[int, ...]]
    if gated:
        shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    else:
        shapes = {
            "fc1": (INNER, HIDDEN), "fc1_bias": (INNER,), "fc2": (HIDDEN, INNER),
            "fc2_bias": (HIDDEN,),
        }  # fmt: skip
    keys = [(layer, expert) for layer in LAYERS for expert in range(EXPERTS)]
    return {key: {part: one(*shape) for part, shape in shapes.items()} for key in keys}


def singles(weights: Weights, names: ExpertNames = NAMES) -> dict[str, Tensor]:
    return {
        names.parts[part].format(layer=layer, expert=expert): tensor
        for (layer, expert), parts in weights.items()
        for part, tensor in parts.items()
    }


def fused(weights: Weights, *, turned: bool) -> dict[str, Tensor]:
    """gate_up_proj [E, 2I, D] and down_proj [E, D, I]; or both with their last two axes swapped."""
    tensors = {}
    for layer in LAYERS:
        own = [weights[layer, expert] for expert in range(EXPERTS)]
        both = torch.stack([torch.cat([parts["gate"], parts["up"]]) for parts in own])
        down = torch.stack([parts["down"] for parts in own])
        stem = f"model.layers.{layer}.mlp.experts"
        tensors[f"{stem}.gate_up_proj"] = both.mT.contiguous() if turned else both
        tensors[f"{stem}.down_proj"] = down.mT.contiguous() if turned else down
    return tensors


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    """A directory of safetensors around experts; the backbone is a few odd tensors."""
    path.mkdir(parents=True)
    rest = {
        "model.norm.weight": torch.arange(HIDDEN, dtype=torch.float32),
        "model.embed_tokens.weight": torch.randn(10, HIDDEN).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.randn(EXPERTS, HIDDEN),
        "model.odd": torch.ones(3, dtype=torch.float16),
    }
    save_file({**tensors, **rest}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
    (path / "tokenizer.json").write_text("{}")
    return path


def opened(
    checkpoint: Checkpoint | Path, dtype: str = "auto", reads: str = "auto", *, gated: bool = True
) -> ExpertStore:
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(checkpoint)
    names = NAMES if gated else PLAIN_NAMES
    return open_store(
        checkpoint, GEOMETRY, names, dtype, reads, hidden=HIDDEN, intermediate=INNER, gated=gated
    )


def parts_of(store: ExpertStore, key: Key) -> dict[str, Tensor]:
    """An expert's parts, dense, as a kernel would see them."""
    out = torch.empty(store.slot_bytes + 4096, dtype=torch.uint8)
    # slots lie at page boundaries
    out = out[-out.data_ptr() % 4096 :]
    assert store.read(key, out) == store.read_bytes(key)
    layout = store.layout(key[0])
    unpacked = unpack_record(layout, out[: layout.nbytes])
    return {
        name: part if isinstance(part, Tensor) else dense(part) for name, part in unpacked.items()
    }


def expect(store: ExpertStore, weights: Weights, dtype: str = "auto") -> None:
    """Every expert is exactly what `convert` makes of the weights."""
    for key in store.geometry.keys():  # noqa: SIM118
        found = parts_of(store, key)
        for part, tensor in weights[key].items():
            wanted = (
                tensor.float() if tensor.ndim == 1 else dense(rounded(DenseWeight(tensor), dtype))
            )
            assert torch.equal(found[part], wanted), (key, part)


class PlainGGUF(GGUFCheckpoint):
    """A GGUF file under its own names, whatever its architecture."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, read_gguf(path)
        self._data = map_files(self._file)
        self.config, self.generation = {"hidden_size": 256}, {}
        self._names = {name: name for name in self._file.tensors}
        self._permuted = False


GGUF_HIDDEN, GGUF_INNER, GGUF_EXPERTS = 256, 512, 3
GGUF_NAMES = ExpertNames(
    {part: f"blk.{{layer}}.{{expert}}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
)


def write_gguf(path: Path, kind: str, down: str | None = None) -> PlainGGUF:
    """One layer of stacked experts of type `kind`, and a Q8_0 matrix beside them."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    shapes = {"gate": (GGUF_INNER, GGUF_HIDDEN), "up": (GGUF_INNER, GGUF_HIDDEN)}
    shapes["down"] = (GGUF_HIDDEN, GGUF_INNER)
    for part, shape in shapes.items():
        values = random.standard_normal((GGUF_EXPERTS, *shape), dtype=np.float32) * 0.1
        stored = (down or kind) if part == "down" else kind
        _add_stack(writer, f"blk.0.ffn_{part}_exps.weight", values, stored)
    beside = random.standard_normal((GGUF_HIDDEN, GGUF_HIDDEN), dtype=np.float32)
    add_tensor(writer, "blk.0.attn_output.weight", beside, "Q8_0")
    finish(writer)
    return PlainGGUF(path)


def _add_stack(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    rows = values.reshape(-1, values.shape[-1])
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        from tests.helpers.models.gguf_files import random_blocks

        raw = random_blocks(rows, kind).reshape(*values.shape[:2], -1)
    else:
        raw = gguf.quants.quantize(values, number)
    writer.add_tensor(name, raw, raw_dtype=number)


def open_gguf(checkpoint: PlainGGUF, dtype: str = "auto", reads: str = "auto") -> ExpertStore:
    geometry = ExpertGeometry((0,), GGUF_EXPERTS, 2)
    shape: dict[str, Any] = {"hidden": GGUF_HIDDEN, "intermediate": GGUF_INNER, "gated": True}
    return open_store(checkpoint, geometry, GGUF_NAMES, dtype, reads, **shape)
