"""Clients that flood the gateway: others are answered meanwhile, and its memory stays as it is.

The whole drill is `python -m benchmarks.serving.floods`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from benchmarks.serving import floods
from coterie.api.transport.connections import MAX_BURST
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import KEYS, MAX_PROBE_S, MachineLag, Served, chat

MAX_BODY = 16_000
# bodies that may be received together, in multiples of the largest: `api/body.py`
MOST_BODIES = 64
WAIT_S = 60.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("floods")
    keys, config = folder / "keys", folder / "coterie.toml"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    config.write_text(
        f"""
        [server]
        api_key_file = "{keys}"
        max_body_bytes = {MAX_BODY}
        [[specialists]]
        name = "tiny"
        model = "{tiny_checkpoint("llama")}"
        """
    )
    served = Served("--config", str(config))
    yield served
    served.stop()


def flooded(served: Served, kind: str, connections: int, seconds: float) -> floods.FloodResult:
    target = floods.FloodTarget(served.url, served.process.pid, "tiny", KEYS)
    result = asyncio.run(floods.measured(target, kind, connections, seconds))
    print(floods.HEADER, result.row(), sep="\n")
    return result


@pytest.mark.parametrize("kind", ["unread", "fragments", "chunks"])
def test_a_short_flood(served: Served, kind: str) -> None:
    result = flooded(served, kind, 8, 1.5)
    # on a busy machine everybody waits longer
    late = {"a probe waited", "a stream paused"}
    assert set(result.faults()) <= late, result.row()
    assert max(result.probes) < MAX_PROBE_S


def test_connections_that_are_opened_without_end(served: Served) -> None:
    """Of an address that opens them too fast most are refused; the other one waits for nothing."""
    before = num_refused(served, "connection_rate")
    with MachineLag() as lag:
        result = flooded(served, "reset", 4, 4.0)
    assert set(result.faults()) <= {"a probe waited", "a stream paused"}, result.row()
    assert max(result.probes) < lag.allowed_s(MAX_PROBE_S)
    # on a busy machine the flood may be slower than the rate
    if result.opened > 4 * MAX_BURST:
        assert num_refused(served, "connection_rate") > before + 100


@pytest.mark.full
@pytest.mark.parametrize("connections", [1, 8, 64])
@pytest.mark.parametrize("kind", floods.KINDS)
def test_a_flood_of_a_minute(served: Served, kind: str, connections: int) -> None:
    result = flooded(served, kind, connections, 60.0)
    assert not result.faults(), result.row()


def test_unfinished_messages_of_sockets_have_a_limit(served: Served) -> None:
    """All together they may take as much as unfinished bodies, and those count too."""
    where = urlsplit(served.url)
    assert where.hostname is not None and where.port is not None
    # a continuation of the largest size, but for its last bytes
    frame = b"\0\xfe" + (MAX_BODY - 100).to_bytes(2) + bytes(4) + b"a" * (MAX_BODY - 200)
    body = chat(max_tokens=1) | {"unknown": "a" * (MAX_BODY - 500)}
    before = num_refused(served)
    with ExitStack() as stack:
        for _ in range(MOST_BODIES + 8):
            sock = floods.opened_socket((where.hostname, where.port), "fragments", KEYS[1])
            stack.enter_context(sock)
            sock.sendall(frame)
        deadline = time.monotonic() + WAIT_S
        while num_refused(served) < before + 8:
            assert time.monotonic() < deadline, served.log()
            time.sleep(0.05)
        assert served.post("/v1/chat/completions", body, x_api_key=KEYS[0]).status == 429
    while served.post("/v1/chat/completions", body, x_api_key=KEYS[0]).status != 200:
        assert time.monotonic() < deadline, served.log()


def num_refused(served: Served, reason: str = "large_messages") -> float:
    text = served.get("/metrics", x_api_key=KEYS[0]).body.decode()
    name = f'coterie_connections_refused_total{{reason="{reason}"}}'
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0
