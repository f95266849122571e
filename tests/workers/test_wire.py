"""workers/wire.py: every value arrives as it was sent."""

from __future__ import annotations

import math

from coterie.core.events import Delta, Failed, Finished, Started, Timings, TokenLogprob, Usage
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings, MoeUsage
from coterie.core.plan import AdapterChoice, Admitted, Assignment, LaneState, Rejected
from coterie.core.request import Limits, Sampling
from coterie.workers import wire
from coterie.workers.contract import ReplicaInfo, WorkerCommand, WorkerReport, WorkerSpec


def test_commands() -> None:
    assignment = Assignment(
        request_id="r\u00e9-1",
        lane="a",
        prompt_ids=(1, 2, 300_000),
        sampling=Sampling(temperature=0.5, logit_bias=((3, -1.5), (4, 2.0)), seed=2**63 - 1, n=2),
        limits=Limits(max_tokens=5, stop=("\n", "ü"), stop_token_ids=(2,), timeout_s=1.5),
        adapters=(AdapterChoice("x", "d", 0.5),),
        session="s",
        tenant="t",
        deadline=12.25,
        arrived_at=1e9 + 0.125,
        emitted=((1, 2), ()),
        finished=(0,),
    )
    for command in (
        WorkerCommand("submit", "r", assignment),
        WorkerCommand("abort", "r"),
        WorkerCommand("stop"),
    ):
        assert wire.decode_command(wire.encode(command)) == command


def test_reports() -> None:
    logprob = TokenLogprob(5, "\ufffd", b"\xff\x00", -math.inf, ((5, "a", b"a", -0.1),))
    report = WorkerReport(
        admitted=[("a", Admitted("r0"))],
        rejected=[("b", Rejected("overloaded", "full", None))],
        started=[Started("a", "r0", 3, 2, (None, logprob))],
        deltas=[
            Delta("a", 0, "", (7,)),
            Delta("a", 1, "x", (7, 8), (logprob,), "stop", "END"),
            Delta("a", 2, "x", (), None, "stop", 2),
        ],
        finished=[
            Finished("a", ("stop", "length"), Usage(1, 2, 1), Timings(0.5, total_s=1.0)),
            Finished(
                "b",
                ("stop",),
                Usage(1, 2),
                Timings(),
                MoeUsage(device_misses=3, read_bytes=2**40, stall_s=0.5),
            ),
        ],
        failed=[Failed("c", "worker_crashed", "twice", 1.0)],
        lanes=(LaneState("a", 1, 3, 4, 5, ("x",), frozenset({b"d"}), 0.5, True),),
        stats={"run_s": 1.5},
    )
    again = wire.decode_report(wire.encode(report))
    assert again == report
    # a stop token id is not a stop string
    assert again.deltas[2].stop_match == 2 and again.deltas[1].stop_match == "END"


def test_loading() -> None:
    dispatch = MoeSettings("lru+active_only", "6GB", "25%", 3, deterministic=True)
    lanes = (LaneConfig("a", context=64, weight=0.5),)
    spec = WorkerSpec("r0", "/models/a", lanes, kv_bytes=7, dispatch=dispatch)
    assert wire.decode_spec(wire.encode(spec)) == spec
    info = ReplicaInfo(
        name="r0", pid=3, architecture="LlamaForCausalLM", dtype="fp32", device="cpu", threads=2,
        weight_bytes=1, kv_bytes=2, fingerprint="f", contexts={"a": 64}, max_sequences={"a": 4},
        generation={"eos_token_id": [1, 2], "temperature": 0.6},
    )  # fmt: skip
    for loaded in (
        wire.LoadOutcome(info),
        wire.LoadOutcome(code="weights_error", message="broken"),
    ):
        assert wire.decode_loaded(wire.encode(loaded)) == loaded
