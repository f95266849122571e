"""The contract that every transport keeps between the service and an engine.

A `WorkerSpec` says what to load, a `WorkerCommand` what to do, a `WorkerReport` what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coterie.core.adapters import DEFAULTS, NO_MODULES, AdaptableModules, AdapterSettings
from coterie.core.events import Delta, Event, Failed, Finished, Started
from coterie.core.moe import AUTOMATIC, MoeSettings
from coterie.core.plan import AdapterChoice, Admitted, Assignment, LaneState, Rejected

Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """A specialist inside the engine. `share` divides the engine's KV bytes and its time."""

    name: str
    context: int = 0  # 0 = what the model was trained for
    block_size: int = 16
    max_queue: int = 256
    max_sequences: int = 64
    max_step_tokens: int = 512
    kv_cache_slots: int = 16
    prefix_cache: bool = True
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a worker needs to build its engine."""

    name: str
    model: str  # a GGUF file or a safetensors directory
    lanes: tuple[LaneSpec, ...]
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0  # 0 = every core
    kv_bytes: int = 0  # 0 = by the machine's free memory
    log_level: str = "info"
    dispatch: MoeSettings = AUTOMATIC
    adapters: AdapterSettings = DEFAULTS
    # folder of adapters by digest; empty = this worker runs none
    library: str = ""


@dataclass(frozen=True, slots=True)
class MoeInfo:
    """Routed experts, as they were placed at start. `weight_bytes` leaves them out."""

    strategy: str
    count: int
    device_slots: int
    host_slots: int
    # all of them; what both tiers may take; what one token passes through
    expert_bytes: int
    held_bytes: int
    token_bytes: int
    # why less is in place than was asked for; "" when all is
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Room for adapters, fixed at start."""

    device_bytes: int
    host_bytes: int
    max_stacks: int
    # what of the model they may change
    modules: AdaptableModules = NO_MODULES


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """What one adapter's loads cost since start, and whether a stack with it is on the device.

    A stack's times count for each of its adapters.
    """

    digest: str
    resident: bool
    loads: int
    disk_s: float
    compose_s: float
    place_s: float


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a worker found out while loading."""

    name: str
    pid: int
    architecture: str
    dtype: str
    device: str
    threads: int
    weight_bytes: int
    kv_bytes: int
    fingerprint: str
    # lane -> most tokens of prompt plus output
    contexts: dict[str, int]
    # lane -> most sequences of one request (n, beams)
    max_sequences: dict[str, int]
    # the model's generation_config
    generation: dict[str, Any]
    # the bytes that the lanes divided; `kv_bytes` is what whole blocks of it came to
    kv_budget: int = 0
    # only of a model with routed experts
    experts: MoeInfo | None = None
    # None = this worker runs no adapters
    adapters: AdapterInfo | None = None
    # lane -> bytes of one KV block, keys and values of every layer
    block_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What a worker is told. `kind` is submit, abort, preload or stop; unread = a command of which
    nothing but the request could be read."""

    kind: str
    request_id: str = ""
    assignment: Assignment | None = None
    # of preload: a stack that a request is about to need
    adapters: tuple[AdapterChoice, ...] = ()


@dataclass(slots=True)
class WorkerReport:
    """Everything a worker has to say after a step, in one message.

    Of one request the order is verdict, started, deltas, finished or failed: readers take the lists
    in that order.
    """

    admitted: list[tuple[str, Admitted]] = field(default_factory=list)
    rejected: list[tuple[str, Rejected]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    lanes: tuple[LaneState, ...] = ()
    stats: dict[str, float] = field(default_factory=dict)
    # the adapters loaded last, at most 64; None = as in the report before
    adapters: tuple[AdapterLoad, ...] | None = None
    # paths of values that could not be told; whoever they belonged to is in `failed`
    faults: list[str] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.deltas.append(event)
        elif isinstance(event, Started):
            self.started.append(event)
        elif isinstance(event, Finished):
            self.finished.append(event)
        else:
            self.failed.append(event)


class Replica(Protocol):
    """One engine, wherever it runs."""

    name: str

    async def start(self) -> ReplicaInfo:
        """Load the model; returns when requests can be served, raises a CoterieError otherwise."""

    async def submit(self, assignment: Assignment, sink: Sink) -> Admitted | Rejected:
        """Hand over a request. `sink` gets its events on the event loop's thread, after the verdict
        is known and until Finished or Failed. Cancelling the call aborts the request."""

    async def abort(self, request_id: str) -> None:
        """Free what the request holds; its sink gets nothing from now on."""

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        """A request with these is about to come: begin to load them. Only a hint: nothing is
        answered, and what is wrong with them is told to the request."""

    def lane_states(self) -> dict[str, LaneState]:
        """How each lane stood after the last step."""

    def in_flight(self) -> int:
        """Requests handed over that have not ended."""

    def stats(self) -> dict[str, float]:
        """Counters for metrics; `restarts` counts starts after the first."""

    def adapter_loads(self) -> tuple[AdapterLoad, ...]:
        """The adapters loaded last, for metrics."""

    def healthy(self) -> bool:
        """True while `submit` leads to an engine that runs."""

    def state(self) -> str:
        """`up`, or why it is not healthy: `starting`, `failing` (starts fail one after another),
        `silent` (the process is not heard of), `quarantined`, `draining`."""

    def retry_after_s(self) -> float:
        """When an unhealthy replica may be healthy again."""

    async def drain(self, timeout_s: float) -> None:
        """Take no new work and wait until what runs has ended, at most `timeout_s`."""

    async def close(self) -> None:
        """Stop at once; what still runs ends in Failed."""
