"""Connections before they are requests: sizes and times of headers, how many, who may ask."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync import client as ws

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import KEYS, MAX_PROBE_S, Probe, Served, chat, frames

CHAT = "/v1/chat/completions"
LIMIT_S, MOST = 1.0, 24
# generous: a busy machine looks later
ENDED_S = 15.0


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Short times, few connections."""
    config = tmp_path_factory.mktemp("impatient") / "coterie.toml"
    config.write_text(
        f"""
        [server]
        header_timeout_s = {LIMIT_S}
        body_timeout_s = {LIMIT_S}
        idle_timeout_s = {LIMIT_S}
        write_timeout_s = {LIMIT_S}
        max_connections_per_address = {MOST}
        [[specialists]]
        name = "tiny"
        model = "{tiny_checkpoint("llama", max_position_embeddings=8192)}"
        """
    )
    served = Served("--config", str(config))
    yield served
    served.stop()


def connect(served: Served) -> socket.socket:
    where = urlsplit(served.url)
    assert where.hostname is not None and where.port is not None
    return socket.create_connection((where.hostname, where.port), timeout=ENDED_S)


def answer(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts: list[bytes] = []
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
UPGRADE = (
    b"GET /v1/infer/ws HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
)
KEY = b"sec-websocket-key: AQIDBAUGBwgJCgsMDQ4PEA==\r\n"
# what is sent, and then nothing more
HALVES = {
    "nothing": b"",
    "half a request line": b"GET /v1/mo",
    "empty lines": b"\r\n\r\n",
    "half of the headers": GET + b"x-a: b\r\n",
    "a header without its end": GET + b"x-a: " + b"b" * 1000,
    "half a body": POST + b"content-length: 90\r\n\r\n{",
    "half a chunk": POST + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
    "a body for a route without one": GET + b"content-length: 90\r\n\r\n{",
    "half an upgrade": UPGRADE,
    "an upgrade without a key": UPGRADE + b"\r\n",
    "an upgrade of another version":
        UPGRADE + b"sec-websocket-version: 5\r\n" + KEY + b"\r\n",
    "an upgrade with a line too long":
        UPGRADE + b"sec-websocket-version: 13\r\nx: " + b"a" * 20_000
        + b"\r\n" + KEY + b"\r\n",
    "an upgrade with many headers":
        UPGRADE + b"sec-websocket-version: 13\r\n" + b"x: a\r\n" * 500 + b"\r\n",
    "an upgrade with a body": UPGRADE + b"content-length: 50\r\n\r\n{",
    "another upgrade":
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n",
    "a request and then nothing": GET + b"\r\n",
    "one request and half of the next": GET + b"\r\n" + GET,
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_what_is_half_sent_ends(impatient: Served, name: str) -> None:
    with connect(impatient) as sock:
        begun = time.monotonic()
        sock.sendall(HALVES[name])
        answer(sock)
        assert time.monotonic() - begun < ENDED_S
    assert impatient.get("/health/live").status == 200


def test_headers_that_drip(impatient: Served) -> None:
    """Each byte comes in time; all of them do not."""
    with connect(impatient) as sock:
        sock.sendall(GET)
        sock.settimeout(0.2)
        begun, read = time.monotonic(), b""
        while time.monotonic() - begun < ENDED_S:
            try:
                sock.sendall(b"x: y\r\n")
                read = sock.recv(65536)
                break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - begun < ENDED_S
        assert read == b"" or b" 408 " in read


def test_who_reads_nothing_is_cut(impatient: Served) -> None:
    before = impatient.metric("coterie_connections_refused_total")
    with connect(impatient) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        # more than the system takes for who does not read
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 300)
        deadline = time.monotonic() + 60
        while impatient.metric("coterie_connections_refused_total") == before:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert '"reason":"write_timeout"' in impatient.log()


def unread_stream(served: Served, road: str, stack: ExitStack) -> None:
    """A client asks for streams that are longer than the system takes, and reads nothing."""
    where = urlsplit(served.url)
    assert where.hostname is not None and where.port is not None
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect((where.hostname, where.port))
    if road == "events":
        body = chat(stream=True, max_tokens=4000, ignore_eos=True, logprobs=True, top_logprobs=20)
        raw = json.dumps(body).encode()
        sock.sendall(POST + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        return
    url = served.url.replace("http", "ws", 1) + "/v1/infer/ws"
    sock.settimeout(ENDED_S)
    client = stack.enter_context(ws.connect(url, sock=sock, max_queue=1, close_timeout=0.1))
    for at in range(16):
        client.send(json.dumps({"prompt": f"x{at}", "max_tokens": 4000, "regex": "[a-z ]{3000}"}))


@pytest.mark.parametrize("road", ["events", "socket"])
def test_streams_that_are_never_read_end(impatient: Served, road: str) -> None:
    """Of eight callers at once: they hold neither memory nor places, and others are answered."""
    alone = impatient.post(CHAT, chat()).json["choices"]
    gateway = psutil.Process(impatient.process.pid).memory_info
    before = gateway().rss
    with ExitStack() as stack, Probe(impatient) as probe:
        with ThreadPoolExecutor(8) as pool:
            for asked in [pool.submit(unread_stream, impatient, road, stack) for _ in range(8)]:
                asked.result()
        deadline = time.monotonic() + 120
        while impatient.metric("coterie_gateway_open_streams"):
            assert time.monotonic() < deadline, impatient.log()[-3000:]
            assert impatient.post(CHAT, chat()).json["choices"] == alone
            assert gateway().rss - before < 100e6
        # the clients still have their ends open
        while impatient.metric("coterie_connections") > 4:
            assert time.monotonic() < deadline, impatient.log()[-3000:]
            time.sleep(0.1)
    # 0.05 s on a quiet machine; beside four loops that leave the gateway a sixth of a core 2.4 s
    assert probe.worst_s < 3 * MAX_PROBE_S


def test_a_socket_that_only_answers_pings_ends(impatient: Served) -> None:
    url = impatient.url.replace("http", "ws", 1) + "/v1/infer/ws"
    with ws.connect(url, open_timeout=30) as silent, ws.connect(url, open_timeout=30) as busy:
        # what runs is not cut, however long it takes
        busy.send(json.dumps({"prompt": "x", "max_tokens": 4000, "regex": "[a-z ]{3000}"}))
        give_up_at = time.monotonic() + ENDED_S
        with pytest.raises(ConnectionClosed) as ended:
            while time.monotonic() < give_up_at:
                silent.ping()
                with suppress(TimeoutError):
                    silent.recv(timeout=0.2)
        assert ended.value.rcvd is not None and ended.value.rcvd.code == 1001
        while json.loads(busy.recv(timeout=60))["event"] != "finished":
            pass
        begun = time.monotonic()
        # the time counts from its end on
        with pytest.raises(ConnectionClosed):
            busy.recv(timeout=ENDED_S)
        assert time.monotonic() - begun > LIMIT_S / 2


def test_headers_have_a_limit(strict_server: Served) -> None:
    """Before a key is asked for; 65,536 bytes with the request line."""
    for head in (
        GET + b"x-long: " + b"a" * 1_000_000,
        GET + b"x-long: a\r\n" * 50_000,
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        GET + b"x-long: " + b"a" * 66_000 + b"\r\n\r\n",
        b"\r\n" * 500_000,
    ):
        with connect(strict_server) as sock:
            try:
                sock.sendall(head)
            except OSError:
                continue
            read = answer(sock)
            assert not read or read.startswith(b"HTTP/1.1 431 "), read[:100]
    with connect(strict_server) as sock:
        sock.sendall(GET + b"x-long: " + b"a" * 60_000 + b"\r\nconnection: close\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 401 ")
    with connect(strict_server) as sock:
        head = GET + b"x-api-key: %s\r\nx-long: " % KEYS[0].encode()
        sock.sendall(head + b"a" * 60_000 + b"\r\nconnection: close\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


def test_nothing_grows_behind_a_body(server: Served) -> None:
    """Trailers and extensions of chunks are no body, and no header either."""
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"
    for rest in (
        b"1;" + b"a" * 3_000_000,
        b"1\r\n{\r\n0\r\nx: " + b"a" * 3_000_000,
        b"1\r\n{\r\n0\r\n" + b"x: a\r\n" * 500_000,
    ):
        with connect(server) as sock:
            try:
                sock.sendall(head + rest)
            except OSError:
                continue
            read = answer(sock)
            assert not read or b" 431 " in read or b" 400 " in read, read[:100]


def test_small_chunks_are_a_body(server: Served) -> None:
    raw = json.dumps(chat("word " * 100)).encode()
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in raw)
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    with connect(server) as sock:
        sock.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


def test_a_large_body_and_the_next_request(server: Served) -> None:
    """The end of a body and the beginning of a request may come in one piece."""
    raw = json.dumps(chat() | {"unknown": "a" * 300_000}).encode()
    post = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with connect(server) as sock:
        sock.sendall((post % len(raw) + raw) * 2 + GET + b"connection: close\r\n\r\n")
        assert answer(sock).count(b"HTTP/1.1 200 ") == 3


def requests(draw: random.Random, count: int) -> tuple[bytes, list[int]]:
    """Requests of all kinds in one piece, and the status of each."""
    raw = json.dumps(chat(max_tokens=1)).encode()
    chunked = b"".join(
        b"%x;note=x\r\n%b\r\n" % (len(part), part) for part in (raw[:9], raw[9:10], raw[10:])
    )
    kinds = [
        (GET + b"\r\n", 200),
        (b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (POST + b"content-length: %d\r\n\r\n" % len(raw) + raw, 200),
        (POST + b"transfer-encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n", 200),
        (POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n\r\n", 400),
        (GET + b"content-length: 4\r\n\r\n\r\n\r\n", 200),
    ]
    chosen = [draw.choice(kinds) for _ in range(count)]
    return b"".join(text for text, _ in chosen), [status for _, status in chosen]


@pytest.mark.parametrize("seed", range(3))
def test_pipelined_requests_are_answered_in_their_order(server: Served, seed: int) -> None:
    """However they are cut on their way."""
    draw = random.Random(seed)
    sent, expected = requests(draw, 60)
    sent += GET + b"connection: close\r\n\r\n"
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sent:
            size = draw.choice((1, 3, 17, 400, 5000))
            sock.sendall(sent[:size])
            sent = sent[size:]
            if draw.random() < 0.2:
                time.sleep(0.001)
        read = answer(sock)
    found = re.findall(rb"HTTP/1\.1 (\d+) ", read)
    assert [int(status) for status in found] == [*expected, 200]


def test_a_pipelined_request_waits_for_the_answer_before_it(server: Served) -> None:
    """The queue of a connection is bytes: what was not read is not begun."""
    first = json.dumps(chat(max_tokens=400, ignore_eos=True, stream=True)).encode()
    post = POST + b"content-length: %d\r\n\r\n"
    second = json.dumps(chat(max_tokens=1)).encode()
    before = server.metric("vllm:request_success_total")
    with connect(server) as sock:
        sock.sendall(post % len(first) + first + (post % len(second) + second) * 1000)
        read = b""
        while b"data: " not in read:
            read += sock.recv(65536)
        assert read.count(b"HTTP/1.1 200 ") == 1
    # who has gone is noticed behind the stream: the thousand are not computed
    deadline = time.monotonic() + ENDED_S
    while server.metric("coterie_gateway_open_streams"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.metric("vllm:request_success_total") - before < 50


def test_a_stream_for_http_1_0_has_no_chunks(server: Served) -> None:
    """Its end is the end of the connection."""
    raw = json.dumps(chat(stream=True)).encode()
    head = b"host: localhost\r\ncontent-length: %d\r\n\r\n" % len(raw)
    bodies = []
    for version in (b"1.0", b"1.1"):
        with connect(server) as sock:
            close = b"" if version == b"1.0" else b"connection: close\r\n"
            line = b"POST " + CHAT.encode() + b" HTTP/" + version + b"\r\n"
            sock.sendall(line + close + head + raw)
            headers, _, body = answer(sock).partition(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200 ") and b"connection: close" in headers
        assert (b"transfer-encoding" in headers) is (version == b"1.1")
        bodies.append(body)
    texts = [
        [data["choices"][0]["delta"] for _, data in frames(body) if isinstance(data, dict)]
        for body in (bodies[0], unchunked(bodies[1]))
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 2
    # other answers have a length
    with connect(server) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.0\r\nhost: localhost\r\n\r\n")
        read = answer(sock)
        assert b"content-length: " in read and b"connection: close" in read
    with connect(server) as sock:
        sock.sendall(b"HEAD /v1/models HTTP/1.0\r\nhost: localhost\r\n\r\n")
        assert answer(sock).endswith(b"\r\n\r\n")


def unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def masked(opcode: int, data: bytes = b"", is_last: bool = True) -> bytes:
    """A frame as clients send it, with a mask of zeros."""
    assert len(data) < 126
    return bytes((opcode | (0x80 if is_last else 0), 0x80 | len(data))) + bytes(4) + data


TEXT, CONT, PING = 1, 0, 9


@contextmanager
def socket_of(served: Served) -> Iterator[socket.socket]:
    """A WebSocket whose frames the test writes."""
    with connect(served) as sock:
        sock.sendall(UPGRADE + b"sec-websocket-version: 13\r\n" + KEY + b"\r\n")
        read = b""
        while b"\r\n\r\n" not in read:
            read += sock.recv(4096)
        assert read.startswith(b"HTTP/1.1 101 ")
        yield sock


def close_code(sock: socket.socket) -> int:
    """Of the close frame at the end of what is received."""
    read = answer(sock)
    found = re.search(rb"\x88[\x02-\x7d](..)[^\x88]*$", read, re.DOTALL)
    assert found is not None, read[-100:]
    return int.from_bytes(found[1])


def test_a_message_of_a_socket_has_few_fragments(server: Served) -> None:
    """As many as are allowed are a message; more end the connection, and nobody waits for it."""
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    with socket_of(server) as sock:
        frames = [masked(TEXT, body[:1], False)]
        frames += [masked(CONT, body[1:2], False), *[masked(CONT, b"", False)] * 4000]
        sock.sendall(b"".join(frames) + masked(CONT, body[2:]))
        read = b""
        while b'"finished"' not in read:
            read += sock.recv(65536)
    with Probe(server) as probe:
        with socket_of(server) as sock:
            sock.sendall(masked(TEXT, b"", False) + masked(CONT, b"", False) * 4096)
            assert close_code(sock) == 1009
        with socket_of(server) as sock, suppress(OSError):
            # as an attacker does: five megabytes at once
            sock.sendall(masked(TEXT, b"", False) + masked(CONT, b"", False) * 820_000)
    assert probe.worst_s < MAX_PROBE_S
    assert server.metric("coterie_connections_refused_total", reason="fragments") >= 2


def test_who_still_sends_is_told_why_a_socket_ends(server: Served) -> None:
    """The code arrives, and what is sent behind it resets nothing and is not kept."""
    with socket_of(server) as sock:
        # the header of a frame that is too large
        sock.sendall(b"\x81\xff" + (4_100_000).to_bytes(8) + b"\0\0\0\0")
        assert close_code(sock) == 1009
        for _ in range(40):
            sock.sendall(b"x" * 100_000)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    with socket_of(server) as sock:
        # a client that never ends its side is not waited for
        sock.sendall(b"\x81\xff" + (4_100_000).to_bytes(8) + b"\0\0\0\0")
        assert close_code(sock) == 1009
        deadline = time.monotonic() + 30
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() < deadline:
                sock.sendall(b"x")
                time.sleep(0.1)


def test_a_socket_takes_few_pings(server: Served) -> None:
    """Some are answered, also in the middle of a message; a flood ends the connection."""
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    with socket_of(server) as sock:
        sock.sendall(masked(TEXT, body[:3], False) + masked(PING, b"abc") * 20)
        read = b""
        while read.count(b"\x8a\x03abc") < 20:
            read += sock.recv(65536)
        sock.sendall(masked(CONT, body[3:]))
        while b'"finished"' not in read:
            read += sock.recv(65536)
    with Probe(server) as probe, socket_of(server) as sock:
        sock.sendall(masked(PING, b"a") * 5000)
        assert close_code(sock) == 1008
    assert probe.worst_s < MAX_PROBE_S
    reasons = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    ended = {line.get("reason") for line in reasons if line["event"] == "connections_refused"}
    assert "control_frames" in ended


def test_connections_have_a_limit(impatient: Served) -> None:
    """The last ones of an address are refused; when others have left, there is room again."""
    before = impatient.metric("coterie_connections_refused_total")
    socks = [connect(impatient) for _ in range(MOST + 8)]
    refused = 0
    for sock in socks:
        read = answer(sock)
        refused += read.startswith(b"HTTP/1.1 503 ")
        sock.close()
    assert refused >= 8
    deadline = time.monotonic() + ENDED_S
    while impatient.get("/health/live").status != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert impatient.metric("coterie_connections_refused_total") >= before + 8
    lines = [json.loads(line) for line in impatient.log().splitlines() if line.startswith("{")]
    told = [line for line in lines if line["event"] == "connections_refused"]
    assert any(line["reason"] == "connections_of_address" for line in told)
    # once in ten seconds, with their number
    assert len(told) < 50


@pytest.mark.full
def test_a_key_file_that_all_can_read(tmp_path: Path) -> None:
    keys, admins = tmp_path / "keys.txt", tmp_path / "admins.txt"
    keys.write_text("some-key\n")
    admins.write_text("some-admin-key\n")
    keys.chmod(0o644)
    admins.chmod(0o600)
    served = Served(
        str(tiny_checkpoint("llama")),
        *("--api-key-file", str(keys), "--admin-key-file", str(admins)),
        wait_ready=False,
    )
    try:
        assert served.get("/health/live").status == 200
        told = [line for line in served.log().splitlines() if "key_file_exposed" in line]
        assert len(told) == 1 and str(keys) in told[0] and "chmod 600" in told[0]
    finally:
        served.stop()
