"""The contract between the service and an engine; every transport implements it.

A `WorkerSpec` says what to load, a `WorkerCommand` what to do, a `WorkerReport` what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from coterie.core.adapters import DEFAULTS, NO_MODULES, AdaptableModules, AdapterSettings
from coterie.core.events import Delta, Event, Failed, Finished, Started
from coterie.core.lane import LaneConfig
from coterie.core.moe import AUTOMATIC, MoeResidency, MoeSettings
from coterie.core.plan import AdapterChoice, Admitted, Assignment, LaneState, Rejected

Sink = Callable[[Event], None]
# called without arguments when no worker runs a request
OnOutage = Callable[[], None]


def never_moved() -> None:
    """The default of `OnOutage`: the request waits for its own replica."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a worker needs to build its engine."""

    name: str
    model: str  # a GGUF file or a safetensors directory
    lanes: tuple[LaneConfig, ...]
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0  # 0 = all cores
    kv_bytes: int = 0  # 0 = depends on the machine's free memory
    # one of config.CAPTURES
    capture_graphs: str = "lazy"
    log_level: str = "info"
    dispatch: MoeSettings = AUTOMATIC
    adapters: AdapterSettings = DEFAULTS
    # folder of adapters by digest; empty = this worker runs no adapters
    library: str = ""


@dataclass(frozen=True, slots=True)
class MoeInfo:
    """Routed experts as they were placed at start. `weight_bytes` does not include them."""

    strategy: str
    count: int
    device_slots: int
    host_slots: int
    # bytes of all experts; of both tiers; of the experts that one token uses
    expert_bytes: int
    held_bytes: int
    token_bytes: int
    # why fewer experts are in place than configured; "" if all are
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Memory for adapters, fixed at start."""

    device_bytes: int
    host_bytes: int
    max_stacks: int
    # the modules of the model that adapters may change
    modules: AdaptableModules = NO_MODULES


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The loads of one adapter since start, and whether a stack with it is on the device.

    The times of a stack count for each of its adapters.
    """

    digest: str
    resident: bool
    loads: int
    disk_s: float
    compose_s: float
    place_s: float


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """The facts that a worker reports after loading."""

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
    # the bytes that were divided between the lanes; `kv_bytes` counts only whole blocks
    kv_budget: int = 0
    # only for a model with routed experts
    experts: MoeInfo | None = None
    # None = this worker runs no adapters
    adapters: AdapterInfo | None = None
    # device memory that captured graphs may take
    graph_bytes: int = 0
    # lane -> bytes of one KV block, keys and values of every layer
    block_bytes: dict[str, int] = field(default_factory=dict)
    # names of the CPU and the GPU that compute
    processor: str = ""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """A command to a worker. `kind` is submit, abort, preload, residency or stop; `unread` is a
    command of which only the request id could be read."""

    kind: str
    request_id: str = ""
    assignment: Assignment | None = None
    # for preload: a stack that a request will need soon
    adapters: tuple[AdapterChoice, ...] = ()


@dataclass(slots=True)
class WorkerReport:
    """Everything that a worker reports after a step, in one message.

    For one request the order is verdict, started, deltas, finished or failed: readers process the
    lists in that order.
    """

    admitted: list[tuple[str, Admitted]] = field(default_factory=list)
    rejected: list[tuple[str, Rejected]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    lanes: tuple[LaneState, ...] = ()
    stats: dict[str, float] = field(default_factory=dict)
    # the adapters that were loaded last, at most 64; None = as in the previous report
    adapters: tuple[AdapterLoad, ...] | None = None
    # one map if it was asked for, none if there are no MoE experts to show; None = not asked for
    residency: tuple[MoeResidency, ...] | None = None
    # paths of values that could not be encoded; their requests are in `failed`
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


class ResidencyReports:
    """The last map of MoE experts. A worker is asked again only after it has answered: in a long
    step questions would pile up."""

    def __init__(self) -> None:
        self.last: MoeResidency | None = None
        self._is_asked = False

    def may_ask(self) -> bool:
        """Whether to ask now; from then on the answer is awaited."""
        was_asked, self._is_asked = self._is_asked, True
        return not was_asked

    def take(self, report: WorkerReport) -> None:
        if report.residency is not None:
            self._is_asked = False
            self.last = report.residency[0] if report.residency else None


def merged_states(
    known: Mapping[str, LaneState], reported: Iterable[LaneState]
) -> dict[str, LaneState]:
    """The states after a report. Prefix digests that it leaves out are as before."""
    merged = dict(known)
    for state in reported:
        if state.prefix_digests is None:
            before = known.get(state.lane)
            digests = None if before is None else before.prefix_digests
            state = replace(state, prefix_digests=digests or frozenset())
        merged[state.lane] = state
    return merged


class Replica(Protocol):
    """One engine, in this process or in another."""

    name: str

    async def start(self) -> ReplicaInfo:
        """Load the model. Returns when requests can be served; raises a CoterieError otherwise."""

    async def submit(
        self, assignment: Assignment, sink: Sink, on_outage: OnOutage = never_moved
    ) -> Admitted | Rejected:
        """Send a request to the engine. `sink` gets its events on the event loop's thread, from the
        verdict until Finished or Failed. Cancelling the call aborts the request. `on_outage` is
        called when no worker runs the request, and again until one does: it may be moved then."""

    def move(self, request_id: str, to: Replica) -> bool:
        """Continue a request that no worker runs at another replica of the same model, after the
        tokens that its client has. False: it stays here."""

    async def abort(self, request_id: str) -> None:
        """Free the request's resources. Its sink gets no further events."""

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        """Start to load these adapters, because a request with them will come soon. Only a hint:
        nothing is returned, and errors are reported to the request."""

    def lane_states(self) -> dict[str, LaneState]:
        """The state of each lane after the last step."""

    def in_flight(self) -> int:
        """Number of requests that were sent and have not ended."""

    def stats(self) -> dict[str, float]:
        """Counters for metrics; `restarts` counts starts after the first."""

    def adapter_loads(self) -> tuple[AdapterLoad, ...]:
        """The adapters that were loaded last, for metrics."""

    def residency(self) -> MoeResidency | None:
        """Where the MoE experts were when the worker was last asked, and asks again; None = not
        known yet, or there are none."""

    def healthy(self) -> bool:
        """Whether `submit` reaches a running engine."""

    def state(self) -> str:
        """`up`, or why it is not healthy: `starting`, `failing` (starts fail one after another),
        `silent` (the process sends nothing), `quarantined`, `draining`."""

    def retry_after_s(self) -> float:
        """Seconds until an unhealthy replica may be healthy again."""

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests; wait until the running ones end, at most `timeout_s`."""

    async def close(self) -> None:
        """Stop at once; running requests end with Failed."""
