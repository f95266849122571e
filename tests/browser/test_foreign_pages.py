"""Pages of other origins in a real browser try to send prompts to a server without keys."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import START_S, Served

BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4, "stream": False})
# a form of text/plain writes NAME=VALUE: the rest of the JSON is the value
BEFORE, _, AFTER = BODY.partition("hello")
# each way to send a prompt without a preflight request has a route of its own, so that the log
# tells them apart
SENDS = {
    "/api/chat": "fetch(URL_, {method: 'POST', mode: 'no-cors', body: BODY})",
    "/api/generate": "fetch(URL_, {method: 'POST', body: BODY}).catch(() => null)",
    "/v1/completions": (
        "fetch(URL_, {method: 'POST', mode: 'no-cors', referrerPolicy: 'no-referrer', body: BODY})"
    ),
    "/v1/chat/completions": "navigator.sendBeacon(URL_, BODY)",
    "/v1/messages": "post(document.body, URL_)",
    "/v1/responses": "sandboxed(URL_)",
    "/v1/infer": "post(document.body, '/redirect?to=' + encodeURIComponent(URL_))",
    "/completion": "post(document.body, URL_, 'multipart/form-data')",
    "/api/tags": "new Image().src = URL_",
    "/v1/models": "framed(URL_)",
}  # fmt: skip
SCRIPT = """
const BODY = %s, BEFORE = %s, AFTER = %s;
function post(where, url, kind = 'text/plain') {
  const frame = document.createElement('iframe');
  frame.name = 'f' + Math.random();
  const form = document.createElement('form');
  Object.assign(form, {action: url, method: 'POST', enctype: kind, target: frame.name});
  const field = document.createElement('input');
  Object.assign(field, {name: BEFORE, value: AFTER});
  form.append(field);
  where.append(frame, form);
  form.submit();
}
function framed(url) {
  document.body.append(Object.assign(document.createElement('iframe'), {src: url}));
}
function sandboxed(url) {
  const frame = document.createElement('iframe');
  frame.sandbox = 'allow-scripts';
  const text = JSON.stringify(url) + ', {method: "POST", mode: "no-cors", body: '
    + JSON.stringify(BODY) + '}';
  frame.srcdoc = '<script>fetch(' + text.replaceAll('<', '') + ')</' + 'script>';
  document.body.append(frame);
}
"""


class ForeignSite(BaseHTTPRequestHandler):
    """A page without content, and a redirect that repeats a POST elsewhere."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title><body></body>")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(307)
        self.send_header("location", parse_qs(urlsplit(self.path).query)["to"][0])
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing is written."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(str(tiny_checkpoint("llama")), "--name", "tiny")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def foreign_port() -> Iterator[int]:
    site = ThreadingHTTPServer(("127.0.0.1", 0), ForeignSite)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    yield site.server_address[1]
    site.shutdown()
    thread.join()
    site.server_close()


def requests_of(served: Served, since: int) -> dict[str, int]:
    """The statuses by route, of the log's lines after the first `since`."""
    lines = [json.loads(line) for line in served.log().splitlines()[since:] if line[:1] == "{"]
    return {line["path"]: line["status"] for line in lines if line.get("path")}


# for a browser another port of the same host is another origin of the same site
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_page_cannot_send_prompts(
    browser: Browser, served: Served, foreign_port: int, host: str
) -> None:
    since = len(served.log().splitlines())
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"http://{host}:{foreign_port}/")
        facts = (json.dumps(part) for part in (BODY, BEFORE, AFTER))
        page.evaluate(SCRIPT % tuple(facts) + _calls(served.url))
        give_up_at = time.monotonic() + START_S
        while requests_of(served, since).keys() < SENDS.keys():
            assert time.monotonic() < give_up_at, requests_of(served, since)
            page.wait_for_timeout(50)
    finally:
        context.close()
    assert requests_of(served, since) == dict.fromkeys(SENDS, 403)
    # the same bytes from a program
    assert served.post("/v1/completions", BODY.encode(), content_type="text/plain").status == 200


def _calls(url: str) -> str:
    return "".join(
        f"\n(() => {{ const URL_ = {json.dumps(url + path)}; {call}; }})();"
        for path, call in SENDS.items()
    )
