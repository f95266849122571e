"""The OpenAPI document against the server: no 5xx, every status and body as declared.

Apart from the slice: to collect these takes seconds, which `make test` saves (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.schema_requests import document, tame, wanted
from tests.helpers.serving.server_process import Served, own_home

WHOLE = document(100, coverage=True)
CHECKS = wanted()
ADMIN = "key-of-the-fuzzer"


@pytest.fixture(scope="module")
def admin_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose experts may be changed by what the fuzzer makes up."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "admins.txt").write_text(f"{ADMIN}\n")
    served = Served(
        str(tiny_checkpoint("llama")),
        *("--name", "tiny", "--admin-key-file", str(folder / "admins.txt"), "--allow-unsigned"),
        COTERIE_HOME=str(own_home(folder / "home")),
    )
    yield served
    served.stop()


@pytest.mark.full
@pytest.mark.timeout(1200)  # hundreds of requests to each address, of which many generate
@WHOLE.parametrize()
def test_whatever_can_be_sent(case: Any, admin_server: Served) -> None:
    tame(case)
    keys = {"authorization": f"Bearer {ADMIN}"}
    case.call_and_validate(base_url=admin_server.url, checks=CHECKS, headers=keys, timeout=60)
    assert admin_server.process.poll() is None
