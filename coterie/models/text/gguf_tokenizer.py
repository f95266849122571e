"""A tokenizer rebuilt from GGUF metadata.

Two kinds: `gpt2` (byte-level BPE with the file's merges, split by the pattern that
`tokenizer.ggml.pre` names) and `llama` (SentencePiece BPE: merges follow from the scores, bytes as
a fallback). An unknown kind or pattern is refused: a wrong split would give wrong tokens without an
error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from coterie.core.errors import WeightsError
from coterie.weights.formats.gguf import GGUFFile

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

# SentencePiece makes pieces of at most 16 characters; longer ones are added tokens
_MAX_PIECE_CHARS = 256

_SPLIT_AT_SPACE = methodcaller("split", " ")

_SPECIALS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}*{_WORD[1]}+|[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}+{_WORD[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> how text is split before merging. None: GPT-2's own pattern; "digits": the
# same with each digit alone; otherwise a pattern.
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
}

# Their vocabulary has whole words that no sequence of merges makes, and texts start with BOS.
_LLAMA3_FAMILY = frozenset(name for name, split in SPLITS.items() if split == _LLAMA3)


@dataclass(frozen=True, slots=True)
class RebuiltTokenizer:
    backend: tokenizers.Tokenizer
    # bos_token, eos_token ... -> their text
    specials: dict[str, str]
    chat_template: str | None


def rebuild_tokenizer(file: GGUFFile) -> RebuiltTokenizer:
    facts = _Facts(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in builders:
        raise WeightsError(
            f"{file.path}: tokenizer {str(kind)[:60]!r} is not supported; supported in GGUF files: "
            f"{', '.join(builders)}. Use the safetensors directory of the model."
        )
    try:
        backend = builders[kind](facts)
        _add_tokens(backend, facts)
        _add_ends(backend, facts, kind)
    except WeightsError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise facts.broken(f"the tokenizer cannot be built ({error})") from error
    template = file.metadata.get("tokenizer.chat_template")
    return RebuiltTokenizer(
        backend, facts.specials, template if isinstance(template, str) else None
    )


class _Facts:
    """The checked metadata of a tokenizer."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise self.broken("it has no tokenizer.ggml.tokens")
        self.tokens: list[str] = tokens
        self.types = self._numbers("token_type", np.ones(len(tokens), dtype=np.int32))
        self.specials = {
            name: tokens[found]
            for name, key in _SPECIALS.items()
            if (found := self.token_id(key)) is not None
        }

    def broken(self, what: str) -> WeightsError:
        return WeightsError(f"{self.file.path}: {what}. Convert the model again.")

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def token_id(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.broken(f"tokenizer.ggml.{key} is {str(value)[:60]}, which no token has")
        return value

    def scores(self) -> list[float]:
        return [float(score) for score in self._numbers("scores", None)]

    def merges(self) -> list[tuple[str, str]]:
        merges = self.get("merges")
        if not isinstance(merges, list):
            raise self.broken("it has no tokenizer.ggml.merges")
        try:
            return [(left, right) for left, right in map(_SPLIT_AT_SPACE, merges)]
        except ValueError:
            raise self.broken("an entry of tokenizer.ggml.merges is not a pair") from None

    def vocab(self) -> dict[str, int]:
        """A text that occurs twice has its first id."""
        last = len(self.tokens) - 1
        return dict(zip(reversed(self.tokens), range(last, -1, -1), strict=True))

    def _numbers(self, key: str, default: Any) -> Any:
        values = self.get(key)
        values = default if values is None else values
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise self.broken(f"tokenizer.ggml.{key} does not have one number per token")
        return values


def _byte_level(facts: _Facts) -> tokenizers.Tokenizer:
    split = facts.get("pre")
    split = "default" if split is None else split
    if split not in SPLITS:
        raise WeightsError(
            f"{facts.file.path}: the splitting rule {split!r} (tokenizer.ggml.pre) is not known. "
            "Use the safetensors directory of the model."
        )
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=facts.vocab(),
            merges=facts.merges(),
            ignore_merges=split in _LLAMA3_FAMILY or split == "tekken",
        )
    )
    backend.pre_tokenizer = _splitter(SPLITS[split])
    if SPLITS[split] == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pattern == "digits":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(facts: _Facts) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=facts.vocab(),
            merges=_merges_from_scores(facts),
            unk_token=facts.specials.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = facts.get("add_space_prefix") is not False
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(facts: _Facts) -> list[tuple[str, str]]:
    """SentencePiece always joins the pair with the highest score: this gives an order of merges."""
    apart = {_UNKNOWN, _CONTROL, _UNUSED, _BYTE}
    vocab = {
        token: index
        for token, index in facts.vocab().items()
        if int(facts.types[index]) not in apart
    }
    scores = facts.scores()
    found = []
    for token, index in sorted(vocab.items(), key=lambda item: item[1]):
        for cut in range(1, min(len(token), _MAX_PIECE_CHARS)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((scores[index], len(left), len(right), left, right))
    # for equal scores the longer left part first, as in transformers
    found.sort(key=lambda item: item[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, facts: _Facts) -> None:
    """Control tokens and user-defined tokens are never split, anywhere in a text."""
    special, plain = [], []
    named = set(facts.specials.values())
    for token, kind in zip(facts.tokens, facts.types.tolist(), strict=True):
        if not token:
            continue
        if kind in (_CONTROL, _UNKNOWN) or token in named:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_ends(backend: tokenizers.Tokenizer, facts: _Facts, kind: str) -> None:
    """Add BOS before and EOS after a text, as the file says or as is usual for its kind."""
    usual = kind == "llama" or facts.get("pre") in _LLAMA3_FAMILY
    asked = facts.get("add_bos_token")
    bos = facts.specials.get("bos_token") if (usual if asked is None else asked) else None
    eos = facts.specials.get("eos_token") if facts.get("add_eos_token") is True else None
    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        backend.post_processor = _template_processor(backend, bos, eos)


def _template_processor(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> processors.PostProcessor:
    """Puts `bos` before and `eos` after every text."""
    single = _pieces((bos, "$A", eos))
    pair = [*single, *_pieces((bos, "$B", eos))]
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _pieces(parts: Iterable[str | None]) -> list[str]:
    return [part for part in parts if part is not None]
