"""A server that answers what it is told to, for what a healthy one never does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# status, headers, body; None closes the connection without a word
Step = tuple[int, dict[str, str], bytes] | None


class Scripted(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, steps: list[Step]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.steps = steps
        # (method, path, headers, body) of what came
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        named = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.command, self.path, named, body))
        step = self.server.steps.pop(0)
        if step is None:
            self.close_connection = True
            return
        status, headers, answer = step
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_DELETE = do_PATCH = _answer

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def scripted(*steps: Step) -> Iterator[Scripted]:
    server = Scripted(list(steps))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(status: int, **headers: str) -> Step:
    error = {"message": "not now", "type": "requests", "param": None, "code": "x"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps({"error": error}).encode()


def answer(**fields: Any) -> Step:
    return 200, {"content-type": "application/json"}, json.dumps(fields).encode()
