"""Values left open, filled in by what is to be done: a table by task type, and the chosen adapter's
own decoding, format and template. What the caller gave always stands.
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

# by task type, as seed 000 has them and in its spirit
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
# an adapter that says how it was judged was judged without a penalty unless it says so
_JUDGED = {"repetition_penalty": 1.0}
_PLACE = re.compile(r"\{(prompt|body)\}")


def suited(features: PromptFeatures, adapter: AdapterProfile | None) -> PromptFeatures:
    """What the chosen adapter is for is what is to be done: its `task:` and `tech:` capabilities
    over what the prompt looks like."""
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
    """The adapter's own over those of the task type."""
    values = dict(TASK_VALUES[task_type])
    if adapter is not None and adapter.decoding:
        values |= _JUDGED | dict(adapter.decoding)
    return values


def filled(asked: Sampling, values: Mapping[str, float]) -> Sampling:
    """`asked` with `values` where it says nothing."""
    open_values: dict[str, Any] = {
        name: values[name]
        for name in TUNED_FIELDS
        if name in values and getattr(asked, name) is None
    }
    if "top_k" in open_values:
        open_values["top_k"] = int(open_values["top_k"])
    return replace(asked, **open_values) if open_values else asked


def tuned(
    request: InferenceRequest, values: Mapping[str, float], adapter: AdapterProfile | None
) -> TunedFields:
    """`adapter` is the one that was chosen alone, if one was."""
    hints, tokens = request.hints, None
    if hints.tune and request.limits.max_tokens is None:
        tokens = int(values["max_tokens"])
    if adapter is None:
        return TunedFields(max_tokens=tokens)
    chat = request.prompt if isinstance(request.prompt, Chat) else None
    wanted, pattern = request.response_format, ""
    if wanted is None and not (chat is not None and chat.tools):
        wanted, pattern = adapter.response_format, adapter.answer_pattern
    prompt = None
    if chat is not None and adapter.template:
        prompt = rewritten(chat, adapter.template, hints.instruction, hints.document)
    own = wanted if wanted is not request.response_format else None
    return TunedFields(prompt, tokens, own, pattern)


def rewritten(chat: Chat, template: str, instruction: str, document: str) -> Prompt | None:
    """The chat with its last message written by `template`; None where that message is not the
    caller's plain words: a template of the caller's own stands."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "user":
        return None
    words = instruction or last.content
    if last.content not in (words, f"{words}\n\n{document}"):
        return None
    parts = {"prompt": words, "body": document}
    text = _PLACE.sub(lambda place: parts[place.group(1)], template)
    if document and "{body}" not in template:
        text = f"{text}\n\n{document}"
    return replace(chat, messages=(*chat.messages[:-1], replace(last, content=text)))
