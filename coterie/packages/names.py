"""What experts and versions may be called: texts that are safe in a path, a URL and a model name.

`:` `@` `+` `=` stay free, because model names such as `base:expert@1.0+other` are built with them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from coterie.core.errors import InvalidRequest
from coterie.core.request import AUTO

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NUMBER = "([0-9]{1,9})"
_LABEL = "([0-9a-z][0-9a-z.-]{0,39})"
_VERSION = re.compile(rf"{_NUMBER}(?:\.{_NUMBER})?(?:\.{_NUMBER})?(?:-{_LABEL})?")


def check_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == AUTO:
        raise InvalidRequest(
            f"{_shown(name)} is no name for an expert: use up to 64 of a-z 0-9 . _ -, "
            "with a letter or digit first, and not auto.",
            param="name",
        )
    return name


def check_version(version: object) -> str:
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise InvalidRequest(
            f"{_shown(version)} is no version: write 1.2.0, or 1.2.0-rc1.", param="version"
        )
    return version


def name_from(text: str) -> str:
    """The nearest permitted name: for directories that nobody named."""
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:64]
    return cleaned if _NAME.fullmatch(cleaned) and cleaned != AUTO else "expert"


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Those that a slip of the finger may have meant, the likeliest first."""
    return difflib.get_close_matches(name, known, n=3, cutoff=0.5)


def version_of(digest: str) -> str:
    """For adapters that carry none: other bytes, other version."""
    return f"0.0.0-{digest[:12]}"


def version_order(version: str) -> tuple[tuple[int, ...], bool, tuple[tuple[bool, int, str], ...]]:
    """Sorts as semantic versions do: a pre-release comes before its release."""
    found = _VERSION.fullmatch(version)
    if found is None:
        return (0, 0, 0), False, ()
    numbers = tuple(int(part or 0) for part in found.group(1, 2, 3))
    label = found.group(4)
    parts = label.split(".") if label else []
    ranks = tuple((not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts)
    return numbers, label is None, ranks


def _shown(value: object) -> str:
    return repr(value)[:80]
