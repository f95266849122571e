"""Settings of a specialist that is an encoder."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.settings import key

GENERATOR, ENCODER = "generator", "encoder"
KINDS = (GENERATOR, ENCODER)
# the model that this release ships: a table of word vectors
STATIC = "static"
POOLING_CHOICES = ("auto", "mean", "cls", "max", "last")


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Limits and form of a specialist of kind `encoder`. Its `context` is the limit of one
    input."""

    pooling: str = key(
        "auto",
        "text",
        "How the vectors of tokens become one; `auto` = as the model's files say, else the mean.",
        among=POOLING_CHOICES,
    )
    threads: int = key(
        0, "integer", "CPU threads; 0 = `engine.threads`, or all cores.", low=0, high=1024
    )
    max_inputs: int = key(2048, "integer", "Most inputs of one request.", low=1, high=30_000)
    max_request_tokens: int = key(
        300_000, "integer", "Most tokens of all inputs of one request.", low=1, high=100_000_000
    )
    max_waiting_tokens: int = key(
        2_000_000,
        "integer",
        "Most tokens that wait and run; past it the answer is 429.",
        low=1,
        high=1_000_000_000,
    )
    batch_tokens: int = key(
        4096, "integer", "Tokens that are computed together.", low=1, high=1_000_000
    )
