"""One bad value fails one request, typed, counted and logged by its path; nobody dies of it."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.core.events import Delta, Failed, Finished, Started, Timings, TokenLogprob, Usage
from coterie.core.plan import Admitted, Assignment, LaneState, Rejected
from coterie.core.value_check import fault_of
from coterie.workers import wire
from coterie.workers.contract import AdapterLoad, WorkerCommand, WorkerReport
from coterie.workers.supervisor import ProcessReplica
from tests.helpers.serving import bad_engine_values
from tests.helpers.serving.bad_engine_values import (
    NO_CHOICE,
    NUMPY_TIME,
    NUMPY_TOKEN,
    SURROGATE,
    TEXT_AS_TOKEN,
    UNADDED,
)
from tests.helpers.serving.concurrent_requests import QUICK
from tests.helpers.serving.worker_requests import assign, begin, run, tiny_spec

# by request: a word of the path that the log must tell
BAD = {
    NUMPY_TOKEN: "token_ids",
    NUMPY_TIME: "timings",
    SURROGATE: "deltas",
    TEXT_AS_TOKEN: "token_ids",
}


@pytest.mark.parametrize("unchecked", [False, pytest.param(True, marks=pytest.mark.full)])
def test_one_bad_value_fails_one_request(
    unchecked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checked where values are made, and (`unchecked`) again where they are written and read."""
    path = bad_engine_values.folder(tmp_path / "site", unchecked)
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{inherited}")
    caplog.set_level(logging.ERROR)

    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            alone = (await run(replica, assign("alone", max_tokens=60))).tokens()
            ids = (*BAD, NO_CHOICE, "good", "fine")
            seen = await asyncio.gather(
                *(begin(replica, assign(name, max_tokens=60)) for name in ids)
            )
            for name, listener in zip(ids, seen, strict=True):
                end = await listener.ended()
                if name in ("good", "fine"):
                    assert isinstance(end, Finished) and listener.tokens() == alone
                    continue
                assert isinstance(end, Failed) and end.code == "internal_error", name
                # what came before is right, and no token of the bad delta
                count = 60 if name == NUMPY_TIME else 2
                assert listener.tokens()[:count] == alone[: len(listener.tokens())], name
            refused = await run(replica, assign(UNADDED))
            assert isinstance(refused.verdict, Rejected)
            assert refused.verdict.code == "internal_error"
            # what failed is not computed any further
            last = await run(replica, assign("last", max_tokens=60))
            assert last.tokens() == alone
            stats = replica.stats()
            assert stats["restarts"] == 0 and stats["running"] == 0
            assert stats["values_refused"] >= len(ids) - 2 and "oddity" not in stats
        finally:
            await replica.close()

    asyncio.run(test())
    told = [
        vars(record).get("reason", "") for record in caplog.records
        if record.getMessage() == "value_refused"
    ]  # fmt: skip
    for name, word in BAD.items():
        assert any(word in path for path in told), (name, told)
    assert any("oddity" in path for path in told)


def test_a_command_that_cannot_be_sent_or_read_fails_its_request() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            bad = replace(assign("numpy"), prompt_ids=(np.int64(4),))  # type: ignore[arg-type]
            unsent = await begin(replica, bad)
            assert isinstance(unsent.verdict, Rejected)
            wrong: Assignment = replace(assign("text"), prompt_ids=("four",))  # type: ignore
            unread = await begin(replica, wrong)
            assert isinstance(unread.verdict, Rejected)
            for listener in (unsent, unread):
                assert listener.verdict.code == "internal_error"  # type: ignore[union-attr]
            assert replica.in_flight() == 0
            assert len((await run(replica, assign("good"))).tokens()) == 16
            assert replica.stats()["restarts"] == 0
        finally:
            await replica.close()

    asyncio.run(test())


def test_a_report_is_read_piece_by_piece() -> None:
    report = WorkerReport(
        admitted=[("a", Admitted("r"))],
        started=[Started("a", "r", 1, 0), Started("b", "r", "one", 0)],  # type: ignore[arg-type]
        deltas=[Delta("b", 0, "x", (1,)), Delta("a", 0, "y", (2,))],
        finished=[Finished("b", ("stop",), Usage(1, 1), Timings())],
        lanes=({"lane": 3},),  # type: ignore[arg-type]
        stats={"run_s": 0.5},
    )
    read = wire.decode_report(wire.encode(report))
    assert read.admitted == report.admitted and read.started == report.started[:1]
    # nothing more is told of a request that lost an event: half would pass for whole
    assert read.deltas == report.deltas[1:] and not read.finished
    assert [failed.request_id for failed in read.failed] == ["b"]
    assert read.stats == {"run_s": 0.5} and read.lanes == ()
    assert len(read.faults) == 2 and any("prompt_tokens" in path for path in read.faults)
    with pytest.raises(wire.Unreadable):
        wire.decode_report(b"\xc1 no msgpack")
    with pytest.raises(wire.Unreadable):
        wire.decode_report(wire.encode({"deltas": 3, "lanes": 1}))


def test_paths_name_what_is_wrong() -> None:
    good = TokenLogprob(5, "x", b"x", -0.5, ((5, "x", b"x", -0.5),))
    delta = Delta("a", 0, "x", (1,), (good,), None, "END")
    assert fault_of(delta, Delta) is None
    assert fault_of(replace(delta, stop_match=2), Delta) is None
    wrong = {
        "choice: bool": replace(delta, choice=True),
        "text: NoneType": replace(delta, text=None),  # type: ignore[arg-type]
        "token_ids: list": replace(delta, token_ids=[1]),  # type: ignore[arg-type]
        "token_ids[1]: int32": replace(delta, token_ids=(1, np.int32(2))),  # type: ignore
        "logprobs[0].logprob: float32": replace(
            delta, logprobs=(replace(good, logprob=np.float32(1)),)  # type: ignore[arg-type]
        ),
        "stop_match: bytes": replace(delta, stop_match=b"x"),  # type: ignore[arg-type]
    }  # fmt: skip
    for path, value in wrong.items():
        assert fault_of(value, Delta) == path
    row = (5, "x", b"x", np.float64(1))
    top = replace(delta, logprobs=(replace(good, top=(row,)),))
    assert fault_of(top, Delta) == "logprobs[0].top[0][3]: float64"
    # an int may stand for a float, as everywhere
    assert fault_of(Timings(1, 0), Timings) is None
    assert fault_of({"a": np.int64(1)}, dict[str, float]) == "['a']: int64"
    for kind in (WorkerReport, WorkerCommand, LaneState, AdapterLoad):
        assert fault_of(object(), kind) == ": object"
