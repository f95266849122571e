"""Which values a sampling field may have: one table for all APIs, packages and the engine.

The ranges are the widest that the engine computes correctly. An API, a package or a flag may
accept less (`SamplingField.narrowed`), never more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coterie.core.errors import InvalidRequest
from coterie.core.request import Sampling


@dataclass(frozen=True, slots=True)
class SamplingField:
    """Accepts `low` to `high`, both included; a field whose `low` is an int holds whole numbers."""

    low: float
    high: float
    # for a request that does not give the field; None = no default
    default: float | None = None
    # `low` itself is excluded
    above_low: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int)

    def narrowed(self, low: float | None = None, high: float | None = None) -> SamplingField:
        """The same field with a smaller range; ValueError if the range would be larger."""
        if (low is not None and low < self.low) or (high is not None and high > self.high):
            raise ValueError(f"{low} to {high} is wider than {self.low} to {self.high}")
        return SamplingField(
            self.low if low is None else low,
            self.high if high is None else high,
            self.default,
            # a raised `low` is included
            self.above_low and (low is None or low == self.low),
        )

    def takes(self, value: float) -> bool:
        # a nan fails both comparisons
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above_low else 'from'} {self.low} to {self.high}"


SAMPLING_FIELDS: dict[str, SamplingField] = {
    "temperature": SamplingField(0.0, 100.0, 1.0),
    "top_p": SamplingField(0.0, 1.0, 1.0, above_low=True),
    # -1 and 0 = off
    "top_k": SamplingField(-1, 2**31 - 1, 0),
    "min_p": SamplingField(0.0, 1.0, 0.0),
    "typical_p": SamplingField(0.0, 1.0, 1.0, above_low=True),
    "repetition_penalty": SamplingField(0.0, 100.0, 1.0, above_low=True),
    "presence_penalty": SamplingField(-2.0, 2.0, 0.0),
    "frequency_penalty": SamplingField(-2.0, 2.0, 0.0),
    # an exponent of the output's length: a larger value overflows
    "length_penalty": SamplingField(-10.0, 10.0, 1.0),
    "n": SamplingField(1, 128, 1),
    "num_beams": SamplingField(1, 64, 1),
    "logprobs": SamplingField(0, 100),
    "prompt_logprobs": SamplingField(0, 100),
    # drawn if it is not given
    "seed": SamplingField(-(2**63), 2**63 - 1),
}
# for each token; added in float32, so a finite number may still be too large
LOGIT_BIAS = SamplingField(-1e9, 1e9)
# fields of `Limits`, not of `Sampling`; the context limits the length of an output
MAX_TOKENS = SamplingField(1, 2**63 - 1)
MIN_TOKENS = SamplingField(0, 2**63 - 1, 0)

# what a package or a task type may set
TUNED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# what a model's generation_config may set
GENERATION_FIELDS = (*TUNED_FIELDS, "typical_p")


def value_of(sampling: Sampling, name: str) -> float:
    """The given value, or the default of a field that has one."""
    given: float | None = getattr(sampling, name)
    default = SAMPLING_FIELDS[name].default
    assert default is not None, name
    return default if given is None else given


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest for the first value that is out of its range."""
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(sampling, name)
        if value is not None and not field.takes(value):
            raise InvalidRequest(f"{name} is {value}; it must be {field}", param=name)
    for _, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequest(
                "logit_bias holds a value that is not a number", param="logit_bias"
            )
        if not LOGIT_BIAS.takes(bias):
            raise InvalidRequest(
                f"logit_bias holds {bias}; it must be {LOGIT_BIAS}", param="logit_bias"
            )
