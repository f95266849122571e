"""Whether stored numbers are numbers, by their bits alone. numpy, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import WeightsError
from coterie.packages.safetensors_header import read_header

# type -> words of its width, all bits but the sign, the exponent of infinity and NaN
MASKS: dict[str, tuple[type[np.signedinteger[Any]], int, int]] = {
    "F32": (np.int32, 0x7FFF_FFFF, 0x7F80_0000),
    "BF16": (np.int16, 0x7FFF, 0x7F80),
    "F16": (np.int16, 0x7FFF, 0x7C00),
}
# stays in a core's cache
_CHUNK = 1 << 16


def is_finite(words: np.ndarray[Any, Any], dtype: str) -> bool:
    """`words` is flat, in the words of `dtype`."""
    _, magnitude, infinity = MASKS[dtype]
    scratch = np.empty(min(_CHUNK, len(words)), words.dtype)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK]
        if np.bitwise_and(part, magnitude, out=scratch[: len(part)]).max() >= infinity:
            return False
    return True


def check_finite(path: Path) -> None:
    """Every number of a safetensors file with types of `MASKS`, a little of it in RAM at a time.
    Raises WeightsError that names the first tensor with another."""
    header = read_header(path)
    first = path.stat().st_size - max(facts["data_offsets"][1] for facts in header.values())
    with path.open("rb") as file:
        for name, facts in header.items():
            words, _, _ = MASKS[facts["dtype"]]
            begin, end = facts["data_offsets"]
            file.seek(first + begin)
            for at in range(begin, end, _CHUNK * words().itemsize):
                part = file.read(min(_CHUNK * words().itemsize, end - at))
                if not is_finite(np.frombuffer(part, words), facts["dtype"]):
                    raise WeightsError(f"{name!r} holds NaN or infinity")
