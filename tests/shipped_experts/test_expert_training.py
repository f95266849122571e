"""The training code's adapters are PEFT's: same formula, same files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.expert_training.batches import Encoded
from examples.expert_training.loop import Plan, answer, train, validate
from examples.expert_training.modules import KINDS, Adapted, Shape
from examples.expert_training.saving import save

_ROWS = [
    Encoded(tuple(3 + (7 * row + at) % 50 for at in range(4 + row % 3)), (5 + row % 9, 7, 2))
    for row in range(24)
]


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.requires_grad_(False)
    return model


def trained(kind: str, model: Any) -> Adapted:
    torch.manual_seed(0)
    shape = Shape(kind, text="abcd")
    adapted = Adapted(model, shape, lambda text: [ord(letter) - 90 for letter in text])
    train(adapted, _ROWS, Plan(steps=12, rows=8, rate=2e-2), lambda _: None)
    return adapted


@pytest.mark.parametrize("kind", KINDS)
def test_learns_and_is_read_by_peft_as_the_same_function(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = tiny()
    base = Adapted(model, replace(Shape("lora"), targets=()), lambda _: [])
    before = validate(base, _ROWS)
    adapted = trained(kind, model)
    assert validate(adapted, _ROWS) < before
    # what is stored is what is compared
    for parameter in adapted.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    ids = torch.tensor([[3, 9, 27, 41, 8, 5]])
    with torch.no_grad():
        ours = model.lm_head(adapted.hidden(ids))
    save(adapted, tmp_path, "tiny")
    adapted.detach()
    peft = PeftModel.from_pretrained(tiny(), tmp_path)
    with torch.no_grad():
        theirs = peft(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(ours, theirs[:, -ids.shape[1] :], atol=1e-5)


def test_a_detached_adapter_leaves_the_base_as_it_was() -> None:
    model = tiny()
    ids = torch.tensor([[3, 9, 27]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
    trained("dora", model).detach()
    with torch.no_grad():
        assert torch.equal(before, model(input_ids=ids).logits)


def test_greedy_answers_do_not_depend_on_padding() -> None:
    model = tiny()
    base = Adapted(model, Shape("lora", targets=()), lambda _: [])
    prompts = [(3, 4, 5, 6, 7, 8), (9, 10)]
    both = answer(base, prompts, 2, 5)
    assert both == [answer(base, [prompt], 2, 5)[0] for prompt in prompts]
