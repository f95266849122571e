"""What a model's authors recommend: the table, who is recognised, and the card's system prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.core.request import Chat, Message, Sampling, Text
from coterie.core.sampling import GENERATION_FIELDS, check_sampling, default_sampling
from coterie.models.recommended import recommended_for, recommended_models
from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.tiny import named_checkpoint

# its card has a system prompt
KNOWN = "tiiuae/Falcon3-1B-Instruct"
ASKED = Chat((Message("user", "hello"),))
# what files and hubs call a model -> the entry of the table; "" = none
NAMES = {
    "Smollm2 135M 8k Lc100K Mix1 Ep2": "SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "SmolLM2-Instruct",
    "SmolLM2-135M": "",
    "Qwen2.5 0.5B Instruct": "Qwen2.5-Instruct, 0.5B and 1.5B",
    "hf:Qwen/Qwen2.5-7B-Instruct-GGUF/qwen2.5-7b-instruct-q4_k_m.gguf@main": "Qwen2.5-Instruct",
    "Qwen2.5-Coder-7B-Instruct": "Qwen2.5-Coder-Instruct",
    "Qwen2.5-7B": "",
    "hf:Qwen/Qwen3-30B-A3B": "Qwen3",
    "Qwen3 8B Base": "",
    "Qwen3-4B-Instruct-2507": "Qwen3-Instruct-2507",
    "Qwen3-30B-A3B-Thinking-2507": "Qwen3-Thinking-2507",
    "Qwen3-Coder-30B-A3B-Instruct": "Qwen3-Coder",
    "Meta Llama 3.1 8B Instruct": "Llama 3 Instruct",
    "meta-llama/Llama-3.2-1B-Instruct": "Llama 3 Instruct",
    "Meta-Llama-3-8B": "",
    "DeepSeek-R1-Distill-Qwen-1.5B": "DeepSeek-R1-Distill",
    "DeepSeek-V2-Lite-Chat": "DeepSeek-V2-Chat",
    "mistralai/Mistral-Nemo-Instruct-2407": "Mistral-Nemo-Instruct",
    "Mistral-Small-3.2-24B-Instruct-2506": "Mistral-Small, 24B",
    "gemma-3-1b-it": "Gemma 3",
    "openai/gpt-oss-20b": "gpt-oss",
    "model": "",
}
DEFAULTED = "{% if messages[0].role != 'system' %}S: be kind\n{% endif %}{% for m in messages %}{{ m.role[0]|upper }}: {{ m.content }}\n{% endfor %}"  # noqa: E501
PLAIN = "{% for m in messages %}{{ m.role[0]|upper }}: {{ m.content }}\n{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.content }}\n{% endfor %}"
)
DROPS = "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"


def tokenizer(folder: Path, template: str | None) -> Tokenizer:
    return load_tokenizer(named_checkpoint(folder / "model", KNOWN, template))


@pytest.mark.parametrize(("name", "entry"), NAMES.items())
def test_models_are_known_by_their_names(name: str, entry: str) -> None:
    assert recommended_for(["", name]).name == entry


def test_every_entry_can_be_used() -> None:
    models = [model.recommendation for model in recommended_models()]
    assert len({model.name for model in models}) == len(models)
    for model in models:
        assert model.source and (model.sampling or model.system_prompt), model.name
        for values in (model.sampling, model.without_thinking):
            assert values.keys() <= set(GENERATION_FIELDS), model.name
            check_sampling(Sampling(**dict(values)))  # type: ignore[arg-type]


def test_a_chat_without_thinking_has_its_own_values() -> None:
    qwen = recommended_for(["Qwen3-8B"])
    off = replace(ASKED, template_kwargs={"enable_thinking": False})
    assert qwen.sampling_for(ASKED)["temperature"] == 0.6
    assert qwen.sampling_for(off)["temperature"] == 0.7
    by_dialect = replace(ASKED, template_defaults={"enable_thinking": False})
    assert qwen.sampling_for(by_dialect)["temperature"] == 0.7
    on = replace(by_dialect, template_kwargs={"enable_thinking": True})
    assert qwen.sampling_for(on) == qwen.sampling_for(Text("hello")) == qwen.sampling


def test_the_default_model_is_recognised(default_model_path: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer.recommended.name == "SmolLM2-135M-Instruct"
    # its template writes the card's system prompt itself
    assert tokenizer.recommended.system_prompt in tokenizer.render(ASKED)
    assert not tokenizer.card_system and tokenizer.writes_system
    # also where its config is written to a directory
    config = open_checkpoint(default_model_path).config
    assert recommended_for([config["_name_or_path"]]) == tokenizer.recommended


def test_the_files_own_values_come_before_the_table() -> None:
    advice = recommended_for(["Qwen2.5-7B-Instruct"]).sampling
    found = default_sampling({"temperature": 0.3, "top_k": 5}, advice)
    assert {name: (item.value, item.source) for name, item in found.items()} == {
        "temperature": (0.3, "generation_config"),
        "top_p": (0.8, "recommended"),
        "top_k": (5, "generation_config"),
        "repetition_penalty": (1.05, "recommended"),
    }
    assert {item.source for item in default_sampling({}, {}).values()} == {"default"}


def test_the_cards_system_prompt_is_added_to_chats_that_have_none(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, PLAIN)
    prompt = known.recommended.system_prompt
    assert prompt and known.card_system == prompt
    assert known.render(ASKED) == f"S: {prompt}\nU: hello\n"
    given = Chat((Message("system", "mine"), Message("user", "hello")))
    assert known.render(given) == "S: mine\nU: hello\n"
    # adapters were trained without it, and text is read as it is
    assert known.text_of(known.readable(ASKED, with_adapters=True)) == "U: hello\n"  # type: ignore[arg-type]
    assert known.readable(Text("hello")) == Text("hello")
    assert known.encode_prompt(Text("hello")) == known.encode("hello")
    # a caller's own template is the caller's to fill
    assert known.render(replace(ASKED, template=PLAIN)) == "U: hello\n"


@pytest.mark.parametrize("template", [DEFAULTED, NO_SYSTEM, DROPS])
def test_no_template_gets_what_it_has_or_does_not_take(template: str, tmp_path: Path) -> None:
    known = tokenizer(tmp_path, template)
    assert not known.card_system
    assert known.recommended.system_prompt not in known.render(ASKED)


def test_inspect_tells_where_values_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], default_model_path: Path
) -> None:
    def inspected(path: Path) -> dict[str, object]:
        assert main(["inspect", str(path), "--json"]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    found = inspected(default_model_path)
    assert found["format"] == "gguf" and found["context"] == 8192
    assert found["sampling"]["temperature"] == {"value": 0.0, "source": "recommended"}  # type: ignore[index]
    assert found["system_prompt"] == {"source": "chat template", "text": ""}
    path = named_checkpoint(tmp_path / "model", KNOWN, PLAIN)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.4}))
    found = inspected(path)
    assert found["format"] == "safetensors"
    assert found["sampling"] == {
        "temperature": {"value": 0.4, "source": "generation_config"},
        "top_p": {"value": 1.0, "source": "default"},
    }
    assert found["system_prompt"]["source"] == "recommended"  # type: ignore[index]
    assert main(["inspect", str(path)]) == 0
    assert "0.4 (generation_config)" in capsys.readouterr().out
    config = json.loads((path / "config.json").read_text())
    config.pop("max_position_embeddings", None)
    (path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(path)]) == 0
    assert "None" not in capsys.readouterr().out
