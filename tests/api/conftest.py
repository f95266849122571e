"""Servers the API tests share: one open, one with keys and a queue of one."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.helpers.models.tiny import thinking_checkpoint, tiny_checkpoint
from tests.helpers.models.tool_callers import taught_checkpoint
from tests.helpers.serving.server_process import KEYS, Served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """The tiny model under the name `tiny`, no keys."""
    served = Served(str(tiny_checkpoint("llama")), "--name", "tiny")
    yield served
    served.stop()


@pytest.fixture(scope="session")
def taught_server() -> Iterator[Served]:
    """A tiny model that calls tools of its own accord, in Hermes' format."""
    served = Served(str(taught_checkpoint("hermes")), "--name", "tiny")
    yield served
    served.stop()


@pytest.fixture(scope="session")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Keys, one sequence at a time, a queue of one, a rate per user, and a model that thinks."""
    folder = tmp_path_factory.mktemp("strict")
    keys = folder / "keys.txt"
    keys.write_text("# two tenants\n" + "\n".join(KEYS) + "\n")
    served = Served(
        str(thinking_checkpoint(folder / "model")),
        *("--name", "tiny", "--api-key-file", str(keys)),
        *("--max-sequences", "1", "--max-queue", "1", "--user-rate", "0.2"),
    )
    yield served
    served.stop()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def caller(taught_server: Served) -> Iterator[openai.OpenAI]:
    """A client of the model that calls tools."""
    with openai.OpenAI(base_url=f"{taught_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
