"""obs/loop_watch.py in a real server: a stuck event loop is told while it is stuck."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served

# the loop runs a function that holds it until a file appears: the handler itself may interrupt the
# loop's thread while that holds the lock of the log
STUCK = """
import asyncio, os, signal, time

def hold_up_the_loop():
    secret = "words of a prompt"
    while not os.path.exists(os.environ["RELEASE"]):
        time.sleep(0.01)

def ask(number, frame):
    asyncio.get_running_loop().call_soon_threadsafe(hold_up_the_loop)

signal.signal(signal.SIGUSR1, ask)
"""
WAIT_S = 60.0


def lines(served: Served, event: str) -> list[dict[str, Any]]:
    # the last line may be half written
    whole = served.log().rpartition("\n")[0].split("\n")
    found = [json.loads(line) for line in whole if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def until(condition: Callable[[], object], served: Served) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, served.log()
        time.sleep(0.02)


def test_a_stuck_loop_is_told_while_it_is_stuck_and_counted_after(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    release = tmp_path / "release"
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    served = Served(
        str(tiny_checkpoint("llama")), "--name", "tiny", PYTHONPATH=path, RELEASE=str(release)
    )
    try:
        before = served.metric("coterie_event_loop_blocks_total")
        told = len(lines(served, "event_loop_blocked"))
        served.process.send_signal(signal.SIGUSR1)
        until(lambda: len(lines(served, "event_loop_blocked")) > told, served)
        line = lines(served, "event_loop_blocked")[-1]
        assert line["wait_s"] >= 1.0
        assert any("hold_up_the_loop" in frame for frame in line["frames"]), line
        assert "words of a prompt" not in served.log()
        resumed = len(lines(served, "event_loop_resumed"))
        release.touch()
        until(lambda: len(lines(served, "event_loop_resumed")) > resumed, served)
        assert served.metric("coterie_event_loop_blocks_total") > before
        text = served.get("/metrics").body.decode()
        assert "coterie_event_loop_lag_seconds_bucket" in text
    finally:
        served.stop()
