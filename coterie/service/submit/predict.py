"""How long a request will take at a given load: one predictor per specialist, fitted online.

A step of an engine costs a fixed time, some time per row and some per prompt token, and where lanes
cannot share a step they take turns. So a token of an answer takes `a + b * lanes + c * sequences`,
and each prompt token that is computed meanwhile adds a constant; the first token takes the same and
its own prompt. These are linear in what the gateway counts (load.py). The coefficients are fitted
to ended requests by least squares of the relative error, with forgetting; none is negative. A
machine that does other work becomes slower as a whole, and faster than that fit follows: the
`drift` is the mean ratio of measured to fitted time of the latest requests.

The fit gives the expected time. What is promised is that time multiplied by a factor: a high
quantile of measured over expected, and a margin that grows with each missed deadline and shrinks
slowly otherwise, so that the share of misses stays near `MISSES` whatever the error's form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.service.submit.load import EngineLoad, LoadProfile, LoadSums, ReplicaRequest

# a sample this many ended requests ago counts 1/e
MEMORY = 300.0
# ended requests before which a predictor is not used to refuse
MIN_SAMPLES = 12
# share of deadlines that may be missed; how much one that was missed adds to the margin
MISSES, MARGIN_STEP = 0.004, 0.1
# share of requests that end within the factor, before the margin
COVERED = 0.99
# sweeps of coordinate descent for each new sample; they go on from the last solution
SWEEPS = 6
# so many first samples are solved for at once, later ones a few at a time
SOLVED_EACH, SOLVE_EVERY = 64, 8
# strength of the first guess, in samples
GUESS_WEIGHT = 0.02
# weight of the newest request in the drift
DRIFT = 0.15
# one measurement may be this many times the expected value; more is cut
OUTLIER = 4.0

# first guesses in seconds: first token (constant, own prompt token, prompt token of others, lane,
# sequence) and further tokens (each: constant, lane, sequence; and prompt token of others). Too
# high rather than too low, because a low guess is held on to.
FIRST_GUESS = (0.02, 5e-4, 5e-4, 0.02, 0.005)
TOKEN_GUESS = (0.01, 0.01, 0.005, 5e-4)


class LeastSquares:
    """Coefficients, none negative, that minimise the squared relative errors, newest first."""

    def __init__(self, guess: Sequence[float]) -> None:
        self.coefficients = list(guess)
        self.num_samples = 0
        size = len(guess)
        # (strength of the first guess, that times the guess)
        self._pulls = [(pull, pull * x) for x in guess for pull in (GUESS_WEIGHT / (x * x),)]
        self._products: NDArray[np.float64] = np.zeros((size, size))
        self._sums: NDArray[np.float64] = np.zeros(size)
        # scaled features of samples that are not in the sums yet
        self._waiting: list[list[float]] = []

    def value(self, features: Sequence[float]) -> float:
        return float(sum(map(mul, self.coefficients, features)))

    def learn(self, features: Sequence[float], measured: float) -> float:
        """Returns the time that was expected for these features."""
        expected = self.value(features)
        if self.num_samples >= MIN_SAMPLES and expected > 0:
            measured = min(max(measured, expected / OUTLIER), expected * OUTLIER)
        if not measured > 0:
            return expected
        self._waiting.append([x / measured for x in features])
        self.num_samples += 1
        if self.num_samples <= SOLVED_EACH or self.num_samples % SOLVE_EVERY == 0:
            self._add_waiting()
            self._solve()
        return expected

    def saved(self) -> dict[str, Any]:
        """What it has learnt, as JSON can hold it."""
        if self._waiting:
            self._add_waiting()
        return {
            "coefficients": list(self.coefficients),
            "num_samples": self.num_samples,
            "products": self._products.tolist(),
            "sums": self._sums.tolist(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what cannot have been saved."""
        size = len(self.coefficients)
        found, products, sums = (
            np.array(saved[name], np.float64) for name in ("coefficients", "products", "sums")
        )
        if (found.shape, products.shape, sums.shape) != ((size,), (size, size), (size,)):
            raise ValueError("saved coefficients are of another kind")
        if not (np.isfinite(products).all() and np.isfinite(sums).all() and (found >= 0).all()):
            raise ValueError("saved coefficients are not numbers")
        self.num_samples = int(saved["num_samples"])
        self.coefficients, self._products, self._sums = found.tolist(), products, sums

    def _add_waiting(self) -> None:
        """Add the samples to the sums: many at once take less time."""
        rows, self._waiting = np.array(self._waiting), []
        weights = _KEPT[-len(rows) :]
        kept = _KEEP ** len(rows)
        self._products = self._products * kept + (rows.T * weights) @ rows
        self._sums = self._sums * kept + weights @ rows

    def _solve(self) -> None:
        found, pulls = self.coefficients, self._pulls
        rows = list(zip(self._products.tolist(), self._sums.tolist(), pulls, strict=True))
        for _ in range(SWEEPS):
            for i, (row, total, (pull, pulled)) in enumerate(rows):
                own = row[i]
                rest = sum(map(mul, row, found)) - own * found[i]
                value = (total + pulled - rest) / (own + pull)
                found[i] = value if value > 0.0 else 0.0


_KEEP = math.exp(-1.0 / MEMORY)
# what counts of samples that wait together, the newest last
_KEPT = _KEEP ** np.arange(SOLVE_EVERY - 1, -1, -1)


class RatioQuantile:
    """A quantile of recent ratios, from counts by size that fade."""

    LOW, STEP, COUNT = 0.25, 1.025, 130

    def __init__(self, quantile: float, guess: float, weight: float = 1.0) -> None:
        """`guess` counts as so many samples at the start."""
        self._quantile = quantile
        self._counts = [0.0] * self.COUNT
        # the highest place that has a count
        self._highest = self._place(guess)
        self._counts[self._highest] = self._total = weight
        self._newest = 1.0
        self.value = guess

    def learn(self, ratio: float) -> None:
        # newer counts grow instead of older ones being made smaller
        self._newest *= 1.0 + 1.0 / MEMORY
        place, counts = self._place(ratio), self._counts
        counts[place] += self._newest
        self._total += self._newest
        if place > self._highest:
            self._highest = place
        if self._newest > 1e9:
            counts = self._counts = [count / self._newest for count in counts]
            self._total, self._newest = sum(counts), 1.0
        self._find()

    def _find(self) -> None:
        counts = self._counts
        above = (1.0 - self._quantile) * self._total
        for place in range(self._highest, -1, -1):
            above -= counts[place]
            if above < 0:
                self.value = self.LOW * self.STEP**place
                return

    def saved(self) -> list[float]:
        return [count / self._newest for count in self._counts]

    def restore(self, saved: Sequence[float]) -> None:
        counts = [float(count) for count in saved]
        if len(counts) != self.COUNT or not 0 < sum(counts) < math.inf or min(counts) < 0:
            raise ValueError("saved counts are of another kind")
        self._counts, self._total, self._newest = counts, sum(counts), 1.0
        self._highest = max(place for place, count in enumerate(counts) if count)
        self._find()

    def _place(self, ratio: float) -> int:
        if ratio <= self.LOW:
            return 0
        return min(round(math.log(ratio / self.LOW) / _LOG_STEP), self.COUNT - 1)


_LOG_STEP = math.log(RatioQuantile.STEP)


class LoadFeatures(NamedTuple):
    """The load that a prediction is made for."""

    lanes: float
    sequences: float
    # prompt tokens of others that are computed first
    prompt_tokens: float


def load_after(load: EngineLoad, lane: str, num_sequences: int) -> LoadFeatures:
    """The load if a request with `num_sequences` is added in `lane`."""
    sequences = load.num_sequences_with(lane, num_sequences)
    return LoadFeatures(load.num_lanes(lane), sequences, load.prompt_tokens)


# plain figures of a predictor that are kept
_SAVED = ("used", "mean_tokens", "margin", "drift")


class LatencyPredictor:
    """Of one specialist, or of all specialists that share engines."""

    def __init__(self) -> None:
        self._first = LeastSquares(FIRST_GUESS)
        self._tokens = LeastSquares(TOKEN_GUESS)
        # share of max_tokens that answers use: expected, and that few exceed; tokens of an answer
        self.used = 1.0
        self.mean_tokens = 0.0
        self._most_used = RatioQuantile(0.95, 1.0, 4.0)
        # measured over expected, for whole answers
        self._ratios = RatioQuantile(COVERED, 1.3, 2.0)
        self.margin = 1.0
        # of the latest requests: measured over fitted time
        self.drift = 1.0

    @property
    def is_fitted(self) -> bool:
        return self._tokens.num_samples >= MIN_SAMPLES

    @property
    def num_samples(self) -> int:
        """Requests that it has learnt from."""
        return self._tokens.num_samples

    def saved(self) -> dict[str, Any]:
        """What it has learnt, for the next start of the server."""
        return {
            "first": self._first.saved(),
            "tokens": self._tokens.saved(),
            "most_used": self._most_used.saved(),
            "ratios": self._ratios.saved(),
            **{name: getattr(self, name) for name in _SAVED},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what cannot have been saved, and is then as
        before."""
        fresh = LatencyPredictor()
        fresh._first.restore(saved["first"])
        fresh._tokens.restore(saved["tokens"])
        fresh._most_used.restore(saved["most_used"])
        fresh._ratios.restore(saved["ratios"])
        values = {name: float(saved[name]) for name in _SAVED}
        if not all(0 <= value < math.inf for value in values.values()) or not values["drift"]:
            raise ValueError("saved figures are not numbers")
        vars(self).update(vars(fresh) | values)

    @property
    def factor(self) -> float:
        """What an expected time is multiplied by, to be exceeded seldom."""
        return max(self._ratios.value, 1.0) * self.margin

    @property
    def coefficients(self) -> tuple[list[float], list[float]]:
        """Of the first token and of further ones, in the order of FIRST_GUESS and TOKEN_GUESS."""
        return self._first.coefficients, self._tokens.coefficients

    def first_s(self, uncached: int, load: LoadFeatures) -> float:
        """Expected seconds from submission to the first token, if a place is free."""
        features = (1.0, uncached, load.prompt_tokens, load.lanes, load.sequences)
        return self.drift * self._first.value(features)

    def token_s(self, load: LoadFeatures) -> float:
        """Expected seconds per further token."""
        constant, lane, sequence, _ = self._tokens.coefficients
        return self.drift * (constant + lane * load.lanes + sequence * load.sequences)

    def tokens_s(self, num_tokens: float, profile: LoadProfile) -> float:
        """Expected seconds for so many tokens of a request that is in `profile`."""
        constant, lane, sequence, _ = self._tokens.coefficients
        lanes, sequences = profile.rounds(num_tokens)
        return self.drift * (constant * num_tokens + lane * lanes + sequence * sequences)

    def prompt_s(self, num_tokens: float) -> float:
        """Seconds that computing so many prompt tokens delays all others."""
        return self.drift * self._tokens.coefficients[3] * num_tokens

    @property
    def output_share(self) -> float:
        """Share of max_tokens that an answer seldom exceeds."""
        return min(self._most_used.value, 1.0)

    def output_tokens(self, max_tokens: int) -> int:
        """Tokens that an answer with this limit seldom exceeds."""
        return max(math.ceil(max_tokens * self.output_share), 1)

    def learn(self, request: ReplicaRequest, now: LoadSums) -> None:
        """From a request that ended normally now."""
        taken, first, at = request.taken, request.first, request.first_token_at
        if taken is None or first is None or at is None:
            return
        measured_s = expected_s = 0.0
        if request.had_place:
            first_s = at - request.taken_at
            load = _between(taken, first, request.uncached)
            own = (1.0, float(request.uncached), load.prompt_tokens, load.lanes, load.sequences)
            measured_s, expected_s = first_s, self._first.learn(own, first_s)
        tokens = request.num_output // request.num_sequences - 1
        if tokens >= 1 and now.at > at:
            prompts = max(now.prompt_tokens - first.prompt_tokens, 0)
            features = (float(tokens), request.lane_rounds, request.sequence_rounds, prompts)
            measured_s += now.at - at
            expected_s += self._tokens.learn(features, now.at - at)
        if expected_s > 0 and self.is_fitted:
            ratio = measured_s / expected_s / self.drift
            if request.had_place:
                self._ratios.learn(ratio)
            self.drift *= min(max(ratio, 0.5), 2.0) ** DRIFT
            self.drift = min(max(self.drift, 0.2), 5.0)
        share = (tokens + 1) / request.max_tokens
        self._most_used.learn(min(share, 1.0))
        self.used += 0.1 * (min(share, 1.0) - self.used)
        self.mean_tokens = self.mean_tokens or tokens + 1.0
        self.mean_tokens += 0.05 * (tokens + 1 - self.mean_tokens)

    def deadline_met(self, is_met: bool) -> None:
        """A promise was kept or not: the margin finds the size at which the share of misses is
        `MISSES`."""
        self.margin += MARGIN_STEP * ((0.0 if is_met else 1.0) - MISSES)
        self.margin = min(max(self.margin, 0.85), 2.0)


def _between(start: LoadSums, end: LoadSums, own_tokens: int) -> LoadFeatures:
    """The mean load between two moments. Of the prompts that were computed, `own_tokens` are not
    those of others."""
    passed_s = max(end.at - start.at, 1e-9)
    prompts = end.prompt_tokens - start.prompt_tokens - own_tokens
    return LoadFeatures(
        (end.lanes_s - start.lanes_s) / passed_s,
        (end.sequences_s - start.sequences_s) / passed_s,
        max(prompts, 0),
    )
