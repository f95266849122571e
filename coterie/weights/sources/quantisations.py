"""The GGUF files of a repository by quantisation, and which of them to fetch.

A quantisation is known by the end of a file's name: `Qwen3-4B-Q4_K_M.gguf` is Q4_K_M.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from coterie.core.errors import WeightsError
from coterie.weights.formats.gguf import gguf_parts
from coterie.weights.kinds import KEPT_AS
from coterie.weights.room import ModelRoom

_LABEL = re.compile(
    r"(?:^|[-_.])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|F16|FP16|F32|FP32))$",
    re.IGNORECASE,
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# images, importance matrices and draft heads, which are no models by themselves
_BESIDE = re.compile(r"(^|[-_.])(mmproj|imatrix|eagle3?|draft|mtp)([-_.]|$)", re.IGNORECASE)
# Q4_K_M is mostly Q4_K
_MIX = re.compile(r"_(XS|S|M|L|XL)$")
# publishers of UD- files mix types that no name tells
_DYNAMIC = "UD-"
_UNQUANTISED = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """A model of a repository: one file, or the parts of one that is split."""

    # such as Q4_K_M; "" if the name tells none
    label: str
    # in the order of the parts
    files: tuple[str, ...]
    nbytes: int

    @property
    def stored_as(self) -> str:
        """The type of most of its matrices."""
        return _MIX.sub("", self.label.removeprefix(_DYNAMIC)).replace("FP16", "F16")

    @property
    def is_readable(self) -> bool:
        """Whether its type is read; of one that mixes types by a recipe, only its header tells."""
        return self.stored_as in KEPT_AS

    @property
    def is_common(self) -> bool:
        """Fit to be taken unasked: quantised, by types that are read."""
        return (
            self.is_readable
            and self.stored_as not in _UNQUANTISED
            and not self.label.startswith(_DYNAMIC)
            and not self.label.endswith("_XL")
        )


def choices(sizes: Mapping[str, int]) -> tuple[GgufChoice, ...]:
    """The models among a repository's files (name -> bytes), the largest first."""
    found: list[GgufChoice] = []
    for name in sorted(sizes):
        path = PurePosixPath(name)
        if path.suffix != ".gguf" or _BESIDE.search(path.stem):
            continue
        parts = gguf_parts(path.name) or [path.name]
        # a split model is one choice, made of its first part
        if path.name == parts[0]:
            files = tuple(str(path.with_name(part)) for part in parts)
            nbytes = sum(sizes.get(file, 0) for file in files)
            found.append(GgufChoice(_label(path), files, nbytes))
    return tuple(sorted(found, key=lambda choice: -choice.nbytes))


def _label(path: PurePosixPath) -> str:
    for text in (_PART.sub("", path.stem), path.parent.name):
        match = _LABEL.search(text)
        if match:
            return match[1].upper()
    return ""


def named_choice(source: str, quant: str, found: Sequence[GgufChoice]) -> GgufChoice:
    """The model of that quantisation; a file in one piece before the same in parts."""
    fitting = [choice for choice in found if choice.label == quant] or [
        choice for choice in found if choice.label == f"{_DYNAMIC}{quant}"
    ]
    if not fitting:
        labels = ", ".join(dict.fromkeys(choice.label for choice in found if choice.label))
        has = f"it has {labels}" if labels else "its GGUF files name none"
        raise WeightsError(f"{source}: the repository has no {quant}; {has}. Name one of them.")
    whole = [choice for choice in fitting if len(choice.files) == 1] or fitting
    if len(whole) > 1:
        names = ", ".join(choice.files[0] for choice in whole[:3])
        raise WeightsError(
            f"{source}: {len(whole)} files are {quant} ({names}). Name one: hf:ORG/REPO/FILE.gguf."
        )
    if not whole[0].is_readable:
        readable = ", ".join(dict.fromkeys(c.label for c in found if c.is_common))
        other = f"Choose one of {readable}" if readable else "Choose another repository"
        raise WeightsError(
            f"{source}: {quant} is not a type that is read. Nothing was fetched. {other}."
        )
    return whole[0]


def best_fitting(
    source: str, found: Sequence[GgufChoice], room: ModelRoom
) -> tuple[GgufChoice, str]:
    """The largest quantised file that leaves room for keys and values, and a line that says which
    and why. Where none fits the smallest is taken: experts of a model may stay on the disk."""
    common = [choice for choice in found if choice.is_common]
    able = common or [choice for choice in found if choice.is_readable or not choice.label]
    if not able:
        labels = ", ".join(dict.fromkeys(choice.label for choice in found))
        raise WeightsError(f"{source}: holds {labels}, none of which is read. Use another model.")
    fitting = [choice for choice in able if choice.nbytes <= room.weight_bytes]
    if fitting:
        best, why = fitting[0], f"the largest of {len(able)} that fits"
    else:
        best, why = able[-1], f"the smallest of {len(able)}; none fits"
    name = best.label or best.files[0]
    return best, f"{source}: {name}, {best.nbytes / 1e9:.1f} GB, {why} ({room})"
