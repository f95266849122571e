"""Files with the official client, and uploads that no honest client sends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.helpers.serving.batch_requests import (
    ask_database,
    batch_server,
    begin,
    client_of,
    ended,
    jsonl,
    line,
    until,
)
from tests.helpers.serving.server_process import (
    KEYS,
    Probe,
    Reply,
    Served,
    chat,
    own_home,
)

SETTINGS = """
[server]
body_timeout_s = 2.0
[files]
max_bytes = "3MB"
max_tenant_bytes = "8MB"
max_total_bytes = "12MB"
"""
BOUNDARY = "the-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_home(tmp_path_factory.mktemp("files") / "home")


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    server = batch_server(home, SETTINGS)
    yield server
    server.stop()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made
        for file in made.files.list():
            made.files.delete(file.id)


def stored(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "state" / "files").iterdir())


def part(name: str, value: bytes, filename: str | None = None, headers: str = "") -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    head = f'content-disposition: form-data; name="{name}"{named}\r\n{headers}\r\n'
    return f"--{BOUNDARY}\r\n".encode() + head.encode() + value + b"\r\n"


PURPOSE = part("purpose", b"batch")
GOOD = part("file", b"{}\n", "a.jsonl")
END = f"--{BOUNDARY}--\r\n".encode()


def upload(served: Served, body: bytes, content_type: str = FORM) -> Reply:
    key = f"Bearer {KEYS[0]}"
    return served.send("POST", "/v1/files", body, content_type=content_type, authorization=key)


def test_a_file_lives_from_upload_to_delete(client: openai.OpenAI, home: Path) -> None:
    raw = bytes(range(256)) * 4000
    file = client.files.create(
        file=("in.jsonl", raw),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert file.object == "file" and file.bytes == len(raw) and file.filename == "in.jsonl"
    assert file.expires_at == file.created_at + 7200 and file.status == "processed"
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == raw
    assert (home / "state" / "files" / file.id).stat().st_mode & 0o777 == 0o600
    assert [item.id for item in client.files.list(purpose="batch")] == [file.id]
    assert not list(client.files.list(purpose="batch_output"))
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert stored(home) == []


def test_pages_and_orders_of_files(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{i}", b"x"), purpose="batch").id for i in range(5)]
    assert [item.id for item in client.files.list(limit=2)] == made[::-1]
    assert [item.id for item in client.files.list(limit=2, order="asc")] == made
    assert client.files.list(limit=2, after=made[2]).data[0].id == made[1]
    with pytest.raises(openai.BadRequestError):
        client.files.list(after="file-nothing")
    with pytest.raises(openai.BadRequestError):
        client.files.list(limit=0)


def test_a_file_is_gone_when_its_time_is_over(client: openai.OpenAI, home: Path) -> None:
    file = client.files.create(file=("a", b"x"), purpose="batch")
    ask_database(home, "UPDATE files SET expires_at = ? WHERE id = ?", time.time(), file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert not list(client.files.list())
    client.files.delete(file.id)


@pytest.mark.parametrize(
    "name",
    ["../../../../etc/passwd", "..\\\\..\\\\boot.ini", "/tmp/x", "a\x00b", "..", "é" * 400],
)
def test_a_name_is_only_shown(served: Served, client: openai.OpenAI, home: Path, name: str) -> None:
    reply = upload(served, PURPOSE + part("file", b"x", name) + END)
    assert reply.status == 200, reply.body
    shown = reply.json["filename"]
    assert "/" not in shown and "\\" not in shown and "\0" not in shown
    assert shown not in ("", "..") and len(shown) <= 255
    assert stored(home) == [reply.json["id"]]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "ended before"),
        (END, 400, "purpose"),
        (PURPOSE + END, 400, "file: is required"),
        (GOOD + END, 400, "purpose"),
        (PURPOSE + part("file", b"", "a") + END, 400, "empty"),
        (part("purpose", b"fine-tune") + GOOD + END, 400, "purpose"),
        (part("purpose", b"batch_output") + GOOD + END, 400, "purpose"),
        (PURPOSE + PURPOSE + GOOD + END, 400, "twice"),
        (PURPOSE + GOOD + GOOD + END, 400, "one file"),
        (PURPOSE + GOOD + part("other", b"x", "b") + END, 400, "no other"),
        (PURPOSE + GOOD, 400, "ended before"),
        ((PURPOSE + GOOD)[:-9], 400, "ended before"),
        (PURPOSE + b"--" + BOUNDARY.encode() + b"\r\n\r\nx\r\n" + END, 400, "no name"),
        (part("x", b"", headers="y: " + "z" * 5000 + "\r\n") + END, 413, "headers"),
        (part("x", b"z" * 20_000) + END, 413, "fields"),
        (b"".join(part(f"n{i}", b"") for i in range(17)) + END, 400, "parts"),
        (b"z" * 2000 + PURPOSE + GOOD + END, 400, "outside"),
        (PURPOSE + GOOD + END + b"z" * 2000, 400, "outside"),
        (b"--" + BOUNDARY.encode() + b"x" * 2000, 400, "new line"),
        (PURPOSE + part("expires_after[anchor]", b"created_at") + GOOD + END, 400, "seconds"),
        (part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"9")
         + PURPOSE + GOOD + END, 400, "3600"),
        (PURPOSE + part("expires_after", b"tomorrow") + GOOD + END, 400, "expires_after"),
        (PURPOSE + part("expires_after", b"[" * 9000) + GOOD + END, 400, "expires_after"),
        (PURPOSE + part("expires_after", b'{"anchor": "created_at"}') + GOOD + END, 400, "seconds"),
        (PURPOSE + part("expires_after", b"null") + part("expires_after[seconds]", b"9")
         + GOOD + END, 400, "twice"),
        (part("purpose", b"\xff") + GOOD + END, 400, "UTF-8"),
        (PURPOSE + part("file", b"x" * 3_000_001, "a") + END, 413, "limit"),
        (PURPOSE + part("file", b"x" * 4_000_000, "a") + END, 413, "limit"),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_and_leaves_nothing(
    served: Served, home: Path, body: bytes, status: int, message: str
) -> None:
    reply = upload(served, body)
    assert reply.status == status, reply.body
    assert message in reply.json["error"]["message"], reply.json
    assert stored(home) == []


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
        (f"multipart/form-data; boundary={'x' * 71}", 400),
        ("multipart/form-data; boundary=a@b", 400),
        ("multipart/form-data; boundary=other", 400),
        ("application/json", 415),
        ("text/plain", 415),
    ],
)
def test_a_body_without_a_usable_boundary_is_refused(
    served: Served, home: Path, content_type: str, status: int
) -> None:
    assert upload(served, PURPOSE + GOOD + END, content_type).status == status
    assert stored(home) == []


def raw_upload(served: Served, *pieces: bytes, declared: int | None = None) -> bytes:
    """Chunked unless a length is declared; with a pause between the pieces."""
    host, port = served.url.removeprefix("http://").split(":")
    length = "transfer-encoding: chunked" if declared is None else f"content-length: {declared}"
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEYS[0]}\r\n"
        f"content-type: {FORM}\r\nconnection: close\r\n{length}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode())
        for piece in pieces:
            sent = piece if declared is not None else b"%x\r\n%b\r\n" % (len(piece), piece)
            connection.sendall(sent)
            time.sleep(0.001)
        if declared is None:
            connection.sendall(b"0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_every_cut_of_a_body_gives_the_same_file(served: Served, client: openai.OpenAI) -> None:
    content = f"\r\n--{BOUNDARY[:-1]}\r\n-\r\r\n--".encode() * 3
    body = PURPOSE + part("file", content, "a") + END
    for size in (1, 2, 3, 7, 16):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        answer = raw_upload(served, *pieces)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        file_id = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
        assert client.files.content(file_id).content == content


def test_a_client_that_stops_sending_leaves_nothing(served: Served, home: Path) -> None:
    body = PURPOSE + part("file", b"x" * 300_000, "a") + END
    begun = time.monotonic()
    # it says that more will come
    answer = raw_upload(served, body[:200_000], declared=len(body))
    assert answer.startswith(b"HTTP/1.1 400") and b"too slowly" in answer, answer
    # two seconds, and one for each 64 kB
    assert 4 < time.monotonic() - begun < 20
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEYS[0]}\r\n"
        head += f"content-type: {FORM}\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[:290_000])
        until(lambda: stored(home), lambda names: len(names) == 1)
    until(lambda: stored(home), lambda names: not names)


def test_bounds_of_a_tenant_and_of_all(served: Served, client: openai.OpenAI) -> None:
    piece = b"x" * 2_500_000
    for _ in range(3):
        client.files.create(file=("a", piece), purpose="batch")
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("a", piece), purpose="batch")
    assert refused.value.status_code == 413 and "delete some" in refused.value.message
    with client_of(served, KEYS[1]) as other:
        made = other.files.create(file=("a", piece), purpose="batch")
        with pytest.raises(openai.RateLimitError):
            other.files.create(file=("a", piece), purpose="batch")
        other.files.delete(made.id)
    # what a batch still needs is not free
    for file in client.files.list():
        client.files.delete(file.id)
    long = chat(max_tokens=8000, ignore_eos=True)
    rows = [line(f"{i}", long, padding="x" * 30_000) for i in range(80)]
    batches = []
    for _ in range(3):
        batches.append(begin(client, jsonl(*rows)))
        client.files.delete(batches[-1].input_file_id)
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("a", piece), purpose="batch")
    assert refused.value.status_code == 413
    for batch in batches:
        client.batches.cancel(batch.id)
        ended(client, batch)
    client.files.create(file=("a", piece), purpose="batch")


def test_eight_uploads_at_once_do_not_hold_up_the_loop(
    served: Served, client: openai.OpenAI
) -> None:
    raw = bytes(900_000)
    with Probe(served) as probe, ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(lambda _: client.files.create(file=("a", raw), purpose="batch"), range(8))
        )
        found = list(pool.map(lambda file: client.files.content(file.id).content, made))
    assert all(content == raw for content in found) and len({file.id for file in made}) == 8
    assert probe.worst_s < probe.lag.allowed_s(1.0)
