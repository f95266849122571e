"""The base model as it is served, for training: the dequantised weights of a checkpoint in the
model class of transformers. Knows no adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import dense


def load_base(path: Path, device: str, dtype: torch.dtype) -> tuple[LlamaForCausalLM, Tokenizer]:
    """A frozen model and its tokenizer."""
    checkpoint = open_checkpoint(path)
    config = LlamaConfig(**{k: v for k, v in checkpoint.config.items() if v is not None})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: dense(checkpoint.read(name)).to(dtype) for name in checkpoint.names()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, assign=True, strict=True)
    model.tie_weights()
    # its buffers are computed, not stored
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.requires_grad_(False)
    return model.to(device).eval(), load_tokenizer(path)
