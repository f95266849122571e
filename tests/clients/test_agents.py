"""tests/clients/agents.py: coding agents from npm do a whole piece of work with their tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.agents import AGENTS, TURNS, AgentTurns
from tests.clients.clients import NotInstalled

# the first one also downloads the agent
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=AGENTS)
def turns(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentTurns]:
    agent = AGENTS[request.param]
    try:
        agent.client.install()
    except NotInstalled as error:
        if agent.client.npm_answers():
            raise
        pytest.skip(f"npm does not answer, {request.param} cannot be fetched: {error}")
    running = AgentTurns(agent, tmp_path_factory.mktemp(request.param))
    try:
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("name", TURNS)
def test_a_file_ends_as_scripted(turns: AgentTurns, name: str) -> None:
    getattr(turns, name)()
