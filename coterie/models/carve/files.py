"""Writes a carved model as a normal directory: config, tokenizer, safetensors, one file per layer.

The directory gets its name only when it is complete. Dense tensors keep their stored type;
quantised ones are widened exactly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.models.arch import carved
from coterie.models.carve.carve import CarvingPlan, LayerCut
from coterie.models.text.gguf_tokenizer import rebuild_tokenizer
from coterie.weights.formats.gguf import read_gguf
from coterie.weights.formats.safetensors import INDEX
from coterie.weights.quantize import DenseWeight, dense

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
_PARTS = ("gate_proj", "up_proj", "down_proj")


class CarvedDirectory:
    """Written layer by layer, then finished. If it is not finished, nothing remains."""

    def __init__(self, checkpoint: Checkpoint, carving: CarvingPlan, out: Path) -> None:
        if out.exists():
            raise ConfigError(f"{out}: is there already; choose another --out", param="out")
        self._checkpoint, self._carving, self._out = checkpoint, carving, out
        self._draft = out.with_name(f".{out.name}.part")
        self._left = set(checkpoint.names())
        self._where: dict[str, str] = {}

    def __enter__(self) -> CarvedDirectory:
        shutil.rmtree(self._draft, ignore_errors=True)
        try:
            self._draft.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"{self._out}: cannot be made ({error})", param="out") from error
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)

    def add(self, layer: int, cut: LayerCut) -> int:
        """Bytes written."""
        stem = f"model.layers.{layer}."
        tensors = dict(self._cut(f"{stem}mlp.", cut))
        for name in sorted(name for name in self._left if name.startswith(stem)):
            tensors[name] = self._take(name)
        self._write(f"model-layer-{layer:03d}.safetensors", tensors)
        return sum(value.nbytes for value in tensors.values())

    def finish(self, notes: dict[str, Any]) -> None:
        """Write everything outside the layers, then give the directory its name."""
        rest = {name: self._take(name) for name in sorted(self._left)}
        self._write("model-ends.safetensors", rest)
        index = {"metadata": {}, "weight_map": dict(sorted(self._where.items()))}
        _dump(self._draft / INDEX, index)
        _dump(self._draft / "config.json", self._config())
        _dump(self._draft / "carve.json", {**asdict(self._carving), **notes})
        write_tokenizer(self._checkpoint, self._draft)
        self._draft.rename(self._out)

    def _cut(self, stem: str, cut: LayerCut) -> Iterator[tuple[str, Tensor]]:
        yield f"{stem}gate.weight", cut.gate
        gate, up, down = (self._take(f"{stem}{part}.weight") for part in _PARTS)
        groups = [("shared_experts", cut.shared)] if len(cut.shared) else []
        groups += [(f"experts.{number}", rows) for number, rows in enumerate(cut.experts)]
        for name, neurons in groups:
            values = (gate[neurons], up[neurons], down[:, neurons])
            for part, value in zip(_PARTS, values, strict=True):
                yield f"{stem}{name}.{part}.weight", value.contiguous()

    def _take(self, name: str) -> Tensor:
        self._left.discard(name)
        weight = self._checkpoint.read(name)
        return weight.tensor if isinstance(weight, DenseWeight) else dense(weight)

    def _write(self, file: str, tensors: dict[str, Tensor]) -> None:
        self._where |= dict.fromkeys(tensors, file)
        # save_file makes files that other users cannot read
        (self._draft / file).write_bytes(save({k: v.contiguous() for k, v in tensors.items()}))

    def _config(self) -> dict[str, Any]:
        config = dict(self._checkpoint.config)
        carving = self._carving
        config.update(
            architectures=[carved.ARCHITECTURE],
            model_type="carved",
            carved_from=self._checkpoint.config["architectures"][0],
            num_experts=carving.experts,
            num_experts_per_tok=carving.active,
            moe_intermediate_size=carving.width,
            shared_intermediate_size=carving.shared,
        )
        return config


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(checkpoint: Checkpoint, target: Path) -> None:
    """A GGUF file's is rebuilt; a directory's files are copied."""
    source = checkpoint.path
    if source.is_dir():
        for name in _TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, target / name)
        return
    rebuilt = rebuild_tokenizer(read_gguf(source))
    rebuilt.backend.save(str(target / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **rebuilt.specials}
    if rebuilt.chat_template is not None:
        settings["chat_template"] = rebuilt.chat_template
    _dump(target / "tokenizer_config.json", settings)
    if checkpoint.generation:
        _dump(target / "generation_config.json", dict(checkpoint.generation))
