"""TLS: every client over one certificate, its renewal while streams run, and hostile handshakes."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPSConnection
from pathlib import Path

import anthropic
import grpc
import openai
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.sync.client import connect

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.api.transport import tls
from coterie.api.transport.tls import certificate_of
from coterie.core.config import ServerSettings
from coterie.core.errors import ConfigError
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat

HANDSHAKE_S, MAX_CONNECTIONS = 2.0, 24
SETTINGS = f"""
[server]
header_timeout_s = {HANDSHAKE_S}
max_connections_per_address = {MAX_CONNECTIONS}
"""


class Authority:
    """Signs certificates for this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.path = folder / "ca.pem"
        own = self._signed(self.name, self.key.public_key(), is_authority=True)
        self.path.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def _signed(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def issue(self, certificate: Path, key: Path) -> int:
        """Writes both files, each in one step; returns the serial number."""
        own = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        made = self._signed(name, own.public_key())
        replace(key, private_pem(own))
        replace(certificate, made.public_bytes(serialization.Encoding.PEM))
        return made.serial_number


def private_pem(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        lock = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(content)
    os.replace(draft, path)


class SecureServer:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        self.serial = self.authority.issue(self.certificate, self.key)
        # what urllib, httpx and grpc believe
        os.environ["SSL_CERT_FILE"] = str(self.authority.path)
        settings = folder / "coterie.toml"
        settings.write_text(SETTINGS)
        self.server = Served(
            *("--config", str(settings), str(tiny_checkpoint("llama")), "--name", "tiny"),
            *("--grpc-port", "0", "--tls-cert", str(self.certificate), "--tls-key", str(self.key)),
        )
        host, _, port = self.server.url.removeprefix("https://").rpartition(":")
        self.address = (host, int(port))

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority.path))

    def connected(self) -> ssl.SSLSocket:
        plain = socket.create_connection(self.address, 30)
        return self.context().wrap_socket(plain, server_hostname="localhost")

    def serial_now(self) -> int:
        with self.connected() as connection:
            found = connection.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found).serial_number

    def grpc_channel(self) -> grpc.Channel:
        port = self.server.log().split("gRPC on 127.0.0.1:")[1].split()[0]
        given = grpc.ssl_channel_credentials(self.authority.path.read_bytes())
        return grpc.secure_channel(f"localhost:{port}", given)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    known = os.environ.get("SSL_CERT_FILE")
    made = SecureServer(tmp_path_factory.mktemp("tls"))
    try:
        yield made
        made.server.stop()
    finally:
        made.server.stop(9)
        if known is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = known


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def infer(channel: grpc.Channel) -> str:
    call = channel.unary_unary(
        "/coterie.v1.Inference/Infer",
        request_serializer=pb.InferRequest.SerializeToString,
        response_deserializer=pb.InferenceResult.FromString,
    )
    asked = pb.InferRequest(prompt="hello", max_tokens=6, temperature=0)
    return str(call(asked, timeout=60).text)


def test_every_client(secure: SecureServer) -> None:
    url = secure.server.url
    assert url.startswith("https://") and f"curl {url}/v1/infer" in secure.server.out()
    words = secure.server.post("/v1/chat/completions", chat()).json["choices"][0]["message"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(**chat(), stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == words["content"]
    with anthropic.Anthropic(base_url=url, api_key="none") as vendor:
        asked = chat()
        greedy = {"temperature": asked.pop("temperature")}
        answer = vendor.messages.create(**asked, extra_body=greedy)
        assert [part.text for part in answer.content] == [words["content"]]
    with connect(url.replace("https", "wss", 1) + "/v1/infer/ws", ssl=secure.context()) as ws:
        ws.send('{"prompt": "hello", "max_tokens": 6, "temperature": 0}')
        assert '"started"' in str(ws.recv(timeout=60))
    same = {"prompt": "hello", "max_tokens": 6, "temperature": 0}
    with secure.grpc_channel() as channel:
        assert infer(channel) == secure.server.post("/v1/infer", same).json["text"]


def test_a_renewed_certificate_is_for_new_connections(secure: SecureServer) -> None:
    old = HTTPSConnection(*secure.address, context=secure.context(), timeout=60)
    old.request("GET", "/health/live")
    assert old.getresponse().read()
    first, before = secure.serial_now(), old.sock
    renewed = secure.authority.issue(secure.certificate, secure.key)
    assert renewed != first
    until(lambda: secure.serial_now() == renewed)
    # the old connection goes on
    old.request("GET", "/health/live")
    assert old.getresponse().status == 200 and old.sock is before
    old.close()

    # while the files are no pair, the one before stays, and that is said once
    def refusals() -> int:
        return secure.server.log().count('"certificate_refused"')

    # one more where it was looked at between the writing of the two files
    known = refusals()
    replace(secure.key, private_pem(ec.generate_private_key(ec.SECP256R1())))
    until(lambda: secure.serial_now() == renewed and refusals() > known)
    time.sleep(2 * tls.LOOK_S)
    with secure.grpc_channel() as channel:
        assert secure.serial_now() == renewed and infer(channel)
    assert refusals() == known + 1
    last = secure.authority.issue(secure.certificate, secure.key)
    until(lambda: secure.serial_now() == last)


def test_what_is_no_tls_is_closed(secure: SecureServer) -> None:
    plain_http = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for first in (plain_http, b"\x16\x03\x01", os.urandom(999)):
        with socket.create_connection(secure.address, 30) as plain:
            plain.sendall(first)
            plain.shutdown(socket.SHUT_WR)
            plain.settimeout(30)
            got = b"".join(iter(lambda: plain.recv(4096), b""))
        # at most an alert of TLS
        assert b"HTTP" not in got and len(got) < 100
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(secure.authority.path)
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError), socket.create_connection(secure.address, 30) as plain:
        old.wrap_socket(plain, server_hostname="localhost")
    assert secure.server.get("/health/live").status == 200


def test_handshakes_that_do_not_end_have_few_places(secure: SecureServer) -> None:
    """An address has as many handshakes as it may have connections, and each has its time."""
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(secure.address, 30))
            for _ in range(4 * MAX_CONNECTIONS)
        ]
        begun = time.monotonic()
        for connection in silent:
            connection.settimeout(60)
            # closed by the server, each
            assert connection.recv(1) == b""
        assert time.monotonic() - begun < 30
    until(lambda: secure.server.get("/health/live").status == 200)
    refused = "coterie_connections_refused_total"
    assert secure.server.metric(refused, reason="connections_of_address") >= 2 * MAX_CONNECTIONS


def test_what_is_not_read_is_bounded(secure: SecureServer) -> None:
    process = psutil.Process(secure.server.process.pid)
    before = process.memory_info().rss
    with secure.connected() as connection:
        connection.settimeout(2)
        asked = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000
        with pytest.raises(TimeoutError):
            while True:
                connection.sendall(asked)
        assert process.memory_info().rss - before < 100e6
        assert secure.server.get("/health/live").status == 200


def test_unusable_files_are_said_before_a_model_loads(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.issue(certificate, key)
    good = key.read_bytes()
    # both in one file
    both = tmp_path / "both.pem"
    both.write_bytes(good + certificate.read_bytes())
    assert certificate_of(ServerSettings(tls_cert=str(both))) is not None
    assert certificate_of(ServerSettings()) is None

    def refused(tls_cert: Path | str = "", tls_key: Path | str = "") -> str:
        with pytest.raises(ConfigError) as caught:
            certificate_of(ServerSettings(tls_cert=str(tls_cert), tls_key=str(tls_key)))
        return f"{caught.value.param}: {caught.value.message}"

    assert "--tls-cert" in refused(tls_key=key)
    assert refused(tmp_path / "none").startswith("server.tls_cert: ")
    assert "cannot be read" in refused(certificate, tmp_path)
    key.write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1())))
    assert "no certificate with its key" in refused(certificate, key)
    key.write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1()), b"word"))
    assert "encrypted" in refused(certificate, key)
    key.write_bytes(b"none")
    assert "PEM" in refused(certificate, key)
    command = [sys.executable, "-m", "coterie", "serve", "/no/model", "--port", "0"]
    command += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") <= 3 and "PEM" in done.stderr
