"""SGLang's launcher, started as Coterie, and the names that its tests take from beside it."""

from __future__ import annotations

import socket
import unittest
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from tests.foreign.server import Server

DEFAULT_MODEL_NAME_FOR_TEST = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_SMALL_MODEL_NAME_FOR_TEST = "meta-llama/Llama-3.2-1B-Instruct"
DEFAULT_SMALL_CROSS_ENCODER_MODEL_NAME_FOR_TEST = "cross-encoder"
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 600
CustomTestCase = unittest.TestCase
_running: dict[int, Server] = {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{_free_port()}"


def is_rust_server_built() -> bool:
    return False


def is_in_ci() -> bool:
    return False


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[str] = (),
    **_: Any,
) -> Any:
    given = [*other_args, "--port", str(urlsplit(base_url).port)]
    if "--context-length" not in given:
        # some ask for 2,048 tokens
        given += ["--context-length", "4096"]
    server = Server(model, given, api_key)
    _running[server.process.pid] = server
    return server.process


def stop(pid: int) -> None:
    if (server := _running.pop(pid, None)) is not None:
        server.stop()
