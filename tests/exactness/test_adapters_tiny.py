"""Logits under adapters equal PEFT's to 1e-4: every kind, stacks, every architecture, both paths.

`make test` runs a slice, `make test-all` every architecture on the native and the torch path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.adapters.compose import compose
from coterie.adapters.files import open_adapter
from coterie.cli.main import main
from coterie.core.errors import WeightsError
from coterie.kernels import patch
from coterie.kernels.batch import AttentionBatch
from coterie.models.base import CausalLM, load_model
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.adapters.peft_adapters import (
    ALL_LINEAR,
    ATTENTION,
    KINDS,
    Stack,
    base_model,
    make_adapter,
    peft_oracle,
)
from tests.helpers.models.gguf_conversion import write_stored_bits, write_twins
from tests.helpers.models.paged_model import Paged
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.greedy_engine import model_at


class Adapted:
    """A model whose rows run under given segments."""

    def __init__(self, model: CausalLM, segments: tuple[patch.Segment, ...]) -> None:
        self._model, self._segments = model, segments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: Tensor, batch: AttentionBatch, kv: Any, rows: Tensor) -> Tensor:
        return self._model.forward(ids, replace(batch, patches=self._segments), kv, rows)


def composed(model: CausalLM, stack: Stack, slot: int = 0) -> patch.PatchStack:
    parts = [(open_adapter(path, path.name), weight) for path, weight in stack]
    made = compose(parts, model.targets)
    return patch.PatchStack(str(stack), slot, made.patches, made.soft)


def virtual(model: CausalLM, stack: patch.PatchStack) -> list[int]:
    count = 0 if stack.soft is None else len(stack.soft)
    return [model.spec.vocab + place for place in range(count)]


def our_logits(model: CausalLM, ids: Sequence[int], stack: Stack, chunk: int = 0) -> Tensor:
    """At the positions of `ids`, all at once or `chunk` tokens at a time."""
    run = _Run(model, composed(model, stack), len(ids))
    tokens = [*run.virtual, *ids]
    size = chunk or len(tokens)
    found = [run(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return torch.cat(found)[-len(ids) :]


def our_greedy(model: CausalLM, ids: Sequence[int], stack: Stack, count: int) -> list[int]:
    run = _Run(model, composed(model, stack), len(ids) + count)
    answer = [int(run([*run.virtual, *ids])[-1].argmax())]
    while len(answer) < count:
        answer.append(int(run(answer[-1:])[-1].argmax()))
    return answer


class _Run:
    """One sequence under one stack: tokens in, their logits out."""

    def __init__(self, model: CausalLM, stack: patch.PatchStack, length: int) -> None:
        self.virtual = virtual(model, stack)
        self._model, self._stack = model, stack
        self._paged = Paged(model, 1, len(self.virtual) + length)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        segments = (patch.Segment(0, len(tokens), self._stack),)
        self._paged.model = Adapted(self._model, segments)  # type: ignore[assignment]
        return self._paged.step([(0, tokens)])[0]


TOLERANCE = 1e-4
SHARED = [f"shared_experts.{part}_proj" for part in ("gate", "up", "down")]
# PEFT's own config keys would name the experts of these layers too: one dense layer by number
FIRST_MLP = [f"0.mlp.{part}_proj" for part in ("gate", "up", "down")]

full = pytest.mark.full
CASES: dict[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "llama": ("llama", {}, ALL_LINEAR),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, ALL_LINEAR),
    "tied_head": ("llama", {"tie_word_embeddings": True}, ["lm_head", "q_proj"]),
    "own_head": ("llama", {}, ["lm_head", "down_proj"]),
    "mistral": ("mistral", {}, ALL_LINEAR),
    "qwen3": ("qwen3", {"attention_bias": True}, ALL_LINEAR),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [0]}, [*ATTENTION, *FIRST_MLP]),
    "mixtral": ("mixtral", {}, ATTENTION),
    "olmoe": ("olmoe", {}, ATTENTION),
    "clipped": ("olmoe", {"clip_qkv": 1.5}, ATTENTION),
    "deepseek": (
        "deepseek_v2",
        {},
        ["q_proj", "kv_a_proj_with_mqa", "o_proj", *SHARED, *FIRST_MLP, "lm_head"],
    ),
    "deepseek_q": (
        "deepseek_v2",
        {"q_lora_rank": 24, "attention_bias": True},
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *SHARED],
    ),
}
# what `make test` runs
NORMAL = {
    ("llama", "cpu"): KINDS,
    ("llama", "reference"): ("dora", "soft_prompt"),
    ("biases", "reference"): ("ia3",),
    ("tied_head", "cpu"): ("dora",),
    ("qwen3_moe", "cpu"): ("lora",),
    ("clipped", "cpu"): ("dora",),
    ("deepseek", "cpu"): ("dora", "ia3"),
}


def full_only(*names: str) -> list[Any]:
    return [pytest.param(name, marks=full) for name in names]


@cache
def prompt(seed: int, length: int = 25) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, 384, (length,), generator=generator).tolist()
    return ids


def differ(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


def of(case: str, kind: str, seed: int, **options: Any) -> Path:
    architecture, keys, targets = CASES[case]
    if kind != "soft_prompt":
        options = {"target_modules": list(targets), **options}
    return make_adapter(tiny_checkpoint(architecture, **keys), kind, seed, **options)


def model_of(case: str, backend: str) -> CausalLM:
    architecture, keys, _ = CASES[case]
    return model_at(tiny_checkpoint(architecture, **keys), backend)


def oracle_of(case: str) -> Any:
    architecture, keys, _ = CASES[case]
    return peft_oracle(tiny_checkpoint(architecture, **keys))


def _cases() -> list[Any]:
    return [
        pytest.param(
            case, backend, kind, marks=() if kind in NORMAL.get((case, backend), ()) else full
        )
        for case in CASES
        for backend in ("cpu", "reference")
        for kind in KINDS
    ]


@pytest.mark.parametrize(("case", "backend", "kind"), _cases())
def test_one_adapter(case: str, backend: str, kind: str) -> None:
    model, oracle, ids = model_of(case, backend), oracle_of(case), prompt(1)
    stack = [(of(case, kind, 1), 0.8)]
    want = oracle.logits(ids, stack)
    assert differ(want, oracle.logits(ids)) > 0.5, "the adapter does nothing"
    assert differ(our_logits(model, ids, stack), want) < TOLERANCE


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=full)])
@pytest.mark.parametrize("kind", ["dora", "soft_prompt", *full_only("lora", "ia3")])
def test_chunks_and_single_rows(backend: str, kind: str) -> None:
    """The same through prefill chunks and decode steps, at the weight PEFT has without asking."""
    model, ids = model_of("llama", backend), prompt(2)
    stack = [(of("llama", kind, 2), 1.0)]
    want = oracle_of("llama").logits(ids, stack)
    for chunk in (7, 1):
        assert differ(our_logits(model, ids, stack, chunk), want) < TOLERANCE


STACKS = {
    "loras": [("lora", 1, 0.5), ("lora", 2, -1.2), ("lora", 3, 1.0)],
    "lora_dora": [("lora", 1, 0.5), ("dora", 2, 0.8)],
    "dora_lora": [("dora", 2, 0.8), ("lora", 1, 0.5)],
    "doras": [("dora", 1, 0.7), ("dora", 2, 1.0)],
    "ia3s": [("ia3", 1, 0.5), ("ia3", 2, 1.5)],
    "lora_ia3": [("lora", 1, 0.7), ("ia3", 2, 1.3)],
    "ia3_lora": [("ia3", 2, 1.3), ("lora", 1, 0.7)],
    "ia3_dora_ia3": [("ia3", 1, 0.6), ("dora", 2, 0.8), ("ia3", 3, 1.0)],
    "four": [("lora", 1, 0.6), ("ia3", 2, 1.3), ("lora", 3, -0.5), ("dora", 4, 0.9)],
    "softs": [("soft_prompt", 1, 1.0), ("soft_prompt", 2, 0.5)],
    "all_kinds": [("dora", 1, 1.0), ("soft_prompt", 2, 0.5), ("ia3", 3, 1.0), ("lora", 4, 0.3)],
}
IN_SLICE = {("biases", "four"), ("llama", "softs"), ("llama", "all_kinds")}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=full)])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=() if (case, name) in IN_SLICE else full)
        for case in ("llama", "biases", "deepseek")
        for name in STACKS
    ],
)
def test_stacks(case: str, name: str, backend: str) -> None:
    """Several active adapters of one PEFT model, or PEFT models wrapped around one another."""
    model, ids = model_of(case, backend), prompt(3)
    stack = [(of(case, kind, seed), weight) for kind, seed, weight in STACKS[name]]
    assert differ(our_logits(model, ids, stack), oracle_of(case).logits(ids, stack)) < TOLERANCE


def test_cat() -> None:
    """A weighted stack of LoRAs of different ranks is PEFT's `cat` combination."""
    from peft import PeftModel

    path = tiny_checkpoint("llama")
    first, second = of("llama", "lora", 5, r=3), of("llama", "lora", 6, r=6, use_rslora=True)
    wrapped = PeftModel.from_pretrained(base_model(path), first, adapter_name="first")
    wrapped.load_adapter(second, adapter_name="second")
    wrapped.base_model.add_weighted_adapter(
        ["first", "second"], [0.4, 1.1], "both", combination_type="cat"
    )
    wrapped.set_adapter("both")
    with torch.no_grad():
        want = wrapped.eval()(torch.tensor([prompt(4)])).logits[0]
    stack = [(first, 0.4), (second, 1.1)]
    assert differ(our_logits(model_of("llama", "cpu"), prompt(4), stack), want) < TOLERANCE


OPTIONS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 6, "lora_alpha": 5},
    "patterns": {
        "rank_pattern": {"q_proj": 7, r"^model\.layers\.1\..*down_proj": 2, "layers.0.mlp": 9},
        "alpha_pattern": {"layers.2.self_attn.v_proj": 31, r".*\.(gate|up)_proj": 3},
    },
    "some_layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "regex": {"target_modules": r".*\.[02]\.(self_attn|mlp)\.(q|up)_proj"},
    "excluded": {"exclude_modules": ["k_proj"]},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "mica": {"init_lora_weights": "mica"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize(
    "name",
    ["patterns", "fp16", *full_only(*sorted(OPTIONS.keys() - {"patterns", "fp16"}))],
)
def test_options(name: str) -> None:
    stack = [(of("llama", "lora", 7, **OPTIONS[name]), 1.0)]
    want = oracle_of("llama").logits(prompt(5), stack)
    got = our_logits(model_of("llama", "reference"), prompt(5), stack)
    assert differ(got, want) < TOLERANCE


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=full)])
@pytest.mark.parametrize("case", ["llama", pytest.param("deepseek", marks=full)])
def test_mixed_batch(case: str, backend: str) -> None:
    """One step over rows of the base and of five stacks: each equals PEFT alone."""
    model, oracle = model_of(case, backend), oracle_of(case)
    stacks: list[Stack] = [
        [(of(case, "lora", 1), 1.0)],
        (),
        [(of(case, "soft_prompt", 1), 1.0)],
        [(of(case, "dora", 2), 0.7), (of(case, "lora", 2), 0.5)],
        [(of(case, "ia3", 3), 1.0)],
        (),
    ]
    made = [composed(model, stack, slot) for slot, stack in enumerate(stacks)]
    texts = [prompt(10 + place, 4 + 5 * place) for place in range(len(stacks))]
    rows = [[*virtual(model, one), *ids] for one, ids in zip(made, texts, strict=True)]
    paged, first, segments = Paged(model, len(rows), 64), 0, []
    for one, tokens, stack in zip(made, rows, stacks, strict=True):
        if stack:
            segments.append(patch.Segment(first, first + len(tokens), one))
        first += len(tokens)
    paged.model = Adapted(model, tuple(segments))  # type: ignore[assignment]
    found = paged.step(list(enumerate(rows)))
    for got, ids, stack in zip(found, texts, stacks, strict=True):
        assert differ(got[-len(ids) :], oracle.logits(ids, stack)) < TOLERANCE


@pytest.mark.parametrize("kind", ["soft_prompt", *full_only("lora", "dora", "ia3")])
def test_greedy_tokens(kind: str) -> None:
    """PEFT's generate, with its cache and its positions, behind a soft prompt too."""
    stack = [(of("llama", kind, 4), 1.0)]
    got = our_greedy(model_of("llama", "cpu"), prompt(6), stack, 12)
    assert got == oracle_of("llama").greedy(prompt(6), stack, 12)


@full
def test_carved(tmp_path: Path) -> None:
    """A dense model whose MLPs were cut, every expert chosen: the dense model's attention."""
    path, out = tiny_checkpoint("llama"), tmp_path / "carved"
    (tmp_path / "text").write_text("A model answers a question. " * 80)
    arguments = ["--experts", "8", "--active", "2", "--calibration", str(tmp_path / "text")]
    assert main(["carve", str(path), "--out", str(out), *arguments]) == 0
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 8}))
    stack = [(make_adapter(path, "dora", 1, target_modules=list(ATTENTION)), 1.0)]
    got = our_logits(model_at(out, "cpu"), prompt(8), stack)
    assert differ(got, peft_oracle(path).logits(prompt(8), stack)) < TOLERANCE
    with pytest.raises(WeightsError, match="routed experts in place"):
        our_logits(model_at(out, "cpu"), prompt(8), [(of("llama", "lora", 1), 1.0)])


@pytest.mark.parametrize(
    ("architecture", "split_kv"),
    [("mixtral", False), pytest.param("deepseek_v2", True, marks=full)],
)
def test_gguf(architecture: str, split_kv: bool, tmp_path: Path) -> None:
    """Converters reorder rows of q and k; adapters are for the model as transformers has it."""
    file, twin = write_twins(tiny_checkpoint(architecture), tmp_path, "F32", split_kv=split_kv)
    latent = ["q_proj", "kv_a_proj_with_mqa", "o_proj"]
    targets = latent if architecture == "deepseek_v2" else list(ATTENTION)
    stack = [(make_adapter(twin, "dora", 1, target_modules=targets), 1.0)]
    model = load_model(open_checkpoint(file), dtype="fp32")
    try:
        want = peft_oracle(twin).logits(prompt(7), stack)
        assert differ(our_logits(model, prompt(7), stack), want) < TOLERANCE
    finally:
        model.close()


@pytest.mark.parametrize("kind", ["dora", "soft_prompt", *full_only("lora", "ia3")])
def test_stored_bits_of_gguf(kind: str, tmp_path: Path) -> None:
    """Over Q4_K, Q6_K and Q5_0: PEFT on the model of their values."""
    file, twin = write_stored_bits("qwen3", tmp_path)
    stack = [(make_adapter(twin, kind, 1), 1.0)]
    model = load_model(open_checkpoint(file))
    assert model.dtype == "q4_k"
    # what is left is that activations have 15 bits
    model.kv_dtype = torch.float32
    try:
        want = peft_oracle(twin).logits(prompt(7), stack)
        limit = 5e-4 * float(want.abs().max())
        assert differ(our_logits(model, prompt(7), stack), want) < limit
        assert differ(want, peft_oracle(twin).logits(prompt(7), [])) > 100 * limit
    finally:
        model.close()
