"""Servers the API tests share: one open, one with keys and a queue of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served
from tiny import tiny_checkpoint
from tools_rig import taught_checkpoint

KEYS = ("key-of-the-first-tenant", "key-of-the-second-tenant")
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '</think>\\n' }}{% endif %}"
    "{% endif %}"
)


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


def thinking_checkpoint(path: Path) -> Path:
    """The tiny model with a chat template that opens a thought."""
    shutil.copytree(tiny_checkpoint("llama", max_position_embeddings=8192), path)
    settings = path / "tokenizer_config.json"
    facts = json.loads(settings.read_text())
    facts["chat_template"] = THINKING_TEMPLATE
    settings.write_text(json.dumps(facts))
    for beside in path.glob("chat_template*"):
        beside.unlink()
    return path
