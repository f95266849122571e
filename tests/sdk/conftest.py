"""One server for both SDKs, and the TypeScript client built once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.sdk_clients import ADMIN, CALLER, ENDS, OTHER, build_typescript
from tests.helpers.serving.server_process import Served, own_home


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sdk-server")
    (folder / "callers").write_text(f"{CALLER}\n{OTHER}\n")
    (folder / "admins").write_text(f"{ADMIN}\n")
    model = tiny_checkpoint("llama", max_position_embeddings=8192, eos_token_id=ENDS)
    served = Served(
        *(str(model), "--name", "tiny", "--allow-unsigned"),
        *("--api-key-file", str(folder / "callers"), "--admin-key-file", str(folder / "admins")),
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
