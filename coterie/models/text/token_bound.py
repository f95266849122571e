"""How few tokens a text can have, by its characters alone: a prompt of megabytes that can never fit
is refused without reading it.

Only where the tokenizer drops and joins nothing: of others nothing is known.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

# normalizers that leave the number of ASCII characters as it is
_KEEPING = frozenset({"Prepend", "ByteLevel", "Lowercase"})
# these join a letter and the mark behind it
_COMPOSING = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
_WORD = (string.ascii_letters + string.digits).encode()
_NO_WORD = bytes(byte for byte in range(256) if byte not in _WORD)
# a vocabulary may lack some of these, and they are dropped
_CONTROL = bytes((*range(32), 127))


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Most printable ASCII characters, and most letters and digits, that one token stands for;
    runs of blanks and dashes make the first several times the second."""

    characters: int
    word_characters: int
    # of a text with other characters nothing is known
    only_ascii: bool

    def least_tokens(self, text: str) -> int:
        if self.only_ascii and not text.isascii():
            return 0
        plain = text.encode("ascii", "ignore").translate(None, _CONTROL)
        words = plain.translate(None, _NO_WORD)
        return max(len(plain) // self.characters, len(words) // self.word_characters)


def token_bound(backend: tokenizers.Tokenizer) -> TokenBound | None:
    parts: dict[str, Any] = json.loads(backend.to_str())
    kinds = _normalizers(parts.get("normalizer"))
    if kinds is None or not _keeps(parts.get("pre_tokenizer")) or parts.get("truncation"):
        return None
    # those take any number of blanks with them
    if any(token["lstrip"] or token["rstrip"] for token in parts.get("added_tokens", ())):
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    if not _knows_ascii(parts["model"], vocab):
        return None
    characters = max(map(len, vocab))
    words = max(len(token.encode("ascii", "ignore").translate(None, _NO_WORD)) for token in vocab)
    return TokenBound(characters, max(words, 1), bool(kinds & _COMPOSING))


def _knows_ascii(model: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Otherwise a run of what is unknown may become one token, or none."""
    if model.get("type") != "BPE":
        return False
    if model.get("byte_fallback") and all(f"<0x{code:02X}>" in vocab for code in range(128)):
        return True
    return all(chr(code) in vocab for code in range(33, 127)) and ("Ġ" in vocab or "▁" in vocab)


def _normalizers(given: Any) -> set[str] | None:
    """Their kinds; None where one may drop characters."""
    if given is None:
        return set()
    kind: str = given["type"]
    if kind == "Sequence":
        found: set[str] = set()
        for part in given["normalizers"]:
            kinds = _normalizers(part)
            if kinds is None:
                return None
            found |= kinds
        return found
    if kind == "Replace":
        pattern = given["pattern"].get("String")
        return None if pattern is None or len(given["content"]) < len(pattern) else {kind}
    return {kind} if kind in _KEEPING | _COMPOSING else None


def _keeps(splitter: Any) -> bool:
    if splitter is None or splitter["type"] in _SPLITTERS:
        return True
    if splitter["type"] == "Sequence":
        return all(_keeps(part) for part in splitter["pretokenizers"])
    return bool(splitter["type"] == "Split") and splitter["behavior"] != "Removed"
