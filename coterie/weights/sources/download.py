"""Fetches one file over HTTP: progress, retries, resume, checksum.

A download writes to a `.part` file next to its target and continues it after any interruption. The
target appears only when it is complete and its checksum is correct.
"""

from __future__ import annotations

import base64
import email.message
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from coterie.core.errors import WeightsError

# (bytes done, bytes in total or None if unknown)
Progress = Callable[[int, int | None], None]

_CHUNK_BYTES = 1 << 18
_TIMEOUT_S = 60.0
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.5

_NETWORK_ERRORS = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file to fetch. `url` may be http, https or file."""

    url: str
    sha256: str | None = None
    size_bytes: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


class RefusedDownload(WeightsError):
    """The server knows the file and does not give it to this caller: HTTP 401 or 403."""


def open_url(url: str, headers: dict[str, str] | None = None, timeout_s: float = _TIMEOUT_S) -> Any:
    """Opens a URL. A user and password in it are sent as a header, and only to its own host."""
    clean, login = _without_login(url)
    all_headers = {"User-Agent": "coterie", **(headers or {})}
    if login:
        all_headers["Authorization"] = f"Basic {login}"
    request = urllib.request.Request(clean, headers=all_headers)
    opener = urllib.request.build_opener(
        _SafeRedirects, urllib.request.HTTPSHandler(context=_tls_context())
    )
    return opener.open(request, timeout=timeout_s)


def shown(url: str) -> str:
    """`url` without user, password, query and fragment, for use in a message."""
    parts = urllib.parse.urlsplit(_without_login(url)[0])
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def reason(error: BaseException) -> str:
    """The cause of an error, in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def download(remote: RemoteFile, target: Path, progress: Progress | None = None) -> None:
    """Makes `target`; continues an earlier attempt if there is one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    for attempt in range(_ATTEMPTS):
        try:
            _transfer(remote, part, progress)
            break
        except _NETWORK_ERRORS as error:
            if not _is_network(error):
                raise
            if isinstance(error, urllib.error.HTTPError):
                # it holds the connection of the answer
                error.close()
            if _is_final(error) or attempt + 1 == _ATTEMPTS:
                raise _failure(remote, error) from error
            time.sleep(_FIRST_PAUSE_S * 2**attempt)
    if remote.sha256 and _sha256(part) != remote.sha256.lower():
        part.unlink()
        raise WeightsError(
            f"{shown(remote.url)}: what arrived does not have the expected sha256, so it was "
            "thrown away. Try again; if it stays, the source is damaged."
        )
    os.replace(part, target)


def _failure(remote: RemoteFile, error: Exception) -> WeightsError:
    where = f"{shown(remote.url)}: cannot be fetched ({reason(error)})."
    if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
        return RefusedDownload(f"{where} Check the name and the token or password for it.")
    return WeightsError(f"{where} Try again; what has arrived is kept.")


def _transfer(remote: RemoteFile, part: Path, progress: Progress | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    if remote.size_bytes is not None and have > remote.size_bytes:
        part.unlink()
        have = 0
    if have and have == remote.size_bytes:
        return
    headers = dict(remote.headers)
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = open_url(remote.url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        part.unlink()  # the server has no such range: the part does not belong to its file
        raise ConnectionError("the server refused to resume") from error
    with response:
        resumed = _resumes_at(response, have)
        length = response.headers.get("Content-Length")
        rest = int(length) if length and length.isdigit() else None
        start = have if resumed else 0
        total = start + rest if rest is not None else remote.size_bytes
        with part.open("ab" if resumed else "wb") as sink:
            done = _copy_body(response, sink, start, total, progress)
    if total is not None and done != total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


def _resumes_at(response: Any, have: int) -> bool:
    """Whether the body continues at byte `have`; a server may send the whole file instead."""
    if not have or getattr(response, "status", None) != 206:
        return False
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-")


def _copy_body(
    source: Any, sink: IO[bytes], start: int, total: int | None, progress: Progress | None
) -> int:
    done = start
    while chunk := source.read(_CHUNK_BYTES):
        sink.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
    return done


def _is_network(error: BaseException) -> bool:
    """Whether the network failed, and not the disk or the permissions of a folder."""
    network = (
        urllib.error.URLError,
        http.client.HTTPException,
        ConnectionError,
        TimeoutError,
        ssl.SSLError,
    )
    return isinstance(error, network)


def _is_final(error: BaseException) -> bool:
    """Whether another attempt cannot help."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (401, 403, 404, 410)
    return isinstance(error, urllib.error.URLError) and isinstance(error.reason, FileNotFoundError)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _without_login(url: str) -> tuple[str, str | None]:
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at or parts.scheme == "file":
        return url, None
    login = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), login


def _tls_context() -> ssl.SSLContext:
    """Trusts the system's certificates, pip's `cert`, and certifi's if it is installed."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    try:
        import certifi
    except ImportError:
        return context
    context.load_verify_locations(certifi.where())
    return context


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but sends a login to no other host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: email.message.Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        same = urllib.parse.urlsplit(newurl).netloc == urllib.parse.urlsplit(req.full_url).netloc
        if following is not None and not same:
            following.remove_header("Authorization")
        return following
