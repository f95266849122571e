"""The places of gRPC messages that are being received: who waits for whom, and how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.api.transport import grpc_messages
from coterie.api.transport.grpc_messages import MAX_READS, MessageReader, caller_address
from coterie.core.errors import InvalidRequest, Overloaded

# the longest that a message may take, and a test
LONG_S, WAIT_S = 60.0, 20.0


async def message(after_s: float = 0.0) -> AsyncIterator[bytes]:
    await asyncio.sleep(after_s)
    yield pb.InferRequest(prompt="hello").SerializeToString()


def reading(
    reader: MessageReader, address: str, after_s: float = 0.0, tenant: str = "local"
) -> asyncio.Task[pb.InferRequest]:
    return asyncio.create_task(reader.read(message(after_s), pb.InferRequest, tenant, address))


async def ended(*tasks: asyncio.Task[pb.InferRequest]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_slow_messages_of_one_address_keep_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_messages, "GRACE_S", 0.2)

    async def test() -> None:
        reader = MessageReader(LONG_S)
        # more than there are places: the others of that address wait, too
        slow = [reading(reader, "a", LONG_S) for _ in range(3 * MAX_READS)]
        await asyncio.sleep(0)
        begun = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            for _ in range(3):
                assert (await reading(reader, "b")).prompt == "hello"
            assert time.monotonic() - begun >= 0.1, "they had their time"
            # a tenant has places of its own
            await reading(reader, "a", tenant="other")
        given_up = [task for task in slow if task.done()]
        assert len(given_up) == 3
        assert all(isinstance(task.exception(), InvalidRequest) for task in given_up)
        await ended(*slow)
        # all places are free again
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(reading(reader, "c", 0.05) for _ in range(4 * MAX_READS)))

    asyncio.run(test())


def test_a_wait_for_a_place_ends() -> None:
    async def test() -> None:
        reader = MessageReader(0.3)
        slow = [reading(reader, "a", LONG_S) for _ in range(2 * MAX_READS)]
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*slow, return_exceptions=True)
        kinds = {type(result) for result in results}
        assert kinds <= {InvalidRequest, Overloaded} and InvalidRequest in kinds
        # those at the end wait for longer than a message may take
        late = [reading(reader, "a", LONG_S) for _ in range(4 * MAX_READS)]
        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*late, return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) >= 2 * MAX_READS
        assert (await reading(reader, "a")).prompt == "hello"

    asyncio.run(test())


def test_addresses_with_equal_shares_end_nothing_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_messages, "GRACE_S", 0.0)

    async def test() -> None:
        reader = MessageReader(LONG_S)
        made = [reading(reader, f"address {i % 4}", 0.1) for i in range(4 * MAX_READS)]
        async with asyncio.timeout(WAIT_S):
            assert {item.prompt for item in await asyncio.gather(*made)} == {"hello"}
        # waiting ones that leave pass on what they were given
        slow = [reading(reader, "a", 0.2) for _ in range(MAX_READS)]
        others = [reading(reader, "b", 0.0) for _ in range(4)]
        await asyncio.sleep(0.05)
        await ended(*others)
        await asyncio.gather(*slow, return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(reading(reader, "c", 0.05) for _ in range(MAX_READS)))
        places = reader._places["local"]
        assert places._num_free == MAX_READS and not places._held and not places._waiting

    asyncio.run(test())


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:50000", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:50000", "2001:db8::/64"),
        ("ipv6:%5B::ffff:1.2.3.4%5D:50000", "1.2.3.4"),
    ],
)
def test_the_address_of_a_call(peer: str, address: str) -> None:
    assert caller_address(SimpleNamespace(peer=lambda: peer)) == address
