"""A tiny model whose tokenizer has the tokens that fill gaps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.helpers.models.tiny import tiny_checkpoint

FILL_MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


def filling_checkpoint(path: Path) -> Path:
    """The tiny model with the tokens that fill gaps, in place of unused ones at the end."""
    shutil.copytree(tiny_checkpoint("llama"), path)
    file = path / "tokenizer.json"
    facts = json.loads(file.read_text())
    vocab = facts["model"]["vocab"]
    last = sorted(vocab, key=vocab.__getitem__)[-len(FILL_MARKS) :]
    ids = {vocab.pop(token): mark for token, mark in zip(last, FILL_MARKS, strict=True)}
    facts["model"]["merges"] = [
        pair for pair in facts["model"]["merges"] if "".join(pair) not in last
    ]
    for number, mark in ids.items():
        vocab[mark] = number
    file.write_text(json.dumps(facts))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in FILL_MARKS])
    tokenizer.save(str(file))
    return path
