"""Which matrices of a loaded model adapters find, what they learn of them, and the refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coterie.adapters.compose import compose
from coterie.adapters.files import WEIGHTS, open_adapter
from coterie.core.errors import WeightsError
from coterie.core.moe import MoeSettings
from coterie.kernels.backend import best_backend
from coterie.models.base import CausalLM, load_model
from coterie.models.build.targets import TargetMatrix
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint


def loaded(kind: str, dtype: str = "fp32", backend: str | None = None, **keys: Any) -> CausalLM:
    settings = MoeSettings(strategy="persistent", warmup="none", predict="off")
    path = tiny_checkpoint(kind, **keys)
    return load_model(open_checkpoint(path), dtype=dtype, backend=backend, dispatch=settings)


def matrices(model: CausalLM) -> dict[str, TargetMatrix]:
    found = model.targets._matrices  # type: ignore[attr-defined]
    assert found
    return dict(found)


ATTENTION = "model.layers.0.self_attn."
REFUSED = [
    ("llama", "model.embed_tokens", "embeddings"),
    ("llama", "model.layers.3.self_attn.q_proj", "3 layers"),
    ("llama", ATTENTION + "q_proj.x", "no such module"),
    ("llama", "transformer.h.0.attn.c_attn", "no such module"),
    ("llama", "model.layers.0.input_layernorm", "norms"),
    ("qwen3", ATTENTION + "q_norm", "norms"),
    ("deepseek_v2", ATTENTION + "kv_b_proj", "absorbed"),
    ("deepseek_v2", ATTENTION + "q_a_proj", "no such module"),
    ("deepseek_v2", "model.layers.1.mlp.experts.0.up_proj", "routed experts"),
    ("qwen3_moe", "model.layers.0.mlp.gate", "router"),
    ("qwen3_moe", "model.layers.0.mlp.gate_proj", "routed experts in place"),
    ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w1", "routed experts"),
    ("mixtral", "model.layers.0.mlp.experts", "routed experts"),
    ("dwr", "blocks.0.attn.qkv", "takes no adapters"),
    ("dwr", "lm_head", "takes no adapters"),
]


@pytest.mark.parametrize(("kind", "path", "words"), REFUSED)
def test_refused(kind: str, path: str, words: str) -> None:
    model = loaded(kind, backend="reference")
    try:
        with pytest.raises(WeightsError, match=words) as caught:
            model.targets.find(path)
        assert path in caught.value.message
    finally:
        model.close()


def test_nothing_is_computed_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(TargetMatrix, "_norms_squared", lambda self: asked.append(self))
    model = loaded("llama")
    assert model.targets is model.targets and model.targets.hidden == 64
    assert not asked and all(matrix._norms is None for matrix in matrices(model).values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v2"])
def test_norms_are_the_kernels(kind: str, dtype: str) -> None:
    """Identity rows through the product give the weight that the kernels multiply by."""
    model = loaded(kind, dtype, best_backend("cpu"))
    try:
        found = matrices(model)
        assert len(found) >= 4
        for name, matrix in found.items():
            weight = matrix.project(torch.eye(matrix.in_features)).double()
            assert weight.shape == (matrix.in_features, matrix.out_features), name
            torch.testing.assert_close(
                matrix.row_norms_squared(), weight.square().sum(0), rtol=1e-4, atol=0
            )
            assert matrix.row_norms_squared() is matrix.row_norms_squared()
    finally:
        model.close()


def test_rows_are_in_the_modules_order() -> None:
    """Latent attention keeps its rows in another order than the file."""
    path = tiny_checkpoint("deepseek_v2")
    stored = load_file(path / "model.safetensors")
    model = loaded("deepseek_v2", backend="reference")
    try:
        found = matrices(model)
        assert len(found) >= 4
        for name, matrix in found.items():
            weight = matrix.project(torch.eye(matrix.in_features)).T
            torch.testing.assert_close(weight, stored[name + ".weight"], rtol=1e-6, atol=1e-6)
    finally:
        model.close()


def test_an_adapter_with_the_head_of_another_model(tmp_path: Path) -> None:
    """PEFT saves the base's head beside an adapter of it: it must be this model's."""
    model = loaded("llama", "int8", backend="reference")
    path = make_adapter(tiny_checkpoint("llama"), "lora", 1, target_modules=["lm_head"])
    adapter = open_adapter(path, "d")
    assert compose([(adapter, 1.0)], model.targets).patches.keys() == {(-1, "head")}
    assert adapter.nbytes < 384 * 64 * 4
    tensors = load_file(path / WEIGHTS)
    for change in (lambda t: t * 1.3, lambda t: t[:300]):
        other = dict(tensors)
        name = "base_model.model.lm_head.base_layer.weight"
        other[name] = change(tensors[name]).contiguous()
        save_file(other, tmp_path / WEIGHTS)
        (tmp_path / "adapter_config.json").write_bytes((path / "adapter_config.json").read_bytes())
        with pytest.raises(WeightsError, match="another base weight"):
            compose([(open_adapter(tmp_path, "d"), 1.0)], model.targets)


def test_soft_tokens_are_rows_of_their_own_stack() -> None:
    """DWR has no twin in PEFT; its soft tokens are embeddings like any other."""
    from dataclasses import replace

    from coterie.kernels.patch import PatchStack, Segment
    from tests.helpers.models.paged_model import Paged

    model = loaded("dwr", backend="reference")
    try:
        words = model._embed(torch.tensor([7, 9, 11]))
        stack = PatchStack("k", 0, {}, words[1:].clone())

        def run(tokens: list[int], patched: bool) -> torch.Tensor:
            paged = Paged(model, 1, 16)
            forward = model.forward

            def under(ids: Any, batch: Any, kv: Any, rows: Any) -> torch.Tensor:
                segments = (Segment(0, len(tokens), stack),) if patched else ()
                return forward(ids, replace(batch, patches=segments), kv, rows)

            model.forward = under  # type: ignore[method-assign, assignment]
            try:
                return paged.step([(0, tokens)])[0]
            finally:
                model.forward = forward  # type: ignore[method-assign]

        vocab = model.spec.vocab
        assert torch.equal(run([vocab, vocab + 1, 5, 7], True), run([9, 11, 5, 7], False))
    finally:
        model.close()


def test_soft_tokens_never_reach_a_captured_step() -> None:
    """A prompt's last chunk may be one row per sequence, like a decode step."""
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.patch import PatchStack, Segment

    class Graphs:
        asked = 0

        def forward(self, *step: Any) -> None:
            self.asked += 1

    model, graphs = loaded("llama", backend="reference"), Graphs()
    model.graphs = graphs  # type: ignore[assignment]
    kv = [torch.zeros(model.kv_shape(1, 16)) for _ in range(model.spec.num_layers)]
    one = torch.ones(1, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    soft, plain = PatchStack("s", 0, {}, torch.ones(1, 64)), PatchStack("p", 1, {})
    for stack, phase, token, asked in (
        (soft, "prefill", model.spec.vocab, 0),
        (soft, "decode", 3, 1),
        (plain, "prefill", 3, 2),
    ):
        segments = (Segment(0, 1, stack),)
        batch = AttentionBatch(
            zero, zero, torch.tensor([0, 1]).int(), one, one[None] * 0, 16, phase, segments
        )
        model.forward(torch.tensor([token]), batch, kv, zero)
        assert graphs.asked == asked
