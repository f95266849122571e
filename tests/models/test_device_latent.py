"""CUDA devices' decoder for latent attention against the plain one, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, relative
from tests.helpers.models.tiny import tiny_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

SMALL = {
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
}
MODELS: dict[str, dict[str, Any]] = {"plain": {}, "low-rank queries": {"q_lora_rank": 24}}
# tokens of each sequence in each step
STEPS: dict[str, list[tuple[int, ...]]] = {
    # a prompt, then one row at a time
    "one": [(4,), (1,), (1,)],
    # a prompt in two parts beside decoding rows, then several decoding rows
    "mixed": [(2, 1), (3, 1), (1, 1)],
}
CASES = [f"{model}/{steps}" for model in MODELS for steps in STEPS]
CASES += ["plain/mixed by torch", "plain/one in order", "whole prompt"]
CASES += ["plain/mixed in pieces"]
# three slots, and every other expert in the bank
CASES += ["plain/one placed", "plain/mixed placed"]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    for changes in MODELS.values():
        tiny_checkpoint("deepseek_v2", **SMALL, **changes)
    return interpreted(__file__, CASES)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_decoder(errors: dict[str, float], case: str) -> None:
    assert errors[case] < 1e-5


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_joined_products_are_parts_of_one(kind: str) -> None:
    from coterie.kernels.linear import ReferenceLinear
    from coterie.kernels.triton.quant_linear import QuantLinear
    from coterie.models.build.device_decoder import device_matrix
    from coterie.models.build.mla import _joined
    from coterie.weights.quantize import DenseWeight, convert

    make = ReferenceLinear if kind == "fp32" else QuantLinear
    weights = [convert(DenseWeight(torch.randn(rows, 64)), kind) for rows in (24, 10)]
    parts = [make([weight], "cpu") for weight in weights]
    got, want = _joined(*parts), device_matrix(make(weights, "cpu"))
    assert got is not None and (got.out_features, got.in_features) == (34, 64)
    whole = device_matrix(got)
    assert (whole.count, whole.width, whole.kind) == (want.count, want.width, want.kind)
    assert torch.equal(whole.weight, want.weight)
    first = 0
    for part in map(device_matrix, parts):
        assert part.weight.data_ptr() == whole.weight[first:].data_ptr()
        if whole.scales is not None and want.scales is not None and part.scales is not None:
            assert torch.equal(whole.scales, want.scales)
            assert part.scales.data_ptr() == whole.scales[first:].data_ptr()
        first += part.count
    assert first == whole.count


def loaded(changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A model, the device's decoder of the same weights, and its experts."""
    from coterie.models.base import load_model
    from coterie.models.build.assemble import decoder_shape
    from coterie.models.build.device_latent import LatentDecoder
    from coterie.models.build.layers import EmbeddingAndHead
    from coterie.models.build.mla import joined_layers
    from coterie.weights.checkpoint import open_checkpoint
    from coterie.weights.quantize import dense

    checkpoint = open_checkpoint(tiny_checkpoint("deepseek_v2", **SMALL, **changes))
    model: Any = load_model(checkpoint, dtype="fp32", device="cpu", backend="reference")
    layers = joined_layers(model._backbone.__self__._blocks)
    shape, ends = decoder_shape(model.spec), EmbeddingAndHead(model._embed, model._head)
    experts = model._moe._layers
    assert LatentDecoder.fits(shape, layers, experts, ends.head)
    norm = dense(checkpoint.read("model.norm.weight"), torch.float32)
    turn = tuple(model.spec.rotary.tables())
    decoder: Any = LatentDecoder(shape, layers, turn, ends, norm, experts)
    return model, decoder, expert_pool(checkpoint, model.spec)


def expert_pool(checkpoint: Any, spec: Any) -> Any:
    from coterie.kernels.cpu.expert_record import pack_record
    from coterie.kernels.device_record import UNIT_BYTES, arrange, device_record
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.moe.runtime.device_pool import DevicePool
    from coterie.weights.quantize import DenseWeight, dense

    moe = spec.moe
    layout = ExpertLayout(spec.hidden, moe.intermediate, True, ("fp32",) * 3)
    size, record = layout.nbytes, torch.zeros(layout.nbytes, dtype=torch.uint8)
    count = len(moe.layers) * moe.num_experts
    arena = torch.zeros(count * size, dtype=torch.uint8)
    slots = torch.randperm(count).view(len(moe.layers), -1)
    for row, layer in enumerate(moe.layers):
        for expert in range(moe.num_experts):
            parts = {
                part: DenseWeight(dense(checkpoint.read(name.format(layer=layer, expert=expert))))
                for part, name in moe.parts.items()
            }
            pack_record(layout, parts, record)
            begin = int(slots[row, expert]) * size
            arrange(layout, record, arena[begin : begin + size])
    own = device_record(layout)
    assert own is not None
    records = dict.fromkeys(moe.layers, own)
    places = slots * (size // UNIT_BYTES)
    return DevicePool(
        arena, size, places, torch.zeros(places.shape, dtype=torch.int8), records, cast(Any, None)
    )


def placing_pool(pool: Any, moe: Any, text: str = "lru", slots: int = 3) -> Any:
    """The same experts behind a few slots, to which steps bring what they miss."""
    from coterie.moe.dispatch.base import StrategyContext
    from coterie.moe.dispatch.table import STRATEGIES
    from coterie.moe.runtime.slot_map import SlotMap
    from coterie.moe.runtime.victims import StepVictims
    from coterie.moe.store.base import ExpertGeometry
    from tests.helpers.moe.slot_simulator import COSTS

    geometry = ExpertGeometry(tuple(moe.layers), moe.num_experts, moe.gate_rule.top_k)
    context = StrategyContext(geometry, SlotMap(slots), None, COSTS, in_place_bytes=3_000_000)
    units = pool.slot_bytes // 16
    arena = torch.cat((torch.zeros(slots * pool.slot_bytes, dtype=torch.uint8), pool.arena))
    places, tiers = pool.places + slots * units, torch.ones_like(pool.tiers)
    record = pool.records[geometry.layers[0]].nbytes
    bank, flat = places.flatten().clone(), (places.view(-1), tiers.view(-1))
    victims = StepVictims(STRATEGIES[text](context), *flat, bank, units, record)
    victims.send()
    return replace(
        pool, arena=arena, slot_bytes=None, places=places, tiers=tiers, bank=cast(Any, bank),
        victims=victims,
    )  # fmt: skip


def steps_error(models: Any, steps: list[tuple[int, ...]]) -> float:
    """Logits of all rows and caches of all layers, after several steps."""
    from tests.helpers.models.paged_model import Paged

    model, decoder, pool = models

    def forward(ids: Any, batch: Any, kv: Any, rows: Any) -> Any:
        return decoder.run(ids, batch, kv, rows, pool.of_step(batch))[0]

    mine = SimpleNamespace(
        spec=model.spec, device=model.device, kv_dtype=model.kv_dtype, kv_shape=model.kv_shape,
        forward=forward,
    )  # fmt: skip
    count = len(steps[0])
    ours, theirs = Paged(mine, count, 40), Paged(model, count, 40)  # type: ignore[arg-type]
    for paged in (ours, theirs):
        for layer in paged.kv:
            layer.zero_()
    worst = 0.0
    for step in steps:
        rows = [
            (at, torch.randint(4, model.spec.vocab, (n,)).tolist()) for at, n in enumerate(step)
        ]
        got, want = (torch.cat(paged.step(rows)) for paged in (ours, theirs))
        worst = max(worst, relative(got, want))
    return max(worst, *(relative(a, b) for a, b in zip(ours.kv, theirs.kv, strict=True)))


def pieces_error(models: Any) -> float:
    """Steps of up to 3 and 4 rows as captured pieces of 4 and 6; none has fewer than 3."""
    from coterie.models.build import piece_graph
    from coterie.models.build.cuda_graph import DecodeGraphs

    model, decoder, pool = models
    graphs = DecodeGraphs(lambda *_: None, 64, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    runs: list[int] = []

    def run(ids: Any, batch: Any, kv: Any, rows: Any, given: Any) -> Any:
        found = pieces.forward(ids, batch, kv, rows, given)
        assert found is not None
        runs.append(len(ids))
        return found

    with patch.object(piece_graph, "ROWS", (4, 6)):
        pieces = piece_graph.PieceGraphs(decoder, graphs, model.spec, "bf16")
        pieces.prepare(6, pool)
        inside = SimpleNamespace(run=run)
        worst = steps_error((model, inside, pool), [(2, 1), (3, 1), (4, 1), (1, 1)])
    assert runs == [3, 4, 5, 2] and graphs.memory.count == 2 * (model.spec.num_layers + 1)
    return worst


def whole_prompt_error(decoder: Any) -> float:
    """Keys and values of full width give the same as latents."""
    from torch.nn.attention import SDPBackend

    from coterie.kernels.triton.latent_attention import latent_attention, write_latent
    from coterie.models.build import device_latent
    from tests.helpers.kernels.triton_interpreter import random_batch

    latent, layer = decoder._latent, decoder._layers[0]
    batch, blocks = random_batch([7], [7], 16, torch.Generator())
    q, kept = torch.randn(7, latent.heads, latent.head), torch.randn(7, latent.cached)
    cache = torch.zeros(1, blocks, 1, 16, latent.cached)
    write_latent(kept, cache, batch.slots)
    key_up, value_up = decoder._ups[0]
    wide = torch.einsum("thn,hrn->thr", q[..., : latent.nope], key_up)
    turned, scale = q[..., latent.nope :], latent.attention_scale
    mixed = latent_attention(wide, turned, cache, batch, scale)
    # the one that torch has for every type and device
    with patch.object(device_latent, "_BACKENDS", [SDPBackend.MATH]):
        fresh = decoder._fresh(layer, q, kept)
    return relative(fresh, device_latent._values(mixed, value_up))


def error_of(case: str, models: Any) -> float:
    from coterie.models.build import device_decoder, device_latent

    if case == "whole prompt":
        return whole_prompt_error(models[1])
    steps, _, how = case.partition("/")[2].partition(" ")
    if how == "in pieces":
        return pieces_error(models)
    if how == "placed":
        pool = placing_pool(models[2], models[0].spec.moe)
        worst = steps_error((*models[:2], pool), STEPS[steps])
        counts = pool.victims.state.counts.tolist()
        # the steps in which every sequence had one row
        assert counts[3] == sum(set(step) == {1} for step in STEPS[steps]) and counts[1] < 3
        return worst
    if how == "by torch":
        with patch.object(device_latent, "FUSED_ROWS", 0):
            return steps_error(models, STEPS[steps])
    if how == "in order":
        # as where experts and the rest have different precisions
        with (
            patch.object(device_decoder, "cut_shared", lambda *_: None),
            patch.object(models[1], "_cut", {}),
        ):
            return steps_error(models, STEPS[steps])
    return steps_error(models, STEPS[steps])


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors."""
    from coterie.models.build import device_decoder, device_moe

    torch.seed()
    found: dict[str, float] = {}
    # the interpreter has no launches before the end of the last kernel
    with (
        patch.object(device_decoder, "launches_early", lambda device: False),
        patch.object(device_moe, "launches_early", lambda device: False),
        torch.inference_mode(),
    ):
        for name, changes in MODELS.items():
            own = [case for case in cases if case.startswith(name)]
            own += ["whole prompt"] if name == "plain" and "whole prompt" in cases else []
            models = loaded(changes) if own else None
            found |= {case: error_of(case, models) for case in own}
    return found
