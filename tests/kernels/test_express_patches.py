"""Patches where a whole MoE stack is one native call: the bits of the walk, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie.core.moe import MoeSettings
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.patch import Segment
from coterie.models.base import CausalLM, load_model
from coterie.models.build.assemble import decoder_shape
from coterie.moe.runtime.runtime import ExpertRuntime
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.kernels.kernel_inputs import paged_batch
from tests.helpers.kernels.patch_inputs import random_stack
from tests.helpers.models.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def opened(kind: str) -> tuple[CausalLM, ExpertRuntime]:
    dispatch = MoeSettings(strategy="persistent", device_budget="100%")
    model = load_model(open_checkpoint(tiny_checkpoint(kind)), dtype="int8", dispatch=dispatch)
    assert isinstance(model.experts, ExpertRuntime)
    return model, model.experts


def logits(model: CausalLM, batch: AttentionBatch) -> Tensor:
    shape = model.kv_shape(int(batch.block_tables.max()) + 1, batch.block_size)
    kv = [torch.zeros(shape, dtype=model.kv_dtype) for _ in range(model.spec.num_layers)]
    rows = torch.arange(len(batch.positions))
    return model.forward(rows * 7 % 380, batch, kv, rows).clone()


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
def test_same_bits_as_the_walk(kind: str) -> None:
    torch.manual_seed(41)
    fast, slow = opened(kind), opened(kind)
    slow[1].spans = []  # someone watches layer by layer
    assert fast[1].resident("prefill") is not None and slow[1].resident("prefill") is None
    spec = fast[0].spec
    stack = random_stack(decoder_shape(spec), range(spec.num_layers), 5, parts=("q", "k", "v", "o"))
    batch = paged_batch([(0, 9), (0, 30), (0, 2)])
    step = replace(batch, patches=(Segment(9, 39, stack),))
    base, got, want = logits(fast[0], batch), logits(fast[0], step), logits(slow[0], step)
    assert torch.equal(got, want)
    assert (got - base)[9:39].abs().amax(1).min() > 1e-3
    untouched = [*range(9), 39, 40]
    assert torch.equal(got[untouched], base[untouched])
    for model, _ in (fast, slow):
        model.close()
