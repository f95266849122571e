"""Short names of models: the table's shape, what a name stands for, what is refused unfetched."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from coterie.core.config import Config, SpecialistSettings
from coterie.core.errors import WeightsError
from coterie.models.base import MODELS
from coterie.service.config_check import expected_names, model_faults, model_name
from coterie.weights.formats.gguf_config import ARCHITECTURES
from coterie.weights.sources import hub, names, pypi
from coterie.weights.sources.names import close_names, find_named, named_models, source_of
from coterie.weights.sources.source import DEFAULT_MODEL, resolve

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*:[a-z0-9][a-z0-9.-]*")
_KEYS = {"name", "source", "file", "bytes", "licence", "architecture", "needs", "active"}


def test_the_table_has_the_shape_that_is_described() -> None:
    tree = tomllib.loads(names.TABLE.read_text(encoding="utf-8"))
    assert set(tree) == {"better", "defaults", "models"}
    entries = tree["models"]
    assert len(entries) >= 30
    found = [entry["name"] for entry in entries]
    assert len(set(found)) == len(found)
    assert all(_NAME.fullmatch(name) for name in found)
    for entry in entries:
        assert set(entry) <= _KEYS and {"name", "source", "architecture"} <= set(entry), entry
        _check_source(entry["source"], entry.get("file", ""))
        assert entry.get("bytes", 1) > 0 and 0 < entry.get("active", 1) <= 1
        # a model with experts says how many of them a token reads
        assert ("active" in entry) == (entry["architecture"] in ("qwen3moe", "olmoe", "gpt-oss"))
        # what is missing is said of those that cannot be opened, and only of those
        assert bool(entry.get("needs")) == (entry["architecture"] not in ARCHITECTURES), entry
    sources = [entry["source"] for entry in entries]
    assert len(set(sources)) == len(sources)


def _check_source(source: str, file: str) -> None:
    """It can be parsed, and the file is of the quantisation that the source names."""
    if source.startswith("pypi:"):
        pypi.parse(source.removeprefix("pypi:"))
        return
    assert source.startswith("hf:")
    repo, _, quant = source.removeprefix("hf:").partition(":")
    assert hub.parse(repo).repo == repo and re.fullmatch(r"[A-Z0-9_]+", quant), source
    assert not file or (file.endswith(".gguf") and quant.lower() in file.lower()), source


def test_every_family_has_a_default_that_is_there() -> None:
    families = {model.name.partition(":")[0] for model in named_models()}
    for family in families:
        named = find_named(family)
        assert named is not None and named.name.startswith(f"{family}:"), family
        assert find_named(f"{family}:latest") == find_named(f" {family.upper()} ") == named
    assert find_named("smollm2") == find_named("smollm2:135m")
    assert source_of("smollm2") == DEFAULT_MODEL


def test_better_models_can_be_opened_and_are_known_to_the_byte() -> None:
    better = names.better_models()
    assert better and all(model.can_open and model.nbytes and model.licence for model in better)
    sizes = [model.nbytes for model in better]
    assert sizes == sorted(sizes, reverse=True)
    default = find_named("smollm2")
    assert default is not None and default.nbytes < sizes[-1]


def test_what_gguf_files_may_hold_can_be_loaded() -> None:
    assert {architecture for architecture, _ in ARCHITECTURES.values()} <= set(MODELS)


@pytest.mark.parametrize("name", ["gpt-oss:20b", "gemma3", "GEMMA3:latest"])
def test_a_model_that_cannot_be_opened_is_refused_before_it_is_fetched(
    name: str, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = find_named(name)
    assert named is not None
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WeightsError, match="cannot open the architecture") as caught:
        resolve(name)
    message = caught.value.message
    assert named.architecture in message and named.needs in message
    assert "Nothing was fetched" in message and "coterie list" in message
    assert list(private_home.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("qwen3:4", "qwen3:4b"), ("lama3.2:3b", "llama3.2:3b"), ("smolm2", "smollm2")],
)
def test_did_you_mean(typed: str, meant: str) -> None:
    assert close_names(typed)[0] == meant
    with pytest.raises(WeightsError, match=f"Did you mean .*{re.escape(meant)}"):
        resolve(typed)


def test_nothing_is_meant_by_a_path() -> None:
    with pytest.raises(WeightsError) as caught:
        resolve("/no/such/model.gguf")
    assert "Did you mean" not in caught.value.message


def test_names_in_a_config(private_home: Path) -> None:
    """Checked without the network, and served by the short name."""
    assert model_name("qwen3:4b", Path("Qwen3-4B-Q4_K_M.gguf")) == "qwen3-4b"
    assert model_name("smollm2", Path("SmolLM2-135M-Instruct.Q4_1.gguf")) == "smollm2-135m-instruct"
    models = ("qwen3:4b", "llama3.2", "gpt-oss:20b", "smollm2")
    config = Config(specialists=tuple(SpecialistSettings(model=model) for model in models))
    assert expected_names(config)[:3] == ["qwen3-4b", "llama3.2-3b", "gpt-oss-20b"]
    faults = [fault.message for fault in model_faults(config)]
    assert len(faults) == 1 and "gpt-oss" in faults[0]
