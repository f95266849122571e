"""GGUF's quantised types keep their bits in memory, and give what their values give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.models.base import MODELS, load_model, read_spec, stored_dtype
from coterie.models.build.reader import TensorPlacement, TensorReader, keeps
from coterie.models.weight_sizes import matrix_bytes
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.kinds import KEPT_AS, KINDS
from tests.helpers.models.gguf_files import write_model
from tests.helpers.models.paged_model import prompt_logits

# as quantisers mix them
MIXES = {
    "Q4_K_M": ("Q4_K", {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"}),
    "Q4_K_M of odd widths": ("Q5_0", {"down_proj": "Q6_K", "v_proj": "Q8_0", "o_proj": "Q4_K"}),
    "Q5_K_M": ("Q5_K", {"v_proj": "Q6_K", "lm_head": "Q6_K"}),
    "Q6_K": ("Q6_K", {}),
    "Q5_1": ("Q5_1", {"q_proj": "Q4_1"}),
}
IDS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_stored_bits_give_the_logits_of_their_values(mix: str, tied: bool, tmp_path: Path) -> None:
    kind, mixed = MIXES[mix]
    path = tmp_path / "model.gguf"
    write_model(path, kind=kind, mixed=mixed, tied=tied)
    model = load_model(open_checkpoint(path))
    assert model.dtype == KEPT_AS[kind] and model.kv_dtype == torch.bfloat16
    exact = load_model(open_checkpoint(path), dtype="fp32")
    plain = load_model(open_checkpoint(path), backend="reference")
    # what is left is that activations have 15 bits
    model.kv_dtype = plain.kv_dtype = torch.float32
    want = prompt_logits(exact, IDS, 16)
    for each, limit in ((model, 5e-4), (plain, 2e-5)):
        assert (prompt_logits(each, IDS, 16) - want).abs().max() < limit * want.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_takes_the_bytes_of_its_file(tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kind, mixed = MIXES["Q4_K_M"]
    write_model(path, kind=kind, mixed=mixed, tied=tied)
    checkpoint = open_checkpoint(path)
    matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    stored = sum(checkpoint.extent(name).nbytes for name in matrices)
    packed = sum(
        KINDS[KEPT_AS[checkpoint.stored_as(name)]].nbytes(*checkpoint.shape(name))
        for name in matrices
    )
    # six-bit scales take a byte
    assert stored <= packed < 1.03 * stored
    # of the embedding no second copy, whether it is the head or a view of the file
    assert load_model(checkpoint).weight_bytes <= packed


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_a_gpu_keeps_the_bytes_of_its_file(mix: str, tied: bool, tmp_path: Path) -> None:
    """What would be loaded there, built on the CPU: no kernel runs."""
    pytest.importorskip("triton")
    from coterie.kernels.device_blocks import FORMS

    path = tmp_path / "model.gguf"
    kind, mixed = MIXES[mix]
    write_model(path, kind=kind, mixed=mixed, tied=tied)
    checkpoint = open_checkpoint(path)
    assert stored_dtype(checkpoint, "cuda") == KEPT_AS[kind]
    assert all(keeps("cuda", kind) for kind in KINDS)
    spec = read_spec(checkpoint)
    placement = TensorPlacement("triton", "cpu", torch.bfloat16)
    reader = TensorReader(checkpoint, spec, "auto", placement)
    parts = MODELS[spec.architecture].build(reader, "triton", lambda *_: None)
    reader.finish()
    kept = 0
    for name in checkpoint.names():
        if len(checkpoint.shape(name)) == 2:
            rows, columns = checkpoint.shape(name)
            form = FORMS.get(KEPT_AS[checkpoint.stored_as(name)])
            stored = checkpoint.extent(name).nbytes
            kept += stored if form is None else rows * form.row_bytes(columns)
    assert parts.nbytes == kept == matrix_bytes(checkpoint, "auto", "cuda", tied=tied)


@pytest.mark.parametrize(("dtype", "kept"), [("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_another_precision_is_one_when_asked(dtype: str, kept: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, kind="Q4_K")
    auto, asked = (load_model(open_checkpoint(path), dtype=of) for of in ("auto", dtype))
    assert asked.dtype == kept and asked.weight_bytes > 1.5 * auto.weight_bytes


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("bits", [0x7C00, 0x7E01])
def test_scales_that_are_no_numbers_are_refused(kind: str, bits: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, kind=kind)
    name = "model.layers.1.mlp.down_proj.weight"
    extent = open_checkpoint(path).extent(name)
    at = 208 if kind == "Q6_K" else 0
    with path.open("r+b") as file:
        file.seek(extent.offset + at)
        file.write(bits.to_bytes(2, "little"))
    with pytest.raises(WeightsError, match=r"(down_proj|ffn_down).*not a finite number"):
        load_model(open_checkpoint(path))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "Q4_0"])
def test_an_embedding_whose_scale_is_no_number_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, kind=kind)
    extent = open_checkpoint(path).extent("model.embed_tokens.weight")
    with path.open("r+b") as file:
        file.seek(extent.offset + (208 if kind == "Q6_K" else 0))
        file.write(b"\x01\x7e")
    with pytest.raises(WeightsError, match=r"embed_tokens.*not a finite number"):
        load_model(open_checkpoint(path))
