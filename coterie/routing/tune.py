"""Fills in values that the caller did not give: from a table by task type, and from the chosen
adapter's decoding, format and template. Values of the caller are never changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coterie.core.adapters import AdapterProfile
from coterie.core.plan import TunedFields
from coterie.core.request import Chat, InferenceRequest, Prompt, Sampling
from coterie.core.sampling import TUNED_FIELDS
from coterie.routing.features.features import LANGUAGES, PromptFeatures

# by task type
TASK_VALUES: dict[str, dict[str, float]] = {
    "json_parsing": {
        "temperature": 0.2, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "code_generation": {
        "temperature": 0.4, "max_tokens": 8192, "top_p": 0.95, "repetition_penalty": 1.05,
    },
    "classification": {
        "temperature": 0.1, "max_tokens": 256, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "extraction": {
        "temperature": 0.2, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "transformation": {
        "temperature": 0.3, "max_tokens": 4096, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "creative_writing": {
        "temperature": 0.8, "max_tokens": 4096, "top_p": 0.95, "repetition_penalty": 1.1,
    },
    "question_answering": {
        "temperature": 0.4, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.1,
    },
    "conversation": {
        "temperature": 0.6, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.1,
    },
}  # fmt: skip
# an adapter that states its decoding was evaluated without a penalty unless it states one
_EVALUATED_WITH = {"repetition_penalty": 1.0}
_PLACEHOLDER = re.compile(r"\{(prompt|body)\}")


def with_capabilities(features: PromptFeatures, adapter: AdapterProfile | None) -> PromptFeatures:
    """The features with the task type and language of the chosen adapter (its `task:` and `tech:`
    capabilities), which have priority over what the prompt looks like."""
    stated = (
        {} if adapter is None else dict(c.split(":", 1) for c in adapter.capabilities if ":" in c)
    )
    task, language = stated.get("task", ""), stated.get("tech", "")
    task = task if task in TASK_VALUES else features.task_type
    language = language if language in LANGUAGES else features.code_language
    if (task, language) == (features.task_type, features.code_language):
        return features
    return replace(features, task_type=task, code_language=language)


def values_for(task_type: str, adapter: AdapterProfile | None) -> dict[str, float]:
    """The adapter's values have priority over those of the task type."""
    values = dict(TASK_VALUES[task_type])
    if adapter is not None and adapter.decoding:
        values |= _EVALUATED_WITH | dict(adapter.decoding)
    return values


def with_defaults(given: Sampling, values: Mapping[str, float]) -> Sampling:
    """`given` with `values` for the fields that it does not set."""
    open_values: dict[str, Any] = {
        name: values[name]
        for name in TUNED_FIELDS
        if name in values and getattr(given, name) is None
    }
    if "top_k" in open_values:
        open_values["top_k"] = int(open_values["top_k"])
    return replace(given, **open_values) if open_values else given


def tuned(
    request: InferenceRequest, values: Mapping[str, float], adapter: AdapterProfile | None
) -> TunedFields:
    """`adapter` is the chosen one if it was the only one."""
    hints, tokens = request.hints, None
    if hints.tune and request.limits.max_tokens is None:
        tokens = int(values["max_tokens"])
    if adapter is None:
        return TunedFields(max_tokens=tokens)
    chat = request.prompt if isinstance(request.prompt, Chat) else None
    response_format, pattern = request.response_format, ""
    if response_format is None and not (chat is not None and chat.tools):
        response_format, pattern = adapter.response_format, adapter.answer_pattern
    prompt = None
    if chat is not None and adapter.template:
        prompt = rewritten(chat, adapter.template, hints.instruction, hints.document)
    own = response_format if response_format is not request.response_format else None
    return TunedFields(prompt, tokens, own, pattern)


def rewritten(chat: Chat, template: str, instruction: str, document: str) -> Prompt | None:
    """The chat with its last message written by `template`. None if that message is not the
    caller's plain text, so that a template of the caller is kept."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "user":
        return None
    request_text = instruction or last.content
    if last.content not in (request_text, f"{request_text}\n\n{document}"):
        return None
    parts = {"prompt": request_text, "body": document}
    text = _PLACEHOLDER.sub(lambda match: parts[match.group(1)], template)
    if document and "{body}" not in template:
        text = f"{text}\n\n{document}"
    return replace(chat, messages=(*chat.messages[:-1], replace(last, content=text)))
