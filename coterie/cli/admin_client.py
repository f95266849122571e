"""Asks a running server: where it is, with which key, and what it answers."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from coterie.core.config import ServerSettings, load
from coterie.core.errors import ConfigError, CoterieError, Unavailable

KEY_VARIABLE = "COTERIE_ADMIN_KEY"
TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 64 * 10**6


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help=f"its first key is sent (default: {KEY_VARIABLE}, or the server's own file)",
    )


def ask(
    args: argparse.Namespace,
    method: str,
    path: str,
    body: Any = None,
    server: ServerSettings | None = None,
) -> Any:
    """The JSON answer of the server. `server`: settings of a file that name its address and its
    admin keys."""
    url = (args.url or _url(server or ServerSettings())).rstrip("/")
    key = _key(args.admin_key_file or (server.admin_key_file if server else ""))
    return fetched(url, path, key, method, body)


def fetched(url: str, path: str, key: str = "", method: str = "GET", body: Any = None) -> Any:
    """The JSON answer of the server at this URL."""
    request = urllib.request.Request(
        url + path,
        method=method,
        data=b"" if body is None and method != "GET" else _encoded(body),
        headers={"content-type": "application/json"},
    )
    if key:
        request.add_unredirected_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.loads(reply.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        raise _refusal(error) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(
            f"no answer from {url}: {reason}. Start a server (coterie serve), or give its --url."
        ) from None


def server_settings(path: str | None) -> ServerSettings | None:
    return None if path is None else load(path).server


def _encoded(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _url(server: ServerSettings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    return f"{'https' if server.tls_cert else 'http'}://{host}:{server.port}"


def _key(file: str) -> str:
    """The key is never part of a message."""
    if not file:
        return os.environ.get(KEY_VARIABLE, "")
    try:
        lines = Path(file).expanduser().read_text(encoding="latin-1").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", param="admin_key_file") from None
    words = [line.split()[0] for line in lines if line.split() and not line.startswith("#")]
    if not words:
        raise ConfigError(f"{file} holds no key", param="admin_key_file")
    return words[0]


def _refusal(error: urllib.error.HTTPError) -> CoterieError:
    try:
        message = str(json.loads(error.read(MAX_ANSWER_BYTES))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {error.code}"
    kind = ConfigError if error.code == 400 else CoterieError
    return kind(message)
