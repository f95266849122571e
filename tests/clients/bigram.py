"""A tiny model with a long context whose every answer is one known sentence.

Agents send prompts of tens of thousands of tokens and take an answer that was cut for a fault, so
neither the default model nor random weights will do. Attention runs as in any other model, but what
it and the MLP find is multiplied by zero: the next token depends on the last one alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import EOS, tiny_checkpoint

SENTENCE = "The quick fox runs."
POSITIONS = 131_072


def bigram_checkpoint() -> Path:
    """A new folder with the model; the caller removes it."""
    source = tiny_checkpoint(
        "llama",
        max_position_embeddings=POSITIONS,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    path = temporary_folder("coterie-bigram-")
    shutil.copytree(source, path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    spoken = tokenizer.encode(SENTENCE, add_special_tokens=False).ids
    assert len(set(spoken)) == len(spoken), "a token comes twice, its follower is not one"
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1.0)
    embedded, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedded.zero_()
    head.zero_()
    # all tokens share direction 0, which begins the sentence; its own have one each, which goes on
    embedded[:, 0] = 1.0
    head[spoken[0], 0] = 5.0
    following = [*spoken[1:], tokenizer.token_to_id(EOS)]
    for place, (token, follower) in enumerate(zip(spoken, following, strict=True), start=1):
        embedded[token, place] = 1.0
        head[follower, place] = 15.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
