"""Tiny random encoders, written through transformers, with a real WordPiece tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.helpers.models.tiny import CORPUS

VOCAB = 320
POSITIONS, MAX_TOKENS = 132, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
    "initializer_range": 0.4,
}
DISTIL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 80,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.4,
}
FAMILIES = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert")


def tiny_encoder(
    path: Path,
    family: str = "bert",
    *,
    cross: bool = False,
    pooling: dict[str, bool] | None = None,
    normalise: bool = True,
    **config: Any,
) -> Path:
    """A directory as sentence-transformers writes it; without the files of its modules if `pooling`
    is an empty dict."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    torch.manual_seed(5)
    shape = DISTIL if family == "distilbert" else SHAPE
    if cross:
        config |= {"num_labels": 1}
    settings = AutoConfig.for_model(family, **{**shape, **config})
    kind = AutoModelForSequenceClassification if cross else AutoModel
    model = kind.from_config(settings).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            # norms and biases start as ones and zeros, which would hide a mistake
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.2)
            del name
    model.save_pretrained(path)
    write_tokenizer(path)
    if not cross and pooling != {}:
        write_modules(path, pooling or {"pooling_mode_mean_tokens": True}, normalise)
    return path


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    # as many files are: padding and a cut are for their own library
    tokenizer.enable_padding(length=MAX_TOKENS, pad_id=1, pad_token="[PAD]")
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.save(str(path / "tokenizer.json"))


def write_modules(path: Path, pooling: dict[str, bool], normalise: bool) -> None:
    stem = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{stem}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{stem}.Pooling"},
    ]
    if normalise:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{stem}.Normalize"})
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    facts = {"word_embedding_dimension": 48, **pooling}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(facts))
    settings = {"max_seq_length": MAX_TOKENS, "do_lower_case": False}
    (path / "sentence_bert_config.json").write_text(json.dumps(settings))


class TransformersEncoder:
    """The same directory through transformers: padded batches with a mask, as its users write
    it."""

    def __init__(self, path: Path, *, cross: bool = False) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoModel, AutoModelForSequenceClassification

        kind = AutoModelForSequenceClassification if cross else AutoModel
        self.model = kind.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def ids(self, texts: list[str]) -> list[list[int]]:
        return [item.ids for item in self.tokenizer.encode_batch(texts)]

    @torch.inference_mode()
    def hidden(self, lists: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, lists))
        ids = torch.tensor([item + [1] * (width - len(item)) for item in lists])
        mask = torch.tensor([[1] * len(item) + [0] * (width - len(item)) for item in lists])
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state, mask

    def mean(self, lists: list[list[int]], normalise: bool = True) -> NDArray[np.float32]:
        hidden, mask = self.hidden(lists)
        weights = mask[..., None].float()
        found = (hidden * weights).sum(1) / weights.sum(1)
        if normalise:
            found = torch.nn.functional.normalize(found, dim=1)
        vectors: NDArray[np.float32] = found.numpy()
        return vectors

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        return self.mean(self.ids(texts))

    @torch.inference_mode()
    def logit(self, query: str, text: str) -> float:
        pair = self.tokenizer.encode(query, text)
        kinds = torch.tensor([pair.type_ids])
        more = {"token_type_ids": kinds} if self.model.config.model_type == "bert" else {}
        return float(self.model(input_ids=torch.tensor([pair.ids]), **more).logits[0, 0])
