"""Compiled grammars over a tokenizer's vocabulary, which constrain answers.

Only this module uses llguidance: the gateway (checking) and the engine (enforcing) compile in the
same way, with the same limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from coterie.core.errors import InvalidRequest, MissingDependency
from coterie.core.request import ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


class Tokenizer(Protocol):
    """What a grammar needs from a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def encode(self, text: str, *, special: bool = True) -> Sequence[int]: ...


# characters of a schema, grammar or pattern
MAX_TEXT = {
    "json_object": 0,
    "json_schema": 200_000,
    "lark": 200_000,
    "gbnf": 50_000,
    "regex": 10_000,
}
# the names that callers use
NAMES = {
    "json_object": "JSON grammar",
    "json_schema": "JSON schema",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
    "regex": "pattern",
}
# tokens to try before a grammar is accepted
PROBE_STEPS = 16
# cached forced texts with their tokens
MAX_FORCED = 10_000
# between the symbols of a JSON text at most one space, or one line end and its indent: a small
# model that may write spaces without end does so
_BLANKS = r" |\n[ \t]{0,24}"
_JSON = {"whitespace_flexible": True, "whitespace_pattern": _BLANKS, "coerce_one_of": False}
# runs of plain text inside a JSON string, for which whole classes of tokens are allowed at once;
# the short ones are for strings with a length limit
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(rf"{_TEXT}{{1,{n}}}" for n in (4, 8, 16, 30)), rf"{_TEXT}+"]


class GrammarVocabulary:
    """A tokenizer's vocabulary for the grammar engine; building a large one takes long."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_ids: Sequence[int]) -> None:
        """`num_ids`: the number of logits, if there are more than tokens."""
        guidance = _guidance()
        self.num_ids = max(num_ids, tokenizer.vocab_size)
        # a model without an end token gets one that it cannot sample
        ends = list(eos_ids) or [self.num_ids]
        words = _Words(tokenizer, max(self.num_ids, ends[-1] + 1), ends)
        self.words: Sequence[bytes] = words.tokens
        # of 32 bits, for a mask over the vocabulary
        self.num_words = -(-len(words.tokens) // 32)
        self.end = ends[0]
        self.specials = frozenset(words.special_token_ids)
        self.backend: LLTokenizer = guidance.LLTokenizer(words, eos_token=ends, slices=_SLICES)
        # the same ids, with one byte for each: the allowed next bytes are found in microseconds
        letters = _Letters(words, self.specials)
        self.byte_ids: Sequence[int] = letters.ids
        self._letters: LLTokenizer = guidance.LLTokenizer(letters, eos_token=ends, slices=[])
        self.num_letter_words = -(-len(letters.tokens) // 32)

    def compile(self, wanted: ResponseFormat) -> LLMatcher:
        """A matcher in its start state. Copy it before use."""
        return self._compile(wanted, self.backend)

    def compile_letters(self, wanted: ResponseFormat) -> LLMatcher:
        """The same over single bytes: feed it `spelled` tokens."""
        return self._compile(wanted, self._letters)

    def spelled(self, token: int) -> list[int]:
        """A token as the tokens of its bytes; a token without text is unchanged."""
        word = self.words[token]
        if len(word) < 2 or token in self.specials:
            return [token]
        return [self.byte_ids[byte] for byte in word]

    def _compile(self, wanted: ResponseFormat, backend: LLTokenizer) -> LLMatcher:
        text = grammar_text(wanted)
        matcher: LLMatcher = _guidance().LLMatcher(backend, text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refusal(wanted, matcher.get_error())
        return matcher


def grammar_text(wanted: ResponseFormat) -> str:
    """In llguidance's notation. Cheap: only compiling shows whether it is valid."""
    check_size(wanted)
    guidance = _guidance()
    matcher = guidance.LLMatcher
    if wanted.kind == "regex":
        return str(matcher.grammar_from_regex(wanted.text))
    if wanted.kind == "lark":
        return str(matcher.grammar_from_lark(wanted.text))
    if wanted.kind == "gbnf":
        return str(matcher.grammar_from_lark(lark_of(wanted.text)))
    schema = '{"type": "object"}' if wanted.kind == "json_object" else wanted.text
    try:
        return str(matcher.grammar_from_json_schema(schema, overrides=_JSON))
    except ValueError as error:
        raise _refusal(wanted, str(error)) from None


def check_size(wanted: ResponseFormat) -> None:
    limit = MAX_TEXT.get(wanted.kind)
    if limit is None:
        raise InvalidRequest(f"no response format {wanted.kind!r}", param="response_format")
    if len(wanted.text) > limit > 0:
        raise InvalidRequest(
            f"the {NAMES[wanted.kind]} has {len(wanted.text)} characters; the limit is {limit}",
            param="response_format",
        )


def probe(wanted: ResponseFormat, matcher: LLMatcher) -> None:
    """Follow the grammar for a few steps, to refuse one that fails at once."""
    for _ in range(PROBE_STEPS):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not mask:
            raise _refusal(wanted, matcher.get_error() or "no text can follow it")
        matcher.consume_token((mask & -mask).bit_length() - 1)
    if matcher.is_error():
        raise _refusal(wanted, matcher.get_error())


def lark_of(text: str) -> str:
    """A GBNF grammar in Lark's notation."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise InvalidRequest("the grammar is nested too deeply", param="response_format") from None
    except Exception as error:  # the converter raises many kinds of errors
        raise _refusal(ResponseFormat("gbnf"), str(error)) from None


def _refusal(wanted: ResponseFormat, reason: str) -> InvalidRequest:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())[:500]
    if reason.startswith("NoExtension"):
        reason = "no text satisfies it"
    return InvalidRequest(
        f"the {NAMES[wanted.kind]} cannot be enforced: {reason}", param="response_format"
    )


class _Words:
    """The attributes that `LLTokenizer` reads from a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, num_ids: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        known = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in known]
        self.tokens += [b""] * (num_ids - len(self.tokens))
        self.special_token_ids = sorted({*filter(tokenizer.is_special, known), *ends})
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_id
        # the same forced texts occur in every answer
        self._forced: dict[bytes, list[int]] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a forced text: its tokenizer's, if they give the same text."""
        data = text.encode() if isinstance(text, str) else text
        ids = self._forced.get(data)
        if ids is None:
            if len(self._forced) >= MAX_FORCED:
                self._forced.clear()
            ids = self._forced[data] = self._tokenise(data)
        return ids

    def _tokenise(self, data: bytes) -> list[int]:
        ids = self._tokenizer.encode(data.decode(errors="replace"), special=False)
        if b"".join(self.tokens[token] for token in ids) == data:
            return list(ids)
        return self._longest_first(data)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """A fifth of this object's memory, for texts that few tokenizers have."""
        return {word: token for token, word in enumerate(self.tokens) if word}

    @cached_property
    def _lengths(self) -> dict[int, list[int]]:
        """First byte -> the lengths of the words that begin with it, the longest first."""
        found: dict[int, set[int]] = {}
        for word in self._ids:
            found.setdefault(word[0], set()).add(len(word))
        return {byte: sorted(lengths, reverse=True) for byte, lengths in found.items()}

    def _longest_first(self, data: bytes) -> list[int]:
        """Linear in the length of the text: it is asked for again with each of its tokens."""
        ids, start = [], 0
        while start < len(data):
            words = (data[start : start + size] for size in self._lengths.get(data[start], ()))
            word = next((word for word in words if word in self._ids), None)
            if word is None:
                break
            ids.append(self._ids[word])
            start += len(word)
        return ids


class _Letters:
    """The same for a vocabulary of bytes: its special tokens, and one token for each byte."""

    is_tokenizer_wrapper = True

    def __init__(self, whole: _Words, specials: frozenset[int]) -> None:
        self.special_token_ids = whole.special_token_ids
        self.eos_token_id, self.bos_token_id = whole.eos_token_id, whole.bos_token_id
        self.tokens = [
            word if len(word) == 1 or token in specials else b""
            for token, word in enumerate(whole.tokens)
        ]
        found = {
            word: token
            for token, word in enumerate(self.tokens)
            if len(word) == 1 and token not in specials
        }
        # the grammar engine reserves the last byte, which no text has
        for byte in range(255):
            if bytes([byte]) not in found:
                found[bytes([byte])] = len(self.tokens)
                self.tokens.append(bytes([byte]))
        self.ids = [found.get(bytes([byte]), -1) for byte in range(256)]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self.ids[byte] for byte in data]


def _limits() -> LLParserLimits:
    limits: LLParserLimits = _guidance().LLParserLimits(verbose_errors=False)
    return limits


def _guidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependency(
            "structured output needs llguidance: pip install llguidance"
        ) from error
    return llguidance
