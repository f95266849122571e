"""Experts that come over HTTP to a real server: hostile packages, uploads that break off or are
slow, eight of one name at once, and kill -9 in the middle."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from coterie.packages.registry import AdapterRegistry
from tests.helpers.adapters import hostile_archives, package_fuzz
from tests.helpers.serving.app_with_experts import ADMIN, MODEL, Packer, adapter
from tests.helpers.serving.server_process import MAX_PROBE_S, Probe, Reply, Served, chat, own_home

CASES = hostile_archives.every()
BYTES = "application/octet-stream"
UPLOADERS = 8
# of 105 packages; every one of them is tried by the registry's own tests
SLICE = 20
KILLS = 10


class Rig:
    def __init__(self, folder: Path) -> None:
        self.home = own_home(folder / "home")
        self.packer = Packer(folder)
        self.packer.trust(self.home / "state" / "trust.json")
        self.admins = folder / "admins.txt"
        self.admins.write_text(f"{ADMIN}\n")
        (folder / "coterie.toml").write_text("[server]\nbody_timeout_s = 1\n")
        self.config = folder / "coterie.toml"
        self.start()

    def start(self) -> None:
        self.served = Served(
            str(MODEL),
            *("--name", "tiny", "--admin-key-file", str(self.admins), "--allow-unsigned"),
            *("--config", str(self.config)),
            COTERIE_HOME=str(self.home),
        )

    def upload(self, data: bytes) -> Reply:
        headers = {"authorization": f"Bearer {ADMIN}", "content_type": BYTES}
        return self.served.post("/v1/experts", data, **headers)

    def load(self, name: str, path: Path | str) -> Reply:
        body = {"lora_name": name, "lora_path": str(path)}
        return self.served.post("/v1/load_lora_adapter", body, authorization=f"Bearer {ADMIN}")

    def installed(self) -> list[str]:
        data = self.served.get("/v1/experts", authorization=f"Bearer {ADMIN}").json["data"]
        return sorted(row["id"] for row in data)

    def begin(self, length: int | None, data: bytes) -> socket.socket:
        """An upload of which `data` is the beginning."""
        address = urlsplit(self.served.url)
        connection = socket.create_connection((address.hostname, address.port or 80), 20)
        body = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        head = f"POST /v1/experts HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += f"authorization: Bearer {ADMIN}\r\ncontent-type: {BYTES}\r\n{body}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def left_over(self) -> list[str]:
        return [path.name for path in (self.home / "state" / "experts" / "staging").glob("*")]

    def is_well(self) -> None:
        assert self.served.post("/v1/chat/completions", chat(max_tokens=2)).status == 200
        assert self.left_over() == []


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("hostile-experts"))
    yield made
    made.served.stop()


def error_of(reply: Reply) -> str:
    assert reply.status == 400, reply.body
    message: str = reply.json["error"]["message"]
    assert "Traceback" not in message and len(message) < 1000
    return message


@pytest.mark.parametrize("count", [SLICE, pytest.param(len(CASES), marks=pytest.mark.full)])
def test_every_hostile_package_is_refused(rig: Rig, count: int) -> None:
    before = rig.installed()
    with Probe(rig.served) as probe:
        for name in random.Random(count).sample(sorted(CASES), count):
            message = error_of(rig.upload(CASES[name][0]))
            assert CASES[name][1] in message or CASES[name][0] == b"", (name, message)
    assert probe.worst_s < MAX_PROBE_S
    assert rig.installed() == before
    rig.is_well()


@pytest.mark.parametrize("count", [16, pytest.param(400, marks=pytest.mark.full)])
def test_damaged_packages_are_refused_or_installed(rig: Rig, count: int) -> None:
    good = rig.packer.package("damaged")
    for number in range(count):
        rng = random.Random(f"upload:{number}")
        mutation = package_fuzz.MUTATIONS[number % len(package_fuzz.MUTATIONS)]
        reply = rig.upload(mutation(rng, good))
        assert reply.status in (201, 400, 403), (number, reply.body)
    rig.is_well()
    for name in {row.partition("@")[0] for row in rig.installed()}:
        rig.served.send("DELETE", f"/v1/experts/{name}", None, authorization=f"Bearer {ADMIN}")
    assert rig.installed() == []


@pytest.mark.parametrize(
    "name", ["../evil", "a/b", "..", "", "a\0b", "a@b", "x" * 5000, "tiny", "é"]
)
def test_names_with_path_parts_are_refused(rig: Rig, name: str) -> None:
    error_of(rig.load(name, adapter()))
    body = {"path": str(adapter()), "name": name, "version": "1.0.0"}
    error_of(rig.served.post("/v1/experts", body, authorization=f"Bearer {ADMIN}"))
    body |= {"name": "good", "version": f"1.0/{name}"}
    error_of(rig.served.post("/v1/experts", body, authorization=f"Bearer {ADMIN}"))
    assert "good" not in str(rig.installed())


def test_folders_with_pipes_and_links(rig: Rig, tmp_path: Path) -> None:
    """Each is answered, and installations go on after it."""
    source = adapter()
    for number, kind in enumerate(("pipe", "/dev/zero", "loop", "outside")):
        for name in ("adapter_model.safetensors", "adapter_config.json", "a.safetensors"):
            folder = tmp_path / f"{number}-{name}"
            folder.mkdir()
            for file in source.iterdir():
                if file.name != name:
                    (folder / file.name).write_bytes(file.read_bytes())
            if kind == "pipe":
                os.mkfifo(folder / name)
            else:
                targets = {"loop": name, "outside": str(source / name)}
                (folder / name).symlink_to(targets.get(kind, kind))
            reply = rig.load(f"linked-{number}", folder)
            if name == "a.safetensors":
                assert reply.status == 200, reply.body
            else:
                error_of(reply)
    for path in (tmp_path / "0-a.safetensors" / "a.safetensors", "/dev/zero", "/proc/self/mem"):
        error_of(rig.load("no-folder", path))
    rig.is_well()


def test_uploads_that_break_off_or_are_slow(rig: Rig) -> None:
    package = rig.packer.package("slow")
    # as many as may upload at once, and more
    slow = [rig.begin(len(package), package[:100]) for _ in range(UPLOADERS)]
    chunked = rig.begin(None, b"10\r\n" + package[:16] + b"\r\n")
    for cut in (0, 1, len(package) // 2, len(package) - 1):
        rig.begin(len(package), package[:cut]).close()
    with Probe(rig.served) as probe:
        # told that the body did not come, or closed; none waits for ever
        for connection in (*slow, chunked):
            connection.settimeout(60)
            answer = connection.recv(4096)
            assert not answer or b" 400 " in answer.partition(b"\r\n")[0], answer
            connection.close()
    assert probe.worst_s < MAX_PROBE_S
    # longer and shorter than it says
    with rig.begin(len(package) - 7, package) as connection:
        assert b" 400 " in connection.recv(4096).partition(b"\r\n")[0]
    assert "slow@1.0.0" not in rig.installed()
    assert rig.upload(package).status == 201
    rig.is_well()


def test_eight_of_one_name_at_once(rig: Rig) -> None:
    """With the same version, of which one set of weights is installed and stays."""
    packages = [rig.packer.package("same", seed=seed % 4) for seed in range(UPLOADERS)]
    with ThreadPoolExecutor(UPLOADERS) as pool:
        replies = list(pool.map(rig.upload, packages))
    good = [reply.json["digest"] for reply in replies if reply.status == 201]
    assert good and len(set(good)) == 1
    for reply in replies:
        assert reply.status == 201 or "installed with other weights" in error_of(reply)
    assert [row for row in rig.installed() if row.startswith("same@")] == ["same@1.0.0"]
    rig.is_well()


@pytest.mark.full
def test_killed_while_experts_are_installed(rig: Rig) -> None:
    """What was answered with 201 is there, and whatever is there is whole."""
    rng = random.Random(1)
    for turn in range(KILLS):
        packages = [rig.packer.package(f"killed-{turn}-{n}", seed=n % 4) for n in range(UPLOADERS)]
        done: list[str] = []

        def upload(package: bytes, done: list[str] = done) -> Any:
            try:
                reply = rig.upload(package)
            except OSError:
                return
            if reply.status == 201:
                done.append(reply.json["id"])

        threads = [threading.Thread(target=upload, args=(package,)) for package in packages]
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.0, 0.1))
        rig.served.stop(signal.SIGKILL)
        for thread in threads:
            thread.join()
        rig.start()
        assert set(done) <= set(rig.installed())
        registry = AdapterRegistry(rig.home / "state" / "experts")
        assert all(registry.is_sound(card.digest) for card in registry.cards())
        registry.close()
        for package in packages:
            assert rig.upload(package).status == 201
