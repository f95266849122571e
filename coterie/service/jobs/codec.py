"""Encodes requests, plans and results as the JSON that the job database stores, and decodes them.

A prompt has one of three types, which JSON cannot distinguish: each is stored under its own key.
"""

from __future__ import annotations

from typing import Any

import msgspec

from coterie.core.errors import InvalidRequest
from coterie.core.events import InferenceResult
from coterie.core.job import JobSpec
from coterie.core.plan import AdapterChoice, RoutePlan
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Limits,
    Prompt,
    ResponseFormat,
    RouteHints,
    Sampling,
    Text,
    Tokens,
)


class _Prompt(msgspec.Struct, omit_defaults=True):
    """Exactly one field is set, or none if the prompt is missing."""

    chat: Chat | None = None
    text: Text | None = None
    tokens: Tokens | None = None


class _Spec(msgspec.Struct, omit_defaults=True):
    id: str
    prompt: _Prompt
    sampling: Sampling
    limits: Limits
    hints: RouteHints
    tenant: str
    vendor: Sampling
    response_format: ResponseFormat | None = None
    session: str | None = None
    user_id: str = ""
    explain: bool = False
    keeps_deltas: bool = False


class PlannedRun(msgspec.Struct):
    """The parts of the first run's plan that a run after a crash uses again."""

    specialist: str
    adapters: tuple[AdapterChoice, ...]
    sampling: Sampling


_encode = msgspec.json.Encoder().encode
_spec_decoder = msgspec.json.Decoder(_Spec)
_plan_decoder = msgspec.json.Decoder(PlannedRun)
_result_decoder = msgspec.json.Decoder(InferenceResult)


def encode_spec(spec: JobSpec) -> bytes:
    request = spec.request
    stored = _Spec(
        id=request.id,
        prompt=_kept(request.prompt),
        sampling=request.sampling,
        limits=request.limits,
        hints=request.hints,
        tenant=request.tenant,
        vendor=spec.vendor,
        response_format=request.response_format,
        session=request.session,
        user_id=request.user_id,
        explain=spec.explain,
        keeps_deltas=spec.keeps_deltas,
    )
    return _written(stored)


def decode_spec(raw: bytes, arrived_at: float, submitted_at: float) -> JobSpec:
    """`arrived_at` is the start of this run: a monotonic clock starts again when the machine boots.
    `submitted_at` is in seconds since 1970."""
    stored = _spec_decoder.decode(raw)
    prompt = _prompt(stored.prompt)
    assert prompt is not None, "a stored request has a prompt"
    request = InferenceRequest(
        id=stored.id,
        prompt=prompt,
        sampling=stored.sampling,
        limits=stored.limits,
        hints=stored.hints,
        response_format=stored.response_format,
        session=stored.session,
        tenant=stored.tenant,
        arrived_at=arrived_at,
        submitted_at=submitted_at,
        user_id=stored.user_id,
    )
    return JobSpec(request, stored.explain, stored.vendor, stored.keeps_deltas)


def encode_plan(plan: RoutePlan) -> bytes:
    return _written(PlannedRun(plan.specialist, plan.adapters, plan.sampling))


def decode_plan(raw: bytes) -> PlannedRun:
    return _plan_decoder.decode(raw)


def encode_result(result: InferenceResult) -> bytes:
    return _encode(result)


def decode_result(raw: bytes) -> InferenceResult:
    return _result_decoder.decode(raw)


def _kept(prompt: Prompt) -> _Prompt:
    if isinstance(prompt, Chat):
        return _Prompt(chat=prompt)
    return _Prompt(text=prompt) if isinstance(prompt, Text) else _Prompt(tokens=prompt)


def _prompt(stored: _Prompt) -> Prompt | None:
    return stored.chat or stored.text or stored.tokens


def _written(stored: Any) -> bytes:
    try:
        return _encode(stored)
    except (TypeError, ValueError, RecursionError) as error:
        # lone surrogates, or nesting that is too deep for the encoder
        raise InvalidRequest("the request holds a text that cannot be stored") from error
