"""service/quotas.py: requests and tokens a minute, with a clock of the test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.core.ensemble import TenantSettings
from coterie.core.errors import InvalidRequest, Overloaded
from coterie.service.quotas import REQUESTS, TOKENS, TenantQuotas


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> TenantQuotas:
    return TenantQuotas(clock)


ACME = TenantSettings("acme", requests_per_minute=6, tokens_per_minute=600)


def test_requests_wait_for_their_turn(quotas: TenantQuotas, clock: Clock) -> None:
    for _ in range(6):
        quotas.enter(ACME).settle(0)
    with pytest.raises(Overloaded) as caught:
        quotas.enter(ACME)
    assert caught.value.param == "requests_per_minute"
    assert caught.value.retry_after_s == pytest.approx(10.0)
    # waiting as told is enough
    assert caught.value.retry_after_s is not None
    clock.now += caught.value.retry_after_s
    quotas.enter(ACME)
    with pytest.raises(Overloaded):
        quotas.enter(ACME)


def test_tokens_are_reserved_and_given_back(quotas: TenantQuotas, clock: Clock) -> None:
    use = quotas.enter(ACME)
    use.reserve(100, 400)
    other = quotas.enter(ACME)
    with pytest.raises(Overloaded, match="600 tokens a minute") as caught:
        other.reserve(100, 50)
    assert caught.value.param == "tokens_per_minute"
    assert caught.value.retry_after_s == pytest.approx(5.0)
    use.settle(120)
    # a second end changes nothing
    use.settle(0)
    use.cancel()
    other.reserve(100, 300)
    requests, tokens = quotas.state(ACME)
    assert (requests.kind, requests.limit, requests.remaining) == (REQUESTS, 6, 4)
    assert (tokens.kind, tokens.limit, tokens.remaining) == (TOKENS, 600, 80)
    assert tokens.reset_s == pytest.approx(52.0)


def test_a_refused_request_costs_nothing(quotas: TenantQuotas) -> None:
    with pytest.raises(ValueError), quotas.enter(ACME) as use:
        use.reserve(10, 10)
        raise ValueError
    assert [state.remaining for state in quotas.state(ACME)] == [6, 600]
    with quotas.enter(ACME) as use:
        use.reserve(10, 10)
    assert [state.remaining for state in quotas.state(ACME)] == [5, 580]


def test_one_that_is_larger_than_the_quota(quotas: TenantQuotas, clock: Clock) -> None:
    use = quotas.enter(ACME)
    use.reserve(100, 10_000)
    use.settle(900)
    # what it used beyond is paid off before the next one
    with pytest.raises(Overloaded) as caught:
        quotas.enter(ACME).reserve(1, 0)
    assert caught.value.retry_after_s == pytest.approx(30.1)
    with pytest.raises(InvalidRequest, match="601 tokens"):
        quotas.enter(ACME).reserve(601, 0)


def test_a_job_is_not_refused_twice(quotas: TenantQuotas) -> None:
    for _ in range(6):
        quotas.enter(ACME)
    job = quotas.enter(ACME, is_accepted=True)
    job.reserve(1000, 1000)
    job.settle(700)
    assert [state.remaining for state in quotas.state(ACME)] == [0, 0]


def test_no_quota_and_no_settings(quotas: TenantQuotas) -> None:
    free = TenantSettings("free")
    for settings in (None, free):
        use = quotas.enter(settings)
        use.reserve(10**9, 10**9)
        use.settle(5)
    assert quotas.state(free) == []


def test_a_changed_limit_counts_what_was_used(quotas: TenantQuotas) -> None:
    for _ in range(4):
        quotas.enter(ACME)
    wider = TenantSettings("acme", requests_per_minute=10)
    assert quotas.state(wider)[0].remaining == 6
    narrower = TenantSettings("acme", requests_per_minute=3)
    assert quotas.state(narrower)[0].remaining == 0
    with pytest.raises(Overloaded):
        quotas.enter(narrower)


def test_tenants_are_apart_and_bounded(clock: Clock) -> None:
    quotas = TenantQuotas(clock, max_tenants=4)
    one = TenantSettings("one", requests_per_minute=1)
    quotas.enter(one)
    with pytest.raises(Overloaded):
        quotas.enter(one)
    for index in range(20):
        quotas.enter(TenantSettings(f"t{index}", requests_per_minute=1))
    assert len(quotas._buckets) == 4


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(0, 300), st.integers(0, 300), st.floats(0, 1)),
        max_size=60,
    )
)
def test_never_more_than_the_rate_allows(steps: list[tuple[float, int, int, float]]) -> None:
    """Whatever comes: what was used fits one full bucket and what flowed in since, and one who
    waits as told is let in."""
    clock = Clock()
    quotas, used, began = TenantQuotas(clock), 0, clock.now
    for pause, prompt, answer, share in steps:
        clock.now += pause
        try:
            with quotas.enter(TenantSettings("t", tokens_per_minute=600)) as use:
                use.reserve(prompt, answer)
        except Overloaded as refused:
            assert refused.retry_after_s is not None
            clock.now += refused.retry_after_s + 1e-6
            with quotas.enter(TenantSettings("t", tokens_per_minute=600)) as use:
                use.reserve(prompt, answer)
        spent = prompt + int(answer * share)
        use.settle(spent)
        used += spent
        assert used <= 600 + (clock.now - began) * 10 + 1
