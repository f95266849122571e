"""An engine that says what it must not: for the tests of what one bad value costs.

`install` changes the engine of this process; `folder` is a PYTHONPATH entry with which worker
processes do so as they start. Which value is bad is told by the request's id.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

# request id -> what the path in the log must name; how each is made bad stands below
NUMPY_TOKEN, NUMPY_TIME, SURROGATE, TEXT_AS_TOKEN, NO_CHOICE = (
    "numpy-token", "numpy-time", "surrogate", "text-as-token", "no-choice",
)  # fmt: skip
UNADDED = "unadded"


def install(unchecked: bool = False) -> None:
    """`unchecked`: as if nothing were looked at where it is made."""
    from coterie.engine.active_request import ActiveRequest
    from coterie.engine.engine import Engine
    from coterie.engine.request_tracker import RequestTracker

    # wire is imported first: its own check stays
    from coterie.workers import loop, wire  # noqa: F401

    if unchecked:
        loop.drop_bad_values = lambda report, fault: None  # type: ignore[attr-defined]
    produce, finished = ActiveRequest.produce, ActiveRequest.finished
    stats, add = Engine.stats, Engine.add

    def bad_produce(self: Any, choice: int, token: int, count: int, score: Any) -> Any:
        delta = produce(self, choice, token, count, score)
        if count != 3:
            return delta
        changes: dict[str, Any] = {
            NUMPY_TOKEN: {"token_ids": (np.int64(token),)},
            SURROGATE: {"text": "\ud800"},
            TEXT_AS_TOKEN: {"token_ids": (str(token),)},
            NO_CHOICE: {"choice": 7},
        }
        return replace(delta, **changes.get(self.request_id, {}))

    def one_by_one(self: Any, sequences: Any, tokens: Any, events: Any) -> None:
        """Tokens that are whole text do not come through `produce`."""
        for sequence, token in zip(sequences, tokens, strict=True):
            self._decoded(sequence, token, events)

    def one(self: Any, sequence: Any, token: Any, events: Any, now: float) -> None:
        self._decoded(sequence, token, events)

    def bad_finished(self: Any, now: float, times: Any) -> Any:
        end = finished(self, now, times)
        if self.request_id != NUMPY_TIME:
            return end
        return replace(end, timings=replace(end.timings, decode_s=np.float64(1.0)))

    def bad_add(self: Any, assignment: Any) -> Any:
        verdict = add(self, assignment)
        if assignment.request_id == UNADDED:
            raise IndexError("nobody thought of this")
        return verdict

    def bad_stats(self: Any) -> Any:
        return stats(self) | {"oddity": np.float32(1)}

    RequestTracker._commit_decoded = one_by_one  # type: ignore[method-assign]
    RequestTracker._decode = one  # type: ignore[method-assign]
    ActiveRequest.produce = bad_produce  # type: ignore[method-assign]
    ActiveRequest.finished = bad_finished  # type: ignore[method-assign]
    Engine.add = bad_add  # type: ignore[method-assign]
    Engine.stats = bad_stats  # type: ignore[method-assign]


def folder(path: Path, unchecked: bool = False) -> Path:
    path.mkdir()
    (path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import sys
            if "coterie.workers.child" in sys.orig_argv:
                sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r})
                from tests.helpers.serving import bad_engine_values
                bad_engine_values.install({unchecked})
        """)
    )
    return path
