"""Filling a gap in a text: the marks by which models were trained to do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.core.errors import UnsupportedFeature
from coterie.core.sampling import prompt_too_long
from coterie.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillMarks:
    """The special tokens before the text before the gap, before the text after it, and before the
    answer."""

    prefix: int
    suffix: int
    middle: int
    # marks a file that is shown for orientation; None = the model knows none
    file: int | None = None
    # the text after the gap comes first
    suffix_first: bool = False


# the marks of known models, and whether the text after the gap comes first
_MARKS = (
    # Qwen2.5-Coder and others
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),
    # StarCoder, SantaCoder, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),
    # DeepSeek-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", False),
    # Code Llama
    ("▁<PRE>", "▁<SUF>", "▁<MID>", False),
    # Codestral
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]", True),
)
_FILES = ("<|file_sep|>", "<file_sep>")


def fill_marks(tokenizer: Tokenizer) -> FillMarks | None:
    """None if the model was not trained to fill gaps."""
    find = tokenizer.token_id
    for before, after, answer, suffix_first in _MARKS:
        prefix, suffix, middle = find(before), find(after), find(answer)
        if prefix is not None and suffix is not None and middle is not None:
            file = next((at for name in _FILES if (at := find(name)) is not None), None)
            return FillMarks(prefix, suffix, middle, file, suffix_first)
    return None


@dataclass(frozen=True, slots=True)
class GapText:
    """The texts before and after a gap; (name, text) of other files; the beginning of what is to be
    filled in."""

    before: str
    after: str
    files: tuple[tuple[str, str], ...] = ()
    begun: str = ""


def fill_prompt(tokenizer: Tokenizer, gap: GapText, context: int, param: str) -> tuple[int, ...]:
    """The tokens of a prompt whose answer fills the gap. Raises UnsupportedFeature, which names
    `param`, and ContextLengthExceeded. Takes long for a long text."""
    marks = fill_marks(tokenizer)
    if marks is None:
        text = f"{param}: this model does not fill gaps: its tokenizer has no tokens for it"
        raise UnsupportedFeature(text, param=param)
    shown = [f"{name}\n{text}\n" for name, text in gap.files]
    refuse_too_long(tokenizer, [*shown, gap.before, gap.after, gap.begun], context)
    ids = _start(tokenizer)
    for text in shown:
        head = [] if marks.file is None else [marks.file]
        ids += [*head, *tokenizer.encode(text, special=False)]
    first = [marks.prefix, *tokenizer.encode(gap.before, special=False)]
    second = [marks.suffix, *tokenizer.encode(gap.after, special=False)]
    ids += [*second, *first] if marks.suffix_first else [*first, *second, marks.middle]
    return (*ids, *tokenizer.encode(gap.begun, special=False)) if gap.begun else tuple(ids)


def refuse_too_long(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> None:
    """Refuse texts that are certainly longer than the context, without encoding them."""
    if sum(map(len, texts)) < context:
        return
    least = sum(tokenizer.least_tokens(text) for text in texts)
    if least >= context:
        raise prompt_too_long(least, context, "at least ")


def _start(tokenizer: Tokenizer) -> list[int]:
    """BOS, if the tokenizer writes one before a text."""
    lead = tokenizer.encode("", special=True)
    return lead[:1] if lead and lead[0] == tokenizer.bos_id else []
