"""The profile of a package, read from manifest and grammar: when and how to use its adapter.

An operator who allows an unsigned package does not vouch for its fields: invalid fields are left
out one by one, and valid ones are limited in size. Raises only errors from reading files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.core.adapters import MAX_STACK, AdapterCard, AdapterProfile
from coterie.core.errors import CoterieError
from coterie.core.request import ResponseFormat
from coterie.core.sampling import MAX_TOKENS, SAMPLING_FIELDS, TUNED_FIELDS
from coterie.packages.manifest import Manifest, check_name, check_version
from coterie.packages.paths import GRAMMAR

MAX_TEXTS = 640
MAX_KEYWORD_CHARS = 64
MAX_EXAMPLE_CHARS = 2_000
MAX_HINT_CHARS = 1_000
MAX_TEMPLATE_CHARS = 20_000
MAX_FORMAT_CHARS = 100_000
MAX_PATTERN_CHARS = 1_000
# how often a template may contain the prompt or the body
MAX_REPEATS = 3
# larger values make no difference
_MAX_ORDER = 1_000_000
# the ranges for a package are narrower than those for a request
DECODING_FIELDS = {name: SAMPLING_FIELDS[name] for name in TUNED_FIELDS} | {
    "temperature": SAMPLING_FIELDS["temperature"].narrowed(high=2.0),
    "top_p": SAMPLING_FIELDS["top_p"].narrowed(low=0.01),
    "top_k": SAMPLING_FIELDS["top_k"].narrowed(low=0, high=1_000_000),
    "repetition_penalty": SAMPLING_FIELDS["repetition_penalty"].narrowed(low=1.0, high=2.0),
    "max_tokens": MAX_TOKENS.narrowed(high=200_000),
}
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_TEXT_FORMATS = ("lark", "gbnf", "regex")


def profile_of(card: AdapterCard, manifest: Manifest, grammar: str = "") -> AdapterProfile:
    """`grammar` is the text of the package's grammar.gbnf, if it has one."""
    routing, constraints = manifest.section("routing"), manifest.section("constraints")
    capabilities = _texts(manifest.document.get("capabilities"), MAX_KEYWORD_CHARS)
    return AdapterProfile(
        card=card,
        keywords=_texts(routing.get("keywords"), MAX_KEYWORD_CHARS),
        examples=_texts(routing.get("examples"), MAX_EXAMPLE_CHARS),
        counterexamples=_texts(routing.get("counterexamples"), MAX_EXAMPLE_CHARS),
        router_hint=_text(routing.get("router_hint"), MAX_HINT_CHARS),
        priority=_number(routing.get("priority"), 0.0, 1.0, 0.5),
        capabilities=capabilities,
        languages=_languages(capabilities),
        requires=_names(constraints.get("requires")),
        incompatible_with=_names(constraints.get("incompatible_with")),
        max_chain=int(_number(constraints.get("max_chain"), 0, MAX_STACK, 0)),
        load_order=int(_number(constraints.get("load_order"), -_MAX_ORDER, _MAX_ORDER, 0)),
        response_format=_format(manifest.document.get("response_format"), grammar),
        answer_pattern=_pattern(manifest.section("check")),
        decoding=_decoding(manifest),
        template=_template(routing.get("template")),
        quality=_quality(manifest),
    )


def read_profile(card: AdapterCard, manifest: Manifest, folder: Path) -> AdapterProfile:
    """`folder` holds the other files of the package."""
    path = folder / GRAMMAR
    grammar = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return profile_of(card, manifest, grammar)


def _text(value: Any, most: int) -> str:
    """The text, or nothing if it is too long: a shortened hint or grammar would mean something
    else."""
    return value.strip() if isinstance(value, str) and len(value) <= most else ""


def _texts(value: Any, most: int) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    texts = (item.strip()[:most] for item in value if isinstance(item, str))
    return tuple(dict.fromkeys(text for text in texts if text))[:MAX_TEXTS]


def _names(value: Any) -> tuple[str, ...]:
    """Names of other adapters, `name` or `name@version`."""
    names: dict[str, None] = {}
    for text in _texts(value, 2 * MAX_KEYWORD_CHARS):
        name, at, version = text.partition("@")
        try:
            check_name(name)
            if at:
                check_version(version)
        except CoterieError:
            continue
        names[text] = None
    return tuple(names)


def _number(value: Any, low: float, high: float, otherwise: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return otherwise
    return min(max(float(value), low), high)


def _template(value: Any) -> str:
    """A prompt may be long: repeated too often it would fill the memory."""
    text = value if isinstance(value, str) and len(value) <= MAX_TEMPLATE_CHARS else ""
    repeats = max(text.count("{prompt}"), text.count("{body}"))
    return text if "{prompt}" in text and repeats <= MAX_REPEATS else ""


def _format(value: Any, grammar: str) -> ResponseFormat | None:
    """The format in the manifest (`{"type": ...}`), otherwise the package's grammar file."""
    stated = _stated_format(value) if isinstance(value, dict) else None
    if stated is not None:
        return stated
    if grammar.strip() and len(grammar) <= MAX_FORMAT_CHARS:
        return ResponseFormat("gbnf", grammar)
    return None


def _stated_format(value: Mapping[str, Any]) -> ResponseFormat | None:
    kind = value.get("type")
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind == "json_schema":
        # in OpenAI's form, or the schema itself
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else value.get("schema")
        text = json.dumps(schema) if isinstance(schema, dict) else ""
    else:
        source = value.get("text")
        text = source if kind in _TEXT_FORMATS and isinstance(source, str) else ""
    if not text.strip() or len(text) > MAX_FORMAT_CHARS:
        return None
    return ResponseFormat(str(kind), text)


def _pattern(check: Mapping[str, Any]) -> str:
    """The regular expression in `check`, if it is valid."""
    text = _text(check.get("text"), MAX_PATTERN_CHARS) if check.get("type") == "regex" else ""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return ""
    return text


def _languages(capabilities: tuple[str, ...]) -> tuple[str, ...]:
    """Taken from capabilities like `language:de`."""
    codes = (
        item.removeprefix("language:") for item in capabilities if item.startswith("language:")
    )
    return tuple(dict.fromkeys(code for code in codes if _LANGUAGE.fullmatch(code)))


def _decoding(manifest: Manifest) -> dict[str, float]:
    """Stated in the manifest, or used in training, or used for its evaluation."""
    for stated in (manifest.document.get("decoding"), manifest.section("training").get("decoding")):
        if isinstance(stated, dict) and (values := _values(stated)):
            return values
    return (
        {"temperature": 0.0} if manifest.section("evaluation").get("decoding") == "greedy" else {}
    )


def _values(stated: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, field in DECODING_FIELDS.items():
        value = _number(stated.get(name), -math.inf, math.inf, math.nan)
        # a value out of range is invalid; it is not replaced by another
        if field.takes(value):
            values[name] = value
    return values


def _quality(manifest: Manifest) -> float | None:
    judged = manifest.section("evaluation").get("expert")
    score = judged.get("score") if isinstance(judged, dict) else None
    if score is None:
        metrics = manifest.section("quality_metrics")
        score = metrics.get("score", metrics.get("accuracy"))
    value = _number(score, -math.inf, math.inf, math.nan)
    return value if 0.0 <= value <= 1.0 else None
