"""How a stack with experts is walked: groups, chunks, owners, hints, absent experts, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.kernels.batch import AttentionBatch, split_batch
from coterie.kernels.expert_gate import ExpertGate, GateRule
from coterie.kernels.linear import ReferenceLinear
from coterie.models.base import CausalLM, load_model, read_spec
from coterie.moe.store.base import ExpertGeometry
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import DenseWeight
from tests.helpers.models.paged_model import Paged, prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.moe.resident_experts import Resident


def loaded(kind: str = "qwen3_moe", **overrides: Any) -> tuple[CausalLM, Resident]:
    checkpoint = open_checkpoint(tiny_checkpoint(kind, **overrides))
    model = load_model(checkpoint, dtype="fp32", experts=Resident)
    assert isinstance(model.experts, Resident)
    return model, model.experts


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(4, 384, (length,), generator=generator).tolist()


@pytest.mark.parametrize(
    ("kind", "overrides", "groups"),
    [
        ("qwen3_moe", {}, ((0,), (1, 2))),
        ("qwen3_moe", {"mlp_only_layers": [0, 3], "num_hidden_layers": 4}, ((1,), (2,))),
        ("deepseek_v2", {}, ((1, 2),)),
        ("dwr", {}, ((0, 1), (2,))),
    ],
)
def test_groups_walk_all_chunks_before_the_next(
    kind: str, overrides: dict[str, Any], groups: tuple[tuple[int, ...], ...]
) -> None:
    model, experts = loaded(kind, **overrides)
    ids = prompt(23)
    want = prompt_logits(model, ids, 23)
    experts.layer_groups, model.chunk_tokens = groups, 5
    experts.steps.clear()
    assert (prompt_logits(model, ids, 23) - want).abs().max() < 1e-5
    assert experts.loaded == list(range(len(groups)))
    walked = [step.layer for step in experts.steps]
    assert walked == [layer for group in groups for _ in range(5) for layer in group]
    assert [len(step.hidden) for step in experts.steps[:: len(groups[0])]][:5] == [5, 5, 5, 5, 3]
    # decode steps are not grouped
    assert prompt_logits(model, ids[:3], 1).shape == (3, 384)
    assert experts.loaded == list(range(len(groups)))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 100])
def test_split_batch_keeps_rows_and_what_they_see(chunk_tokens: int) -> None:
    counts, contexts = [3, 1, 9, 2], [10, 4, 9, 30]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    whole = AttentionBatch(
        positions=torch.cat(
            [torch.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)]
        ),
        slots=torch.arange(15),
        query_starts=starts,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.arange(8, dtype=torch.int32).view(4, 2),
        block_size=16,
        phase="prefill",
    )
    chunks = split_batch(whole, chunk_tokens)
    assert torch.equal(torch.cat([chunk.slots for chunk in chunks]), whole.slots)
    for chunk in chunks:
        assert 0 < len(chunk.positions) <= chunk_tokens
        bounds = chunk.query_starts.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(chunk.positions)
        for s, context in enumerate(chunk.context_lens.tolist()):
            own = chunk.positions[bounds[s] : bounds[s + 1]]
            # row i of n sees positions up to context - n + i: itself
            assert own.tolist() == list(range(context - len(own), context))
            place = int(chunk.block_tables[s, 0]) // 2
            assert chunk.slots[bounds[s]] >= starts[place]


def test_steps_say_whose_rows_they_are() -> None:
    model, experts = loaded()
    paged = Paged(model, 3, 32)
    paged.step([(0, prompt(4)), (2, prompt(2))])
    assert experts.steps[0].phase == "prefill"
    assert experts.steps[0].owners is not None
    assert experts.steps[0].owners.tolist() == [0, 0, 0, 0, 1, 1]
    experts.steps.clear()
    paged.step([(0, [5]), (1, [6]), (2, [7])])
    step = experts.steps[0]
    assert step.phase == "decode" and step.owners is not None and step.owners.tolist() == [0, 1, 2]
    assert step.topk_ids.dtype == torch.int32 and step.topk_weights.dtype == torch.float32
    experts.steps.clear()
    paged.step([(1, [9])])
    assert experts.steps[0].owners is None


def test_hints_are_the_next_router_over_this_layers_rows() -> None:
    model, experts = loaded()
    paged = Paged(model, 1, 32)
    experts.wants_hints = True
    paged.step([(0, prompt(5))])
    assert experts.hints == [], "a prompt asks for nearly all experts anyway"
    experts.steps.clear()
    paged.step([(0, [7])])
    assert [layer for layer, _ in experts.hints] == [1, 2]
    weights = open_checkpoint(tiny_checkpoint("qwen3_moe"))
    for (layer, predicted), step in zip(experts.hints, experts.steps, strict=False):
        gate = weights.read(f"model.layers.{layer}.mlp.gate.weight")
        logits = ReferenceLinear([gate])(step.hidden)
        assert set(predicted[0].tolist()) == set(logits.topk(2).indices[0].tolist())


def router(groups: int = 1, normalise: bool = False) -> ExpertGate:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    routing = GateRule(top_k=2, normalise=normalise, groups=groups, top_groups=max(1, groups // 2))
    return ExpertGate(routing, ReferenceLinear([DenseWeight(weight)]))


@pytest.mark.parametrize("groups", [1, 4])
def test_absent_experts_are_never_picked(groups: int) -> None:
    hidden = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    ids, weights = router(groups)(hidden)
    pruned = router(groups)
    pruned.exclude([2, 5])
    new_ids, new_weights = pruned(hidden)
    assert not set(new_ids.flatten().tolist()) & {2, 5}
    kept = ~((ids == 2) | (ids == 5)).any(-1)
    if groups == 1:
        # rows that lose nothing change nothing, to the bit
        assert 0 < kept.sum() < len(kept)
        assert torch.equal(new_ids[kept], ids[kept])
        assert torch.equal(new_weights[kept], weights[kept])


class Pruned(Resident):
    def __init__(self, wanted: Any) -> None:
        super().__init__(wanted)
        absent = frozenset({(0, 3), (2, 1)})
        self.geometry: ExpertGeometry = replace(self.geometry, absent=absent)


def test_a_stack_masks_what_its_store_lacks() -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen3_moe"))
    model = load_model(checkpoint, dtype="fp32", experts=Pruned)
    Paged(model, 1, 64).step([(0, prompt(60))])
    experts = model.experts
    assert isinstance(experts, Pruned)
    picked = {step.layer: set(step.topk_ids.flatten().tolist()) for step in experts.steps}
    assert 3 not in picked[0] and 1 not in picked[2]
    assert len(picked[1]) > 6, "routing varies"


class AlmostEmpty(Resident):
    def __init__(self, wanted: Any) -> None:
        super().__init__(wanted)
        absent = frozenset((1, expert) for expert in range(7))
        self.geometry: ExpertGeometry = ExpertGeometry(self.geometry.layers, 8, 2, absent)


def test_too_few_experts_left_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"layer 1 has 1 .* needs 2"):
        load_model(open_checkpoint(tiny_checkpoint("qwen3_moe")), experts=AlmostEmpty)


def test_usage_and_close() -> None:
    model, experts = loaded()
    Paged(model, 1, 16).step([(0, prompt(5))])
    usage = model.take_usage()
    assert usage is not None and usage[0].routing_s > 0 and usage[0].device_hits == 3
    model.close()
    assert experts.closed
    dense = load_model(open_checkpoint(tiny_checkpoint("llama")))
    assert dense.take_usage() is None and dense.experts is None
    dense.close()


def changed(tmp_path: Path, kind: str, **changes: Any) -> Path:
    path = shutil.copytree(tiny_checkpoint(kind), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "no layer has experts"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_moe", {"num_local_experts": None}, "num_experts"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act"),
        ("olmoe", {"clip_qkv": -1.0}, "clip_qkv"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "3 groups",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1},
            "fewer than the 2",
        ),
        ("dwr", {"hidden_act": "relu"}, "hidden_act"),
        ("dwr", {"num_attention_heads": 5}, "heads"),
    ],
)
def test_configs_that_mean_something_else_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(WeightsError, match=word):
        read_spec(open_checkpoint(changed(tmp_path, kind, **changes)))


def test_windows_cap_the_context(tmp_path: Path) -> None:
    config = {"sliding_window": 64, "use_sliding_window": True}
    assert read_spec(open_checkpoint(changed(tmp_path, "qwen3_moe", **config))).max_positions == 64
    assert read_spec(open_checkpoint(tiny_checkpoint("qwen3_moe"))).max_positions == 1024


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        # experts of a layer that config calls dense
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"layers.1.mlp.gate_proj.*missing"),
        ("deepseek_v2", {"n_shared_experts": 1}, "shared_experts.gate_proj"),
        ("deepseek_v2", {"n_shared_experts": 0}, "no place for the tensor.*shared_experts"),
        ("dwr", {"num_hidden_layers": 2}, "no place for the tensor 'blocks.2"),
    ],
)
def test_file_and_config_must_agree(
    tmp_path: Path, kind: str, changes: dict[str, Any], word: str
) -> None:
    path = changed(tmp_path, kind, **changes)
    with pytest.raises(WeightsError, match=word):
        load_model(open_checkpoint(path), experts=Resident)


def test_latents_are_all_that_is_cached() -> None:
    model, _ = loaded("deepseek_v2")
    assert model.kv_shape(10, 16) == (1, 10, 1, 16, 40)
    assert model.kv_bytes_per_token() == 3 * 40 * 4


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
        ("olmoe", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("deepseek_v2", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("dwr", "blocks.1.experts.3.fc1.weight"),
    ],
)
def test_templates_are_what_transformers_writes(kind: str, name: str) -> None:
    """In memory transformers fuses and stacks experts; on disk they lie one by one."""
    checkpoint = open_checkpoint(tiny_checkpoint(kind))
    moe = read_spec(checkpoint).moe
    assert moe is not None
    wanted = {
        template.format(layer=layer, expert=expert)
        for template in moe.parts.values()
        for layer in moe.layers
        for expert in range(moe.num_experts)
    }
    stored = set(checkpoint.names())
    assert name in wanted and wanted <= stored
    assert not any(".experts." in other for other in stored - wanted)
