"""What is read out of PEFT directories, and everything that is refused, by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.adapters.base import Adapter
from coterie.adapters.files import CONFIG, WEIGHTS, describe, open_adapter, parse_adapter
from coterie.adapters.kinds.lora import LoraChange
from coterie.adapters.kinds.table import ADAPTERS
from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import FORMATS
from tests.helpers.adapters.peft_adapters import KINDS, make_adapter
from tests.helpers.models.tiny import tiny_checkpoint

Tensors = dict[str, Tensor]


def made(kind: str, tmp_path: Path, **options: Any) -> Path:
    """A copy that a test may spoil."""
    source = make_adapter(tiny_checkpoint("llama"), kind, 1, **options)
    return Path(shutil.copytree(source, tmp_path / "adapter"))


def configured(path: Path, **keys: Any) -> Path:
    table = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**table, **keys}))
    return path


def spoiled(path: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        open_adapter(path, "digest")
    assert str(path) in caught.value.message
    return caught.value.message


def factors(adapter: Adapter) -> Tensors:
    """lora_A by module path."""
    changes = {path: cast("LoraChange", change) for path, change in adapter.changes.items()}
    return {path: change.a for path, change in changes.items()}


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def test_kinds_have_one_table_in_two_halves() -> None:
    assert {name: kind.stored for name, kind in ADAPTERS.items()} == FORMATS


@pytest.mark.parametrize("kind", KINDS)
def test_facts(kind: str, tmp_path: Path) -> None:
    path = made(kind, tmp_path)
    facts, adapter = describe(path), open_adapter(path, "abc")
    assert facts.kind == adapter.kind == kind and adapter.digest == "abc"
    assert facts.num_virtual_tokens == (5 if kind == "soft_prompt" else 0)
    stored = sum(tensor.nbytes for tensor in load_file(path / WEIGHTS).values())
    assert facts.nbytes == adapter.nbytes == stored
    assert facts.base_model_name == str(tiny_checkpoint("llama"))


def test_lora_as_stored(tmp_path: Path) -> None:
    path = made("lora", tmp_path, r=6, lora_alpha=5, use_rslora=True, dtype="bfloat16")
    adapter, tensors = open_adapter(path, "d"), load_file(path / WEIGHTS)
    change = adapter.changes[Q.removeprefix("base_model.model.")]
    assert isinstance(change, LoraChange) and change.scaling == 5 / math.sqrt(6)
    assert change.a.dtype == torch.bfloat16
    assert torch.equal(change.a, tensors[Q + ".lora_A.weight"])
    assert len(adapter.changes) * 2 == len(tensors)


def test_patterns(tmp_path: Path) -> None:
    ranks = {"layers.1.mlp.up_proj": 2, "up_proj": 3, r".*\.[02]\.self_attn\.q_proj": 7}
    adapter = open_adapter(made("lora", tmp_path, rank_pattern=ranks), "d")
    found = {path: len(a) for path, a in factors(adapter).items()}
    stem = "model.layers.{}."
    assert found[stem.format(1) + "mlp.up_proj"] == 2
    assert found[stem.format(2) + "mlp.up_proj"] == 3
    assert [found[stem.format(i) + "self_attn.q_proj"] for i in range(3)] == [7, 4, 7]


def test_nothing_points_into_the_file(tmp_path: Path) -> None:
    path = made("lora", tmp_path)
    adapter = open_adapter(path, "d")
    before = {path: a.clone() for path, a in factors(adapter).items()}
    size = (path / WEIGHTS).stat().st_size
    (path / WEIGHTS).write_bytes(bytes(size))
    assert before and all(torch.equal(before[path], a) for path, a in factors(adapter).items())


REFUSED_OPTIONS = {
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "layer_replication": [[0, 2], [1, 3]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "lora_bias": True,
    "use_qalora": True,
    "alora_invocation_tokens": [5, 6],
    "megatron_config": {"a": 1},
    "arrow_config": {"top_k": 2},
    "use_bdlora": {"nblocks": 2},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"num_samples": 2},
    "velora_config": {"num_groups": 2},
    "bias": "all",
    "task_type": "SEQ_CLS",
    "peft_type": "LOHA",
    "an_option_of_tomorrow": 0.5,
}


@pytest.mark.parametrize("option", REFUSED_OPTIONS)
def test_options_refused_by_name(option: str, tmp_path: Path) -> None:
    path = configured(made("lora", tmp_path), **{option: REFUSED_OPTIONS[option]})
    assert option in refusal(path)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq"])
def test_starts_that_change_the_base(start: str, tmp_path: Path) -> None:
    message = refusal(configured(made("lora", tmp_path), init_lora_weights=start))
    assert start in message and "path_initial_model_for_weight_conversion" in message


def test_every_option_of_peft_is_decided() -> None:
    """A PEFT that knows more options than this one shows here."""
    import dataclasses

    import peft

    from coterie.adapters.kinds import ia3, lora, options, soft_prompt

    pairs = (
        (peft.LoraConfig, lora),
        (peft.IA3Config, ia3),
        (peft.PromptTuningConfig, soft_prompt),
    )
    for config, module in pairs:
        named = {field.name for field in dataclasses.fields(config)}
        known = module._UNDERSTOOD | module._REFUSED.keys() | options._NEUTRAL
        assert named <= known, named - known
        assert not module._UNDERSTOOD & module._REFUSED.keys()


@pytest.mark.parametrize("kind", ["ia3", "soft_prompt"])
def test_modules_to_save(kind: str, tmp_path: Path) -> None:
    path = configured(made(kind, tmp_path), modules_to_save=["embed_tokens"])
    assert "modules_to_save" in refusal(path)


def test_pickle(tmp_path: Path) -> None:
    path = made("lora", tmp_path)
    (path / WEIGHTS).rename(path / "adapter_model.bin")
    assert "pickle" in refusal(path)
    with pytest.raises(WeightsError, match="pickle"):
        describe(path)


SPOILT: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "lora_B": (lambda t: t.pop(Q + ".lora_B.weight"), "lacks lora_B"),
    "stray": (lambda t: t.update({"base_model.model.x.weight": torch.ones(2)}), "no tensor of"),
    "prefix": (lambda t: t.update({"x.lora_A.weight": torch.ones(4, 2)}), "no tensor of"),
    "nan": (lambda t: t[Q + ".lora_A.weight"].view(-1)[3].fill_(math.nan), "NaN"),
    "infinity": (lambda t: t[Q + ".lora_B.weight"].view(-1)[0].fill_(-math.inf), "NaN or inf"),
    "rank": (lambda t: t.update({Q + ".lora_A.weight": torch.ones(5, 64)}), "rank 4"),
    "flat": (lambda t: t.update({Q + ".lora_A.weight": torch.ones(256)}), "rank 4"),
    "type": (lambda t: t.update({Q + ".lora_A.weight": torch.ones(4, 64).double()}), "F64"),
    "empty": (lambda t: t.update({Q + ".lora_A.weight": torch.ones(4, 0)}), "empty"),
    "magnitude": (
        lambda t: t.update({Q + ".lora_magnitude_vector": torch.ones(64)}),
        "use_dora is not set",
    ),
    "embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4)}),
        "embedding",
    ),
    "untargeted": (
        lambda t: t.update(
            {f"base_model.model.x.{part}.weight": torch.ones(4, 4) for part in ("lora_A", "lora_B")}
        ),
        "does not name x",
    ),
    "head": (
        lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(4, 4)}),
        "no adapter of the LM head",
    ),
    "all": (lambda t: t.clear(), "0 tensors"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_tensors_refused(case: str, tmp_path: Path) -> None:
    change, words = SPOILT[case]
    assert words in refusal(spoiled(made("lora", tmp_path), change))


def test_dora_needs_magnitudes(tmp_path: Path) -> None:
    path = made("dora", tmp_path)
    name = Q + ".lora_magnitude_vector"
    assert "lora_magnitude_vector" in refusal(spoiled(path, lambda t: t.pop(name)))
    spoiled(path, lambda t: t.update({name: torch.ones(3)}))
    assert "not as long" in refusal(path)


def test_ia3_shapes(tmp_path: Path) -> None:
    path = made("ia3", tmp_path)
    name = "base_model.model.model.layers.0.mlp.down_proj.ia3_l"
    turned = load_file(path / WEIGHTS)[name].T.contiguous()
    assert "feedforward" in refusal(spoiled(path, lambda t: t.update({name: turned})))
    assert "feedforward_modules" in refusal(configured(path, feedforward_modules=None))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_virtual_tokens": 6}, "says 6 tokens"),
        ({"num_virtual_tokens": "5"}, "num_virtual_tokens"),
        ({"token_dim": 65}, "token_dim"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules"),
    ],
)
def test_soft_prompt_shapes(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(configured(made("soft_prompt", tmp_path), **keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"r": 0}, "r must be"),
        ({"r": True}, "r must be"),
        ({"r": 10**6}, "r must be"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 1e400}, "lora_alpha"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern"),
        ({"rank_pattern": {"(a+)+": 3}}, "too involved"),
        ({"rank_pattern": {".*.*.*.*x": 3}}, "too involved"),
        ({"rank_pattern": {"([": 3}}, "not a pattern"),
        ({"target_modules": "(x|x)*y"}, "too involved"),
        ({"target_modules": [1]}, "target_modules"),
        ({"use_rslora": "yes"}, "use_rslora"),
    ],
)
def test_senseless_values(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(configured(made("lora", tmp_path), **keys))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_broken_config(data: bytes, tmp_path: Path) -> None:
    path = made("lora", tmp_path)
    (path / CONFIG).write_bytes(data)
    assert CONFIG in refusal(path)
    with pytest.raises(WeightsError, match=CONFIG):
        describe(path)


def test_missing_files(tmp_path: Path) -> None:
    path = made("lora", tmp_path)
    (path / CONFIG).unlink()
    assert "missing" in refusal(path)
    (path / WEIGHTS).unlink()
    assert WEIGHTS in refusal(path)


def test_any_bytes_are_an_adapter_or_refused() -> None:
    """Random damage to a real file: nothing but WeightsError, and never a tensor out of bounds."""
    path = make_adapter(tiny_checkpoint("llama"), "lora", 1, target_modules=["q_proj"])
    config, weights = (path / CONFIG).read_bytes(), (path / WEIGHTS).read_bytes()
    generator = torch.Generator().manual_seed(3)
    kept = 0
    for _ in range(300):
        data = bytearray(weights)
        at = torch.randint(0, 1200, (3,), generator=generator).tolist()
        for place, value in zip(at, torch.randint(0, 256, (3,), generator=generator), strict=True):
            data[place] = int(value)
        cut = int(torch.randint(0, 40, (), generator=generator))
        try:
            adapter = parse_adapter(config, data[:-cut] if cut < 3 and cut else data, "d")
        except WeightsError:
            continue
        kept += 1
        assert isinstance(adapter, Adapter) and adapter.nbytes <= len(weights)
    assert kept < 300
