"""Settings of an ensemble: what a specialist promises, intents, remote servers and tenants."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.request import DEFAULT_PRIORITY, MAX_PRIORITY
from coterie.core.settings import key


@dataclass(frozen=True, slots=True)
class SloSettings:
    """What a specialist promises. 0 = no promise."""

    ttft_p95_s: float = key(0.0, "number", "First token, 95% of requests.", low=0, high=3600)
    itl_p95_s: float = key(0.0, "number", "Gap between tokens, 95% of them.", low=0, high=3600)
    correctness: float = key(
        0.0,
        "number",
        "Least share of valid answers in the window; below it the breaker trips.",
        low=0,
        high=1,
    )


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """An OpenAI-compatible server that answers for a specialist."""

    url: str = key("", "text", "Its base URL, such as `http://host:8000/v1`; empty = not remote.")
    model: str = key("", "text", "The model's name there.")
    key_env: str = key("", "text", "Environment variable with its API key.")
    key_file: str = key("", "text", "File with its API key.")
    timeout_s: float = key(
        60.0, "number", "Seconds without a byte until it counts as dead.", low=0.1, high=3600
    )
    max_running: int = key(16, "integer", "Requests it is sent at once.", low=1, high=4096)
    context: int = key(4096, "integer", "Most tokens of prompt plus output there.", low=16)
    price_in: float = key(0.0, "number", "Price of a million prompt tokens.", low=0)
    price_out: float = key(0.0, "number", "Price of a million answered tokens.", low=0)
    shadow: bool = key(False, "flag", "Shadows may be sent to it.")


@dataclass(frozen=True, slots=True)
class IntentSettings:
    """An intent that callers may declare and the classifier finds; specialists list what they
    serve."""

    name: str = key("", "name", "The intent.")
    shadow_below: float = key(
        0.5, "number", "A primary with less confidence is shadowed.", low=0, high=1
    )
    spill_below: float = key(
        0.0,
        "number",
        "Under load, a primary with less confidence goes to its alternate; raised by spikes.",
        low=0,
        high=1,
    )
    high_stakes: bool = key(False, "flag", "A wrong answer is costly: shadowed more often.")


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """A tenant; keys belong to it by `tenant=NAME` in the key file. 0 = no limit."""

    name: str = key("", "name", "The name that key files use.")
    priority: int = key(
        DEFAULT_PRIORITY, "integer", "Highest priority of its requests.", low=0, high=MAX_PRIORITY
    )
    max_running: int = key(0, "integer", "Its sequences that run at once.", low=0, high=4096)
    requests_per_minute: int = key(0, "integer", "Requests a minute.", low=0)
    tokens_per_minute: int = key(0, "integer", "Tokens a minute, prompts and answers.", low=0)
    share: float = key(1.0, "number", "Its share among tenants that wait.", low=0.01, high=100)
    specialists: tuple[str, ...] = key((), "list", "Specialists it may use; empty = all.")
    experts: tuple[str, ...] = key(
        (),
        "list",
        "Experts it may use beside those that belong to a specialist; empty = all.",
    )
    keep_prompts: bool = key(
        False, "flag", "Its prompts may be kept in the calibration log and in receipts."
    )


@dataclass(frozen=True, slots=True)
class EnsembleSettings:
    """How specialists are watched: windows, breakers, shadows, spikes."""

    router: str = key(
        "",
        "text",
        "Folder of the trained router's versions; empty = the state folder's, `shipped` = those of "
        "this release.",
    )
    window_s: float = key(86_400.0, "number", "Window of correctness.", low=1, high=1e7)
    min_judged: int = key(
        20, "integer", "Judged answers below which correctness is unknown.", low=1, high=1_000_000
    )
    breach_s: float = key(
        60.0, "number", "A breach this long trips the breaker.", low=0, high=86_400
    )
    recovery_s: float = key(300.0, "number", "Recovery this long resets it.", low=0, high=864_000)
    max_shadows: int = key(2, "integer", "Shadows that run at once.", low=0, high=256)
    fresh_shadow: float = key(
        0.3,
        "number",
        "Share of a fresh specialist's or adapter's requests shadowed.",
        low=0,
        high=1,
    )
    shadow_sample: float = key(
        0.05, "number", "Share that a demoted specialist is always shadowed with.", low=0, high=1
    )
    spike_s: float = key(
        10.0, "number", "Load that lasts this long is a spike; half of it without ends one.", low=0
    )
    canary_s: float = key(
        604_800.0,
        "number",
        "A canary that is undecided after this long is ended; the version stays staged.",
        low=1,
        high=3.2e7,
    )
    max_receipts: int = key(
        100_000, "integer", "Receipts kept; the oldest go first.", low=0, high=100_000_000
    )
