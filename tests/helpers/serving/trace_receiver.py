"""An OTLP receiver in a process of its own, which reads with the official protobuf types.

`POST /v1/traces` takes spans, `GET /` returns all of them as JSON, `PUT /` sets how it answers:
`{"status": 503, "wait_s": 30, "rejected": 2}`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class TraceReceiver:
    """The process, and what it has received."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def answer(self, **behaviour: float) -> None:
        body = json.dumps(behaviour).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url, body, method="PUT")):
            pass

    def received(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url, timeout=20) as answer:
            return json.loads(answer.read())

    def spans(self, trace_id: str, seconds: float = 20.0) -> list[dict[str, Any]]:
        """The spans of a trace, once there are any: those of a request come together."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = [span for span in self.received()["spans"] if span["trace_id"] == trace_id]
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"no span of {trace_id} after {seconds} s")


def serve() -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    received: dict[str, Any] = {"spans": [], "headers": [], "resources": []}
    behaviour: dict[str, float] = {}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            time.sleep(behaviour.get("wait_s", 0.0))
            status = int(behaviour.get("status", 200))
            if self.path == "/v1/traces" and status == 200:
                message = service.ExportTraceServiceRequest.FromString(body)
                with lock:
                    received["headers"].append({k.lower(): v for k, v in self.headers.items()})
                    read(message, received)
            answer = service.ExportTraceServiceResponse()
            if "rejected" in behaviour:
                answer.partial_success.rejected_spans = int(behaviour["rejected"])
            self.reply(answer.SerializeToString(), status)

        def do_GET(self) -> None:
            with lock:
                self.reply(json.dumps(received).encode())

        def do_PUT(self) -> None:
            behaviour.clear()
            behaviour.update(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.reply(b"")

        def reply(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def read(message: Any, received: dict[str, Any]) -> None:
    for resource in message.resource_spans:
        received["resources"].append(attributes_of(resource.resource.attributes))
        for scope in resource.scope_spans:
            received["spans"] += [described(span) for span in scope.spans]


def described(span: Any) -> dict[str, Any]:
    return {
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "name": span.name,
        "kind": span.kind,
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "attributes": attributes_of(span.attributes),
        "state": span.trace_state,
        "flags": span.flags,
        "is_error": span.status.code == 2,
    }


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)


if __name__ == "__main__":
    serve()
