"""core/sampling.py: every way in takes a sampling field's range or less of it, and nothing else.

Each is asked at the ends of the range that it should have, just inside and just outside.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from coterie.api.anthropic.types import MessagesBody
from coterie.api.body import check
from coterie.api.native.infer_body import InferBody, checked_body
from coterie.api.openai.types import ChatBody, CompletionBody
from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.api.transport.grpc_messages import fields_of
from coterie.cli.options import add_sampling
from coterie.core.adapters import AdapterCard
from coterie.core.errors import CoterieError
from coterie.core.plan import Rejected
from coterie.core.request import Sampling
from coterie.core.sampling import (
    GENERATION_FIELDS,
    LOGIT_BIAS,
    MAX_TOKENS,
    MIN_TOKENS,
    SAMPLING_FIELDS,
    TUNED_FIELDS,
    SamplingField,
    draw_seed,
    resolve_sampling,
    value_of,
)
from coterie.models.config_fields import check_generation
from coterie.packages.manifest import from_document
from coterie.packages.profile import profile_of
from coterie.routing.router import TASK_VALUES
from tests.helpers.adapters.package_files import document
from tests.helpers.models.toy_model import VOCAB, make_assignment, make_engine, make_lane

FIELDS = SAMPLING_FIELDS | {
    "logit_bias": LOGIT_BIAS,
    "max_tokens": MAX_TOKENS,
    "min_tokens": MIN_TOKENS,
}
CARD = AdapterCard("sql", "1.0.0", "d" * 64, "lora", (), 0, 1, 0.0)
HELLO = [{"role": "user", "content": "hello"}]
INT64 = 2**63 - 1


def _takes(ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except CoterieError as error:
        assert error.code == "invalid_request" or "generation_config" in error.message, error
        return False
    return True


def _gateway(name: str, value: Any) -> bool:
    given: dict[str, Any] = {name: ((1, value),) if name == "logit_bias" else value}
    return _takes(lambda: resolve_sampling(Sampling(**given), {}))


def _engine(name: str, value: Any) -> bool:
    engine = make_engine(make_lane(max_sequences=64, max_step_tokens=64))
    given = ((1, value),) if name == "logit_bias" else value
    beams: dict[str, Any] = {"max_tokens": 1} if name == "num_beams" else {}
    verdict = engine.add(make_assignment("x", [1], **beams | {name: given}))
    assert not isinstance(verdict, Rejected) or verdict.code == "invalid_request"
    return not isinstance(verdict, Rejected)


def _generation(name: str, value: Any) -> bool:
    return _takes(lambda: check_generation({name: value}, "generation_config.json"))


def _chat(name: str, value: Any) -> bool:
    key = "top_logprobs" if name == "logprobs" else name
    given = {"1": value} if name == "logit_bias" else value
    return _takes(lambda: check(ChatBody, {"model": "m", "messages": HELLO, key: given}))


def _completion(name: str, value: Any) -> bool:
    given = {"1": value} if name == "logit_bias" else value
    return _takes(lambda: check(CompletionBody, {"model": "m", "prompt": "hello", name: given}))


def _messages(name: str, value: Any) -> bool:
    body = {"model": "m", "messages": HELLO, "max_tokens": 1, name: value}
    return _takes(lambda: check(MessagesBody, body))


def _infer(name: str, value: Any) -> bool:
    return _takes(lambda: checked_body({"prompt": "hello", "num_beams": 2, name: value}))


def _grpc(name: str, value: Any) -> bool:
    fields: dict[str, Any] = {"prompt": "hello", "num_beams": 2, name: value}
    try:
        message = pb.InferRequest(**fields)
    except ValueError:
        # it does not fit the message's type
        return False
    return _takes(lambda: checked_body(fields_of(message)))


def _profile(name: str, value: Any) -> bool:
    manifest = from_document(document(decoding={name: value}))
    return name in profile_of(CARD, manifest).decoding


def _flags(name: str, value: Any) -> bool:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling(parser, max_tokens=1)
    try:
        # `=`: a value may begin with a minus
        read = parser.parse_args([f"--{name.replace('_', '-')}={value!r}"])
    except argparse.ArgumentError:
        return False
    assert getattr(read, name) == value
    return True


@dataclass(frozen=True)
class Door:
    """A way in: `ask` says whether it takes a value of a field."""

    ask: Callable[[str, Any], bool]
    fields: tuple[str, ...]
    # where it takes less than the table: low and high, both taken
    narrower: dict[str, tuple[float, float]] = field(default_factory=dict)


OPENAI = {"temperature": (0.0, 2.0), "logprobs": (0, 20), "prompt_logprobs": (0, 20)}
NATIVE = {
    "temperature": (0.0, 2.0),
    "top_k": (0, 2**31 - 1),
    "repetition_penalty": (1.0, 2.0),
    "max_tokens": (1, 200_000),
}
NATIVE_FIELDS = (*GENERATION_FIELDS, "num_beams", "length_penalty", "seed", "max_tokens")
CHAT_FIELDS = tuple(name for name in FIELDS if name not in ("num_beams", "penalty_window"))
DOORS = {
    # it folds a seed of any size
    "gateway": Door(
        _gateway, (*(name for name in SAMPLING_FIELDS if name != "seed"), "logit_bias")
    ),
    "engine": Door(
        _engine,
        (*SAMPLING_FIELDS, "logit_bias"),
        {"logprobs": (0, VOCAB), "prompt_logprobs": (0, VOCAB)},
    ),
    "generation_config": Door(_generation, GENERATION_FIELDS),
    "chat completions": Door(
        _chat, CHAT_FIELDS, {**OPENAI, "top_p": (0.0, 1.0), "logit_bias": (-100.0, 100.0)}
    ),
    "completions": Door(
        _completion,
        CHAT_FIELDS,
        # 0 with echo scores the prompt
        {
            **OPENAI,
            "top_p": (0.0, 1.0),
            "logit_bias": (-100.0, 100.0),
            "max_tokens": (0, INT64),
        },
    ),
    "messages": Door(
        _messages,
        ("temperature", "top_p", "top_k", "seed", "max_tokens"),
        {"temperature": (0.0, 1.0), "top_p": (0.0, 1.0), "top_k": (0, 2**31 - 1)},
    ),
    "infer": Door(_infer, NATIVE_FIELDS, NATIVE),
    "grpc": Door(_grpc, NATIVE_FIELDS, NATIVE),
    "package": Door(
        _profile,
        (*TUNED_FIELDS, "max_tokens"),
        {
            "temperature": (0.0, 2.0),
            "top_p": (0.01, 1.0),
            "top_k": (0, 1_000_000),
            "repetition_penalty": (1.0, 2.0),
            "max_tokens": (1, 200_000),
        },
    ),
    "flags": Door(_flags, ("temperature", "top_p", "top_k")),
}
# these two are read as something that the table takes: the likeliest token alone, a prompt's scores
READ_AS_ANOTHER = {("top_p", 0.0), ("max_tokens", 0)}


def _beside(value: float, towards: float) -> float:
    """The next value of the same type."""
    if isinstance(value, int):
        return value + (1 if towards > value else -1)
    return math.nextafter(value, towards)


@pytest.mark.parametrize(
    ("door", "name"), [(door, name) for door, made in DOORS.items() for name in made.fields]
)
def test_every_door_keeps_to_the_range(door: str, name: str) -> None:
    made, row = DOORS[door], FIELDS[name]
    low, high = made.narrower.get(name, (row.low, row.high))
    above_low = row.above_low and name not in made.narrower
    takes = {
        low: not above_low,
        _beside(low, math.inf): True,
        _beside(low, -math.inf): False,
        high: True,
        _beside(high, -math.inf): True,
        _beside(high, math.inf): False,
    }
    found = {value: made.ask(name, value) for value in takes}
    assert found == takes
    for value, taken in found.items():
        assert not taken or row.takes(value) or (name, value) in READ_AS_ANOTHER
    if door not in ("grpc", "flags"):
        assert not any(made.ask(name, value) for value in (math.nan, math.inf, -math.inf))


def test_every_sampling_field_is_in_the_table() -> None:
    numbers = {"logit_bias", "constraint", "rules"} ^ set(Sampling.__dataclass_fields__)
    assert set(SAMPLING_FIELDS) == numbers
    # and no body has one that this file does not ask for
    bodies: dict[str, type[BaseModel]] = {
        "chat completions": ChatBody,
        "completions": CompletionBody,
        "messages": MessagesBody,
        "infer": InferBody,
    }
    for door, body in bodies.items():
        own = {"top_logprobs": "logprobs"} if door == "chat completions" else {}
        ranged = {own.get(name, name) for name in body.model_fields} & set(FIELDS)
        assert ranged == set(DOORS[door].fields), door


def test_a_range_is_narrowed_never_widened() -> None:
    share = SamplingField(0.0, 1.0, 1.0, above_low=True)
    assert share.narrowed() == share
    assert share.narrowed(high=0.5) == SamplingField(0.0, 0.5, 1.0, above_low=True)
    assert share.narrowed(low=0.25) == SamplingField(0.25, 1.0, 1.0)
    for wider in ({"low": -0.1}, {"high": 1.1}, {"low": -1.0, "high": 0.5}):
        with pytest.raises(ValueError, match="wider"):
            share.narrowed(**wider)


def test_defaults_and_tuned_values_are_in_range() -> None:
    for name, row in SAMPLING_FIELDS.items():
        assert row.default is None or row.takes(row.default), name
        if row.default is not None:
            assert value_of(Sampling(), name) == row.default
            given: dict[str, Any] = {name: row.high}
            assert value_of(Sampling(**given), name) == row.high
    for values in TASK_VALUES.values():
        assert all(FIELDS[name].takes(value) for name, value in values.items())


def test_drawn_seeds_are_many_different_numbers_that_json_keeps() -> None:
    drawn = [draw_seed() for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in drawn)
    # every bit is drawn
    assert all(300 < sum(seed >> bit & 1 for seed in drawn) < 700 for bit in range(53))
