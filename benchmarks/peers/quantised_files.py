"""GGUF files in the mixes that people download, made by llama.cpp's own quantiser.

    python -m benchmarks.peers.quantised_files [MODEL ...] [--mixes Q4_K_M,Q6_K]

MODEL is a GGUF file, `random-dense` (1.2B parameters, the shape of Llama 3.2 1B) or `random-moe`
(0.7B parameters, 32 experts in 12 layers). Files are written once, to bench/ of Coterie's home. A
file that has a mix already is used as it is.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any, cast

from benchmarks.moe import random_moe
from benchmarks.peers import random_gguf
from benchmarks.peers.__main__ import python_of
from benchmarks.peers.files import folder
from benchmarks.random_models import SHAPES, RandomCheckpoint
from coterie.weights.checkpoint import Checkpoint, open_checkpoint
from coterie.weights.formats.gguf import read_gguf

RANDOM_DENSE, RANDOM_MOE = "random-dense", "random-moe"
MODELS = (RANDOM_DENSE, RANDOM_MOE)
MIXES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_1")
# general.file_type
_NUMBERS = {"Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
_DENSE: dict[str, Any] = SHAPES["SmolLM2-135M"] | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
# the embeddings' scale makes routing depend on the token
_MOE = random_moe.Shape(experts=32, intermediate=512, spread=50.0)
_QUANTISER = Path(__file__).with_name("llamacpp_quantize.py")


def source_of(model: str) -> Path:
    """The file itself, or a random model in BF16."""
    if model not in MODELS:
        return Path(model)
    target = folder() / f"{model}-BF16.gguf"
    if not target.exists():
        random_gguf.write(_random_checkpoint(model), "BF16", target)
    return target


def _random_checkpoint(model: str) -> Checkpoint:
    if model == RANDOM_MOE:
        return open_checkpoint(random_moe.write(folder() / model, _MOE))
    return cast(Checkpoint, RandomCheckpoint(_DENSE, "cpu"))


def mixed(model: str, mix: str, threads: int = 2) -> Path:
    source = source_of(model)
    if read_gguf(source).metadata.get("general.file_type") == _NUMBERS[mix]:
        return source
    target = folder() / f"{source.stem.removesuffix('-BF16')}-{mix}.gguf"
    if not target.exists():
        partial = target.with_suffix(".part")
        command = [str(python_of("llamacpp")), str(_QUANTISER), str(source), str(partial), mix]
        subprocess.run([*command, str(threads)], check=True, stderr=subprocess.DEVNULL)
        partial.rename(target)
    return target


def token_bytes(path: Path) -> int:
    """Bytes of the file that one decoded token must read: the embedding only where it is the head
    too, and of experts the chosen ones."""
    file = read_gguf(path)
    architecture = file.metadata["general.architecture"]
    experts = file.metadata.get(f"{architecture}.expert_count", 1)
    used = file.metadata.get(f"{architecture}.expert_used_count", 1)
    total = 0
    for name, info in file.tensors.items():
        if name == "token_embd.weight" and "output.weight" in file.tensors:
            continue
        total += info.nbytes * used // experts if "_exps." in name else info.nbytes
    return total


def has_experts(path: Path) -> bool:
    return any("_exps." in name for name in read_gguf(path).tensors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for model in arguments.models:
        for mix in arguments.mixes.split(","):
            path = mixed(model, mix, arguments.threads)
            print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
