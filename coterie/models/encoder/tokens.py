"""Texts as the tokens of an encoder, within limits; nothing is cut unless the caller asks for it.

Runs in the gateway, so that limits and quotas are known before any work: no torch here. A text is
tokenised only if it can fit; the tokens of many texts are made in slices, so that a large request
never holds all of its intermediate results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from coterie.core.errors import ContextExcess, ContextLengthExceeded, InvalidRequest, WeightsError
from coterie.models.encoder.spec import EncoderModelSpec

Ids = NDArray[np.int32]
# a token of real text has far fewer characters: a longer text is refused without counting
MAX_CHARS_PER_TOKEN, MIN_CHARS = 100, 100_000
# texts and characters that are tokenised together
SLICE_TEXTS, SLICE_CHARS = 64, 200_000
LEFT, RIGHT = "left", "right"


@dataclass(frozen=True, slots=True)
class InputTruncation:
    """The caller asks for inputs to be cut to `most` tokens; `left` drops the beginning."""

    most: int
    side: str = RIGHT


@dataclass(frozen=True, slots=True)
class TextInput:
    """A text, or a pair of texts for a cross-encoder. `param`: the field it came from."""

    text: str
    param: str
    second: str | None = None


@dataclass(frozen=True, slots=True)
class EncoderTokens:
    """The tokens of one input; `split`: where the second text begins."""

    ids: Ids
    split: int


class EncoderTokenizer(Protocol):
    vocab_size: int
    # most tokens of one input
    limit: int

    def encode(
        self, inputs: Sequence[TextInput], special: bool, cut: InputTruncation | None
    ) -> Iterator[EncoderTokens]: ...


class FileTokenizer:
    """The `tokenizer.json` of a directory."""

    def __init__(self, spec: EncoderModelSpec, limit: int) -> None:
        self.limit = limit
        self.vocab_size = spec.vocab_size
        self._lower = spec.lower_case
        self._backend = _read(spec.path)
        self._backend.no_padding()
        self._backend.no_truncation()

    def encode(
        self, inputs: Sequence[TextInput], special: bool, cut: InputTruncation | None
    ) -> Iterator[EncoderTokens]:
        limit = self.limit if cut is None else min(cut.most, self.limit)
        for part in _slices(inputs):
            for item in part:
                check_size(item, limit)
            if cut is None:
                texts = [self._text(item) for item in part]
                found = self._backend.encode_batch(texts, add_special_tokens=special)
            else:
                found = self._shortened(part, special, InputTruncation(limit, cut.side))
            for item, one in zip(part, found, strict=True):
                ids = np.asarray(one.ids, np.int32)
                check_length(len(ids), limit, item.param)
                if not len(ids):
                    raise InvalidRequest(f"{item.param}: has no tokens", param=item.param)
                kinds = one.type_ids
                split = kinds.index(1) if item.second is not None and 1 in kinds else len(ids)
                yield EncoderTokens(ids, split)

    def _shortened(
        self, part: Sequence[TextInput], special: bool, cut: InputTruncation
    ) -> list[tokenizers.Encoding]:
        """The tokens of each input within the limit. The library's own way is a setting of the
        tokenizer, which requests on several threads share; this gives the same tokens without
        it."""
        firsts = [self._lowered(item.text) for item in part]
        seconds = [self._lowered(item.second) for item in part if item.second is not None]
        plain = self._backend.encode_batch([*firsts, *seconds], add_special_tokens=False)
        others = iter(plain[len(part) :])
        found = []
        for item, first in zip(part, plain, strict=False):
            second = None if item.second is None else next(others)
            added = self._backend.num_special_tokens_to_add(second is not None) if special else 0
            if cut.most < added:
                text = f"{item.param}: cannot be cut to {cut.most} tokens"
                raise InvalidRequest(text, param=item.param)
            kept = _lengths(len(first), 0 if second is None else len(second), cut.most - added)
            first.truncate(kept[0], direction=cut.side)
            if second is not None:
                second.truncate(kept[1], direction=cut.side)
            found.append(self._backend.post_process(first, second, special))
        return found

    def _text(self, item: TextInput) -> str | tuple[str, str]:
        text = self._lowered(item.text)
        return text if item.second is None else (text, self._lowered(item.second))

    def _lowered(self, text: str) -> str:
        return text.lower() if self._lower else text


def _lengths(first: int, second: int, most: int) -> tuple[int, int]:
    """The tokens of a pair that are kept, `most` together: the longer one is cut first."""
    if first + second <= most:
        return first, second
    if not second:
        return most, 0
    shorter = min(first, second, most // 2)
    longer = most - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


def check_size(item: TextInput, limit: int) -> None:
    most = max(MAX_CHARS_PER_TOKEN * limit, MIN_CHARS)
    size = len(item.text) + len(item.second or "")
    if size > most:
        raise ContextLengthExceeded(
            f"{item.param}: {size} characters are too many for the limit of {limit} tokens; "
            "split the text",
            param=item.param,
        )


def check_length(count: int, limit: int, param: str) -> None:
    if count > limit:
        raise ContextLengthExceeded(
            f"{param}: {count} tokens are more than the limit of {limit} for one input; split the "
            "text, or send truncate_prompt_tokens = -1 to have it cut",
            param=param,
            excess=ContextExcess(count, None, limit),
        )


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> Ids:
    if max(ids) >= vocab_size:
        raise InvalidRequest(
            f"{param}: the vocabulary has {vocab_size} tokens; send token ids of this model, or "
            "send the text (langchain-openai: check_embedding_ctx_length=False)",
            param=param,
        )
    return np.asarray(ids, np.int32)


def _slices(inputs: Sequence[TextInput]) -> Iterator[list[TextInput]]:
    part: list[TextInput] = []
    chars = 0
    for item in inputs:
        size = len(item.text) + len(item.second or "")
        if part and (len(part) >= SLICE_TEXTS or chars + size > SLICE_CHARS):
            yield part
            part, chars = [], 0
        part.append(item)
        chars += size
    if part:
        yield part


def _read(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise WeightsError(f"{file}: missing. Save the tokenizer as tokenizer.json.")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises only Exception
        raise WeightsError(f"{file}: not a tokenizer ({error}). Fetch it again.") from error
