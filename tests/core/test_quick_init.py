"""A class with `quick_init` behaves as the plain dataclass does."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from coterie.core.events import Finished, InferenceMetrics, Timings, Usage
from coterie.core.quick_init import quick_init
from coterie.core.request import InferenceRequest, Limits, RouteHints, Sampling


@dataclass(frozen=True, slots=True)
class PlainValue:
    name: str
    count: int = 3
    items: list[int] = field(default_factory=list)
    ratio: float | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class QuickValue:
    name: str
    count: int = 3
    items: list[int] = field(default_factory=list)
    ratio: float | None = None


def test_it_takes_the_same_arguments_and_holds_the_same_values() -> None:
    rng = random.Random(1)
    names = [item.name for item in dataclasses.fields(PlainValue)]
    for _ in range(200):
        values: list[Any] = ["x" * rng.randrange(3), rng.random(), [rng.randrange(9)], None]
        placed = rng.randrange(len(values) + 1)
        given = {n: v for n, v in zip(names, values, strict=True) if rng.random() < 0.5}
        named = {name: value for name, value in given.items() if name in names[placed:]}
        results: list[Any] = []
        for cls in (PlainValue, QuickValue):
            try:
                results.append(dataclasses.asdict(cls(*values[:placed], **named)))
            except TypeError as error:
                results.append(str(error).partition(".")[2])
        assert results[0] == results[1]
    plain, quick = inspect.signature(PlainValue.__init__), inspect.signature(QuickValue.__init__)
    assert list(plain.parameters) == list(quick.parameters)


def test_it_stays_frozen_hashed_copied_and_pickled() -> None:
    value = Sampling(temperature=0.5, seed=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.temperature = 1.0  # type: ignore[misc]
    assert type(value) is Sampling and isinstance(value, Sampling)
    assert hash(value) == hash(Sampling(temperature=0.5, seed=7))
    assert copy.copy(value) == value == pickle.loads(pickle.dumps(value))
    assert dataclasses.replace(value, seed=8) == Sampling(temperature=0.5, seed=8)
    # a default that is a list is made for each
    assert QuickValue("a").items is not QuickValue("b").items


def test_it_is_written_and_read_by_msgspec() -> None:
    end = Finished("r", ("stop",), Usage(3, 4), Timings(queue_s=0.25))
    data = msgspec.msgpack.encode(end.timings)
    assert msgspec.msgpack.decode(data, type=Timings) == end.timings
    assert msgspec.json.decode(msgspec.json.encode(end.usage)) == dataclasses.asdict(end.usage)


@pytest.mark.parametrize("cls", [InferenceRequest, Limits, RouteHints, InferenceMetrics])
def test_defaults_are_those_of_the_fields(cls: Any) -> None:
    for item in dataclasses.fields(cls):
        parameter = inspect.signature(cls.__init__).parameters[item.name]
        if item.default is not dataclasses.MISSING:
            assert parameter.default is item.default
        elif item.default_factory is dataclasses.MISSING:
            assert parameter.default is inspect.Parameter.empty


def test_what_it_cannot_speed_up_is_refused() -> None:
    @dataclass(frozen=True)
    class WithoutSlots:
        name: str

    with pytest.raises(TypeError, match="slots"):
        quick_init(WithoutSlots)
