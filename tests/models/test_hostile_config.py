"""Every field of a model's JSON files and GGUF metadata, with values of every wrong type: read, or
refused by the file's and the field's name; never anything else."""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import CoterieError, WeightsError
from coterie.models.base import load_model, read_spec
from coterie.models.config_fields import CONFIG
from coterie.models.text.gguf_tokenizer import rebuild_tokenizer
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import Checkpoint, open_checkpoint
from coterie.weights.formats.gguf import read_gguf
from coterie.weights.formats.gguf_config import hf_config, hf_generation, tensor_names
from tests.helpers.models.gguf_files import write_model
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.moe.tiny_moe import ARCHITECTURES, checkpoint_of

ODD: tuple[Any, ...] = (
    "x", "", {}, {"a": {}}, [], [[]], ["x"], [None], -1, 0, 1.5, -0.5, True, False,
    float("nan"), float("inf"), 10**40, 20_000_000, 2**31 - 1, "9" * 10_000,
)  # fmt: skip
# of no field of a config is any of these a sound value
WRONG: tuple[Any, ...] = ({"a": {}}, [[]], [None], float("nan"), 10**40)
ROPE = ("rope_type", "factor", "original_max_position_embeddings", "long_factor", "beta_fast")
KINDS = ("linear", "dynamic", "yarn", "longrope", "llama3")


@cache
def checkpoint(architecture: str) -> Checkpoint:
    moe = architecture in ARCHITECTURES
    return open_checkpoint(checkpoint_of(architecture) if moe else tiny_checkpoint(architecture))


def refusal(found: Checkpoint, changes: dict[str, Any], *, generation: bool = False) -> str | None:
    """What a changed config comes to; None when it is read."""
    name = "generation" if generation else "config"
    sound = getattr(found, name)
    setattr(found, name, {**sound, **changes})
    try:
        spec = read_spec(found)
        if spec.rope is not None and spec.max_positions < 10_000 and spec.head_dim < 10_000:
            spec.rope.tables()
    except CoterieError as error:
        assert len(error.message) < 2000
        return error.message
    finally:
        setattr(found, name, sound)
    return None


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", *ARCHITECTURES])
def test_every_field_of_a_config_with_every_odd_value(architecture: str) -> None:
    found = checkpoint(architecture)
    begin = time.process_time()
    tracemalloc.start()
    for field in {*CONFIG, *found.config}:
        for value in ODD:
            told = refusal(found, {field: value})
            if field in CONFIG and any(value is wrong for wrong in WRONG):
                assert told is not None and field in told, (field, value, told)
                assert "config.json" in told
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000, "a number in a file allocated memory"
    assert time.process_time() - begin < 60


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_rope_with_every_odd_value(kind: str) -> None:
    found = checkpoint("llama")
    sound = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    half = int(found.config.get("head_dim") or 16) // 2
    sound |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    for place in ("rope_scaling", "rope_parameters"):
        for field in {*ROPE, *sound}:
            for value in ODD:
                told = refusal(found, {place: {**sound, field: value}})
                if any(value is wrong for wrong in WRONG):
                    assert told is not None and field in told, (field, value, told)


def test_every_field_of_a_generation_config() -> None:
    found = checkpoint("llama")
    fields = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
    for field in (*fields, "eos_token_id"):
        for value in ODD:
            told = refusal(found, {field: value}, generation=True)
            if any(value is wrong for wrong in WRONG):
                assert told is not None and field in told and "generation_config" in told


@pytest.mark.parametrize(
    ("changes", "word"), [({"rope_theta": "x"}, "rope_theta"), ({"eos_token_id": {}}, "eos_token")]
)
def test_loading_names_file_and_field(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(WeightsError, match=rf"config\.json: {word}"):
        load_model(open_checkpoint(path))


def test_positions_are_held_to_what_memory_could_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 million positions of a file cost tables for 20 million, gigabytes of them."""
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20_000_000}))
    monkeypatch.setattr("coterie.models.base.free_host_bytes", lambda: 50_000_000)
    model = load_model(open_checkpoint(path), dtype="fp32")
    try:
        assert 4096 <= model.spec.max_positions <= 50_000_000 // model.kv_bytes_per_token() + 1
    finally:
        model.close()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_every_field_of_a_tokenizers_settings(tmp_path: Path, file: str) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m"))
    fields = (
        "bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens",
        "extra_special_tokens", "chat_template",
    )  # fmt: skip
    for field in fields:
        values: list[Any] = [5, True, 1.5, [[]], {"a": {}}, "x", [None], None]
        for value in values:
            (path / file).write_text(json.dumps({field: value}))
            try:
                load_tokenizer(path)
            except WeightsError as error:
                assert file in error.message and field in error.message
            else:
                assert value not in (5, True, 1.5), field


def test_every_key_of_gguf_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    words = ["t", "o", "to", "<end>", *(f"<{i}>" for i in range(92))]
    told = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1, 1, 1, 3, *[4] * 92],
        "tokenizer.ggml.merges": ["t o"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.bos_token_id": 3,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 256,
        "llama.attention.sliding_window": 128,
        "general.sampling.temp": 0.5,
    }
    write_model(path, metadata=told)
    sound = read_gguf(path)
    found = open_checkpoint(path)
    for key in list(sound.metadata):
        kept = sound.metadata[key]
        for value in (*ODD, None):
            sound.metadata[key] = value
            try:
                found.config, found.generation = hf_config(sound), hf_generation(sound)
                tensor_names(sound)
                read_spec(found)
                rebuild_tokenizer(sound)
            except CoterieError as error:
                assert len(error.message) < 2000
        sound.metadata[key] = kept


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_deep_nesting_in_any_file_is_a_typed_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.moe.planner.machine import MachineIdentity, load, path_of
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.store.base import ExpertGeometry
    from coterie.moe.store.packed import INDEX_FILE, read_index

    text = f'{{"a": {nested(100_000)}}}'
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(WeightsError):
        read_index(tmp_path)
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(WeightsError, match=r"h\.json"):
        Heatmap.load(tmp_path / "h.json", ExpertGeometry((0,), 4, 2), lineage=("f",), workload="w")
    deep = {"counts": [[[[[1]]]]], "fingerprint": [["f"]], "version": 1}
    (tmp_path / "h.json").write_text(json.dumps(deep))
    with pytest.raises(WeightsError):
        Heatmap.load(tmp_path / "h.json", ExpertGeometry((0,), 4, 2), lineage=("f",), workload="w")
    here = MachineIdentity(**dict.fromkeys(MachineIdentity.__slots__, "x"))  # type: ignore[arg-type]
    path_of(here).parent.mkdir(parents=True)
    path_of(here).write_text(text)
    assert load(here) is None
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        kept = (path / name).read_bytes() if (path / name).exists() else None
        (path / name).write_text(text)
        with pytest.raises(WeightsError, match=name):
            load_tokenizer(path)
            load_model(open_checkpoint(path))
        (path / name).unlink() if kept is None else (path / name).write_bytes(kept)
