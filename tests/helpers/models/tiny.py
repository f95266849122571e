"""Tiny random checkpoints, written through transformers, with a real byte-level BPE tokenizer.

They are kept between runs, keyed by everything that shapes them (this file too).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.helpers.folders import CHECKPOINTS

VOCAB = 384
BOS, EOS, PAD, TURN = "<s>", "</s>", "<pad>", "<|turn|>"

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "dwr": "DWRForCausalLM",
}

# what each architecture's config has beside the shared keys: 8 experts, 2 of them per token
OWN_KEYS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "olmoe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "head_dim": 16,
    },
    "dwr": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "deepseek_v2": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
}

CORPUS = [
    "The quick brown fox jumps over the lazy dog while the river runs slowly to the sea.",
    "A model answers a question; another model checks the answer and explains what was wrong.",
    "def add(left, right):\n    return left + right\n\n\nfor index in range(10):\n    print(index)",
    "Numbers such as 0, 1, 2, 3, 10, 42, 128, 1024 and 65536 appear in every serious program.",
    'JSON looks like {"name": "value", "list": [1, 2, 3], "nested": {"true": false}}.',
    "Die Straße führt über die Brücke; où est la bibliothèque? ¿Dónde está el mañana? 你好，世界。",
    "She sells sea shells by the sea shore, and the shells she sells are surely seashells.",
    "What is the capital of France? Paris is the capital. What is the tallest mountain? Everest.",
]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '</think>\\n' }}{% endif %}"
    "{% endif %}"
)


def tiny_checkpoint(architecture: str, seed: int = 0, **overrides: Any) -> Path:
    """A Hugging Face safetensors directory of a random `architecture` (a key of ARCHITECTURES).

    `overrides` are config.json keys; `dtype` ("bfloat16") is what the tensors are stored as.
    Weights are drawn wide enough that greedy output and routing vary. Tests share it: serve a copy
    of one with experts, because a server leaves its heatmap beside the model.
    """
    classes = {name: kind for kind, name in ARCHITECTURES.items()}
    kind = classes.get(architecture, architecture)
    facts = json.dumps([ARCHITECTURES[kind], seed, overrides], sort_keys=True, default=str)
    digest = hashlib.sha256((facts + _own_source()).encode()).hexdigest()[:16]
    home = CHECKPOINTS / "tiny"
    path = home / f"{kind}-{digest}"
    if not (path / "config.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / ".lock"):
            if not (path / "config.json").exists():
                draft = Path(tempfile.mkdtemp(dir=home))
                _write(draft, kind, seed, overrides)
                shutil.rmtree(path, ignore_errors=True)
                draft.rename(path)
    return path


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


def named_checkpoint(path: Path, name: str, template: str | None) -> Path:
    """The tiny model, with what it is called in its config and a chat template of its own; None =
    without one."""
    shutil.copytree(tiny_checkpoint("llama"), path)
    for beside in path.glob("chat_template*"):
        beside.unlink()
    settings, config = path / "tokenizer_config.json", path / "config.json"
    facts = json.loads(settings.read_text()) | {"chat_template": template}
    if template is None:
        del facts["chat_template"]
    settings.write_text(json.dumps(facts))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": name}))
    return path


@cache
def _own_source() -> str:
    sources = [Path(__file__), Path(__file__).with_name("dwr_reference.py")]
    return "".join(source.read_text() for source in sources) + version("transformers")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(path: Path, kind: str, seed: int, overrides: dict[str, Any]) -> None:
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    settings.update(OWN_KEYS.get(kind, {}))
    settings.update(overrides)
    shards = settings.pop("max_shard_size", "5GB")
    dtype = getattr(torch, settings.pop("dtype", "float32"))
    if kind == "dwr":
        from tests.helpers.models.dwr_reference import random_dwr

        random_dwr(settings, seed).save(path, dtype)
        _write_tokenizer(path)
        return
    model_class = getattr(transformers, ARCHITECTURES[kind])
    config = model_class.config_class(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        _draw(model)
    model.to(dtype).save_pretrained(path, max_shard_size=shards)
    _write_tokenizer(path)


def _draw(model: Any) -> None:
    """Norms and biases start constant: draw them too, so that ignoring one shows."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.6, 1.4)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith(".gate.weight"):
            torch.nn.init.normal_(parameter, std=0.3)


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS, PAD, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(facts, indent=1))
