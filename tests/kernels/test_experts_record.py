"""Records: native and torch write the same bytes, which hold exactly what was packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie.core.errors import InternalError
from coterie.kernels.cpu import expert_record
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.cpu.expert_record import pack_record, rebias, unpack_record, weight_offset
from coterie.kernels.expert_layout import PAGE, ExpertLayout, PartPlace
from coterie.weights.formats.gguf_tensors import decode
from coterie.weights.kinds import BLOCK_KINDS, KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Int8Weight, Weight, dense
from tests.helpers.kernels.expert_inputs import expert_parts, record_of
from tests.helpers.kernels.kernel_inputs import weight

CASES = [
    (kind, gated, hidden, inner)
    for kind in KINDS
    for gated in (True, False)
    for hidden, inner in (
        [(256, 512), (512, 768)] if kind in BLOCK_KINDS else [(64, 96), (96, 160), (32, 32)]
    )
] + [(kind, True, 53, 21) for kind in ("fp32", "bf16")]


def fields(weight: Weight | Tensor) -> list[Tensor]:
    if isinstance(weight, Tensor):
        return [weight]
    if isinstance(weight, DenseWeight):
        return [weight.tensor]
    if isinstance(weight, GgufBlocks):
        return [weight.data]
    return [weight.q, weight.scale, *([] if isinstance(weight, Int8Weight) else [weight.minimum])]


@pytest.mark.parametrize("kind,gated,hidden,inner", CASES)
def test_unpacking_is_the_inverse(kind: str, gated: bool, hidden: int, inner: int) -> None:
    torch.manual_seed(41)
    layout = ExpertLayout(hidden, inner, gated, (kind,) * (3 if gated else 2))
    parts = expert_parts(layout)
    record = record_of(layout, parts)
    assert record.nbytes == layout.nbytes and layout.nbytes % PAGE == 0
    back = unpack_record(layout, record)
    assert list(back) == list(parts)
    for name, part in parts.items():
        assert type(back[name]) is type(part)
        for ours, theirs in zip(fields(back[name]), fields(part), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    again = record_of(layout, back)
    assert torch.equal(again, record)  # gaps are zero, not what lay there before


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind,gated,hidden,inner", CASES)
def test_torch_and_native_write_the_same_bytes(
    kind: str, gated: bool, hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(42)
    layout = ExpertLayout(hidden, inner, gated, (kind,) * (3 if gated else 2))
    parts = expert_parts(layout)
    native_bytes = record_of(layout, parts)
    weight_offset()  # of this machine, whichever of the two writes
    monkeypatch.setattr(expert_record, "native", lambda: None)
    assert torch.equal(record_of(layout, parts), native_bytes)


def test_rebias_moves_int8_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(43)
    layout = ExpertLayout(64, 96, True, ("int8", "int4", "int8"))
    parts = expert_parts(layout)
    here = record_of(layout, parts)
    other = here.clone()
    rebias(layout, other)
    there = 128 - weight_offset()
    monkeypatch.setattr(expert_record, "native", lambda: None)
    monkeypatch.setattr(expert_record, "weight_offset", lambda: there)
    assert torch.equal(record_of(layout, parts), other)
    for name, part in unpack_record(layout, other).items():
        assert torch.equal(fields(part)[0], fields(parts[name])[0])
    rebias(layout, other)
    assert torch.equal(other, here)


def test_weights_are_brought_to_the_layout() -> None:
    torch.manual_seed(44)
    layout = ExpertLayout(32, 64, True, ("bf16", "int8", "fp32"))
    stored = {
        "gate": weight("fp32", 64, 32),
        "up": weight("bf16", 64, 32),
        "down": weight("int4", 32, 64),
    }
    back = unpack_record(layout, record_of(layout, stored))
    assert torch.equal(fields(back["gate"])[0], dense(stored["gate"], torch.bfloat16))
    assert isinstance(back["up"], Int8Weight)
    assert torch.equal(fields(back["down"])[0], dense(stored["down"]))


def test_refuses_what_does_not_fit() -> None:
    layout = ExpertLayout(256, 256, True, ("q4_k", "q4_k", "q4_k"))
    good = expert_parts(layout)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    for wrong in (weight("q6_k", 256, 256), weight("q4_k", 128, 256), weight("int8", 256, 256)):
        with pytest.raises(InternalError, match="gate"):
            pack_record(layout, {**good, "gate": wrong}, out)
    layout = ExpertLayout(64, 64, True, ("int8", "int8", "int8"))
    with pytest.raises(InternalError, match="up"):
        pack_record(layout, {**expert_parts(layout), "up": weight("int4", 64, 64)}, out)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_have_the_values_of_the_gguf_package(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    torch.manual_seed(45)
    stored = weight(kind, 48, 512)
    assert isinstance(stored, GgufBlocks) and stored.shape == (48, 512)
    want = quants.dequantize(stored.data.numpy(), GGMLQuantizationType[kind.upper()])
    assert torch.equal(dense(stored), torch.from_numpy(want).float())
    kept = decode(stored.data.flatten(), kind.upper(), (48, 512))
    assert isinstance(kept, GgufBlocks) and torch.equal(kept.data, stored.data)
    wide = decode(stored.data.flatten(), kind.upper(), (24, 2, 512))
    assert isinstance(wide, DenseWeight)
    assert torch.equal(wide.tensor.view(48, 512), dense(stored))


def test_layout_sizes_are_the_packed_sizes() -> None:
    place = ExpertLayout(64, 40, True, ("bf16",) * 3).parts()[2]
    assert place == PartPlace("down", "bf16", 64, 40, 2 * 48 * 64 * 2, 64 * 64 * 2)
