"""What a worker sends is read in turns, all of it and in its order."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import zmq

from coterie.workers.worker_process import WorkerSocket

COUNT = 600
READ_S = 0.002


def flood(address: str) -> None:
    """As an engine does whose steps are shorter than the gateway's work for them."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(address)
    for number in range(COUNT):
        socket.send(number.to_bytes(4, "little"))
    socket.close()


def test_a_worker_that_sends_faster_than_is_read_holds_up_nobody(tmp_path: Path) -> None:
    seen: list[int] = []

    def slow(message: bytes) -> None:
        seen.append(int.from_bytes(message, "little"))
        until = time.monotonic() + READ_S
        while time.monotonic() < until:
            pass

    async def test() -> tuple[int, float]:
        address = f"ipc://{tmp_path}/s"
        link = WorkerSocket(address, slow)
        sender = threading.Thread(target=flood, args=(address,))
        sender.start()
        turns, begun, worked = 0, time.monotonic(), time.thread_time()
        while len(seen) < COUNT:
            await asyncio.sleep(0)
            # a send in between does not add turns
            link.send(1)
            turns += 1
            assert time.monotonic() - begun < 60
        sender.join()
        # the time that this thread had a core: other programs may take it
        spent = time.thread_time() - worked
        link.close()
        return turns, spent

    turns, spent = asyncio.run(test())
    assert seen == list(range(COUNT))
    # a turn is over after some milliseconds: others had theirs
    assert turns > spent / 0.05


def test_what_a_worker_said_last_is_read(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def slow(message: bytes) -> None:
        seen.append(message)
        time.sleep(READ_S)

    async def test() -> None:
        address = f"ipc://{tmp_path}/s"
        link = WorkerSocket(address, slow)
        sender = threading.Thread(target=flood, args=(address,))
        sender.start()
        begun = time.monotonic()
        # what was sent may still be on its way
        while len(seen) < COUNT:
            await link.read_rest()
            await asyncio.sleep(0.01)
            assert time.monotonic() - begun < 60
        sender.join()
        link.close()

    asyncio.run(test())
    assert seen == [number.to_bytes(4, "little") for number in range(COUNT)]
