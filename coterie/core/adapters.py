"""Adapters as the gateway sees them: cards from a registry, and the memory budgets of an engine.

Values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coterie.core.request import ResponseFormat
from coterie.core.settings import key

# most adapters in one request
MAX_STACK = 10
# with a larger weight the output depends on the adapter alone, which was not trained for that
MAX_WEIGHT = 10.0


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Adapters of every engine: what an `.expert` file carries."""

    device_bytes: int = key(
        512 * 10**6,
        "bytes",
        "Room for adapters where the model runs, fixed at start; 0 = no adapters.",
        low=0,
    )
    host_bytes: int = key(
        10**9, "bytes", "RAM for adapters that were read from disk before.", low=0
    )
    batching: str = key(
        "mixed",
        "text",
        "`mixed`: one step serves every adapter; `grouped`: one step, one adapter.",
        among=("mixed", "grouped"),
    )


DEFAULTS = AdapterSettings()


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """One installed version of an adapter. Its digest is its identity."""

    name: str
    version: str
    digest: str
    kind: str
    # fingerprints of the base models it was made for
    bases: tuple[str, ...]
    # only for a soft prompt: its positions count in KV and context
    num_virtual_tokens: int
    nbytes: int
    installed_at: float
    # key id whose signature was verified at installation; empty = unsigned, allowed by the operator
    signer: str = ""
    pinned: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class AdapterProfile:
    """What an adapter's package says about when and how to use it."""

    card: AdapterCard
    keywords: tuple[str, ...] = ()
    # prompts it is for, and similar prompts that it is not for
    examples: tuple[str, ...] = ()
    counterexamples: tuple[str, ...] = ()
    # boolean expression over features and keywords; empty = none
    router_hint: str = ""
    # 0 to 1; 0.5 = neither preferred nor avoided
    priority: float = 0.5
    capabilities: tuple[str, ...] = ()
    # names of other adapters
    requires: tuple[str, ...] = ()
    incompatible_with: tuple[str, ...] = ()
    # most adapters in a stack with this one; 0 = no limit from this adapter
    max_chain: int = 0
    # lower is composed first
    load_order: int = 0
    response_format: ResponseFormat | None = None
    # sampling values it was evaluated with: {"temperature": 0.0}
    decoding: Mapping[str, float] = field(default_factory=dict)
    # text with {prompt} and {body}; empty = the prompt as it is
    template: str = ""
    # share of its held-out items that it answered correctly; None = not evaluated
    quality: float | None = None
    # device memory it needs beside a model in fp32; 0 = unknown
    device_bytes: int = 0
    # regular expression that matches every correct answer from start to end; empty = not stated
    answer_pattern: str = ""
    # codes of the languages it was measured in ("en", "de"); empty = not stated
    languages: tuple[str, ...] = ()
    # the same if all factors of its stack can stay in bf16; 0 = its own factors cannot
    narrow_bytes: int = 0
    # extra bytes on a base whose modules have biases
    shift_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdaptableModules:
    """The parts of a model that adapters may change."""

    hidden: int
    # path -> features in, features out
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    # an adapter that scales a module with a bias also needs a shift for that bias
    has_bias: bool = False


NO_MODULES = AdaptableModules(0)
