"""The default model in each form a peer can read, made once from the default GGUF.

    bf16/       safetensors directory: transformers and vllm
    BF16.gguf   llama.cpp; also Q8_0.gguf and Q4_0.gguf
    Q4_1.gguf   the original file

The bf16, Q8_0 and Q4_0 copies are re-encodings of a Q4_1 file: speed anchors, not quality anchors.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from coterie.weights.home import home
from coterie.weights.sources.source import DEFAULT_MODEL, resolve


def folder() -> Path:
    path = home() / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def original() -> Path:
    return resolve(DEFAULT_MODEL)


def safetensors_directory() -> Path:
    target = folder() / "bf16"
    if (target / "model.safetensors").exists():
        return target
    import torch
    from safetensors.torch import save_file

    from coterie.weights.checkpoint import open_checkpoint
    from coterie.weights.quantize import dense

    checkpoint = open_checkpoint(original())
    target.mkdir(exist_ok=True)
    tensors = {
        name: dense(checkpoint.read(name), torch.bfloat16).contiguous()
        for name in checkpoint.names()
    }
    config = dict(checkpoint.config)
    config.update(dtype="bfloat16", tie_word_embeddings=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(target)
    partial = target / "model.part"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(target / "model.safetensors")
    return target


def random_directory() -> Path:
    """Random bf16 weights of the default model's shape."""
    from benchmarks.random_models import SHAPES, make_peer, write_tokenizer

    path = Path(tempfile.mkdtemp(prefix="coterie-bench-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    config = SHAPES["SmolLM2-135M"]
    make_peer(config, "cpu").save_pretrained(path)
    write_tokenizer(path, config["vocab_size"])
    return path


def _write_tokenizer(target: Path) -> None:
    from transformers import AutoTokenizer

    source = original()
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def gguf(form: str) -> Path:
    """`form` is BF16, Q8_0, Q4_0 or Q4_1."""
    if form == "Q4_1":
        return original()
    target = folder() / f"{form}.gguf"
    if not target.exists():
        _reencode(target, form)
    return target


def _reencode(target: Path, form: str) -> None:
    import gguf as package

    reader = package.GGUFReader(original())
    kind = package.GGMLQuantizationType[form]
    partial = target.with_suffix(".part")
    writer = package.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == package.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, sub_type)
    for tensor in reader.tensors:
        if tensor.tensor_type == package.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = package.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, package.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
