"""Content decides which base answers: its own marks are read, and its own name is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from coterie.core.request import RouteHints
from coterie.routing import router
from coterie.routing.features.features import PromptFeatures, extract
from coterie.routing.resolve import NameResolver, ResolvedRoute
from tests.helpers.models.tiny import thinking_checkpoint
from tests.helpers.serving.app_with_experts import MODEL, RELATED, UNRELATED, ExpertApp
from tests.helpers.serving.server_process import own_home

SQL = {
    "keywords": ["sql", "query", "table", "database", "select", "join"],
    "examples": [
        "Write a SQL query that lists all customers",
        "Turn this question into SQL: how many orders were placed in May?",
        "Give me a SELECT statement that joins orders and customers",
    ],
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertApp]:
    """A model that thinks answers by default; the one expert is for another model."""
    folder = tmp_path_factory.mktemp("two-bases")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("COTERIE_HOME", str(own_home(folder / "home")))
        file = folder / "coterie.toml"
        file.write_text(
            f'[[specialists]]\n[[specialists]]\nname = "tiny"\nmodel = {json.dumps(str(MODEL))}\n'
        )
        rig = ExpertApp(
            folder, runner, file,
            **{
                "specialists.0.model": str(thinking_checkpoint(folder / "model")),
                "specialists.0.name": "thinker",
                "server.admin_key_file": str(folder / "admins.txt"),
            },
        )  # fmt: skip
        rig.trust(folder / "home" / "state" / "trust.json")
        made = rig.package("sql-writer", description="Writes SQL queries", routing=SQL)
        assert rig.send("POST", "/v1/experts", made).status_code == 201
        runner.run(rig.pipeline._fleet.catalog.settled())
        yield rig
        rig.close()


def asked(rig: ExpertApp, path: str, content: str, model: str = "auto") -> Any:
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0}
    reply = rig.send("POST", path, body | {"seed": 1}, key="")
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["model"] == reply.headers["x-coterie-specialist"]
    return answer


def test_openai(rig: ExpertApp) -> None:
    by_expert = asked(rig, "/v1/chat/completions", RELATED)
    message = by_expert["choices"][0]["message"]
    # nothing of it is a thought: this model has none
    assert by_expert["model"] == "tiny" and message["content"]
    assert "reasoning_content" not in message
    by_base = asked(rig, "/v1/chat/completions", UNRELATED)
    assert by_base["model"] == "thinker"
    assert by_base["choices"][0]["message"]["reasoning_content"]


def test_anthropic(rig: ExpertApp) -> None:
    by_expert = asked(rig, "/v1/messages", RELATED)
    assert by_expert["model"] == "tiny"
    assert [block["type"] for block in by_expert["content"]] == ["text"]
    assert asked(rig, "/v1/messages", UNRELATED)["model"] == "thinker"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_is_routed_once(
    rig: ExpertApp, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose marks are read and whose name is told comes from the plan that it runs by."""
    looks, names = list[str](), list[str | None]()
    resolve = NameResolver.resolve

    def counted(instruction: str, document: str) -> PromptFeatures:
        looks.append(instruction)
        return extract(instruction, document)

    def resolved(self: NameResolver, hints: RouteHints) -> ResolvedRoute:
        names.append(hints.model)
        return resolve(self, hints)

    monkeypatch.setattr(router, "extract", counted)
    monkeypatch.setattr(NameResolver, "resolve", resolved)
    asked(rig, path, RELATED)
    assert looks == [RELATED] and not names
    asked(rig, path, RELATED, model="tiny")
    assert looks == [RELATED] and names == ["tiny"]
