"""Prefix digests from worker to gateway: sent when they changed, kept when they are left out."""

from __future__ import annotations

from dataclasses import replace

from coterie.core.plan import LaneState
from coterie.workers.contract import merged_states
from coterie.workers.loop import PREFIXES_EVERY_S, PrefixReports

STATE = LaneState("a", 0, 4, 100, 100, (), frozenset({b"1"}), 0.0, False)


def test_unchanged_digests_are_not_sent_again() -> None:
    now = [0.0]
    reports = PrefixReports(lambda: now[0])

    def sent(*states: LaneState, at_once: bool = False) -> list[frozenset[bytes] | None]:
        return [s.prefix_digests for s in reports.without_known(states, at_once=at_once)]

    other = replace(STATE, lane="b", prefix_digests=frozenset({b"2"}))
    assert sent(STATE, other) == [{b"1"}, {b"2"}]
    assert sent(STATE, other) == [None, None]
    # a change waits for its turn
    changed = replace(STATE, prefix_digests=frozenset({b"1", b"3"}))
    assert sent(changed, other) == [None, None]
    now[0] += PREFIXES_EVERY_S
    assert sent(changed, other) == [{b"1", b"3"}, None]
    # unless no report follows soon
    emptied = replace(STATE, prefix_digests=frozenset())
    assert sent(emptied) == [None] and sent(emptied, at_once=True) == [frozenset()]


def test_what_a_report_leaves_out_stays() -> None:
    known = merged_states({}, [STATE])
    assert known == {"a": STATE}
    later = merged_states(known, [replace(STATE, queued=3, prefix_digests=None)])
    assert later["a"].queued == 3 and later["a"].prefix_digests is STATE.prefix_digests
    # a worker that starts again has nothing cached
    again = merged_states(known, [replace(STATE, prefix_digests=frozenset())])
    assert again["a"].prefix_digests == frozenset()
    first = merged_states({}, [replace(STATE, prefix_digests=None)])
    assert first["a"].prefix_digests == frozenset()
