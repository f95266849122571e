"""Adapters by name in the embedded API, against PEFT itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie import LLM
from coterie.core.errors import ContextLengthExceeded, InvalidRequest, NotFound
from coterie.packages.registry import AdapterRegistry
from coterie.packages.trust import TrustStore
from coterie.workers.adapter_names import parse
from tests.helpers.adapters.peft_adapters import make_adapter, peft_oracle
from tests.helpers.models.tiny import CHAT_TEMPLATE, named_checkpoint, tiny_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
PROMPT = [0, 40, 41, 42, 90]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def llm(home: Path) -> Iterator[LLM]:
    model = str(tiny_checkpoint("llama"))
    with LLM(model, dtype="fp32", threads=1, kv_bytes=8_000_000, library=home) as llm:
        yield llm


def adapter(kind: str, seed: int) -> Path:
    return make_adapter(tiny_checkpoint("llama"), kind, seed)


@pytest.mark.parametrize("kind", ["lora", "soft_prompt"])
def test_a_directory_answers_as_peft_does(llm: LLM, kind: str) -> None:
    path = adapter(kind, 1)
    (answer,) = llm.generate(PROMPT, experts=[str(path)], **GREEDY)
    oracle = peft_oracle(tiny_checkpoint("llama"))
    assert answer.token_ids == oracle.greedy(PROMPT, [(path, 1.0)], 10)
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.token_ids != llm.generate(PROMPT, **GREEDY)[0].token_ids


def test_weights_stacks_and_streams(llm: LLM) -> None:
    one, two = adapter("lora", 1), adapter("lora", 2)
    stack = [f"{one}=0.5", (str(two), 2.0)]
    (answer,) = llm.generate(PROMPT, experts=stack, **GREEDY)
    oracle = peft_oracle(tiny_checkpoint("llama"))
    assert answer.token_ids == oracle.greedy(PROMPT, [(one, 0.5), (two, 2.0)], 10)
    streamed = [t for d in llm.stream(PROMPT, experts=stack, **GREEDY) for t in d.token_ids]
    assert streamed == answer.token_ids
    said = llm.chat([{"role": "user", "content": "Hello"}], experts=str(one), **GREEDY)
    assert said.text != llm.chat([{"role": "user", "content": "Hello"}], **GREEDY).text


def test_installed_names_and_versions(llm: LLM, home: Path) -> None:
    registry, trust = AdapterRegistry(home), TrustStore(home / "trust.json")
    for version, seed in (("1.0.0", 3), ("2.0.0", 4)):
        registry.install(
            adapter("lora", seed),
            trust=trust,
            allow_unsigned=True,
            name="poet",
            version=version,
            now=True,
        )
    registry.close()

    def answer(name: str) -> list[int]:
        return llm.generate(PROMPT, experts=[name], **GREEDY)[0].token_ids

    assert answer("poet") == answer("poet@2.0.0") == answer(str(adapter("lora", 4)))
    assert answer("poet@1.0.0") == answer(str(adapter("lora", 3))) != answer("poet")


def test_wrong_names_are_refused_with_help(llm: LLM, home: Path) -> None:
    with pytest.raises(NotFound, match="nobody"):
        llm.generate(PROMPT, experts=["nobody"], **GREEDY)
    with pytest.raises(NotFound, match="no such file"):
        llm.generate(PROMPT, experts=["./nobody.expert"], **GREEDY)
    with pytest.raises(InvalidRequest, match="no number"):
        llm.generate(PROMPT, experts=["poet=much"], **GREEDY)
    with pytest.raises(InvalidRequest, match="up to 10"):
        llm.generate(PROMPT, experts=[str(adapter("lora", 1))] * 11, **GREEDY)
    with pytest.raises(ContextLengthExceeded):
        soft = str(adapter("soft_prompt", 1))
        llm.generate([5] * 1020, experts=[soft], temperature=0.0)
    assert llm.generate(PROMPT, **GREEDY)[0].usage.completion_tokens == 10


def test_names_are_read_as_they_are_written() -> None:
    assert parse("poet") == ("poet", 1.0)
    assert parse("poet@1.0=-0.25") == ("poet@1.0", -0.25)
    assert parse(("a=b", 2)) == ("a=b", 2.0)
    for wrong in ("=1", "poet=nan", "poet=", ("poet", float("inf"))):
        with pytest.raises(InvalidRequest):
            parse(wrong)


def test_adapters_run_without_the_cards_system_prompt(tmp_path: Path) -> None:
    model = named_checkpoint(tmp_path / "model", "Falcon3-1B-Instruct", CHAT_TEMPLATE)
    turns = [{"role": "user", "content": "Hello"}]
    with LLM(str(model), dtype="fp32", threads=1, kv_bytes=8_000_000) as llm:
        alone = llm.chat(turns, **GREEDY)
        adapted = llm.chat(turns, experts=str(adapter("lora", 1)), **GREEDY)
        system = {"role": "system", "content": llm.tokenizer.card_system}
        assert alone.prompt_token_ids == llm.chat([system, *turns], **GREEDY).prompt_token_ids
    assert llm.tokenizer.decode(adapted.prompt_token_ids, skip_special=False) == (
        "<s><|turn|>user\nHello</s>\n<|turn|>assistant\n"
    )
