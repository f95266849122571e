"""Looking at numbers as words: the same answers as torch's operators."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save

from coterie.adapters.files import parse_adapter
from coterie.adapters.kinds.lora import LoraChange
from coterie.adapters.kinds.patch_builder import is_finite, transposed
from coterie.core.errors import WeightsError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).min])
    assert is_finite(values)
    for place in (0, 65_535, 65_536, 69_999):
        spoilt = values.clone()
        spoilt[place] = bad
        assert not is_finite(spoilt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 7), (33, 8)])
def test_turned_is_the_transpose_in_memory_of_its_own(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, made = matrix.clone(), transposed(matrix)
    assert made.is_contiguous() and torch.equal(made, matrix.T)
    made.zero_()
    assert torch.equal(matrix, before)


def test_a_file_of_several_types() -> None:
    """Each tensor in its own type, at whatever byte it begins, and each one looked at."""
    config = json.dumps({"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}).encode()
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = torch.randn(1, 3).bfloat16(), torch.randn(4, 1)
    adapter = parse_adapter(config, bytearray(_file({"A": a, "B": b}, stem)), "d")
    change = adapter.changes["model.layers.0.self_attn.q_proj"]
    assert isinstance(change, LoraChange)
    assert torch.equal(change.a, a) and torch.equal(change.b, b)
    b[3, 0] = float("nan")
    with pytest.raises(WeightsError, match=r"lora_B.*NaN"):
        parse_adapter(config, bytearray(_file({"A": a, "B": b}, stem)), "d")


def _file(parts: dict[str, torch.Tensor], stem: str) -> bytes:
    """bf16 first, so that fp32 begins at no multiple of its width."""
    body, header = b"", {}
    for name, tensor in parts.items():
        own = save({"x": tensor})
        data = own[8 + int.from_bytes(own[:8], "little") :]
        kind = "BF16" if tensor.dtype == torch.bfloat16 else "F32"
        offsets = [len(body), len(body) + len(data)]
        entry = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        header[f"{stem}{name}.weight"] = entry
        body += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body
