"""routing/router.py and the filling in of values it relies on (core/sampling.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from coterie.core.errors import ContextLengthExceeded, InvalidRequest, NotFound
from coterie.core.request import InferenceRequest, Limits, RouteHints, Sampling, Text
from coterie.core.sampling import VENDOR_DEFAULTS, check_tokens, resolve_limits, resolve_sampling
from coterie.routing.router import Router, Specialist

GENERATION = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 2}


def request(model: str | None, sampling: Sampling | None = None) -> InferenceRequest:
    return InferenceRequest(
        id="r", prompt=Text("hi"), sampling=sampling or Sampling(), limits=Limits(),
        hints=RouteHints(model), response_format=None, session=None, tenant="t", arrived_at=0.0,
    )  # fmt: skip


@pytest.fixture
def router() -> Router:
    return Router([Specialist("first", GENERATION), Specialist("second")])


@pytest.mark.parametrize("model", [None, "", "auto"])
def test_the_first_specialist_is_the_default(router: Router, model: str | None) -> None:
    plan = router.plan(request(model))
    assert plan.specialist == "first" and plan.reasons == ("default specialist",)


def test_a_name_is_obeyed_and_an_unknown_one_lists_what_exists(router: Router) -> None:
    assert router.plan(request("second")).specialist == "second"
    with pytest.raises(NotFound, match="first, second") as caught:
        router.plan(request("third"))
    assert caught.value.param == "model"


def test_request_then_model_then_vendor(router: Router) -> None:
    plan = router.plan(request("first", Sampling(top_k=5)), Sampling(top_p=0.9, n=1, num_beams=1))
    # request over model, model over vendor, vendor last
    assert (plan.sampling.top_k, plan.sampling.temperature, plan.sampling.top_p) == (5, 0.6, 0.9)
    plain = router.plan(request("second")).sampling
    assert replace(plain, seed=None) == VENDOR_DEFAULTS
    # greedy is a value, not "not given"
    assert router.plan(request("first", Sampling(temperature=0.0))).sampling.temperature == 0.0


def test_a_missing_seed_is_drawn_and_a_given_one_kept(router: Router) -> None:
    drawn = {router.plan(request("first")).sampling.seed for _ in range(8)}
    assert len(drawn) == 8 and all(seed is not None and 0 <= seed < 2**63 for seed in drawn)
    assert router.plan(request("first", Sampling(seed=0))).sampling.seed == 0
    # beyond 64 bits and below zero: still one fixed, storable seed
    for seed in (2**70 + 3, -5):
        kept = {router.plan(request("first", Sampling(seed=seed))).sampling.seed for _ in range(2)}
        (only,) = kept
        assert only is not None and 0 <= only < 2**63


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 0.0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5), ("typical_p", 0.0),
        ("repetition_penalty", 0.0), ("presence_penalty", 2.5), ("frequency_penalty", math.nan),
        ("n", 0), ("num_beams", 0), ("logprobs", -1), ("logit_bias", ((1, math.nan),)),
    ],
)  # fmt: skip
def test_values_out_of_range_name_their_parameter(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_sampling(replace(Sampling(), **{name: value}), {})
    assert caught.value.param == name


def test_max_tokens_fills_the_context_or_is_refused() -> None:
    assert resolve_limits(Limits(), 10, 64).max_tokens == 54
    assert resolve_limits(Limits(max_tokens=54), 10, 64).max_tokens == 54
    assert resolve_limits(Limits(context_size=32), 10, 64).max_tokens == 22
    with pytest.raises(ContextLengthExceeded, match=r"^context_size is 32 tokens.*40") as caught:
        resolve_limits(Limits(context_size=32, max_tokens=30), 10, 64)
    assert caught.value.param == "context_size"
    with pytest.raises(
        ContextLengthExceeded, match="maximum context length is 64 tokens"
    ) as caught:
        resolve_limits(Limits(context_size=99, max_tokens=60), 10, 64)
    assert caught.value.param is None
    with pytest.raises(ContextLengthExceeded, match="65 tokens"):
        resolve_limits(Limits(max_tokens=55), 10, 64)
    with pytest.raises(ContextLengthExceeded, match="prompt has 64"):
        resolve_limits(Limits(), 64, 64)


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        (Limits(max_tokens=0), "max_tokens"),
        (Limits(max_tokens=-3), "max_tokens"),
        (Limits(max_tokens=4, min_tokens=5), "min_tokens"),
        (Limits(min_tokens=-1), "min_tokens"),
        (Limits(priority=10), "priority"),
        (Limits(timeout_s=math.nan), "timeout"),
        (Limits(timeout_s=0.0), "timeout"),
    ],
)
def test_wrong_limits_name_their_parameter(limits: Limits, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_limits(limits, 10, 64)
    assert caught.value.param == param


def test_token_ids_must_exist() -> None:
    check_tokens([0, 9], Sampling(logit_bias=((9, 1.0),)), 10)
    for ids in ([], [10], [3, -1]):
        with pytest.raises(InvalidRequest, match=r"prompt|token"):
            check_tokens(ids, Sampling(), 10)
    with pytest.raises(InvalidRequest) as caught:
        check_tokens([1], Sampling(logit_bias=((10, 1.0),)), 10)
    assert caught.value.param == "logit_bias"
