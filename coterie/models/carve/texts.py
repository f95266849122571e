"""What a model reads while it is carved, and what it is judged on afterwards. The two are disjoint.

Prose is the project's own (texts/); documentation is Python's language reference, which every
CPython carries in pydoc_data: three quarters of its topics calibrate, the others are held out.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.errors import ConfigError

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

WINDOW = 256
# of one topic, so that no long one crowds the others out
_WINDOWS_PER_TEXT = 3

_FOLDER = Path(__file__).parent / "texts"


def calibration(tokenizer: Tokenizer, file: Path | None, windows: int = 32) -> Tensor:
    """Token ids [windows, WINDOW]: of `file`, or of what comes with the package."""
    if file is None:
        own = _windows(tokenizer, [_own("calibration.txt")], windows, windows)
        topics = _topics(held_out=False)
        if len(own) == windows or not topics:
            return own
        more = _windows(tokenizer, topics, windows - len(own), _WINDOWS_PER_TEXT)
        return torch.cat([own, more])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: cannot be read as UTF-8 text ({error})", param="calibration"
        ) from error
    return _windows(tokenizer, [text], windows, windows)


def held_out(tokenizer: Tokenizer, windows: int = 8) -> dict[str, Tensor]:
    found = {"prose": _windows(tokenizer, [_own("held_out.txt")], windows, windows)}
    topics = _topics(held_out=True)
    if topics:
        found["documentation"] = _windows(tokenizer, topics, windows, 1)
    return found


def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _topics(*, held_out: bool) -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship Python without its documentation
        return []
    chosen = [name for name in sorted(topics) if (zlib.crc32(name.encode()) % 4 == 0) == held_out]
    return [topics[name] for name in chosen]


def _windows(tokenizer: Tokenizer, texts: list[str], limit: int, each: int) -> Tensor:
    found: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text)
        cuts = range(0, len(ids) - WINDOW + 1, WINDOW)
        found += [ids[start : start + WINDOW] for start in cuts][:each]
    if not found:
        raise ConfigError(
            f"the calibration text has fewer than {WINDOW} tokens", param="calibration"
        )
    return torch.tensor(found[:limit])
