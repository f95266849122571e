"""One server for both SDKs, and the TypeScript client built once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.sdk_clients import ADMIN, CALLER, ENDS, OTHER, build_typescript
from tests.helpers.serving.server_process import Served, own_home


@dataclass(frozen=True, slots=True)
class PageSite:
    """Another site, whose pages may call the server: `folder` holds them."""

    origin: str
    folder: Path


@pytest.fixture(scope="session")
def page_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageSite]:
    folder = tmp_path_factory.mktemp("site")

    class Pages(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_: object) -> None:
            """The test reads standard error."""

    site = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    yield PageSite(f"http://127.0.0.1:{site.server_port}", folder)
    site.shutdown()
    thread.join()
    site.server_close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, page_site: PageSite) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sdk-server")
    (folder / "callers").write_text(f"{CALLER}\n{OTHER}\n")
    (folder / "admins").write_text(f"{ADMIN}\n")
    model = tiny_checkpoint("llama", max_position_embeddings=8192, eos_token_id=ENDS)
    served = Served(
        *(str(model), "--name", "tiny", "--allow-unsigned"),
        *("--api-key-file", str(folder / "callers"), "--admin-key-file", str(folder / "admins")),
        *("--cors-origins", page_site.origin),
        COTERIE_HOME=str(own_home(folder / "home")),
    )
    yield served
    served.stop()


@pytest.fixture
def environment(server: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that lead a client to the server; set here too."""
    named = {
        "COTERIE_BASE_URL": server.url,
        "COTERIE_API_KEY": CALLER,
        "COTERIE_ADMIN_KEY": ADMIN,
    }
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **named}


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where `@coterie/client` is installed and the examples are compiled."""
    folder = tmp_path_factory.mktemp("typescript")
    build_typescript(folder)
    return folder
