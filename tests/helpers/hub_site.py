"""A stand-in of the Hugging Face hub: a real HTTP server that answers what huggingface_hub asks.

It speaks `/api/models/ORG/REPO[/revision/REV]?blobs=true` and `/ORG/REPO/resolve/REV/FILE`, which
redirects to its store of files as the hub does, with the hub's `X-Error-Code` for what it refuses.
"""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "c0ffee" * 6 + "cafe"
TOKEN = "hf_of_somebody_who_may"


@dataclass
class HubRepo:
    files: dict[str, bytes]
    # what the listing is refused with, such as (403, "GatedRepo"), and what files are
    listing_error: tuple[int, str] | None = None
    file_error: tuple[int, str] | None = None
    # names of files whose bytes arrive wrong
    corrupted: set[str] = field(default_factory=set)
    # what the listing says of a file's size, in place of the truth
    stated_bytes: dict[str, int] = field(default_factory=dict)
    # with this token nothing is refused
    token: str = TOKEN
    commit: str = COMMIT


@dataclass
class HubSite:
    """What the hub holds, how it misbehaves, and what it was asked."""

    url: str = ""
    repos: dict[str, HubRepo] = field(default_factory=dict)
    # bytes of a file's body after which the connection is cut, each used once
    cuts: list[int] = field(default_factory=list)
    # a body waits here when its first half is sent
    halfway: threading.Event | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def ranges(self) -> list[str | None]:
        """Of the files that were asked for, in order."""
        return [wanted for path, wanted in self.asked if path.startswith("/store/")]

    def environment(self, home: Path) -> dict[str, str]:
        """For a child: this hub alone, and nobody's token."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home / "hf"),
            "HF_TOKEN": "",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def hub_site() -> Iterator[HubSite]:
    site = HubSite()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, site)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        if site.halfway is not None:
            site.halfway.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def reachable_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[HubSite]:
    """A hub that this process and its children ask: huggingface_hub reads its environment when it
    is imported, and other tests forbid it the network."""
    import huggingface_hub.constants as constants

    from coterie.weights.sources import download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "no-token"))
    monkeypatch.setattr(download, "_FIRST_PAUSE_S", 0.01)
    with hub_site() as site:
        for name, value in site.environment(home).items():
            monkeypatch.setenv(name, value)
        yield site


def _answer(request: BaseHTTPRequestHandler, site: HubSite) -> None:
    path = urllib.parse.unquote(request.path.partition("?")[0])
    site.asked.append((path, request.headers.get("Range")))
    if path.startswith("/api/models/"):
        _list(request, site, path.removeprefix("/api/models/"))
    elif "/resolve/" in path:
        _redirect(request, site, path)
    elif path.startswith("/store/"):
        _send_file(request, site, path.removeprefix("/store/"))
    else:
        _refuse(request, 404, "EntryNotFound")


def _repo(site: HubSite, name: str) -> HubRepo | None:
    return site.repos.get(name)


def _may(request: BaseHTTPRequestHandler, repo: HubRepo) -> bool:
    return request.headers.get("Authorization") == f"Bearer {repo.token}"


def _list(request: BaseHTTPRequestHandler, site: HubSite, path: str) -> None:
    name, _, revision = path.partition("/revision/")
    repo = _repo(site, name)
    if repo is None:
        # the hub does not say whether a private repository is there
        return _refuse(request, 401, "RepoNotFound")
    if repo.listing_error is not None and not _may(request, repo):
        return _refuse(request, *repo.listing_error)
    if revision not in ("", "main", repo.commit):
        return _refuse(request, 404, "RevisionNotFound")
    siblings = [_sibling(repo, file) for file in repo.files]
    info = {"id": name, "modelId": name, "sha": repo.commit, "private": False, "siblings": siblings}
    body = json.dumps(info).encode()
    request.send_response(200)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def _sibling(repo: HubRepo, file: str) -> dict[str, object]:
    data = repo.files[file]
    size = repo.stated_bytes.get(file, len(data))
    found: dict[str, object] = {"rfilename": file, "size": size, "blobId": "b" * 40}
    if file.endswith((".gguf", ".safetensors")):
        sha256 = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
    return found


def _redirect(request: BaseHTTPRequestHandler, site: HubSite, path: str) -> None:
    name, _, rest = path.removeprefix("/").partition("/resolve/")
    file = rest.partition("/")[2]
    repo = _repo(site, name)
    if repo is None or file not in repo.files:
        return _refuse(request, 404, "EntryNotFound")
    if repo.file_error is not None and not _may(request, repo):
        return _refuse(request, *repo.file_error)
    request.send_response(302)
    request.send_header("Location", f"{site.url}/store/{name}/{urllib.parse.quote(file)}")
    request.send_header("Content-Length", "0")
    request.end_headers()


def _send_file(request: BaseHTTPRequestHandler, site: HubSite, path: str) -> None:
    organisation, name, file = path.split("/", 2)
    repo = site.repos[f"{organisation}/{name}"]
    body = repo.files[file]
    if file in repo.corrupted:
        body = bytes(len(body))
    wanted = request.headers.get("Range")
    first, _, last = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
    start, end = int(first), int(last) + 1 if last else len(body)
    request.send_response(206 if wanted else 200)
    if wanted:
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
    request.send_header("Content-Type", "application/octet-stream")
    request.send_header("Content-Length", str(end - start))
    request.end_headers()
    end = site.cuts.pop(0) if site.cuts else end
    if site.halfway is not None:
        # in two pieces that do not arrive at one moment: of these nobody could tell the speed
        for piece, wait_s in ((len(body) // 4, 0.2), (len(body) // 2, 60)):
            request.wfile.write(body[start:piece])
            request.wfile.flush()
            site.halfway.wait(wait_s)
            start = piece
    try:
        request.wfile.write(body[start:end])
    except ConnectionError:
        # the client was killed
        return
    request.close_connection = True


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    request.send_response(status)
    request.send_header("X-Error-Code", code)
    request.send_header("Content-Length", "0")
    request.end_headers()
