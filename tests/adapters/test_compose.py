"""Composing is what wrapping means: random stacks against the definitions, one module at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coterie.adapters.base import Adapter, ModuleChange
from coterie.adapters.compose import StackImage, compose
from coterie.adapters.files import open_adapter
from coterie.adapters.kinds.dora import DoraChange
from coterie.adapters.kinds.ia3 import Ia3Change
from coterie.adapters.kinds.lora import LoraChange
from coterie.core.adapters import AdaptableModules
from coterie.core.errors import InvalidRequest, WeightsError
from coterie.kernels import patched
from coterie.kernels.linear import ReferenceLinear
from coterie.kernels.patch import PatchStack, Segment
from coterie.models.build.reader import BiasedLinear
from coterie.models.build.targets import TargetMatrix
from coterie.packages.adapter_kinds import DeviceSize, device_size
from coterie.weights.quantize import DenseWeight
from tests.helpers.adapters.peft_adapters import KINDS, make_adapter
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.greedy_engine import model_at

INNER, OUTER, PATH = 24, 40, "model.layers.0.self_attn.q_proj"
Function = Callable[[Tensor], Tensor]


class OneMatrix:
    """A model of one module, its rows perhaps kept in another order."""

    hidden = 16

    def __init__(self, seed: int, *, biased: bool, shuffled: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(OUTER, INNER, generator=generator)
        self.bias = torch.randn(OUTER, generator=generator) if biased else None
        order = torch.randperm(OUTER, generator=generator) if shuffled else None
        rows = self.weight if order is None else self.weight[order]
        self.order, self.product = order, ReferenceLinear([DenseWeight(rows)])
        self.matrix = TargetMatrix(
            (0, "q"), self.product, 0, OUTER, lambda: self.weight, self.bias, order
        )

    def modules(self) -> AdaptableModules:
        raise AssertionError("only checks without weights ask for these")

    def find(self, path: str) -> TargetMatrix:
        assert path == PATH
        return self.matrix

    def run(self, x: Tensor, stack: PatchStack) -> Tensor:
        """Through the patch, back in the module's order."""
        product: ReferenceLinear | BiasedLinear = self.product
        if self.bias is not None:
            bias = self.bias if self.order is None else self.bias[self.order]
            product = BiasedLinear(self.product, bias)
        segments = (Segment(0, len(x), stack),)
        y = patched.linear(product, x, 0, (("q", OUTER),), segments)
        if self.order is None:
            return y
        back = torch.empty_like(y)
        back[:, self.order] = y
        return back


def drawn(kind: str, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Adapter:
    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.4).to(dtype)

    rank = int(torch.randint(1, 6, (), generator=generator))
    scaling = float(torch.rand((), generator=generator)) + 0.5
    change: ModuleChange
    if kind in ("lora", "dora"):
        magnitude = (5 + normal(OUTER)).float() if kind == "dora" else None
        change = LoraChange(normal(rank, INNER), normal(OUTER, rank), scaling)
        if magnitude is not None:
            change = DoraChange(change, magnitude)
    else:
        inner = kind == "ia3_inner"
        change = Ia3Change(1 + normal(INNER if inner else OUTER), inner)
    return Adapter("d", kind.removesuffix("_inner"), {PATH: change})


def wrapped(model: OneMatrix, f: Function, adapter: Adapter, w: float) -> Function:
    """The kinds' definitions, in fp64."""
    change = adapter.changes[PATH]
    weight = model.weight.double()
    bias = 0.0 if model.bias is None else model.bias.double()
    if isinstance(change, Ia3Change):
        vector = 1 + w * (change.vector.double() - 1)
        return (lambda x: f(x * vector)) if change.feedforward else (lambda x: vector * f(x))
    factors = change.factors if isinstance(change, DoraChange) else change
    assert isinstance(factors, LoraChange)
    delta = w * factors.scaling * (factors.b.double() @ factors.a.double())
    if not isinstance(change, DoraChange):
        return lambda x: f(x) + x @ delta.T
    g = change.magnitude.double() / (weight + delta).norm(dim=1)
    return lambda x: g * (f(x) - bias) + bias + g * (x @ delta.T)


@pytest.mark.parametrize("seed", range(40))
def test_random_stacks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = OneMatrix(seed, biased=seed % 2 == 0, shuffled=seed % 3 == 0)
    kinds = ["lora", "dora", "ia3", "ia3_inner"]
    picked = torch.randint(0, 4, (1 + seed % 10,), generator=generator).tolist()
    parts = [
        (drawn(kinds[kind], generator), float(torch.randn((), generator=generator)))
        for kind in picked
    ]
    bias = 0.0 if model.bias is None else model.bias.double()

    def base(x: Tensor) -> Tensor:
        return x @ model.weight.double().T + bias

    f: Function = base
    for adapter, weight in parts:
        f = wrapped(model, f, adapter, weight)
    made = compose(parts, model)
    x = torch.randn(7, INNER, generator=generator)
    want = f(x.double())
    got = model.run(x, PatchStack("k", 0, made.patches))
    assert float((got - want).abs().max()) < 2e-5 * max(1.0, float(want.abs().max()))
    assert made.nbytes == sum(patch.nbytes for patch in made.patches.values())


def stored(change: ModuleChange) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The config and the tensors of a PEFT directory."""
    if isinstance(change, Ia3Change):
        return {"peft_type": "IA3"}, {"ia3_l": change.vector}
    factors = change.factors if isinstance(change, DoraChange) else change
    assert isinstance(factors, LoraChange)
    config: dict[str, object] = {"peft_type": "LORA", "r": 1, "lora_alpha": factors.scaling}
    tensors = {"lora_A.weight": factors.a, "lora_B.weight": factors.b}
    if isinstance(change, DoraChange):
        return {**config, "use_dora": True}, {**tensors, "lora_magnitude_vector": change.magnitude}
    return config, tensors


def at_scaling(adapter: Adapter, scaling: float) -> Adapter:
    change = adapter.changes[PATH]
    assert isinstance(change, LoraChange)
    return replace(adapter, changes={PATH: replace(change, scaling=scaling)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_tell_the_most_that_a_stack_can_take(dtype: torch.dtype, tmp_path: Path) -> None:
    """And, in fp32 or where bf16 stays, hardly more: alignment alone."""
    generator = torch.Generator().manual_seed(5)
    model = OneMatrix(0, biased=True, shuffled=False)

    def saved(adapter: Adapter) -> DeviceSize:
        config, tensors = stored(adapter.changes[PATH])
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        named = {f"base_model.model.{PATH}.{name}": part for name, part in tensors.items()}
        named["base_model.model.lm_head.base_layer.weight"] = torch.zeros(1000, 16)
        save_file(named, tmp_path / "adapter_model.safetensors")
        return device_size(tmp_path)

    for count in range(30):
        kinds = torch.randint(0, 4, (1 + count % 5,), generator=generator).tolist()
        stack = [drawn(("lora", "dora", "ia3", "ia3_inner")[k], generator, dtype) for k in kinds]
        taken = StackImage(compose([(adapter, 0.7) for adapter in stack], model)).nbytes
        sizes = [saved(adapter) for adapter in stack]
        most = sum(size.wide + size.shifts for size in sizes)
        assert most % 256 == 0 and taken <= most
        if dtype == torch.float32 and kinds == [0]:
            assert most < taken + 256
        # a strength that is a power of two, where nothing has a bias
        loras = [drawn("lora", generator, dtype) for _ in kinds]
        exact = [at_scaling(adapter, 2.0) for adapter in loras]
        taken = StackImage(compose([(adapter, 0.5) for adapter in exact], model)).nbytes
        sizes = [saved(adapter) for adapter in exact]
        told = sum(size.narrow or size.wide for size in sizes)
        assert taken <= told < taken + 512 * len(kinds)
        assert all(bool(size.narrow) == (dtype == torch.bfloat16) for size in sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_every_kind_tell_enough_on_a_base_with_biases(kind: str) -> None:
    """A kind that scales outputs and does not say so in its row needs more than it tells."""
    path = tiny_checkpoint("llama", attention_bias=True, mlp_bias=True)
    folder = make_adapter(path, kind, 1)
    parts = [(open_adapter(folder, "d"), 0.7)]
    size = device_size(folder)
    taken = StackImage(compose(parts, model_at(path, "reference").targets)).nbytes
    assert taken <= size.wide + size.shifts


def test_bf16_stays_where_nothing_is_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    model = OneMatrix(0, biased=False, shuffled=False)
    lora = drawn("lora", generator, torch.bfloat16)
    (change,) = lora.changes.values()
    assert isinstance(change, LoraChange)
    whole = Adapter("d", "lora", {PATH: LoraChange(change.a, change.b, scaling=2.0)})
    wide = Adapter("d", "lora", {PATH: LoraChange(change.a.float(), change.b.float(), scaling=2.0)})

    def dtype(*parts: tuple[Adapter, float]) -> torch.dtype:
        patch = compose(parts, model).patches[0, "q"]
        assert patch.a is not None and patch.b is not None
        assert patch.a.dtype == patch.b.dtype
        assert patch.a.is_contiguous() and patch.b.is_contiguous()
        return patch.a.dtype

    assert dtype((whole, 0.25)) == torch.bfloat16
    assert dtype((whole, -1.0), (whole, 0.5)) == torch.bfloat16
    assert dtype((whole, 0.7)) == torch.float32
    assert dtype((whole, 1.0), (wide, 1.0)) == torch.float32
    assert dtype((whole, 1.0), (drawn("ia3", generator), 1.0)) == torch.float32
    patch = compose([(whole, 0.25)], model).patches[0, "q"]
    assert patch.b is not None and torch.equal(patch.b.float(), change.b.float().T * 0.5)


def test_weight_zero() -> None:
    """Takes LoRA and IA3 away; DoRA's magnitudes and a soft prompt's positions stay."""
    generator = torch.Generator().manual_seed(1)
    model = OneMatrix(1, biased=True, shuffled=False)
    lora, ia3, dora = (drawn(kind, generator) for kind in ("lora", "ia3", "dora"))
    assert not compose([(lora, 0.0), (ia3, 0.0)], model).patches
    patch = compose([(dora, 0.0)], model).patches[0, "q"]
    assert patch.out_scale is not None and patch.a is None and patch.shift is None
    soft = Adapter("s", "soft_prompt", soft=torch.ones(3, 16))
    made = compose([(soft, 0.0)], model)
    assert made.soft is not None and torch.equal(made.soft, torch.zeros(3, 16))


def test_soft_prompts_follow_one_another() -> None:
    model = OneMatrix(2, biased=False, shuffled=False)
    first = Adapter("a", "soft_prompt", soft=torch.randn(2, 16).bfloat16())
    second = Adapter("b", "soft_prompt", soft=torch.randn(3, 16))
    made = compose([(second, 0.5), (first, 1.0)], model)
    assert made.soft is not None and made.soft.dtype == torch.float32
    assert first.soft is not None and second.soft is not None
    assert torch.equal(made.soft[:3], second.soft * 0.5)
    assert torch.equal(made.soft[3:], first.soft.float())
    assert made.nbytes == made.soft.nbytes and not made.patches


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_are_finite(weight: float) -> None:
    adapter = drawn("lora", torch.Generator().manual_seed(0))
    with pytest.raises(InvalidRequest, match="finite"):
        compose([(adapter, weight)], OneMatrix(0, biased=False, shuffled=False))


@pytest.mark.parametrize(
    "change",
    [
        LoraChange(torch.ones(2, INNER + 1), torch.ones(OUTER, 2)),
        LoraChange(torch.ones(2, INNER), torch.ones(OUTER - 1, 2)),
        DoraChange(LoraChange(torch.ones(2, INNER), torch.ones(OUTER, 2)), torch.ones(OUTER + 1)),
        Ia3Change(torch.ones(INNER)),
        Ia3Change(torch.ones(OUTER), feedforward=True),
    ],
)
def test_shapes_of_another_model(change: ModuleChange) -> None:
    kind = {LoraChange: "lora", DoraChange: "dora", Ia3Change: "ia3"}[type(change)]
    model = OneMatrix(0, biased=False, shuffled=False)
    with pytest.raises(WeightsError, match="another model"):
        compose([(Adapter("d", kind, {PATH: change}), 1.0)], model)


def test_width_of_another_model() -> None:
    soft = Adapter("s", "soft_prompt", soft=torch.ones(3, 17))
    with pytest.raises(WeightsError, match="17 wide"):
        compose([(soft, 1.0)], OneMatrix(0, biased=False, shuffled=False))


def test_rows_that_vanish() -> None:
    """DoRA divides by the norm of what it adapts."""
    model = OneMatrix(0, biased=False, shuffled=False)
    model.weight[3] = 0
    model.product.weight[3] = 0
    factors = LoraChange(torch.zeros(1, INNER), torch.zeros(OUTER, 1))
    change = DoraChange(factors, torch.ones(OUTER))
    with pytest.raises(WeightsError, match="zero"):
        compose([(Adapter("d", "dora", {PATH: change}), 1.0)], model)
