"""What a person wrote for an expert, `NAME_OR_PATH[@VERSION][=WEIGHT]`, as an adapter.

An installed name or alias, an `.expert` file, or a PEFT directory. Paths are told by a separator or
the suffix, or by not being installed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from coterie.core.adapters import AdapterCard
from coterie.core.errors import InvalidRequest, NotFound
from coterie.packages.registry import Registry
from coterie.packages.trust import TrustStore

SUFFIX = ".expert"


def parse_choice(text: str) -> tuple[str, float]:
    """`sql=0.5` -> ("sql", 0.5); without a weight, 1."""
    reference, equals, tail = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        weight = float(tail)
    except ValueError:
        # a path with = in it
        return text, 1.0
    if not math.isfinite(weight) or not reference:
        raise InvalidRequest(f"{text!r}: write NAME=WEIGHT with a number", param="expert")
    return reference, weight


def find_expert(
    registry: Registry, reference: str, trust: TrustStore, *, allow_unsigned: bool = False
) -> AdapterCard:
    """The adapter itself, in the registry's library from now on."""
    path = Path(reference).expanduser()
    looks_like_path = reference.endswith(SUFFIX) or any(
        separator in reference for separator in (os.sep, os.altsep) if separator
    )
    if not looks_like_path:
        name, at, version = reference.partition("@")
        try:
            return registry.find(name, version if at else None)
        except NotFound:
            if not path.is_dir():
                raise
    if path.is_dir():
        return registry.import_directory(path)
    if not path.is_file():
        raise NotFound(f"{reference}: no such file or directory. Check the path.")
    return registry.import_package(path, trust=trust, allow_unsigned=allow_unsigned)
