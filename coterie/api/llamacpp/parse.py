"""Turns llama.cpp's bodies into `ParsedRequest` values."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coterie.api.body_fields import positive_top_p, refuse_misplaced_fields
from coterie.api.dialect import CallerInfo, ParsedRequest
from coterie.api.llamacpp.types import (
    InfillBody,
    LlamaCompletionBody,
    LlamaFields,
    PromptPart,
    TextPrompt,
)
from coterie.api.openai.parse import logit_biases
from coterie.api.response_format import response_format_of, schema_format
from coterie.core.errors import InvalidRequest, UnsupportedFeature
from coterie.core.request import (
    InferenceRequest,
    Limits,
    Prompt,
    ResponseFormat,
    RouteHints,
    Sampling,
    Text,
    Tokens,
)
from coterie.models.text.fill import GapText, fill_prompt, refuse_too_long
from coterie.models.text.tokenizer import Tokenizer

# editors send these with every request to fill a gap; they only say when to give up
_HINTS = frozenset({"samplers", "n_indent", "t_max_prompt_ms", "t_max_predict_ms"})
# fields of other APIs; what to do instead
_MISPLACED = {
    "max_completion_tokens": "use n_predict",
    "repetition_penalty": "use repeat_penalty",
    "response_format": "use json_schema",
    "guided_json": "use json_schema",
    "messages": "use /v1/chat/completions, or /apply-template first",
    "tools": "use /v1/chat/completions",
    "system_prompt": "put it into prompt",
    "suffix": "use /infill",
    "logprobs": "use n_probs",
    "t_max_predict_ms": "send the header x-deadline-ms",
    "n_indent": "is honoured by no model here",
}
# a bias that no token overcomes
_NEVER = -100.0


def parse_completion(body: LlamaFields, caller: CallerInfo, id_: str) -> ParsedRequest:
    """The prompt is set afterwards: it may need the model's tokens."""
    extra = body.model_extra or {}
    is_infill = isinstance(body, InfillBody)
    given = {name: extra[name] for name in extra if not (is_infill and name in _HINTS)}
    # zero is llama.cpp's default of its limits
    refuse_misplaced_fields({name: given[name] for name in given if given[name] != 0}, _MISPLACED)
    _refuse(body)
    answer_format = _format(body)
    field = "grammar" if body.grammar else "json_schema"
    request = InferenceRequest(
        id=id_,
        prompt=Text(""),
        sampling=_sampling(body),
        limits=Limits(
            # an engine always makes one token; the answer leaves it out
            max_tokens=None if body.most in (None, -1) else max(body.most or 0, 1),
            stop=tuple(body.stop or ()),
            ignore_eos=bool(body.ignore_eos),
            priority=caller.priority(None),
            timeout_s=caller.timeout_s,
        ),
        hints=RouteHints(body.model, intent=caller.intent),
        response_format=answer_format,
        session=caller.session_key(None),
        tenant=caller.tenant,
        arrived_at=caller.arrived_at,
    )
    return ParsedRequest(request, bool(body.stream), format_field=field)


async def completion_prompt(
    body: LlamaCompletionBody, tokenizer: Tokenizer | None, context: int
) -> Prompt:
    """`tokenizer` is None for a model on another server."""
    if isinstance(body.prompt, str):
        return Text(body.prompt)
    if isinstance(body.prompt, TextPrompt):
        if body.prompt.multimodal_data:
            text = "prompt.multimodal_data: only text can be read here"
            raise UnsupportedFeature(text, param="prompt.multimodal_data")
        return Text(body.prompt.prompt_string)
    if all(isinstance(part, int) for part in body.prompt):
        return Tokens(tuple(part for part in body.prompt if isinstance(part, int)))
    texts = [part for part in body.prompt if isinstance(part, str)]
    if len(texts) == len(body.prompt) == 1:
        return Text(texts[0])
    if len(texts) == len(body.prompt):
        raise UnsupportedFeature("prompt: send one prompt in a request", param="prompt")
    if tokenizer is None:
        text = "prompt: this model is on another server, its tokens are not known here"
        raise UnsupportedFeature(text, param="prompt")
    refuse_too_long(tokenizer, texts, context)
    return Tokens(await asyncio.to_thread(_joined, body.prompt, tokenizer))


def _joined(parts: list[PromptPart], tokenizer: Tokenizer) -> tuple[int, ...]:
    ids: list[int] = []
    for index, part in enumerate(parts):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, special=index == 0)
    return tuple(ids)


async def infill_prompt(body: InfillBody, tokenizer: Tokenizer, context: int) -> Tokens:
    files = tuple((item.filename, item.text) for item in body.input_extra or ())
    gap = GapText(body.input_prefix, body.input_suffix, files, body.prompt or "")
    return Tokens(await asyncio.to_thread(fill_prompt, tokenizer, gap, context, "model"))


def with_prompt(parsed: ParsedRequest, prompt: Prompt) -> ParsedRequest:
    return replace(parsed, request=replace(parsed.request, prompt=prompt))


def _refuse(body: LlamaFields) -> None:
    if body.post_sampling_probs:
        text = "post_sampling_probs: n_probs are those before sampling here"
        raise UnsupportedFeature(text, param="post_sampling_probs")
    is_penalised = body.repeat_penalty not in (None, 1) or any(
        (body.presence_penalty, body.frequency_penalty)
    )
    if is_penalised and body.repeat_last_n not in (None, -1, 0):
        text = "repeat_last_n: penalties count the whole context here; give -1"
        raise UnsupportedFeature(text, param="repeat_last_n")
    if body.grammar and body.json_schema is not None:
        raise InvalidRequest("give grammar or json_schema, not both", param="json_schema")


def _sampling(body: LlamaFields) -> Sampling:
    is_off = body.repeat_last_n == 0
    return Sampling(
        temperature=body.temperature,
        top_p=positive_top_p(body.top_p),
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        typical_p=body.typical_p,
        repetition_penalty=None if is_off else body.repeat_penalty,
        presence_penalty=None if is_off else body.presence_penalty,
        frequency_penalty=None if is_off else body.frequency_penalty,
        logit_bias=_biases(body),
        seed=None if body.seed is None or body.seed < 0 else body.seed,
        logprobs=body.n_probs or None,
    )


def _biases(body: LlamaFields) -> tuple[tuple[int, float], ...]:
    if isinstance(body.logit_bias, dict):
        return logit_biases(body.logit_bias)
    return tuple(sorted(map(_bias, body.logit_bias or ())))


def _bias(pair: list[bool | float]) -> tuple[int, float]:
    token, amount = pair
    if isinstance(token, bool) or not 0 <= token < 2**31 or token != int(token):
        raise InvalidRequest("logit_bias: the first of a pair is a token id", param="logit_bias")
    if amount is True or not -100 <= amount <= 100:
        text = "logit_bias: the second of a pair is false or a number from -100 to 100"
        raise InvalidRequest(text, param="logit_bias")
    return int(token), _NEVER if amount is False else float(amount)


def _format(body: LlamaFields) -> ResponseFormat | None:
    if body.json_schema is not None:
        return schema_format(body.json_schema, param="json_schema")
    return response_format_of(None, body.grammar or None)
