"""Who may ask and in whose words they are answered: hosts, origins, content types, vendors."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import pytest
import websockets.sync.client as ws_client
from websockets.exceptions import InvalidStatus

from coterie.api.auth import OriginCheck
from coterie.core.config import ServerSettings
from coterie.core.errors import Forbidden
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
VENDOR = {"anthropic_version": "2023-06-01"}
LONG = "word " * 3000


@pytest.fixture(scope="module")
def lenient() -> Iterator[Served]:
    """Named, open to one origin, and shortening what is asked for."""
    served = Served(
        *(str(tiny_checkpoint("llama")), "--name", "tiny", "--clamp-max-tokens"),
        *("--allowed-hosts", "coterie.example,other", "--cors-origins", "https://APP.example/"),
        *("--kv-cache-slots", "4", "--context", "128"),
    )
    yield served
    served.stop()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1:99", 200), ("[::1]:8000", 200),
        ("192.168.1.7", 200), ("a.localhost", 200), ("evil.example", 421),
        ("localhost.evil.example", 421), ("127.0.0.1.evil.example", 421), ("coterie.example", 421),
    ],
)  # fmt: skip
def test_hosts_without_keys(server: Served, host: str, status: int) -> None:
    """A name that a page made point here is refused; an address cannot be made to."""
    reply = server.get("/v1/models", host=host)
    assert reply.status == status, reply.body
    assert server.post(CHAT, chat(), host=host).status == status
    if status == 421:
        assert "--allowed-hosts" in reply.json["error"]["message"]
        assert server.get("/health", host=host).status == 200


def test_hosts_that_are_listed(lenient: Served, strict_server: Served) -> None:
    assert lenient.get("/v1/models", host="coterie.example:8000").status == 200
    assert lenient.get("/v1/models", host="evil.example").status == 421
    # a page knows no key
    assert strict_server.get("/v1/models", host="evil.example").status == 401


# what a page may post without a preflight request
SIMPLE_TYPES = (
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "text/plain;application/json",
)  # fmt: skip
OLLAMA = "/api/chat"
# headers of a browser with a page that may not call
FOREIGN_PAGES: dict[str, dict[str, str]] = {
    "another site": {"origin": "https://evil.example"},
    "a sandboxed frame": {"origin": "null"},
    "a redirected form": {"origin": "null", "sec_fetch_site": "cross-site"},
    "another port of this machine": {"origin": "http://127.0.0.1:1"},
    "no origin, another site": {"sec_fetch_site": "cross-site"},
    "no origin, in capitals": {"sec_fetch_site": " Cross-Site "},
    "no origin, another port": {"sec_fetch_site": "same-site"},
    "no origin, an unknown site": {"sec_fetch_site": "far-away"},
    "a form that opens a page": {
        "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SIMPLE_TYPES)
def test_programs_may_send_prompts_in_any_type(server: Served, kind: str) -> None:
    for path in (CHAT, MESSAGES, "/v1/infer", OLLAMA):
        body = {"prompt": "hello", "max_tokens": 8} if path == "/v1/infer" else chat()
        if path == OLLAMA:
            del body["max_tokens"], body["temperature"]
            body["options"] = {"num_predict": 8}
        assert server.post(path, body, content_type=kind).status == 200, path
    own = {"origin": server.url, "sec_fetch_site": "same-origin"}
    assert server.post(CHAT, chat(), content_type=kind, **own).status == 200
    assert server.post(CHAT, b"model=tiny&prompt=hello", content_type=kind).status == 400


@pytest.mark.parametrize("kind", SIMPLE_TYPES)
@pytest.mark.parametrize("path", ["/v1/feedback", "/tokenize", "/v1/batches", "/v1/files"])
def test_other_routes_want_their_type(server: Served, path: str, kind: str) -> None:
    reply = server.post(path, chat(), content_type=kind)
    if path == "/v1/files" and kind.startswith("multipart"):
        assert reply.status == 400
        return
    assert reply.status == 415
    wanted = "multipart/form-data" if path == "/v1/files" else "application/json"
    assert f"content-type: {wanted}" in reply.json["error"]["message"]


def test_admin_routes_want_json(tmp_path: Path) -> None:
    keys = tmp_path / "admins"
    keys.write_text("key-of-an-admin\n")
    keys.chmod(0o600)
    served = Served(
        *(str(tiny_checkpoint("llama")), "--name", "tiny", "--admin-key-file", str(keys))
    )
    try:
        admin = {"authorization": "Bearer key-of-an-admin"}
        drain, canary = "/v1/ensemble/specialists/tiny/drain", "/v1/ensemble/canaries"
        for path in (drain, canary, "/v1/load_lora_adapter"):
            for kind in SIMPLE_TYPES:
                assert served.post(path, {}, content_type=kind, **admin).status == 415, path
            page = admin | FOREIGN_PAGES["no origin, another site"]
            assert served.post(path, {}, **page).status == 403, path
        assert served.post(drain, {"reason": "a test"}, **admin).status == 200
    finally:
        served.stop()


@pytest.mark.parametrize("page", FOREIGN_PAGES)
def test_foreign_pages_are_refused(server: Served, page: str) -> None:
    headers = FOREIGN_PAGES[page]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
        for path in (CHAT, MESSAGES, "/v1/infer", OLLAMA, "/api/show", "/tokenize"):
            reply = server.post(path, chat(), content_type=kind, **headers)
            assert reply.status == 403, (path, kind)
            assert "--cors-origins" in reply.body.decode(), path
            assert "access-control-allow-origin" not in reply.headers
    refused = server.post(CHAT, chat(), **headers).json["error"]
    assert (refused["type"], refused["code"]) == ("permission_error", "permission_denied")
    assert list(server.post(OLLAMA, {"model": "tiny"}, **headers).json) == ["error"]


def test_links_and_pictures_of_other_pages(server: Served) -> None:
    """A link leads here; what a page loads without asking does not."""
    link = FOREIGN_PAGES["a form that opens a page"]
    assert server.get("/dashboard", **link).status == 200
    assert server.send("HEAD", "/", None, **link).status == 200
    for change in ({"sec_fetch_mode": "no-cors"}, {"sec_fetch_dest": "iframe"}):
        assert server.get("/dashboard", **(link | change)).status == 403
    for site in ("same-origin", "none"):
        assert server.get("/v1/models", sec_fetch_site=site).status == 200
    assert "specialists" not in server.get("/health", sec_fetch_site="cross-site").json


def test_a_name_that_was_made_to_point_here(server: Served, lenient: Served) -> None:
    """To its browser the page is of this server's own origin: only the name shows that it is not.
    A name that is listed is the operator's."""
    page = {
        "host": "evil.example:8000",
        "origin": "http://evil.example:8000",
        "sec_fetch_site": "same-origin",
    }
    for served in (server, lenient):
        for path in (CHAT, OLLAMA):
            for kind in ("text/plain", "application/json"):
                assert served.post(path, chat(), content_type=kind, **page).status == 421
    named = page | {"host": "coterie.example", "origin": "http://coterie.example"}
    assert lenient.post(CHAT, chat(), content_type="text/plain", **named).status == 200


def test_a_listed_page_and_its_other_requests(lenient: Served) -> None:
    listed = {"origin": "https://app.example", "sec_fetch_site": "cross-site"}
    for kind in ("text/plain", "application/json"):
        assert lenient.post(CHAT, chat(), content_type=kind, **listed).status == 200
    # the page's origin is not known without its header
    assert lenient.post(CHAT, chat(), sec_fetch_site="cross-site").status == 403


def test_origins_of_no_host() -> None:
    """With keys any host may be named, an empty one too; `null` is not its origin."""
    check = OriginCheck(ServerSettings(), has_keys=True)
    for origin in (b"null", b""):
        with pytest.raises(Forbidden):
            check.check([(b"host", b""), (b"origin", origin)], "POST")
    open_to_all = OriginCheck(ServerSettings(cors_origins=("*",)), has_keys=True)
    open_to_all.check([(b"host", b"a"), (b"origin", b"null")], "POST")
    open_to_all.check([(b"host", b"a"), (b"sec-fetch-site", b"cross-site")], "POST")


def test_json_by_any_name(server: Served) -> None:
    for kind in ("application/json", "application/json; charset=utf-8", "application/ld+json"):
        assert server.post(CHAT, chat(), content_type=kind).status == 200


def test_origins(server: Served, lenient: Served) -> None:
    place = urlsplit(server.url).netloc
    for origin in ("https://evil.example", "null", "http://localhost:1", "http://[", ""):
        assert server.get("/v1/models", origin=origin).status == 403, origin
        reply = server.post(CHAT, chat(), origin=origin)
        assert reply.status == 403
    assert "--cors-origins" in reply.json["error"]["message"]
    assert server.post(CHAT, chat(), origin=f"http://{place}").status == 200
    assert lenient.post(CHAT, chat(), origin="https://app.example").status == 200
    assert lenient.post(CHAT, chat(), origin="https://evil.example").status == 403


def test_a_page_of_a_listed_origin_may_do_everything(lenient: Served) -> None:
    """And read every answer, refusals and streams too; other pages may do and read nothing."""
    ours, foreign = "https://app.example", "https://evil.example"
    told = "access-control-allow-origin"
    for method in ("GET", "HEAD", "POST", "PATCH", "DELETE"):
        asked = {
            "access_control_request_method": method,
            "access_control_request_headers": "authorization,x-api-key,content-type,x-stainless-os",
        }
        allowed = lenient.send("OPTIONS", "/v1/experts/any", None, origin=ours, **asked)
        assert (allowed.status, allowed.headers[told]) == (200, ours), method
        assert "x-api-key" in allowed.headers["access-control-allow-headers"]
        refused = lenient.send("OPTIONS", "/v1/experts/any", None, origin=foreign, **asked)
        assert refused.status == 400 and told not in refused.headers
    calls: list[tuple[str, dict[str, Any] | None]] = [
        ("/v1/models", None), ("/nowhere", None), ("/health", None), (CHAT, chat()),
        (CHAT, chat(stream=True)), (CHAT, {"model": 1}), ("/v1/experts", None),
    ]  # fmt: skip
    for path, body in calls:
        for origin in (ours, foreign, f"{ours}.evil.example", "null", "https://app.example:444"):
            send = lenient.get if body is None else partial(lenient.post, body=body)
            reply = send(path, origin=origin)
            assert reply.headers.get(told) == (ours if origin == ours else None), (path, origin)
            assert reply.status == 403 or origin == ours or path == "/health", (path, origin)
        assert "Origin" in reply.headers["vary"]
    streamed = lenient.post(CHAT, chat(stream=True), origin=ours)
    assert streamed.body.rstrip().endswith(b"[DONE]")


def test_origins_and_hosts_of_sockets(server: Served) -> None:
    place = urlsplit(server.url)
    url = f"ws://{place.netloc}/v1/infer/ws"
    for headers, status in (
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 421),
    ):
        with pytest.raises(InvalidStatus) as caught:
            _connect(url, headers)
        assert caught.value.response.status_code == status
    _connect(url, {})


def _connect(url: str, headers: dict[str, str]) -> None:
    place = urlsplit(url)
    host = headers.get("Host")
    if host is None:
        with ws_client.connect(url, additional_headers=headers):
            return
    assert place.hostname is not None
    with (
        socket.create_connection((place.hostname, place.port or 80)) as sock,
        ws_client.connect(f"ws://{host}{place.path}", sock=sock),
    ):
        return


def test_a_prompt_that_is_too_long_in_the_vendors_words(server: Served) -> None:
    """Claude Code reads the numbers and asks again for less."""
    long = server.post(MESSAGES, chat(LONG, max_tokens=10)).json["error"]["message"]
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", long)
    assert found is not None and int(found[1]) > int(found[2]) == 1024
    much = server.post(MESSAGES, chat(max_tokens=32_000)).json["error"]["message"]
    found = re.fullmatch(
        r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+), "
        r"decrease input length or `max_tokens` and try again",
        much,
    )
    assert found is not None and (found[2], found[3]) == ("32000", "1024")
    # what is left fits exactly
    room = int(found[3]) - int(found[1])
    assert server.post(MESSAGES, chat(max_tokens=room)).status == 200
    assert server.post(MESSAGES, chat(max_tokens=room + 1)).status == 400
    streamed = server.post(MESSAGES, chat(max_tokens=32_000, stream=True))
    assert streamed.json["error"]["message"] == much
    assert "maximum context length" in server.post(CHAT, chat(LONG)).json["error"]["message"]


def test_max_tokens_is_shortened_where_that_is_asked_for(lenient: Served) -> None:
    reply = lenient.post(MESSAGES, chat(max_tokens=32_000))
    assert reply.status == 200
    assert lenient.post(CHAT, chat(max_tokens=32_000)).status == 200
    assert lenient.post("/v1/infer", {"prompt": "hello", "max_tokens": 32_000}).status == 200
    long = lenient.post(MESSAGES, chat(LONG, max_tokens=32_000))
    assert long.json["error"]["message"].startswith("prompt is too long: ")


def test_models_by_every_spelling(server: Served) -> None:
    listed = server.get("/v1/models").json
    assert server.get("/v1/models/").json == listed
    assert server.get("/v1/models/tiny/").json["id"] == "tiny"
    assert server.get("/v1/models/auto").json["id"] == "auto"
    assert server.get("/v1/models/auto", **VENDOR).json["id"] == "auto"


def test_pages_of_models(server: Served) -> None:
    first = server.get("/v1/models?limit=1", **VENDOR).json
    assert [item["id"] for item in first["data"]] == ["tiny"]
    assert (first["first_id"], first["last_id"]) == ("tiny", "tiny")
    after = server.get("/v1/models?limit=1&after_id=tiny&beta=true", **VENDOR).json
    assert after["data"] == [] and after["has_more"] is False
    assert server.get("/v1/models?before_id=tiny", **VENDOR).json["data"] == []
    for query in ("limit=0", "limit=x", "limit=5000", "after_id=nobody"):
        reply = server.get(f"/v1/models?{query}", **VENDOR)
        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        assert [model.id for model in client.models.list(limit=1)] == ["tiny"]


def test_the_root_says_what_this_is(server: Served) -> None:
    reply = server.get("/")
    assert reply.status == 200 and reply.json["name"] == "Coterie"
    page = server.get("/", accept="text/html,application/xhtml+xml")
    assert page.headers["content-type"].startswith("text/html")
    assert b"<title>Coterie</title>" in page.body
    head = server.send("HEAD", "/", None)
    assert head.status == 200 and head.body == b""
    wrong = server.post("/", {})
    assert wrong.status == 405 and wrong.headers["allow"] == "GET, HEAD"


def test_the_log_says_why(server: Served) -> None:
    server.get("/v1/made-up-route")
    server.get("/v1/models", origin="https://evil.example")
    assert server.post("/v1/messages", {**chat(), "thread": "t"}).status == 400
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    asked = [line for line in lines if line["event"] == "request"]
    # 499: the client was gone
    refused = [line for line in asked if 400 <= line["status"] < 499]
    assert all(line["path"] and line["reason"] for line in refused)
    reasons = {line["path"]: line["reason"] for line in refused}
    assert "GET /v1/made-up-route" in reasons["/v1/made-up-route"]
    assert reasons["/v1/messages"]
    assert all(len(line["reason"]) <= 300 and len(line["path"]) <= 128 for line in refused)
