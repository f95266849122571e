"""The error table of the pipeline, row by row, against a real server with experts installed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.helpers.serving.app_with_experts import (
    ADMIN,
    MODEL,
    RELATED,
    SQL,
    UNRELATED,
    Packer,
    adapter,
    infer,
)
from tests.helpers.serving.server_process import Served, own_home


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three experts of one size, and room for one of them (and a half)."""
    folder = tmp_path_factory.mktemp("degrades")
    home = own_home(folder / "home")
    (folder / "admins.txt").write_text(f"{ADMIN}\n")
    packer = Packer(folder)
    packer.trust(home / "state" / "trust.json")
    nbytes = (adapter() / "adapter_model.safetensors").stat().st_size
    served = Served(
        str(MODEL),
        *("--name", "tiny", "--admin-key-file", str(folder / "admins.txt")),
        *("--adapter-bytes", str(nbytes * 3 // 2)),
        COTERIE_HOME=str(home),
    )
    made = [
        packer.package("sql-writer", seed=1, description="Writes SQL queries", routing=SQL),
        packer.package("poems", seed=2, description="Writes rhymed poems"),
        packer.package("letters", seed=3, description="Writes formal letters"),
    ]
    for package in made:
        reply = served.post(
            "/v1/experts",
            package,
            authorization=f"Bearer {ADMIN}",
            content_type="application/octet-stream",
        )
        assert reply.status == 201, reply.body
    deadline = time.monotonic() + 60
    # an index of what is installed is made in the background
    while infer(served, UNRELATED, max_tokens=1)["degraded"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield served
    served.stop()


@pytest.mark.parametrize("prompt", ["", " \n\t ", "x" * 500_001])
def test_an_invalid_prompt_is_a_400_that_names_it(house: Served, prompt: str) -> None:
    reply = house.post("/v1/infer", {"prompt": prompt})
    assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")


def test_a_suitable_expert_answers(house: Served) -> None:
    answer = infer(house, RELATED, explain=True)
    assert answer["experts_used"] == ["sql-writer"], answer["plan"]["reasons"]
    assert answer["degraded"] == []
    assert answer["plan"]["composition_order"] == ["sql-writer@1.0.0"]
    assert answer["metrics"]["experts_used"] == ["sql-writer@1.0.0"]


def test_no_suitable_expert_means_the_base_model(house: Served) -> None:
    answer = infer(house, UNRELATED, explain=True, temperature=0.0)
    assert answer["experts_used"] == [] and answer["model"] == "tiny"
    assert "base model alone" in answer["plan"]["reasons"][0]
    assert answer["tokens_generated"] == 8


def test_an_excluded_expert_leaves_the_base_model(house: Served) -> None:
    answer = infer(house, RELATED, exclude_experts=["sql-writer"])
    assert answer["experts_used"] == []


def test_overflow_means_fewer_experts_and_says_so(house: Served) -> None:
    answer = infer(house, RELATED, force_experts=["poems", "letters"])
    assert answer["experts_used"] == ["poems"]
    assert len(answer["degraded"]) == 1 and "letters" in answer["degraded"][0]
    assert "do not fit" in answer["degraded"][0]
    assert answer["metrics"]["num_experts"] == 1


def test_a_timeout_means_the_text_so_far(house: Served) -> None:
    whole = infer(house, UNRELATED, max_tokens=150, temperature=0)
    timeout_ms = whole["metrics"]["total_latency_ms"] / 3
    # the same answer takes a third of the time, or three times, when its neighbours let it
    for _ in range(20):
        allowed = max(1, int(timeout_ms))
        cut = infer(house, UNRELATED, max_tokens=150, temperature=0, timeout_ms=allowed)
        if cut["finish_reason"] == "timeout" and cut["text"]:
            break
        timeout_ms *= 1.5 if cut["finish_reason"] == "timeout" else 0.67
    assert cut["finish_reason"] == "timeout"
    assert 0 < cut["tokens_generated"] < 150
    assert whole["text"].startswith(cut["text"]) and cut["text"]


def test_a_timeout_before_the_first_token_is_an_empty_text(house: Served) -> None:
    answer = infer(house, UNRELATED, timeout_ms=1)
    assert (answer["finish_reason"], answer["text"]) == ("timeout", "")


def test_a_failed_validation_comes_with_the_text_and_the_error(house: Served) -> None:
    asked = {"max_tokens": 1, "temperature": 0, "response_format": {"type": "json_object"}}
    answer = infer(house, UNRELATED, **asked)
    # one token, whichever of them the tokenizer made
    assert answer["text"] in ("{", '{"') and answer["finish_reason"] == "length"
    assert answer["validation"]["valid"] is False and answer["validation"]["error"]
    assert answer["metrics"]["validation_passed"] is False
